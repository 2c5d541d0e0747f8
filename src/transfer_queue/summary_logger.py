"""Writes the figures of `TransferQueueClient.stats` to a training's own logger: TensorBoard, W&B and others."""

from __future__ import annotations

import importlib
import inspect
import os
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from transfer_queue.attachment import current_client
from transfer_queue.client import TransferQueueClient
from transfer_queue.display import short_repr
from transfer_queue.errors import InvalidArgumentError, NotInitializedError
from transfer_queue.names import did_you_mean
from transfer_queue.utils.logging_utils import get_logger

__all__ = ["SummaryLogger", "log_stats"]


class Tracker(NamedTuple):
    """A package whose active run can be found."""

    begin: str
    """The call that begins a run."""
    active_run: Callable[[Any], Any]
    """Returns the active run of the module. Without an active run it returns None or raises an error."""


TRACKERS = {
    "wandb": Tracker("wandb.init()", lambda module: module.run),
    "swanlab": Tracker("swanlab.init()", lambda module: module.get_run()),
    "mlflow": Tracker("mlflow.start_run()", lambda module: module.active_run()),
}
"""The trackers that a name or a module can stand for."""
FLUSH_SECONDS = 10
"""TensorBoard's files are at most this old, in seconds."""

Write = Callable[[dict[str, float], int | None], None]
"""Writes figures at a step; None: the destination chooses the step."""


class SummaryLogger:
    """Write how a training waits to the logger that the training already has.

    Each `log` writes the figures of `TransferQueueClient.stats`: shares of waiting, rates, queues, staleness. In a
    training of many ranks, one rank logs. The destination is one of these:

    - `log_dir=`: a folder for TensorBoard. Needs the extra `tensorboard`.
    - A `SummaryWriter` of torch or tensorboardX, or any object with `add_scalar(name, value, step)`.
    - A run of W&B (`wandb.run`) or SwanLab (`swanlab.init(...)`), or any object with `log(values, step=...)`.
    - The module `mlflow` or an active run of it, or any object with `log_metrics(values, step=...)`.
    - "wandb", "swanlab" or "mlflow": the active run of this process.

    Args:
        destination: Where the figures are written. Default: `log_dir`.
        log_dir: A folder for TensorBoard files, which is created. Default: none.
        every: Seconds between entries that a thread in the background writes until `close`; their steps are the seconds
            since the logger was made. W&B adds them to its current step. Default: no thread.
        client: The client whose figures are written. Default: that of this process.

    Example:
        >>> import tempfile
        >>> with tq.SummaryLogger(log_dir=tempfile.mkdtemp()) as logger:
        ...     stats = logger.log(step=1)
        >>> stats["tq/rows"]
        0.0
    """

    def __init__(
        self,
        destination: Any = None,
        *,
        log_dir: str | os.PathLike[str] | None = None,
        every: float | None = None,
        client: TransferQueueClient | None = None,
    ) -> None:
        _check_arguments(destination, log_dir, every)
        self._client = client
        self._began = time.monotonic()
        self._close: Callable[[], None] = lambda: None
        if log_dir is not None:
            writer = _tensorboard_writer(log_dir)
            self._write = self._at_seconds(_write_scalars(writer))
            self._close = writer.close
        else:
            self._write = self._write_to(destination)
        self._lock = threading.Lock()
        self._closed = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if every is not None:
            self._thread = threading.Thread(target=self._repeat, args=(every,), name="tq-summary-logger", daemon=True)
            self._thread.start()

    def log(self, step: int | None = None) -> dict[str, float]:
        """Write the figures of the time since the previous entry.

        Args:
            step: The step of the training. Default: the seconds since the logger was made; in W&B the current step.

        Returns:
            The figures that were written.

        Raises:
            InvalidArgumentError: `step` is not an integer.
            NotInitializedError: The logger was closed, or this process is not attached to a system.

        Example:
            >>> import tempfile
            >>> logger = tq.SummaryLogger(log_dir=tempfile.mkdtemp())
            >>> for step in range(2):
            ...     stats = logger.log(step)
            >>> logger.close()
        """
        if step is not None and (isinstance(step, bool) or not hasattr(step, "__index__")):
            raise InvalidArgumentError(f"step must be an integer, got {short_repr(step)}")
        client = current_client() if self._client is None else self._client
        figures = client.stats()
        with self._lock:
            if self._closed:
                raise NotInitializedError("this SummaryLogger was closed; make a new one")
            self._write(figures, None if step is None else int(step))
        return figures

    def close(self) -> None:
        """End the thread in the background, and close the files of `log_dir`. Further calls do nothing.

        A destination that was passed stays open.

        Example:
            >>> import tempfile
            >>> tq.SummaryLogger(log_dir=tempfile.mkdtemp()).close()
        """
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._close()

    def __enter__(self) -> SummaryLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repeat(self, every: float) -> None:
        """Log until `close`. An error is logged as a warning once, so that it does not end the training."""
        failed = ""
        while not self._stop.wait(every):
            try:
                self.log()
                failed = ""
            except Exception as error:
                if not failed and not self._stop.is_set():
                    get_logger(__name__).warning(
                        f"SummaryLogger could not write its figures, and tries again every {every:g} s. "
                        f"{type(error).__name__}: {error}"
                    )
                failed = str(error)

    def _at_seconds(self, write: Write) -> Write:
        """Return a function that writes entries without a step at the seconds since the logger was made."""
        return lambda values, step: write(values, int(time.monotonic() - self._began) if step is None else step)

    def _write_to(self, destination: Any) -> Write:
        """Return the function that writes to a destination."""
        target = _module_of(destination) if isinstance(destination, str) else destination
        if isinstance(target, ModuleType) and target.__name__ in TRACKERS:
            target = _active_run(target)
        package = type(target).__module__.partition(".")[0]
        if package == "mlflow" and hasattr(target, "info"):
            return self._at_seconds(_write_to_mlflow(target))
        if package == "wandb" and hasattr(target, "log"):
            return _write_to_wandb(target)
        if _accepts(target, "add_scalar", "name", 0.0, 0):
            return self._at_seconds(_write_scalars(target))
        for method in ("log_metrics", "log"):
            if _accepts(target, method, {}, step=0):
                return self._at_seconds(_write_values(getattr(target, method)))
        raise InvalidArgumentError(
            "destination must have a method add_scalar(name, value, step), log_metrics(values, step=...) or "
            f"log(values, step=...), got {short_repr(destination)} without one. {_ADVICE}"
        )


