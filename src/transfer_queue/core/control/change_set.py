"""What happened to a partition since its waiting requests were last looked at."""

from __future__ import annotations

from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import ShareKey


class ChangeSet:
    """What happened to one partition since its parked claims were last looked at.

    everything: any of them may be met now, or have come to its end. tasks: any of these tasks' may. consumed: of these
    tasks, those for whom a wholly consumed partition is the end. shares: task -> the batches that were dealt. joined:
    rows joined groups, so that some may be whole now. Beyond these, a claim can be met only where rows became ready
    for its task. space: rows ended, for which puts may wait.
    """

    __slots__ = ("consumed", "everything", "joined", "shares", "space", "tasks")

    def __init__(self) -> None:
        self.everything = False
        self.joined = False
        self.space = False
        self.tasks: set[str] = set()
        self.consumed: set[str] = set()
        self.shares: dict[str, set[ShareKey]] = {}

    def note(self, record: r.AnyRecord, partition: Partition | None) -> None:
        """A record of this partition was applied; the partition is as it is after it."""
        if isinstance(record, (r.RowsPut, r.Published, r.RowsReserved)):
            assert partition is not None
            self.joined |= record.groups is not None
            self.everything |= self.joined and partition.sealed  # they may leave others that can never be whole
        elif isinstance(record, r.Dealt):
            # takes rows away: it can meet only those who ask for one of its shares, or end what waits for more
            if record.batch_index is not None:
                shares = self.shares.setdefault(record.task, set())
                shares |= {(share.dp_rank, record.batch_index) for share in record.shares}
            assert partition is not None
            if partition.sealed:
                self.tasks.add(record.task)
            elif partition.wholly_consumed(record.task):
                self.consumed.add(record.task)
        elif isinstance(record, (r.RowsCleared, r.RowsDropped)) and partition is not None and not partition.sealed:
            self.space = True
            self.consumed |= {task for task in partition.tasks if partition.wholly_consumed(task)}
        elif isinstance(record, (r.PassedOver, r.LeaseAcked, r.LeaseEnded, r.RankLeft)):
            self.everything |= bool(getattr(record, "freed", b""))
            self.tasks.add(record.task)
        else:
            self.everything = True
