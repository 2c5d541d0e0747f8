"""References and group demand of consumers, and the groups that producers promise. Reads the state, returns records."""

from __future__ import annotations

import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State, require_partition
from transfer_queue.core.tables.rows import rows_without, sort_unique
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.partitions import SetGroupDemand, TakeGroupDemand


def rank_of(claim: Claim) -> int:
    """Return the dp_rank of a claim; 0 if it has none."""
    rank = claim.sampling.get("dp_rank")
    return rank if isinstance(rank, int) else 0


def consumer_of(claim: Claim) -> tuple[str, str, int]:
    """Return the consumer of a claim, by which its next claim is recognized: (partition, task, dp_rank)."""
    return claim.partition, claim.task, rank_of(claim)


def idle_consumers(
    partition: Partition, task: str, client: str, busy: dict[str, set[tuple[str, str, int]]]
) -> list[tuple[str, str, int]]:
    """Return as which consumers of this task a client that has not fetched again references no rows any more."""
    mine = [consumer for consumer in busy.get(client, ()) if consumer[:2] == (partition.name, task)]
    return [consumer for consumer in mine if not len(partition.holds.rows_of(task, client, consumer[2]))]


def hold_records(partition: Partition, client: str, claim: Claim, rows: np.ndarray) -> list[r.AnyRecord]:
    """Return the record that a client references these rows, if the partition frees finished rows."""
    holds = partition.holds
    if claim.probe or claim.task not in holds.tasks:
        return []
    rank = rank_of(claim)
    live = rows[partition.rows.positions_of(rows) >= 0]
    fresh = rows_without(sort_unique(live), holds.rows_of(claim.task, client, rank))
    return [r.RowsHeld(partition.name, claim.task, client, rank, fresh.tobytes())] if len(fresh) else []


def describe_spanning_group(partition: Partition, rows: np.ndarray, size: int) -> str | None:
    """Return a warning if several clients reserved one of these dealt groups of `size`; None otherwise."""
    if len(partition.owners) < 2 or len(rows) % size:
        return None
    groups = rows.reshape(-1, size)
    owners = partition.rows.owners_of(partition.rows.positions_of(rows)).reshape(-1, size)
    mixed = np.flatnonzero((owners != owners[:, :1]).any(axis=1))
    if not len(mixed):
        return None
    return (
        f"groups of partition {partition.name!r} are formed by order of reservation, {size} samples each, but several "
        f"clients reserve samples there: samples {groups[mixed[0]].tolist()} were dealt as one group, although they "
        f"come from different clients. Put samples with group_ids= so that groups do not mix prompts."
    )


def missing_groups(partition: Partition | None, task: str, size: int) -> int:
    """Return how many groups the task wants in addition to those that exist undealt or that producers have promised.

    They are not more than the limit of staleness admits now.

    size: samples of a group, used if the partition was created without a group_size.
    """
    if partition is None or task not in partition.wants.groups:
        return 0
    size = partition.groups.size or size
    consumed = partition.tasks.get(task, 0) + partition.claimed.get(task, 0)
    if partition.groups.explicit:
        there = len(partition.groups.declared) - partition.groups.broken - consumed // size
    else:
        there = -(-(partition.row_count - consumed) // size)
    promised = -(-partition.wants.promised_rows(task) // size)
    missing = partition.wants.groups[task] - max(0, there) - promised
    if partition.window.limit is not None:
        space = partition.window.limit - partition.window.counted - sum(partition.wants.promised.values())
        missing = min(missing, space // size)
    return max(0, missing)


def decide_demand(state: State, request: SetGroupDemand) -> list[r.AnyRecord]:
    """Return the record that sets how many groups a task wants; none if nothing changes."""
    if request.groups < 0:
        raise InvalidArgumentError(f"groups must not be negative, got {request.groups}")
    partition = require_partition(state.partitions, request.partition)
    if partition.wants.groups.get(request.task, 0) == request.groups:
        return []
    return [r.GroupsWanted(request.partition, request.task, request.groups)]


def decide_production(
    partition: Partition | None, client: str, request: TakeGroupDemand, size: int
) -> tuple[int, list[r.AnyRecord]]:
    """Return how many groups a producer is to make, and the record of its promise to make them."""
    count = missing_groups(partition, request.task, size)
    if request.most is None or not count or partition is None:
        return count, []
    if request.most < 1:
        raise InvalidArgumentError(f"most must be positive or None, got {request.most}")
    count = min(count, request.most)
    rows = min(count * (partition.groups.size or size), r.LARGEST)
    return count, [r.GroupsTaken(request.partition, request.task, client, rows)]
