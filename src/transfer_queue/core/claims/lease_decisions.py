"""Decides how leases are granted, acknowledged, returned and ended. Reads the state and returns records."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec
import numpy as np

from transfer_queue.core.claims.final_rounds import pass_over_record
from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.state.unknown_partitions import require_partition
from transfer_queue.core.tables.lease_table import RowLease
from transfer_queue.core.tables.row_table import CLAIMED, indexes_in
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.claims import Ack, Claim, ClaimReply, Nack, RankGone

POISON = "poison"  # the reason under which rows are skipped that were delivered too often
NONE = np.zeros(0, "i8")


def mark_claimed(claim: Claim, records: list[r.AnyRecord]) -> list[r.AnyRecord]:
    """Return the records of a claim, with the dealt rows claimed instead of consumed if it asks for a lease."""
    if claim.lease is None:
        return records
    return [
        msgspec.structs.replace(record, claimed=True) if isinstance(record, r.Dealt) else record for record in records
    ]


def grant(
    state: State,
    partition: Partition,
    client: str,
    claim: Claim,
    rows: np.ndarray,
    records: list[r.AnyRecord],
    unit: int,
) -> tuple[list[r.AnyRecord], int]:
    """Return the records of a claim with what its client holds, and the token of this; 0 if it holds nothing.

    With a lease, the client holds the rows that are claimed after the deals are recorded. Without a lease, it holds
    what was dealt for no rank until it has handed it over, and the rows of a dealt batch that wait for an ack are
    consumed.

    unit: samples of a group; 0 if the sampler deals single samples.
    """
    deals = [record for record in records if isinstance(record, r.Dealt)]
    if claim.lease is None and deals:
        deal = deals[-1]
        if not claim.hand_over or deal.batch_index is not None or not deal.consumed:
            return records, 0
        batch = r.UnseenBatch(state.next_token, claim.task, client, deal.consumed, partition.policy_version)
        held = msgspec.structs.replace(deal, unseen=[batch])
        return [held if record is deal else record for record in records], batch.token
    leased = _lease_of(state, partition, client, claim, rows, deals, unit)
    return _with_lease(records, leased), leased.token if isinstance(leased, r.RowsLeased) else 0


def _lease_of(
    state: State, partition: Partition, client: str, claim: Claim, rows: np.ndarray, deals: list[r.Dealt], unit: int
) -> r.RowsLeased | r.LeaseAcked | None:
    """Return the record of the lease on the rows that a claim gets, or of consuming them without a lease.

    Returns None if there are no such rows.
    """
    if claim.lease is None and not partition.claimed.get(claim.task):
        return None
    batch = _share_of(deals, rows)
    if deals:
        fresh = np.unique(np.concatenate([_rows_of(deal) for deal in deals]))
        mine = np.intersect1d(fresh, rows)
        mine = mine[partition.consumption_states(claim.task, partition.rows.positions_of(mine)) == 0]
    else:
        mine = np.unique(rows)
        positions = partition.rows.positions_of(mine)
        mine = mine[(positions >= 0) & (partition.consumption_states(claim.task, positions) == CLAIMED)]
        known = partition.batch_of(claim.task, partition.rows.position_of(int(mine[0]))) if len(mine) else None
        if known is None:
            return None  # a user's sampler returned rows again that other clients have
        batch = known[1:]
    if claim.lease is None:
        return _acked_record(partition, claim.task, 0, mine, mine) if len(mine) else None
    if not len(mine):
        return None
    replicas = (claim.replicas or partition.options.replicas) if batch is not None else 1
    return r.RowsLeased(
        claim.partition, claim.task, state.next_token, client, mine.tobytes(), claim.lease, batch, replicas, unit
    )


def _with_lease(records: list[r.AnyRecord], lease: r.RowsLeased | r.LeaseAcked | None) -> list[r.AnyRecord]:
    """Return the records with that of the lease.

    A lease is part of the record that deals its rows, so that dealt rows are never without a lease.
    """
    if lease is None:
        return records
    for at, record in enumerate(records):
        if isinstance(record, r.Dealt) and np.isin(np.frombuffer(lease.rows, "<i8"), _rows_of(record)).all():
            assert isinstance(lease, r.RowsLeased)
            return [*records[:at], msgspec.structs.replace(record, lease=lease), *records[at + 1 :]]
    return [*records, lease]


def _rows_of(deal: r.Dealt) -> np.ndarray:
    return np.frombuffer(deal.consumed, "<i8")


def _share_of(deals: list[r.Dealt], rows: np.ndarray) -> tuple[int, int] | None:
    """Return the (dp_rank, batch_index) of the dealt share with these rows; None if there is none."""
    column = rows.astype("i8", copy=False).tobytes()
    for deal in deals:
        for share in deal.shares:
            if deal.batch_index is not None and share.rows == column:
                return share.dp_rank, deal.batch_index
    return None


def deliveries(partition: Partition, task: str, rows: np.ndarray) -> bytes | None:
    """Return the delivery number of each row (i4), from 1, and 0 for a row that is cleared; None if all are 1."""
    positions = partition.rows.positions_of(rows)
    counts = np.where(positions < 0, 0, partition.leases.delivered.counts_of(task, positions) + 1)
    return None if (counts == 1).all() else counts.astype("<i4").tobytes()


def find_unseen(state: State, name: str, token: int) -> tuple[Partition, r.UnseenBatch] | None:
    """Return a batch that was not handed over, with its partition; None if there is no such batch."""
    partition = state.partitions.get(name)
    batch = None if partition is None else partition.unseen_batches.by_token.get(token)
    return None if partition is None or batch is None else (partition, batch)


def take_back(partition: Partition, batch: r.UnseenBatch, reason: str = "nacked") -> r.LeaseEnded:
    """Return the record that makes the rows of a batch that was not handed over ready again."""
    return r.LeaseEnded(partition.name, batch.task, batch.token, batch.rows, b"", batch.rows, reason)


def return_batch(state: State, name: str, token: int) -> list[r.AnyRecord]:
    """Return the records that end a lease whose rows nobody has received; none if it has ended."""
    unseen = find_unseen(state, name, token)
    if unseen is not None:
        return [take_back(*unseen)]
    partition = state.partitions.get(name)
    lease = None if partition is None else partition.leases.by_token.get(token)
    if partition is None or lease is None:
        return []
    return end_lease(partition, lease, lease.rows, "nacked", 0, delivered=False)


def settle_unseen(
    state: State, marked: Callable[[], Collection[int]], client: str | None = None, reason: str = ""
) -> list[r.AnyRecord]:
    """Return the records for batches whose notices have not arrived, although they were handed over.

    Args:
        state: The state.
        marked: Returns the tokens of batches that were handed over, as the processes of this node have noted.
        client: A client that is gone: what it has not handed over becomes ready again. None: nothing does.
        reason: Why it does, for the records.
    """
    found = [
        (partition, batch)
        for partition in state.partitions.values()
        for batch in partition.unseen_batches.by_token.values()
        if client is None or batch.client == client
    ]
    done = marked() if found else ()
    over = [r.HandedOver(partition.name, batch.token) for partition, batch in found if batch.token in done]
    if client is None:
        return list(over)
    return [*over, *(take_back(*each, reason) for each in found if each[1].token not in done)]


def decide_ack(state: State, request: Ack) -> list[r.AnyRecord]:
    """Return the record that acknowledges those of these rows that the lease has; none if it has ended."""
    found = _find_lease(state, request.partition, request.token, request.rows)
    if found is None:
        return []
    partition, lease, mine = found
    done = mine
    if lease.replicas > 1:
        before = partition.leases.acked.counts_of(lease.task, partition.rows.positions_of(mine))
        done = mine[before + 1 >= lease.replicas]
    return [_acked_record(partition, lease.task, lease.token, mine, done)]


def decide_nack(state: State, request: Nack, limit: int) -> list[r.AnyRecord]:
    """Return the records that return those of these rows that the lease has. limit: see `end_lease`.

    A batch that was not handed over is returned as a whole.
    """
    unseen = find_unseen(state, request.partition, request.token)
    if unseen is not None:
        return [take_back(*unseen)]
    found = _find_lease(state, request.partition, request.token, request.rows)
    if found is None:
        return []
    partition, lease, mine = found
    return end_lease(partition, lease, mine, "nacked", limit, delivered=request.delivered)


def _find_lease(state: State, name: str, token: int, rows: bytes) -> tuple[Partition, RowLease, np.ndarray] | None:
    """Return the partition, the lease and those of these rows that it has; None if it has none.

    Raises InvalidArgumentError if the rows are only a part of a group.
    """
    partition = state.partitions.get(name)
    lease = None if partition is None else partition.leases.by_token.get(token)
    if partition is None or lease is None:
        return None
    live = partition.leases.live_rows(lease)
    mine = np.intersect1d(live, indexes_in(rows))
    if not len(mine):
        return None
    if lease.unit:
        groups = partition.groups.groups_of(partition.rows.positions_of(live), lease.unit)
        named = np.isin(live, mine)
        split = np.isin(groups, groups[named]) & ~named & (groups >= 0)
        if split.any():
            raise InvalidArgumentError(
                f"the samples {live[split][:5].tolist()} are missing: other samples of their groups are acknowledged "
                f"or returned here; acknowledge or return complete groups (of {lease.unit} samples)"
            )
    return partition, lease, mine


def _acked_record(partition: Partition, task: str, token: int, rows: np.ndarray, done: np.ndarray) -> r.LeaseAcked:
    free = NONE
    if token:
        free = done[partition.holds.finished_without(partition.rows.positions_of(done), task)]
    return r.LeaseAcked(partition.name, task, token, rows.tobytes(), done.tobytes(), free.tobytes())


def end_lease(
    partition: Partition, lease: RowLease, rows: np.ndarray, reason: str, limit: int, *, delivered: bool = True
) -> list[r.AnyRecord]:
    """Return the records that end a lease of rows that were not acknowledged.

    limit: the system's number of deliveries after which a row is skipped; 0 for no limit. delivered: whether this
    delivery counts. It does not count for rows that another lease of the same batch still has.
    """
    live = np.intersect1d(rows, partition.leases.live_rows(lease))
    others = [] if lease.batch is None else partition.leases.leases_of_batch(lease.batch)
    open_ = np.setdiff1d(live, np.concatenate([NONE, *(other.rows for other in others if other is not lease)]))
    counted = open_ if delivered else NONE
    poison = _poisoned_rows(partition, lease, counted, _max_deliveries(partition, limit))
    returned = NONE if lease.batch is not None else open_
    records: list[r.AnyRecord] = [
        r.LeaseEnded(
            partition.name, lease.task, lease.token, rows.tobytes(), counted.tobytes(), returned.tobytes(), reason
        )
    ]
    return records + _skip_poison(partition, lease.task, poison)


def return_unseen(state: State, client: str, sequence: int) -> list[r.AnyRecord]:
    """Return the records that end the lease of a claim that its client cancels, which has not seen the rows."""
    kept = state.clients.get(client)
    met = None if kept is None else kept.replies.get(sequence)
    token = met.token if isinstance(met, ClaimReply) else 0
    names = list(state.partitions) if token else []
    return next((records for name in names if (records := return_batch(state, name, token))), [])


def _max_deliveries(partition: Partition, limit: int) -> int:
    own = partition.options.max_deliveries
    return limit if own is None else own


def _poisoned_rows(partition: Partition, lease: RowLease, counted: np.ndarray, limit: int) -> np.ndarray:
    """Return those of these rows, in complete groups, that reach the limit of deliveries with this delivery."""
    if not limit or not len(counted):
        return NONE
    positions = partition.rows.positions_of(counted)
    bad = partition.leases.delivered.counts_of(lease.task, positions) + 1 >= limit
    if lease.unit:
        groups = partition.groups.groups_of(positions, lease.unit)
        bad |= np.isin(groups, groups[bad])
    poison: np.ndarray = counted[bad]
    return poison


def _skip_poison(partition: Partition, task: str, poison: np.ndarray) -> list[r.AnyRecord]:
    """Return the records that skip these rows, and count them as done if no other task has to consume them."""
    if not len(poison):
        return []
    records: list[r.AnyRecord] = [pass_over_record(partition, task, poison, POISON)]
    done = min(len(poison), partition.undone)
    if done and partition.options.free_when == [task]:
        records.append(r.RowsDone(partition.name, done))
    return records


def decide_rank_gone(state: State, request: RankGone, limit: int) -> tuple[list[r.AnyRecord], int]:
    """Return the records that make the unacknowledged rows of a rank ready again, and the number of these rows."""
    partition = require_partition(state.partitions, request.partition)
    task, rank = request.task, request.dp_rank
    dealt = partition.dealt.get(task)
    kept = [dealt.batches[number].rows for (owner, _), number in dealt.by_key.items() if owner == rank] if dealt else []
    rows = np.unique(np.concatenate([NONE, *kept]))
    positions = partition.rows.positions_of(rows)
    rows = rows[(positions >= 0) & (partition.consumption_states(task, positions) == CLAIMED)]
    leases = partition.leases.leases_of_rank(task, rank)
    counted, poison = NONE, NONE
    for lease in leases:
        mine = np.setdiff1d(np.intersect1d(rows, lease.rows), counted)
        counted = np.union1d(counted, mine)
        poison = np.union1d(poison, _poisoned_rows(partition, lease, mine, _max_deliveries(partition, limit)))
    left = r.RankLeft(
        partition.name, task, rank, [lease.token for lease in leases], rows.tobytes(), counted.tobytes()
    )  # fmt: skip
    return [left, *_skip_poison(partition, task, poison)], len(rows) - len(poison)


def has_poisoned_rows(partition: Partition, task: str, rows: np.ndarray) -> bool:
    """Return whether rows of a dealt batch are skipped as poison."""
    if (task, POISON) not in partition.passed.counts:
        return False
    positions = partition.rows.positions_of(rows)
    return any(partition.passed.reason(task, p) == POISON for p in positions[positions >= 0].tolist())
