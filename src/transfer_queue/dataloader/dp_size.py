"""Finds the number of data-parallel ranks: from the caller, or from the processes of torch.distributed.

A process of torch.distributed does not know how its world is divided into ranks. So each process that makes a dataset
writes its dp_rank into the store of the process group, and reads the ranks of the others before its first batch. All
processes use the same answer: the first one that has it writes it into the store. No collective operation is needed.
"""

from __future__ import annotations

import datetime
from collections import Counter
from typing import Any

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.utils.logging_utils import get_logger

ANSWER_SECONDS = 5.0  # for the other processes of the world to make their datasets
UNKNOWN = "unknown"

_announced: Counter[str] = Counter()  # datasets of this process, by task


def checked_dp_size(dp_size: Any, dp_rank: int) -> int | None:
    """Return a dp_size as an int; it may be a number, a process group or a device mesh. None for None.

    Raises:
        InvalidArgumentError: It is not a positive number, or dp_rank is not less than it.
    """
    if dp_size is None:
        return None
    size = dp_size.size() if callable(getattr(dp_size, "size", None)) else dp_size
    if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
        raise InvalidArgumentError(
            f"dp_size must be a positive number of dp_ranks, or a process group or device mesh of them, got {dp_size!r}"
        )
    if dp_rank >= size:
        raise InvalidArgumentError(f"dp_rank must be less than dp_size, got dp_rank {dp_rank} and dp_size {size}")
    return int(size)


class Census:
    """Finds out for one dataset how many dp_ranks have loaders of its task.

    The n-th dataset of a task in one process belongs together with the n-th one in every other process.
    """

    def __init__(self, task_name: str, dp_rank: int, store: Any, rank: int, world: int) -> None:
        self._task_name = task_name
        self._store = store
        self._world = world
        self._key = f"transfer_queue/dp_size/{task_name}/{_announced[task_name]}"
        _announced[task_name] += 1
        store.set(f"{self._key}/{rank}", str(dp_rank))

    def answer(self) -> int | None:
        """Return the number of dp_ranks, the same in every process; None if not all have written theirs in time."""
        keys = [f"{self._key}/{rank}" for rank in range(self._world)]
        verdict = f"{self._key}/answer"
        if not self._store.check([verdict]):
            try:
                self._store.wait(keys, datetime.timedelta(seconds=ANSWER_SECONDS))
                ranks = {int(self._store.get(key)) for key in keys}
                size = str(len(ranks)) if ranks == set(range(len(ranks))) else UNKNOWN
            except RuntimeError:  # not all keys were written in time
                size = UNKNOWN
            self._store.compare_set(verdict, "", size)
        agreed: str = self._store.get(verdict).decode()
        if agreed != UNKNOWN:
            return int(agreed)
        get_logger(__name__).warning(
            f"The number of dp_ranks of task {self._task_name!r} is not known: not all of the {self._world} processes "
            f"of torch.distributed have made a StreamingDataset of this task within {ANSWER_SECONDS:g} s, or their "
            f"dp_ranks are not 0, 1, 2, ... Pass dp_size= to it, so that no rank takes samples that another one needs."
        )
        return None


def census(task_name: str, dp_rank: int) -> Census | None:
    """Publish this process's dp_rank to the other processes of torch.distributed.

    Returns None if torch.distributed is not initialized in this process, or if its world is only this process, because
    then it has no information about other ranks.
    """
    import torch.distributed

    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    if torch.distributed.get_world_size() < 2:
        return None
    store = torch.distributed.distributed_c10d._get_default_store()
    return Census(task_name, dp_rank, store, torch.distributed.get_rank(), torch.distributed.get_world_size())
