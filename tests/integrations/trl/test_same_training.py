"""A training from the queue is the same as one from a queue.Queue that has the same samples."""

from __future__ import annotations

import dataclasses
import queue
from pathlib import Path
from typing import Any

import numpy as np
import torch
import toy
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from transfer_queue.integrations.trl import TransferQueueRolloutWorker
from transfer_queue.integrations.trl.producers import advantages_of

STEPS = 12
PROMPTS = toy.rows((STEPS + 2) * toy.BATCH // toy.GROUP)


class PrefilledWorker:
    """A rollout worker with a queue.Queue, and the weight transfer that does nothing."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()

    def send_weights(self, iterator: Any) -> None:
        for _ in iterator:
            pass

    def nothing(self, *arguments: Any) -> None:
        pass

    start = stop = pause = resume = init_weight_transfer = destroy = update_model_version = check_health = nothing


def sample_of(row: dict[str, Any], answer: Any, advantage: float, metrics: dict[str, float]) -> RolloutSample:
    """A sample as TRL's own worker makes it."""
    names = {field.name for field in dataclasses.fields(RolloutSample)}
    made = np.asarray if "group_id" in names else (lambda values, dtype: np.asarray(values, dtype).tolist())
    zeros = [0] * len(answer.prompt_ids)
    values = {
        "prompt": [], "completion": [],
        "input_ids": made([*answer.prompt_ids, *answer.completion_ids], np.int64),
        "completion_mask": made([*zeros, *[1] * len(answer.completion_ids)], np.int64),
        "old_log_probs": made([*zeros, *answer.logprobs], np.float32),
        "advantage": advantage, "model_version": 1_000_000, "group_id": row["number"], "metrics": metrics,
        "enqueued_at": 0.0,
    }  # fmt: skip
    return RolloutSample(**{name: value for name, value in values.items() if name in names})


def prefilled(folder: Path, args: Any) -> Any:
    worker = PrefilledWorker()
    for row in PROMPTS:
        answers = toy.FixedEngine().answers(row, toy.GROUP)
        rewards = toy.task.reward([answer.content for answer in answers], [row["digit"]] * toy.GROUP)
        for answer, advantage, metrics in zip(answers, *advantages_of({"reward": rewards})):
            worker.rollout_buffer.put(sample_of(row, answer, advantage, metrics))
    transfer = {"weight_transfer": worker} if hasattr(args, "token_budget") else {}
    trainer = toy.make_trainer(folder, args, rollout_worker=worker, **transfer)
    trainer.train()
    return trainer


def from_queue(folder: Path, args: Any) -> Any:
    worker = TransferQueueRolloutWorker(PROMPTS, args)
    trainer = toy.make_trainer(folder, args, **worker.trainer_arguments())
    with toy.producers():
        trainer.train()
    return trainer


def test_losses_gradient_norms_and_parameters_are_bit_identical(tmp_path: Path) -> None:
    expected = prefilled(tmp_path, toy.arguments(tmp_path))
    found = from_queue(tmp_path, toy.arguments(tmp_path))
    assert len(toy.figures(found)) == STEPS
    assert len({loss for loss, _ in toy.figures(found)}) > STEPS // 2
    assert toy.figures(found) == toy.figures(expected)
    assert found.state.log_history[-2]["reward"] == expected.state.log_history[-2]["reward"]
    wanted = toy.parameters(expected)
    untrained = type(found.model).from_pretrained(tmp_path / "model").state_dict()
    for name, tensor in toy.parameters(found).items():
        assert torch.equal(tensor, wanted[name]), name
    assert not all(torch.equal(tensor, untrained[name]) for name, tensor in wanted.items())


def test_accumulated_micro_batches_and_groups_across_steps_are_bit_identical(tmp_path: Path) -> None:
    changes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_staleness": 4}
    expected = prefilled(tmp_path, toy.arguments(tmp_path, **changes))
    found = from_queue(tmp_path, toy.arguments(tmp_path, **changes))
    assert toy.figures(found) == toy.figures(expected)
