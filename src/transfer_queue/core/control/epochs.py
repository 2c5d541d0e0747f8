"""What clients know of rows is of one epoch: loading a checkpoint ends it, and rows are those of another time."""

from __future__ import annotations

from typing import Any

from transfer_queue.core.state.state import State
from transfer_queue.errors import StaleMetadataError


def check_epoch(state: State, request: Any) -> None:
    """StaleMetadataError where a request names rows that its client learnt of in another epoch."""
    epoch = getattr(request, "epoch", None)
    if epoch is not None and epoch != state.epoch:
        when = "since this metadata was made" if epoch < state.epoch else "before, with other metadata"
        raise StaleMetadataError(
            f"a checkpoint was loaded {when}, so that the samples of partition {request.partition!r} that it names are "
            f"not those of now; fetch their metadata anew"
        )
