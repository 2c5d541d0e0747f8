"""The simulated system, and datasets of real ones."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from small_datasets import small_dataset

from simulated import a, b, cluster, start  # noqa: F401
from transfer_queue.dataloader.streaming_dataset import StreamingDataset

_numbers = itertools.count()


@pytest.fixture
def partition() -> str:
    """The name of a new partition."""
    return f"p{next(_numbers)}"


@pytest.fixture
def dataset(system: Any, partition: str) -> Callable[..., StreamingDataset]:
    """Makes a dataset of the partition: batches of 4, micro-batches of 2, and a task of its own."""

    return lambda **more: small_dataset(
        system, **{"partition_id": partition, "task_name": f"t{next(_numbers)}", **more}
    )
