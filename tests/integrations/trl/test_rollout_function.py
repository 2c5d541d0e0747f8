"""QueueRollouts: GRPOTrainer with completions from the queue."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import transfer_queue as tq
from transfer_queue.integrations.trl import Completion, QueueRollouts, generate_rollouts, rollout_function

STEPS = 4


class ByPrompt(toy.FixedEngine):
    """Answers depend on the prompt alone; `rollout_func` gets no other columns."""

    def generate(self, rows: Sequence[Mapping[str, Any]], count: int) -> list[list[Completion]]:
        return super().generate([{"number": int(row["prompt"][0])} for row in rows], count)


def local(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The same answers without a queue."""
    answers = [group[0] for group in ByPrompt().generate([{"prompt": prompt} for prompt in prompts], 1)]
    names = ("prompt_ids", "completion_ids", "logprobs")
    return {name: [getattr(answer, name) for answer in answers] for name in names}


def train(folder: Path, rollout_func: Any, **changes: Any) -> Any:
    model = folder / "model"
    if not model.exists():
        toy.task.make_model(model, seed=0)
    settings = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": toy.task.ANSWER, "learning_rate": 1e-2, "beta": 0.0, "logging_steps": 1,
        "report_to": [], "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True,
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    trainer = GRPOTrainer(
        model=str(model), reward_funcs=_by_length, args=GRPOConfig(**settings | changes), rollout_func=rollout_func,
        train_dataset=Dataset.from_list(toy.rows(10)), processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[rollout_func] if isinstance(rollout_func, QueueRollouts) else [],
    )  # fmt: skip
    trainer.train()
    return trainer


def _by_length(completion_ids: list[list[int]], **others: Any) -> list[float]:
    """Differs within a group, so that there is something to learn."""
    return [float(number % 4) for number, _ in enumerate(completion_ids)]


def test_the_training_is_the_same_as_with_a_local_function(tmp_path: Path) -> None:
    expected = train(tmp_path, local)
    engine = ByPrompt()
    with toy.producers(engine, rewards=False, generators=2):
        found = train(tmp_path, QueueRollouts())
    assert len(toy.figures(found)) == STEPS
    assert toy.figures(found) == toy.figures(expected)
    wanted = toy.parameters(expected)
    for name, tensor in toy.parameters(found).items():
        assert torch.equal(tensor, wanted[name]), name
    assert engine.loaded > STEPS  # by two generators together
    (progress,) = (p for p in tq.get_client().status().partitions if p.name == "rollouts")
    assert (progress.rows, progress.sealed) == (0, True)


def _hang(reports: Any) -> None:
    class Hanging(ByPrompt):
        def generate(self, rows: Sequence[Mapping[str, Any]], count: int) -> list[list[Completion]]:
            reports.send(len(rows))
            threading.Event().wait()
            raise AssertionError

    generate_rollouts(Hanging(), prompts_together=3, lease=1.0)


def test_the_prompts_of_a_killed_generator_are_answered_by_another_one(tmp_path: Path) -> None:
    expected = train(tmp_path, local)
    reader, writer = multiprocessing.Pipe(duplex=False)
    first = multiprocessing.get_context("fork").Process(target=_hang, args=(writer,))
    first.start()

    def replace() -> None:
        reader.recv()  # the first one has claimed prompts
        generate_rollouts(ByPrompt(), lease=toy.LEASE)

    def kill() -> None:
        reader.poll(None)
        second.start()
        first.kill()

    second = threading.Thread(target=replace)
    killer = threading.Thread(target=kill)
    killer.start()
    found = train(tmp_path, QueueRollouts())
    killer.join()
    first.join()
    second.join(30)
    assert not second.is_alive()
    assert toy.figures(found) == toy.figures(expected)


def test_a_call_without_generators_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_function, "WAIT", 0.2)
    with pytest.raises(TimeoutError, match=r"no generator has worked.*8 of 8 prompts have no completion"):
        train(tmp_path, QueueRollouts(producer_timeout=0.5))
