"""A toy training: a model made locally, an engine whose answers depend on the prompt alone, and its trainer."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from transfer_queue.integrations.trl import (
    Completion,
    TransferQueueRolloutWorker,
    generate_rollouts,
    score_rollouts,
)

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "trl_grpo"
sys.path.insert(0, str(EXAMPLE))
task = importlib.import_module("task")
importlib.import_module("cpu_attention").replace_flash_attention()

GROUP, BATCH = 4, 16
LEASE = 2.0
WEIGHTS = {"layer.weight": torch.arange(6.0).view(2, 3).to(torch.bfloat16), "scale": torch.tensor(2.0)}
SECONDS = 60


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{number % 10}=", "digit": str(number % 10), "number": number} for number in range(count)]


class FixedEngine:
    """Answers depend on the number of the prompt alone, so that two trainings get the same samples."""

    def __init__(self) -> None:
        self.loaded = 0

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.loaded += 1

    def generate(self, rows: Sequence[Mapping[str, Any]], count: int) -> list[list[Completion]]:
        return [self.answers(row, count) for row in rows]

    def answers(self, row: Mapping[str, Any], count: int) -> list[Completion]:
        random = torch.Generator().manual_seed(row["number"])
        answers = []
        for _ in range(count):
            length = int(torch.randint(1, task.ANSWER + 1, (), generator=random))
            tokens = torch.randint(3, 14, (length,), generator=random).tolist()
            logprobs = (-3 * torch.rand(length, generator=random)).tolist()
            text = "".join(task.CHARACTERS[token - 3] for token in tokens)
            answers.append(Completion([3 + row["number"] % 10, 13], tokens, logprobs, text))
        return answers


@contextmanager
def producers(engine: Any = None, rewards: Any = None, generators: int = 1) -> Iterator[list[threading.Thread]]:
    """Run generators and a reward stage in threads. They must end with the training."""
    engine = engine or FixedEngine()
    loops: list[Callable[[], None]] = [lambda: generate_rollouts(engine, prompts_together=2, lease=LEASE)] * generators
    if rewards is not False:
        loops.append(lambda: score_rollouts(rewards or task.reward, lease=LEASE))
    threads = [threading.Thread(target=loop, daemon=True) for loop in loops]
    for thread in threads:
        thread.start()
    yield threads
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a producer did not end with the training"


def arguments(folder: Path, **changes: Any) -> AsyncGRPOConfig:
    budget = {"token_budget": 0} if hasattr(AsyncGRPOConfig, "token_budget") else {}
    settings = {
        "output_dir": str(folder), "max_steps": 12, "per_device_train_batch_size": BATCH, "num_generations": GROUP,
        "gradient_accumulation_steps": 1, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_staleness": 2,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True, "bf16": False,
        "disable_tqdm": True, "ignore_data_skip": True,
    }  # fmt: skip
    return AsyncGRPOConfig(**settings | budget | changes)


class Observer(TrainerCallback):
    """Records the groups and ages of the samples of each batch, as the trainer collates them."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.steps: list[list[int]] = []
        self.ages: list[int] = []
        self.trainer: Any = None
        self._samples: dict[int, Any] = {}

    def watch(self, worker: Any) -> None:
        """Observe what the trainer takes from the worker's buffer."""
        take = worker.rollout_buffer.get

        def get(*arguments: Any, **named: Any) -> Any:
            sample = take(*arguments, **named)
            self._samples[id(sample.input_ids)] = sample
            self.ages.append(self.trainer.model_version - sample.model_version)
            return sample

        worker.rollout_buffer.get = get

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loader = kwargs["train_dataloader"].base_dataloader
        collate = loader.collate_fn

        def observed(examples: Any) -> Any:
            samples = examples if isinstance(examples[0], dict) else [s for row in examples[0] for s in row.samples]
            self.batches.append(sorted(self._number(self._samples[id(s["input_ids"])]) for s in samples))
            return collate(examples)

        loader.collate_fn = observed

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._use()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._use()

    def _use(self) -> None:
        self.steps.append(self.batches[len(self.steps)])

    def _number(self, sample: Any) -> int:
        return int(sample.metrics["rewards/numbered"])


def numbered(completions: list[str], number: list[int], **others: Any) -> list[float]:
    """The number of the prompt as a reward, so that each sample that is trained on says which it is."""
    return [float(each) for each in number]


def make_trainer(folder: Path, args: AsyncGRPOConfig, **more: Any) -> AsyncGRPOTrainer:
    model = folder / "model"
    if not model.exists():
        task.make_model(model, seed=0)
    return AsyncGRPOTrainer(
        model=str(model), reward_funcs=task.reward, args=args, train_dataset=Dataset.from_list(rows(10)), **more
    )


def figures(trainer: Any) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step."""
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def parameters(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def begin(folder: Path, prompts: int = 32, worker: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A worker of a training that has begun."""
    made = TransferQueueRolloutWorker(rows(prompts), arguments(folder, **changes), **worker or {})
    made.send_weights(WEIGHTS.items())
    made.update_model_version(1)
    made.start()
    return made


def take(worker: Any, count: int) -> list[Any]:
    return [worker.rollout_buffer.get(timeout=SECONDS) for _ in range(count)]
