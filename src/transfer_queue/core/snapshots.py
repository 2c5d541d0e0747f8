"""What a partition holds, for who looks at it from outside: pages of rows with what is produced, consumed, and tags."""

from __future__ import annotations

from transfer_queue.core.state import State
from transfer_queue.messages import SnapshotReply, TakeSnapshot

PAGE_ROWS = 4096  # of an answer: about two milliseconds


def take_snapshot(state: State, request: TakeSnapshot) -> SnapshotReply:
    """The next page. Positions ascend as global indexes do."""
    partition = state.partitions.get(request.partition)
    if partition is None or request.made not in (None, partition.changes.made):
        return SnapshotReply(known=False)
    live = partition.rows.live_positions()
    first = int(live.searchsorted(request.start))
    positions = live[first : first + PAGE_ROWS]
    more = first + PAGE_ROWS < len(live)
    fields = list(partition.fields)
    keys = partition.keys_of(positions)
    return SnapshotReply(
        known=True,
        made=partition.changes.made,
        rows=partition.rows.indexes_of(positions).tobytes(),
        fields=fields,
        produced=partition.produced(fields, positions).tobytes(),
        consumed={task: partition.consumed(task, positions).tobytes() for task in partition.tasks},
        keys=keys if any(key is not None for key in keys) else None,
        tags=partition.tags_of(positions),
        start=int(positions[-1]) + 1 if more else None,
    )
