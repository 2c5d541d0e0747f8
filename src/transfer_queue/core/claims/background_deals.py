"""Long deals under way: which tasks wait for one, and whose claim began it. Not part of the state."""

from __future__ import annotations

from transfer_queue.core.claims.batch_selection import ComputedDeal, DealTooLong, Shares
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import RequestKey


class BackgroundDeal:
    """A long deal. waiter: the claim that began it. stale: the task's consumption was reset since."""

    def __init__(self, number: int, partition: Partition, task: str, waiter: RequestKey, long: DealTooLong) -> None:
        self.number = number
        self.partition = partition
        self.task = task
        self.waiter = waiter
        self.long = long
        self.stale = False

    def made(self, shares: Shares) -> ComputedDeal | None:
        """The deal, to be checked against the state of now; None where it is void."""
        return None if self.stale else ComputedDeal(self.partition, self.long, shares)


class BackgroundDeals:
    """At most one job of each (partition, task). begun: how many there were so far."""

    def __init__(self) -> None:
        self._jobs: dict[int, BackgroundDeal] = {}
        self._of: dict[tuple[str, str], BackgroundDeal] = {}
        self.begun = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def busy(self, partition: str, task: str) -> bool:
        """Whether a deal of this task is under way."""
        return (partition, task) in self._of

    def begin(self, partition: Partition, task: str, waiter: RequestKey, long: DealTooLong) -> BackgroundDeal:
        """A job more."""
        self.begun += 1
        job = BackgroundDeal(self.begun, partition, task, waiter, long)
        self._jobs[job.number] = self._of[partition.name, task] = job
        return job

    def end(self, number: int) -> BackgroundDeal:
        """A job is done."""
        job = self._jobs.pop(number)
        del self._of[job.partition.name, job.task]
        return job

    def void(self) -> None:
        """Another state is in place: all deals that are under way are void."""
        for job in self._jobs.values():
            job.stale = True

    def forget(self, partition: str, task: str | None) -> None:
        """The consumption of a task (None: of every one) is reset: deals that are under way are void."""
        for (name, other), job in self._of.items():
            if name == partition and task in (None, other):
                job.stale = True
