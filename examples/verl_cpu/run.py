"""Runs verl's V1 trainer on the CPU: ten steps of GRPO, with samples that stream through this package.

python examples/verl_cpu/run.py
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STEPS, PROMPTS, SAMPLES = 10, 32, 8

os.environ["VERL_USE_EXTERNAL_MODULES"] = "cpu_backend"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))  # of Ray's workers
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(HERE))


def settings(folder: Path, steps: int, sampler: str, verbose: bool) -> list[str]:
    """Return the command line of verl's trainer."""
    return [
        "trainer.v1.sampler.custom_sampler.path=pkg://transfer_queue.integrations.verl",
        f"trainer.v1.sampler.custom_sampler.name={sampler}",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/train.parquet",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={PROMPTS * SAMPLES}",
        "actor_rollout_ref.rollout.name=transformers",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={PROMPTS * SAMPLES}",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={HERE}/task.py",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=False",
        "trainer.logger=[file]",
        "trainer.resume_mode=disable",
        f"trainer.total_training_steps={steps}",
        "ray_kwargs.ray_init.num_cpus=8",
        "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.include_dashboard=False",
        f"+ray_kwargs.ray_init.log_to_driver={verbose}",
        f"hydra.run.dir={folder}",
        "hydra.output_subdir=null",
    ]


def main() -> None:
    """Make the files of the task, run the trainer, and print the reward of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--mode", choices=["sync", "colocate_async"], default="sync", help="of verl's trainer")
    parser.add_argument("--verbose", action="store_true", help="print what verl's processes log")
    options = parser.parse_args()

    import task
    from verl.trainer import main_ppo

    sampler = "EventDrivenReplayBuffer" if options.mode == "sync" else "EventDrivenReplayBufferAsync"
    print(f"{options.steps} steps of verl's {options.mode} trainer; its processes take a minute to start", flush=True)
    with tempfile.TemporaryDirectory(prefix="verl-cpu-") as name:
        folder = Path(name)
        task.make_files(folder, PROMPTS * options.steps)
        metrics = folder / "metrics.jsonl"
        os.environ["VERL_FILE_LOGGER_PATH"] = str(metrics)
        command = settings(folder, options.steps, sampler, options.verbose)
        sys.argv[1:] = [*command, f"trainer.v1.trainer_mode={options.mode}"]
        main_ppo.main()
        for line in metrics.read_text("utf-8").splitlines():
            print_step(json.loads(line))


def print_step(logged: dict[str, Any]) -> None:
    """Print the metrics of a step that verl has logged."""
    data = logged["data"]
    reward, gradient = data["critic/score/mean"], data["actor/grad_norm"]
    times = f"rollout {data['timing_s/gen']:.2f} s of {data['timing_s/step']:.2f} s"
    print(f"step {logged['step']:2d}: reward {reward:.3f}, gradient norm {gradient:.3f}, {times}")


if __name__ == "__main__":
    main()
