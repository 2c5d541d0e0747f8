"""`tq.SummaryLogger` writes to TensorBoard, and to other loggers by the methods that they have."""

from __future__ import annotations

import logging
import math
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import transfer_queue as tq
from transfer_queue.client import client as client_module
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.messages.reports.timeline import TimelineReply
from transfer_queue.timeline.events import CLOSED, EventKind
from transfer_queue.timeline.recording import Recording

FIGURES = {"tq/rows": 2.0, "tq/train/rate": 0.5}


class FakeClient:
    """Counts its calls, and fails as often as wanted."""

    def __init__(self, fails: int = 0) -> None:
        self.calls, self.fails = 0, fails
        self.called = threading.Event()

    def stats(self) -> dict[str, float]:
        self.calls += 1
        if self.calls > self.fails:
            self.called.set()
            return dict(FIGURES)
        raise tq.ConnectionLostError("the system stopped")


class ScalarWriter:
    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []
        self.closed = False

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert global_step is not None
        self.seen.append((tag, scalar_value, global_step))

    def close(self) -> None:
        self.closed = True


class ValueLogger:
    """As `swanlab.Run`, and verl's and accelerate's trackers."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        self.seen.append((data, step))


class WandbRun(ValueLogger):
    """As `wandb.Run` of 0.31."""

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.seen.append((data, step, commit))


WandbRun.__module__ = "wandb.sdk.wandb_run"


class MetricLogger:
    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen.append((metrics, step))


class MlflowRun:
    """As `mlflow.ActiveRun` of 3.17: it has an identity, and no method to log."""

    info = types.SimpleNamespace(run_id="r7")


MlflowRun.__module__ = "mlflow.tracking.fluent"


def logger(destination: Any, client: Any = None, **more: Any) -> tq.SummaryLogger:
    return tq.SummaryLogger(destination, client=FakeClient() if client is None else client, **more)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("mlflow")
    module.seen, module.active = [], MlflowRun()  # type: ignore[attr-defined]
    module.active_run = lambda: module.active  # type: ignore[attr-defined]
    module.log_metrics = lambda metrics, step=None, synchronous=None, run_id=None: module.seen.append(  # type: ignore[attr-defined]
        (metrics, step, run_id)
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


class TestDestinations:
    def test_a_summary_writer_gets_one_scalar_for_each_figure(self) -> None:
        writer = ScalarWriter()
        with logger(writer) as made:
            assert made.log(7) == FIGURES
        assert writer.seen == [("tq/rows", 2.0, 7), ("tq/train/rate", 0.5, 7)]
        assert not writer.closed  # the caller made it

    @pytest.mark.parametrize("kind", [ValueLogger, MetricLogger])
    def test_an_object_with_log_or_log_metrics(self, kind: type) -> None:
        run = kind()
        logger(run).log(3)
        assert run.seen == [(FIGURES, 3)]

    def test_without_a_step_it_is_the_seconds_since_the_beginning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run, now = ValueLogger(), [100.0]
        monkeypatch.setattr("time.monotonic", lambda: now[0])
        made = logger(run)
        now[0] = 142.9
        made.log()
        assert run.seen == [(FIGURES, 42)]

    def test_a_run_of_wandb_keeps_its_steps(self) -> None:
        run = WandbRun()
        made = logger(run)
        made.log(3)
        made.log()  # added to W&B's current step, so that no step of the training is refused
        assert run.seen == [(FIGURES, 3, None), (FIGURES, None, False)]

    @pytest.mark.parametrize("by_name", [True, False])
    def test_the_active_run_of_a_module(self, by_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        module = types.ModuleType("wandb")
        module.run = WandbRun()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "wandb", module)
        logger("wandb" if by_name else module).log(1)
        assert module.run.seen == [(FIGURES, 1, None)]

    def test_swanlab_has_its_run_by_a_function(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module, run = types.ModuleType("swanlab"), ValueLogger()
        module.get_run = lambda: run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "swanlab", module)
        logger("swanlab").log(1)
        assert run.seen == [(FIGURES, 1)]

    @pytest.mark.parametrize("destination", ["mlflow", "module", "run"])
    def test_mlflow_gets_the_run_because_another_thread_has_no_active_one(
        self, destination: str, mlflow: types.ModuleType
    ) -> None:
        made = logger({"module": mlflow, "run": MlflowRun()}.get(destination, "mlflow"))
        mlflow.active = None  # type: ignore[attr-defined]
        made.log(5)
        assert mlflow.seen == [(FIGURES, 5, "r7")]  # type: ignore[attr-defined]


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"destination": "wandbb"}, "got 'wandbb'; did you mean 'wandb'?"),
            ({"destination": "runs/x"}, "A folder for TensorBoard is passed as log_dir="),
            ({"destination": "tensorboard"}, "A folder for TensorBoard is passed as log_dir="),
            ({"destination": Path("runs")}, "a folder is passed as log_dir="),
            ({}, "wandb.run is None until wandb.init() was called"),
            ({"destination": object()}, "must have a method add_scalar(name, value, step)"),
            ({"destination": math}, "must have a method"),
            ({"destination": torch}, "must have a method"),
            ({"destination": logging.getLogger("x")}, "must have a method"),
            ({"destination": ValueLogger(), "log_dir": "x"}, "destination and log_dir were both passed"),
            ({"log_dir": 3}, "log_dir must be a path, got 3"),
            ({"destination": ValueLogger(), "every": 0}, "every must be a number of seconds of at least 0.1, got 0"),
            ({"destination": ValueLogger(), "every": math.nan}, "every must be a number"),
            ({"destination": ValueLogger(), "every": True}, "every must be a number"),
        ],
    )
    def test_an_argument_that_is_not_valid(self, arguments: dict[str, Any], words: str) -> None:
        with pytest.raises(tq.InvalidArgumentError) as caught:
            tq.SummaryLogger(**arguments)
        assert words in str(caught.value)

    def test_a_missing_package_is_named_with_what_installs_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "swanlab", None)
        with pytest.raises(tq.InvalidArgumentError, match=r"swanlab is not installed.*: pip install swanlab"):
            tq.SummaryLogger("swanlab")
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(tq.InvalidArgumentError, match=r"pip install 'transfer_queue\[tensorboard\]'"):
            tq.SummaryLogger(log_dir=tmp_path / "runs")

    def test_a_module_without_an_active_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def get_run() -> Any:
            raise RuntimeError("no run")

        for name, begin, find in (
            ("wandb", "wandb.init()", {"run": None}),
            ("swanlab", "swanlab", {"get_run": get_run}),
        ):
            module = types.ModuleType(name)
            vars(module).update(find)
            monkeypatch.setitem(sys.modules, name, module)
            with pytest.raises(
                tq.InvalidArgumentError, match=f"{name} has no active run; call {begin}".replace("()", r"\(\)")
            ):
                tq.SummaryLogger(name)

    @pytest.mark.parametrize("step", ["1", 1.5, True])
    def test_a_step_that_is_no_integer(self, step: Any) -> None:
        with pytest.raises(tq.InvalidArgumentError, match="step must be an integer"):
            logger(ValueLogger()).log(step)

    def test_a_closed_logger_writes_nothing(self) -> None:
        run = ValueLogger()
        made = logger(run)
        made.close()
        made.close()
        with pytest.raises(tq.NotInitializedError, match="was closed"):
            made.log(1)
        assert run.seen == []


def names_of_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


class TestBackground:
    def test_a_thread_writes_until_close(self) -> None:
        run, client = ValueLogger(), FakeClient()
        with logger(run, client, every=0.1):
            assert client.called.wait(60)
            assert "tq-summary-logger" in names_of_threads()
        assert "tq-summary-logger" not in names_of_threads()
        assert run.seen
        assert all(values == FIGURES for values, _ in run.seen)

    def test_what_fails_is_a_warning_and_the_thread_goes_on(self, caplog: pytest.LogCaptureFixture) -> None:
        run, client = ValueLogger(), FakeClient(fails=3)
        with logger(run, client, every=0.1):
            assert client.called.wait(60)
        warned = [record.getMessage() for record in caplog.records]
        assert len(warned) == 1
        assert warned[0].endswith("tries again every 0.1 s. ConnectionLostError: the system stopped")


@pytest.fixture(scope="module")
def system() -> Iterator[None]:
    tq.init({"system": {"name": "summary"}}, task="rollout", rank=0)
    yield
    tq.close()


def test_tensorboard_files_have_the_figures(system: None, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages, when they are imported
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        made = tq.SummaryLogger(log_dir=tmp_path / "runs")
    written = []
    for step in range(3):
        tq.kv_batch_put([f"{step}-{n}" for n in range(4)], "train_0", {"prompt": torch.zeros(4, 3)})
        tq.get_client().get_meta(["prompt"], 2, "train_0", task_name="train")
        written.append(made.log(step))
    made.close()
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set().union(*written)
    for name in ("tq/train/rate", "tq/rollout/rate", "tq/rows", "tq/train/queue_rows", "tq/memory/held_bytes"):
        read = [(each.step, each.value) for each in events.Scalars(name)]
        assert read == [(step, pytest.approx(values[name], rel=1e-5)) for step, values in enumerate(written)]


def test_an_error_of_the_client_ends_the_logger_of_the_caller_only(system: None) -> None:
    client = TransferQueueClient(tq.interface.CURRENT.system)  # type: ignore[arg-type]
    made = tq.SummaryLogger(ValueLogger(), client=client)
    client.close()
    with pytest.raises(tq.NotInitializedError):
        made.log(1)


@pytest.mark.parametrize("fails", [False, True])
def test_a_client_that_closes_because_of_an_error_is_gone(system: None, fails: bool) -> None:
    client = TransferQueueClient(tq.interface.CURRENT.system, task=f"reward {fails}", rank=1)  # type: ignore[arg-type]
    try:
        client.kv_put("a", "train_1", {"prompt": torch.zeros(3)})
        if fails:
            raise RuntimeError("out of memory")
        client.close()
    except RuntimeError:
        client.close()
    assert flags_of_the_end(f"reward {fails}") == (0 if fails else CLOSED)


def flags_of_the_end(task: str) -> int:
    """Return the flags of the end of a task's client, as soon as the controller has noticed it."""
    reader = tq.get_client()
    while True:
        recording = Recording()
        while not recording.caught_up:
            recording.add(reader._run(reader._operations._ask(recording.request(), TimelineReply, None)))
        for each in recording.events[recording.events["kind"] == EventKind.GONE]:
            if recording.lanes[each["lane"]].task == task:
                return int(each["flags"])


@pytest.mark.parametrize(
    ("error", "fails"), [(None, False), (ValueError(), True), (SystemExit(1), True), (SystemExit(0), False),
                         (KeyboardInterrupt(), False)]
)  # fmt: skip
def test_which_errors_count_as_a_failure(
    error: BaseException | None, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", error, raising=False)  # as after an uncaught exception
    assert client_module._is_failing() == fails
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert not client_module._is_failing()
