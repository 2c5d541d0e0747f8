"""CheckpointReport: what a checkpoint of chosen partitions contains, and which values are lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from transfer_queue.core.state.restore import lost_values
from transfer_queue.core.state.state import State
from transfer_queue.utils.logging_utils import get_logger

_logger = get_logger(__name__)

MAX_NAMED = 5  # samples that a warning names


@dataclass(frozen=True)
class CheckpointReport:
    """What was saved or loaded by `tq.save_checkpoint` and `tq.load_checkpoint` with `partitions`.

    Example:
        >>> meta = tq.kv_put("a", "train_0", {"prompt": torch.tensor([1, 2])})
        >>> tq.save_checkpoint("checkpoint", partitions="train_0")
        CheckpointReport(samples={'train_0': 1}, lost={})
    """

    samples: dict[str, int]
    """Partition -> number of samples."""
    lost: dict[str, dict[str | int, list[str]]] = field(default_factory=dict)
    """Partition -> key of a sample (its global index in the saved system if it has none) -> fields whose values are
    lost.

    Their storage unit was lost before the save. Put these fields again, or clear the samples.
    """


def warn_of_losses(report: CheckpointReport) -> None:
    """Log a warning that names the lost values, if there are any."""
    for partition, samples in report.lost.items():
        named = ", ".join(f"{key!r} ({', '.join(fields)})" for key, fields in list(samples.items())[:MAX_NAMED])
        more = f" and {len(samples) - MAX_NAMED} more" if len(samples) > MAX_NAMED else ""
        _logger.warning(
            "%d samples of partition %r in the checkpoint have values that were lost with their storage unit: %s%s; "
            "put these fields again, or clear the samples",
            len(samples), partition, named, more,
        )  # fmt: skip


def report_on(state: State) -> CheckpointReport:
    """Return the report on a saved state."""
    samples = {name: partition.row_count for name, partition in state.partitions.items()}
    return CheckpointReport(samples, lost_values(state))
