"""Runs verl's V1 trainer on the CPU: ten steps of GRPO, with samples that stream through this package.

    python examples/verl_cpu/run.py
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
STEPS, PROMPTS, SAMPLES = 10, 16, 4

os.environ["VERL_USE_EXTERNAL_MODULES"] = "cpu_backend"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))  # of Ray's workers
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(HERE))


def settings(folder: Path, steps: int, sampler: str) -> list[str]:
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
        "actor_rollout_ref.actor.optim.lr=5e-3",
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
        "trainer.logger=[console]",
        "trainer.resume_mode=disable",
        f"trainer.total_training_steps={steps}",
        "ray_kwargs.ray_init.num_cpus=8",
        "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.include_dashboard=False",
        f"hydra.run.dir={folder}",
        "hydra.output_subdir=null",
    ]


def main() -> None:
    """Make the files of the task, and run the trainer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--mode", choices=["sync", "colocate_async"], default="sync")
    options = parser.parse_args()

    import task
    from verl.trainer import main_ppo

    sampler = "EventDrivenReplayBuffer" if options.mode == "sync" else "EventDrivenReplayBufferAsync"
    with tempfile.TemporaryDirectory(prefix="verl-cpu-") as folder:
        task.make_files(Path(folder), PROMPTS * options.steps)
        sys.argv[1:] = [*settings(Path(folder), options.steps, sampler), f"trainer.v1.trainer_mode={options.mode}"]
        main_ppo.main()


if __name__ == "__main__":
    main()
