"""Datasets of tests: small batches of field x of one partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transfer_queue.dataloader.streaming_dataset import StreamingDataset

Build = Callable[..., StreamingDataset]


def small_dataset(config: Any, **more: Any) -> StreamingDataset:
    """Batches of 4 of partition "p" in micro-batches of 2, for dp_rank 0 of the task "train", unless `more` differs."""
    arguments: dict[str, Any] = {
        "batch_size": 4, "micro_batch_size": 2, "data_fields": ["x"], "partition_id": "p", "task_name": "train",
        "dp_rank": 0,
    }  # fmt: skip
    return StreamingDataset(config, **{**arguments, **more})
