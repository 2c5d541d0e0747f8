"""The long deals that other threads compute now. They are not part of the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from transfer_queue.core.ready.ready_sets import ReadySet
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import RequestKey
from transfer_queue.sampler.base import Deal

Shares = Mapping[int, tuple[Any, Any]]  # as `sampler.base.Share`, in lists or i8 columns


class DealTooLong(Exception):
    """A deal would take too long to compute in the controller's loop."""

    def __init__(self, deal: Deal, count: int) -> None:
        super().__init__()
        self.deal = deal
        self.count = count
        """The batch_size with which it was prepared."""


class ComputedDeal:
    """A long deal that another thread has computed."""

    def __init__(self, partition: Partition, long: DealTooLong, shares: Shares) -> None:
        self.partition = partition
        self.long = long
        self.shares = shares

    def is_valid(self, partition: Partition, ready: ReadySet, unit: int, count: int) -> bool:
        """Return whether it is still valid: `count` rows for each share, all of them ready, and all groups complete."""
        if partition is not self.partition or count != self.long.count:
            return False
        positions = partition.rows.positions_of(self.long.deal.rows)
        if (positions < 0).any() or not ready.has_all(positions, partition.rows):
            return False
        if not partition.groups.explicit:
            return True  # a group by order of reservation changes only if one of its rows is cleared
        groups, sizes = np.unique(partition.groups.groups_of(positions, unit), return_counts=True)
        return bool((sizes == unit).all()) and all(
            partition.groups.size_of(group, unit) == unit for group in groups.tolist()
        )


class BackgroundDeal:
    """A long deal that another thread computes."""

    def __init__(self, number: int, partition: Partition, task: str, waiter: RequestKey, long: DealTooLong) -> None:
        self.number = number
        self.partition = partition
        self.task = task
        self.waiter = waiter
        """The claim that started it."""
        self.long = long
        self.stale = False
        """Whether the deal is not valid any more: the consumption was reset, or another state was loaded."""

    def validate_shares(self, shares: Shares) -> ComputedDeal | None:
        """Return the computed deal, which must be checked against the present state; None if it is stale."""
        return None if self.stale else ComputedDeal(self.partition, self.long, shares)


class BackgroundDeals:
    """The long deals, at most one for each (partition, task)."""

    def __init__(self) -> None:
        self._jobs: dict[int, BackgroundDeal] = {}
        self.by_task: dict[tuple[str, str], BackgroundDeal] = {}
        """(partition, task) -> its deal."""
        self.begun = 0
        """The number of deals started so far."""

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, partition: Partition, task: str, waiter: RequestKey, long: DealTooLong) -> BackgroundDeal:
        """Register and return a new deal."""
        self.begun += 1
        job = BackgroundDeal(self.begun, partition, task, waiter, long)
        self._jobs[job.number] = self.by_task[partition.name, task] = job
        return job

    def end(self, number: int) -> BackgroundDeal:
        """Remove and return a deal that was computed."""
        job = self._jobs.pop(number)
        del self.by_task[job.partition.name, job.task]
        return job

    def mark_all_stale(self) -> None:
        """Mark all deals as stale, because another state was loaded."""
        for job in self._jobs.values():
            job.stale = True

    def mark_stale(self, partition: str, task: str | None) -> None:
        """Mark the deals of a task (None: of every task) as stale, because its consumption was reset."""
        for (name, other), job in self.by_task.items():
            if name == partition and task in (None, other):
                job.stale = True
