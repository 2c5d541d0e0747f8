"""A GRPO training by TRL on the CPU, with generators and rewards in processes of their own. See README.md.

python examples/trl_grpo/run.py                    one generator is killed in the middle: it must lose nothing
python examples/trl_grpo/run.py --trainer grpo     the same with GRPOTrainer, which waits for each batch
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from datasets import Dataset
from transfer_queue.integrations.transformers import TransferQueueCallback
from transfer_queue.integrations.trl import QueueRollouts, TransferQueueRolloutWorker
from transformers import PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar, set_verbosity_error
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

import roles
import task
from cpu_attention import replace_flash_attention

GENERATORS = 2
GROUP = 8
"""Completions of each prompt."""
BATCH = 64
"""Samples of an optimizer step."""
STALENESS = 2
"""By how many versions of the weights a sample may be old."""


class Progress(TrainerCallback):
    """Prints the reward, and kills a generator at a step."""

    def __init__(self, kill_at: int, kill: Callable[[], None]) -> None:
        self.rewards: list[float] = []
        self._kill_at, self._kill = kill_at, kill

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        """Print the mean reward since the previous entry."""
        if logs and "reward" in logs:
            self.rewards.append(float(logs["reward"]))
            print(f"step {state.global_step:4}   reward {self.rewards[-1]:.2f}", flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Kill a generator in the middle of the training."""
        if state.global_step == self._kill_at:
            self._kill()


def main() -> int:
    """Train, and return 0 if the reward rose and no sample was lost."""
    options = parse()
    folder = Path(options.out or tempfile.mkdtemp(prefix="trl-grpo-"))
    began = time.monotonic()
    prepare(folder / "model", options.seed)
    tq.init(attach="never", task="train")
    processes = start_processes(folder / "model", options.trainer == "async")
    progress = Progress(options.steps // 2, lambda: kill(processes[0]))
    try:
        if options.trainer == "async":
            train_async(options, folder, progress)
        else:
            train_in_turn(options, folder, progress)
        return report(options, progress, folder, time.monotonic() - began)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
        tq.close()


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="run.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trainer", choices=("async", "grpo"), default="async", help="AsyncGRPOTrainer or GRPOTrainer")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the model, checkpoints and TensorBoard files")
    return parser.parse_args()


def prepare(folder: Path, seed: int) -> None:
    """Make the model, and give the processes of this run their own system."""
    os.environ.setdefault("TQ_SYSTEM", f"trl-{os.getpid()}")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    disable_progress_bar()
    set_verbosity_error()
    torch.set_num_threads(1)
    task.make_model(folder, seed)
    replace_flash_attention()


def start_processes(folder: Path, with_rewards: bool) -> list[Any]:
    """Start the generators and the process that computes rewards; GRPOTrainer computes them itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["roles"])  # which imports torch once, while the trainer is imported
    processes = [context.Process(target=roles.generate, args=(folder, seed)) for seed in range(GENERATORS)]
    if with_rewards:
        processes.append(context.Process(target=roles.score))
    for process in processes:
        process.daemon = True
        process.start()
    return processes


def kill(process: Any) -> None:
    """Kill a generator, whatever it is doing."""
    process.kill()
    print(f"killed the generator with process id {process.pid}", flush=True)


def train_async(options: argparse.Namespace, folder: Path, progress: Progress) -> None:
    """Train with AsyncGRPOTrainer, which takes samples from the queue."""
    args = AsyncGRPOConfig(
        per_device_train_batch_size=BATCH, num_generations=GROUP, max_staleness=STALENESS, weight_sync_steps=1,
        gradient_accumulation_steps=1, learning_rate=2e-3, **common(options, folder),
        **({"token_budget": 0} if hasattr(AsyncGRPOConfig, "token_budget") else {}),
    )  # fmt: skip
    rows = task.prompts()
    worker = TransferQueueRolloutWorker(rows, args, seed=options.seed)
    trainer = AsyncGRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=task.reward,
        args=args,
        train_dataset=Dataset.from_list(rows),
        **worker.trainer_arguments(callbacks=[progress, TransferQueueCallback()]),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def train_in_turn(options: argparse.Namespace, folder: Path, progress: Progress) -> None:
    """Train with GRPOTrainer, which waits for the completions of each batch."""
    rollouts = QueueRollouts()
    args = GRPOConfig(
        per_device_train_batch_size=BATCH, num_generations=GROUP, max_completion_length=task.ANSWER,
        learning_rate=2e-3, beta=0.0, **common(options, folder),
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=task.reward,
        args=args,
        train_dataset=Dataset.from_list(task.prompts() * BATCH),
        rollout_func=rollouts,
        callbacks=[rollouts, progress, TransferQueueCallback()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def common(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the arguments of both trainers."""
    return {
        "output_dir": str(folder), "max_steps": options.steps, "seed": options.seed, "lr_scheduler_type": "constant",
        "logging_steps": 5, "report_to": ["tensorboard"], "save_strategy": "no", "use_cpu": True, "bf16": False,
        "disable_tqdm": True,
    }  # fmt: skip


def report(options: argparse.Namespace, progress: Progress, folder: Path, seconds: float) -> int:
    """Print what the training reached. Return 0 if the reward rose and no sample was lost."""
    first, last = progress.rewards[0], progress.rewards[-1]
    print(f"reward {first:.2f} -> {last:.2f} in {options.steps} steps and {seconds:.0f} s")
    lost = count_lost(options.steps) if options.trainer == "async" else 0
    print(f"samples lost: {lost}; TensorBoard: tensorboard --logdir {folder}")
    return 0 if first < 0.2 and last > 0.75 and not lost else 1


def count_lost(steps: int) -> int:
    """Return how many samples were admitted, and are neither trained on nor in the partition, where they wait."""
    client = tq.get_client()
    (progress,) = (p for p in client.status().partitions if p.name == "rollouts")
    assert progress.policy is not None
    waiting = client.get_meta("prompt", None, "rollouts", mode="force_fetch").size
    return progress.policy.admitted - steps * BATCH - waiting


if __name__ == "__main__":
    raise SystemExit(main())
