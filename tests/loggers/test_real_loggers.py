"""`tq.SummaryLogger` with the real W&B, SwanLab and MLflow, which write to files of this machine (`make loggers`).

Each test reads what the package has written, and compares it with the figures that the logger returned.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import swanlab
import torch
import wandb
from swanlab.proto.swanlab.record.v1 import record_pb2
from wandb.proto import wandb_internal_pb2

import transfer_queue as tq
from tests.loggers.record_log import records

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what MLflow imports

TASKS = ("train", "rew@rd [0]", "评分", "a b/c", "x" * 300)
"""Names of tasks, among them some with characters that a logger refuses in the name of a metric."""

Entries = dict[int, dict[str, float]]


@pytest.fixture(scope="module", autouse=True)
def system() -> Iterator[None]:
    """Start a system whose tasks have claimed samples."""
    tq.init()
    client = tq.get_client()
    for number, task in enumerate(TASKS):
        client.kv_batch_put([f"{number}/0", f"{number}/1"], "p", {"prompt": torch.zeros(2, 3)})
        client.get_meta("prompt", 2, "p", task_name=task)
    yield
    tq.close()


def assert_written(entries: Entries, logged: dict[int, dict[str, float]]) -> None:
    """Assert that each entry that was logged was written completely, and that it has figures of every task."""
    for step, figures in logged.items():
        assert len([name for name in figures if name.endswith("/wait_share")]) == len(TASKS)
        written = {name: value for name, value in entries[step].items() if name.startswith("tq/")}
        assert written == pytest.approx(figures)


class TestWandb:
    @pytest.fixture
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
            monkeypatch.setenv(name, str(tmp_path))
        with wandb.init(mode="offline", dir=tmp_path, project="p", settings=wandb.Settings(console="off")) as run:
            yield run

    def entries(self, folder: Path) -> Entries:
        wandb.teardown()  # waits until the process that writes the file has ended
        (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
        found: Entries = {}
        for data in records(path):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {each.key or "/".join(each.nested_key): each.value_json for each in record.history.item}
                found[record.history.step.num] = {name: json.loads(value) for name, value in items.items()}
        return found

    @pytest.mark.parametrize("by", ["name", "module", "run"])
    def test_an_entry_at_a_step_is_written(self, run: Any, tmp_path: Path, by: str) -> None:
        logger = tq.SummaryLogger({"name": "wandb", "module": wandb, "run": run}[by])
        logged = {step: logger.log(step) for step in (1, 7)}
        run.finish()
        assert_written(self.entries(tmp_path), logged)

    @pytest.mark.parametrize(("passed", "steps", "added"), [(True, (3, 4), 3), (False, (0, 1), 1)])
    def test_an_entry_without_a_step_is_added_to_the_current_step(
        self, run: Any, tmp_path: Path, passed: bool, steps: tuple[int, int], added: int
    ) -> None:
        logger = tq.SummaryLogger("wandb")
        run.log({"loss": 0.5}, step=steps[0] if passed else None)
        figures = logger.log()
        run.log({"loss": 0.25}, step=steps[1] if passed else None)
        run.finish()
        entries = self.entries(tmp_path)
        assert_written(entries, {added: figures})
        assert [entries[step]["loss"] for step in steps] == [0.5, 0.25]
        assert [step for step in steps if "tq/rows" in entries[step]] == [added]


class TestSwanlab:
    @pytest.fixture
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path / "home"))
        run = swanlab.init(mode="offline", logdir=str(tmp_path), project="p")
        yield run
        if swanlab.has_run():
            swanlab.finish()

    def entries(self, folder: Path) -> Entries:
        (path,) = folder.glob("run-*/run-*.swanlab")
        found: Entries = {}
        for data in records(path):
            record = record_pb2.Record.FromString(data)
            if record.HasField("scalar"):
                found.setdefault(record.scalar.step, {})[record.scalar.key] = record.scalar.value.number
        return found

    @pytest.mark.parametrize("by", ["name", "module", "run"])
    def test_an_entry_at_a_step_is_written(self, run: Any, tmp_path: Path, by: str) -> None:
        logger = tq.SummaryLogger({"name": "swanlab", "module": swanlab, "run": run}[by])
        logged = {step: logger.log(step) for step in (1, 7)}
        swanlab.finish()
        assert_written(self.entries(tmp_path), logged)

    def test_an_entry_without_a_step_is_at_the_seconds(self, run: Any, tmp_path: Path) -> None:
        figures = tq.SummaryLogger("swanlab").log()
        swanlab.finish()
        (step, written), *_ = self.entries(tmp_path).items()
        assert step < 600
        assert written == pytest.approx(figures)


class TestMlflow:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Iterator[Any]:
        mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
        mlflow.create_experiment("e", artifact_location=str(tmp_path / "artifacts"))
        mlflow.set_experiment("e")
        with mlflow.start_run() as run:
            yield run

    def entries(self, run: Any) -> Entries:
        client = mlflow.MlflowClient()
        found: Entries = {}
        for name in client.get_run(run.info.run_id).data.metrics:
            for each in client.get_metric_history(run.info.run_id, name):
                found.setdefault(each.step, {})[name] = each.value
        return found

    @pytest.mark.parametrize("by", ["name", "module", "run"])
    def test_an_entry_at_a_step_is_written(self, run: Any, by: str) -> None:
        logger = tq.SummaryLogger({"name": "mlflow", "module": mlflow, "run": run}[by])
        logged = {step: logger.log(step) for step in (1, 7)}
        assert_written(self.entries(run), logged)

    def test_another_thread_writes_to_the_same_run(self, run: Any) -> None:
        logger, found = tq.SummaryLogger("mlflow"), {}
        thread = threading.Thread(target=lambda: found.update(logger.log(2)))
        thread.start()
        thread.join()
        assert_written(self.entries(run), {2: found})


@pytest.mark.parametrize("name", ["wandb", "swanlab", "mlflow"])
def test_without_an_active_run_the_call_that_begins_one_is_named(name: str) -> None:
    with pytest.raises(tq.InvalidArgumentError, match=rf"{name} has no active run; call {name}\.\w+\(\) first"):
        tq.SummaryLogger(name)
