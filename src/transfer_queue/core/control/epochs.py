"""Epochs: loading a checkpoint begins a new one, in which the metadata that clients have is not valid any more."""

from __future__ import annotations

from typing import Any

from transfer_queue.core.state.state import State
from transfer_queue.errors import StaleMetadataError


def check_epoch(state: State, request: Any) -> None:
    """Raise StaleMetadataError if a request names rows by metadata of another epoch."""
    epoch = getattr(request, "epoch", None)
    if epoch is not None and epoch != state.epoch:
        when = "after this metadata was fetched" if epoch < state.epoch else "that this metadata does not belong to"
        raise StaleMetadataError(
            f"a checkpoint was loaded {when}, so the samples of partition {request.partition!r} are others now; fetch "
            f"their metadata again"
        )
