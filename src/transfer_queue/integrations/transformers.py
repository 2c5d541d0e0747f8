"""TransferQueueCallback: logs the figures of the queue in each training of transformers' Trainer, and of TRL's."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from transfer_queue.attachment import current_client
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.summary_logger import TRACKERS, SummaryLogger

FOLDER = os.path.join("runs", "transfer_queue")
"""The folder of TensorBoard's files, inside `output_dir`."""


class _Figures:
    """Figures that several loggers write: each call of `stats` of a client would begin a new interval."""

    def __init__(self) -> None:
        self.now: dict[str, float] = {}

    def stats(self) -> dict[str, float]:
        return self.now


class TransferQueueCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not installed with mypy
    """Write the figures of `TransferQueueClient.stats` whenever the trainer logs, on its main process.

    Args:
        destination: See `SummaryLogger`. Default: what `report_to` of the trainer's arguments names: for "tensorboard"
            the folder `runs/transfer_queue` in `output_dir`, for "wandb", "swanlab" and "mlflow" the active run.
        log_dir: A folder for TensorBoard files. Default: see `destination`.

    Example:
        ::

            trainer = GRPOTrainer(model=model, args=args, callbacks=[TransferQueueCallback()])
    """

    def __init__(self, destination: Any = None, *, log_dir: str | os.PathLike[str] | None = None) -> None:
        self._destination = destination
        self._log_dir = log_dir
        self._figures = _Figures()
        self._loggers: list[tuple[SummaryLogger, bool]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the destinations. Raises InvalidArgumentError if there is none."""
        if state.is_world_process_zero:
            self.on_train_end(args, state, control)
            self._loggers = [
                (SummaryLogger(**where, client=self._figures), where.get("destination") != "wandb")  # type: ignore[arg-type]
                for where in self._destinations(args)
            ]

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the figures of the time since the previous entry."""
        if self._loggers:
            self._figures.now = current_client().stats()
        for logger, has_steps in self._loggers:
            # W&B counts entries itself: the figures become a part of the trainer's next one.
            logger.log(state.global_step if has_steps else None)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the files."""
        for logger, _ in self._loggers:
            logger.close()
        self._loggers = []

    def _destinations(self, args: Any) -> list[dict[str, Any]]:
        """Return the arguments of a SummaryLogger for each destination."""
        if self._destination is not None or self._log_dir is not None:
            return [{"destination": self._destination, "log_dir": self._log_dir}]
        destinations: list[dict[str, Any]] = [{"destination": name} for name in args.report_to if name in TRACKERS]
        if "tensorboard" in args.report_to:
            destinations.append({"log_dir": os.path.join(args.output_dir, FOLDER)})
        if not destinations:
            raise InvalidArgumentError(
                f"report_to must name one of {', '.join(['tensorboard', *TRACKERS])}, got {args.report_to}: set it in "
                f"the arguments of the trainer, or pass a destination to TransferQueueCallback"
            )
        return destinations