def log_stats(
    destination: Any, step: int | None = None, *, client: TransferQueueClient | None = None
) -> dict[str, float]:
    """Write the figures of `TransferQueueClient.stats` to a logger once. `SummaryLogger` keeps the logger.

    Args:
        destination: See `SummaryLogger`.
        step: The step of the training. Default: 0; in W&B the current step.
        client: The client whose figures are written. Default: that of this process.

    Returns:
        The figures that were written, of the time since the previous entry.

    Raises:
        InvalidArgumentError: `destination` has no method to log, or `step` is not an integer.
        NotInitializedError: This process is not attached to a system.

    Example:
        >>> class Writer:
        ...     def add_scalar(self, name, value, step):
        ...         if name == "tq/rows":
        ...             print(name, value, step)
        >>> stats = tq.log_stats(Writer(), step=7)
        tq/rows 0.0 7
    """
    return SummaryLogger(destination, client=client).log(step)


_ADVICE = (
    'Pass log_dir="runs/x" for TensorBoard, a run such as wandb.run, or one of the names '
    f"{', '.join(map(repr, TRACKERS))}."
)


def _check_arguments(destination: Any, log_dir: Any, every: Any) -> None:
    if destination is not None and log_dir is not None:
        raise InvalidArgumentError("destination and log_dir were both passed; make a SummaryLogger for each")
    if destination is None and log_dir is None:
        raise InvalidArgumentError(
            f"destination must not be None. {_ADVICE} wandb.run is None until wandb.init() was called."
        )
    if isinstance(destination, os.PathLike):
        raise InvalidArgumentError(f"a folder is passed as log_dir=, got destination={short_repr(destination)}")
    if log_dir is not None and not isinstance(log_dir, (str, os.PathLike)):
        raise InvalidArgumentError(f"log_dir must be a path, got {short_repr(log_dir)}")
    number = isinstance(every, (int, float)) and not isinstance(every, bool)
    if every is not None and not (number and 0.1 <= every <= threading.TIMEOUT_MAX):
        raise InvalidArgumentError(f"every must be a number of seconds of at least 0.1, got {short_repr(every)}")


def _tensorboard_writer(log_dir: str | os.PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InvalidArgumentError(
            f"log_dir needs TensorBoard, which is not installed ({error}): pip install 'transfer_queue[tensorboard]'"
        ) from error
    return SummaryWriter(os.fspath(log_dir), flush_secs=FLUSH_SECONDS)


def _module_of(name: str) -> ModuleType:
    """Return the module of a tracker."""
    if name not in TRACKERS:
        folder = " A folder for TensorBoard is passed as log_dir=." if os.sep in name or name == "tensorboard" else ""
        raise InvalidArgumentError(
            f"destination must be an object with a method to log, or one of {', '.join(map(repr, TRACKERS))}, got "
            f"{short_repr(name)}{did_you_mean(name, TRACKERS) or '.'}{folder}"
        )
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InvalidArgumentError(f"{name} is not installed ({error}): pip install {name}") from error


def _active_run(module: ModuleType) -> Any:
    """Return the active run of a tracker in this process."""
    name = module.__name__
    try:
        run = TRACKERS[name].active_run(module)
    except Exception:
        run = None
    if run is None:
        raise InvalidArgumentError(f"{name} has no active run; call {TRACKERS[name].begin} first, or pass a run")
    return run


def _accepts(destination: Any, method: str, *values: Any, **named: Any) -> bool:
    """Return whether an object has a method that can be called with these arguments."""
    function = getattr(destination, method, None)
    try:
        inspect.signature(function).bind(*values, **named)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # it does not take these arguments, or has no signature, such as math.log
        return False
    return True


def _write_scalars(writer: Any) -> Write:
    def write(values: dict[str, float], step: int | None) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write


def _write_values(function: Callable[..., Any]) -> Write:
    return lambda values, step: function(values, step=step)


def _write_to_mlflow(run: Any) -> Write:
    """Return the function that writes to an MLflow run, in any thread: the active run is one of the calling thread."""
    mlflow, identity = importlib.import_module("mlflow"), run.info.run_id
    return lambda values, step: mlflow.log_metrics(values, step=step, run_id=identity)


def _write_to_wandb(run: Any) -> Write:
    """Return the function that writes to a W&B run.

    An entry without a step is added to the current step of W&B, so that no step of the training is refused: to the
    latest entry of a training that passes its steps to W&B, otherwise to its next entry.
    """

    def write(values: dict[str, float], step: int | None) -> None:
        if step is None:
            run.log(values, commit=False)
        else:
            run.log(values, step=step)

    return write
