"""TransferQueueCallback: the figures of the queue in the logs of a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import toy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from transfer_queue.integrations.transformers import TransferQueueCallback
from transfer_queue.integrations.trl import TransferQueueRolloutWorker


def train(folder: Path, callback: TransferQueueCallback, **changes: Any) -> None:
    args = toy.arguments(folder, max_steps=4, logging_steps=2, **changes)
    worker = TransferQueueRolloutWorker(toy.rows(20), args)
    trainer = toy.make_trainer(folder, args, **worker.trainer_arguments([callback]))
    with toy.producers():
        trainer.train()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_figures_are_in_tensorboard_beside_those_of_the_trainer(tmp_path: Path) -> None:
    train(tmp_path, TransferQueueCallback(), report_to=["tensorboard"])
    found = scalars(tmp_path / "runs" / "transfer_queue")
    assert [step for step, _ in found["tq/train/rate"]] == [2, 4, 4]  # the trainer logs a summary at the end
    assert found["tq/train/rate"][0][1] > 0
    assert {"tq/generate/rate", "tq/score/rate", "tq/rows"} <= set(found)
    (own,) = (path for path in (tmp_path / "runs").iterdir() if path.name != "transfer_queue")
    assert "train/reward" in scalars(own)


def test_figures_are_written_to_a_destination(tmp_path: Path) -> None:
    entries: list[tuple[int, dict[str, float]]] = []

    class Run:
        def log_metrics(self, values: dict[str, float], step: int) -> None:
            entries.append((step, values))

    train(tmp_path, TransferQueueCallback(Run()))
    assert [step for step, _ in entries] == [2, 4, 4]
    assert all("tq/train/rate" in values for _, values in entries)


def test_a_trainer_that_reports_to_nothing_is_an_error(tmp_path: Path) -> None:
    args = toy.arguments(tmp_path)
    worker = TransferQueueRolloutWorker(toy.rows(20), args)
    trainer = toy.make_trainer(tmp_path, args, **worker.trainer_arguments([TransferQueueCallback()]))
    with pytest.raises(ValueError, match=r"report_to must name one of tensorboard, wandb, swanlab, mlflow, got \[\]"):
        trainer.train()
