"""Checkpoints of the trainer contain the queue, and a resumed training neither loses nor repeats a sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from transformers import TrainerCallback

import transfer_queue as tq
from transfer_queue.integrations.trl import TransferQueueRolloutWorker

PROMPTS = toy.rows(64)
STEPS, SAVED, CRASH = 8, 4, 6


class Crash(TrainerCallback):
    """Ends a training in the middle."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def train(
    folder: Path, args: Any, checkpoint: Path | None = None, crash: int = -1
) -> tuple[Any, toy.Observer, TransferQueueRolloutWorker]:
    worker = TransferQueueRolloutWorker(PROMPTS, args, seed=3, checkpoint=checkpoint)
    observer = toy.Observer()
    trainer = toy.make_trainer(folder, args, **worker.trainer_arguments([Crash(crash), observer]))
    observer.trainer = trainer
    observer.watch(worker)
    with toy.producers(rewards=[toy.task.reward, toy.numbered]):
        if crash < 0:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        else:
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
    return trainer, observer, worker


@pytest.mark.parametrize("changes", [{}, {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1}])
def test_a_resumed_training_is_the_same_as_one_that_was_not_interrupted(tmp_path: Path, changes: Any) -> None:
    """Six samples are not a whole number of groups of four, so a checkpoint is in the middle of a group."""
    whole, expected, _ = train(tmp_path / "a", toy.arguments(tmp_path / "a", max_steps=STEPS, **changes))

    args = toy.arguments(tmp_path / "b", max_steps=STEPS, save_strategy="steps", save_steps=SAVED, **changes)
    _, first, _ = train(tmp_path / "b", args, crash=CRASH)
    resumed, second, worker = train(tmp_path / "b", args, checkpoint=tmp_path / "b" / f"checkpoint-{SAVED}")

    assert first.steps[:SAVED] + second.steps == expected.steps
    assert len(expected.steps) == STEPS
    assert toy.figures(resumed) == toy.figures(whole)
    wanted = toy.parameters(whole)
    for name, tensor in toy.parameters(resumed).items():
        assert torch.equal(tensor, wanted[name]), name
    assert worker.version == STEPS
    assert max(expected.ages + first.ages + second.ages) <= args.max_staleness


def test_a_training_that_resumes_without_its_queue_says_so(tmp_path: Path) -> None:
    args = toy.arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    train(tmp_path, args)
    worker = TransferQueueRolloutWorker(PROMPTS, args)
    trainer = toy.make_trainer(tmp_path, args, **worker.trainer_arguments())
    with pytest.raises(tq.TransferQueueError, match="begins at step 1, but the queue is of step 0"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_training_that_would_skip_samples_says_so(tmp_path: Path) -> None:
    args = toy.arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    train(tmp_path, args)
    args = toy.arguments(tmp_path, max_steps=2)
    checkpoint = tmp_path / "checkpoint-1"
    worker = TransferQueueRolloutWorker(PROMPTS, args, checkpoint=checkpoint)
    trainer = toy.make_trainer(tmp_path, args, **worker.trainer_arguments())
    trainer.args.ignore_data_skip = False
    with pytest.raises(tq.TransferQueueError, match="ignore_data_skip must be True"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
