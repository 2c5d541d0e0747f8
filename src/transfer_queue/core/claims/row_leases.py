"""Leases of rows: how they are granted, acknowledged, returned and ended, at the latest when their time is over.

The decisions read the state and return records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from transfer_queue.core.claims.final_rounds import pass_over_record
from transfer_queue.core.claims.plan import ClaimPlan, OpenClaim
from transfer_queue.core.context import Context, CoreService, observes
from transfer_queue.core.deadlines import Deadlines
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State, require_partition
from transfer_queue.core.tables.leases import RowLease
from transfer_queue.core.tables.rows import CLAIMED, indexes_in
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.claims import Ack, ClaimReply, Nack, RankGone
from transfer_queue.messages.reports.overview import LeaseSummary
from transfer_queue.metrics.timing import MAX_NAMES, OTHER, bounded_key

POISON = "poison"  # the reason under which rows are skipped that were delivered too often
NONE = np.zeros(0, "i8")


class Leases(CoreService):
    """The deadlines of the leases of rows, and how many there were since the controller started."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        leases = [
            (partition.name, lease)
            for partition in context.state.partitions.values()
            for lease in partition.leases.by_token.values()
        ]
        self.deadlines = Deadlines(leases, self._find, context.now)
        self.granted: Counter[str] = Counter()
        """Task -> leases."""
        self.acknowledged: Counter[str] = Counter()
        """Task -> rows."""
        self.redelivered: Counter[tuple[str, str]] = Counter()
        """(task, reason) -> rows whose delivery ended without an ack."""

    @classmethod
    def must_start(cls, context: Context) -> bool:
        """See `CoreService.must_start`."""
        return any(partition.leases.by_token for partition in context.state.partitions.values())

    def _find(self, name: str, token: int) -> RowLease | None:
        entry = find_lease(self.context.state, name, token)
        return None if entry is None else entry[1]

    def begin(self, partition: str, lease: RowLease) -> None:
        """Set the deadline of a new lease."""
        self.deadlines.begin(partition, lease, self.context.now)
        self.granted[_bounded_label(lease.task, self.granted)] += 1

    def renew(self, name: str, token: int) -> bool:
        """Restart the time of a lease. Returns whether it is in force. One whose rows are all cleared is not."""
        entry = find_lease(self.context.state, name, token)
        live = entry is not None and bool(len(entry[0].leases.live_rows(entry[1])))
        return live and self.deadlines.renew(name, token, self.context.now)

    def next_due(self) -> float | None:
        """See `CoreService.next_due`."""
        return self.deadlines.next_deadline()

    def on_due(self) -> list[Effect]:
        """End the leases whose time is over: their rows are ready again, or dropped after too many deliveries."""
        context = self.context
        for name, lease in self.deadlines.expired(context.now):
            leased = context.state.partitions[name]
            for record in end_lease(leased, lease, lease.rows, "expired", context.config.max_deliveries):
                context.log.apply(record)
        return []

    @observes(r.LeaseAcked)
    def count_ack(self, record: r.LeaseAcked) -> None:
        """Count acknowledged rows."""
        if record.token:
            self.acknowledged[_bounded_label(record.task, self.acknowledged)] += len(record.rows) // 8

    @observes(r.LeaseEnded, r.RankLeft)
    def count_end(self, record: r.LeaseEnded | r.RankLeft) -> None:
        """Count rows that are delivered again."""
        reason = record.reason if isinstance(record, r.LeaseEnded) else "rank gone"
        if record.counted:
            task, reason = bounded_key((record.task, reason), self.redelivered)
            self.redelivered[task, reason] += len(record.counted) // 8

    def summarize(self, lease: RowLease, summaries: dict[str, LeaseSummary], now: float) -> None:
        """Add a lease to the summary of its task. now: The time on the controller's clock."""
        task = _bounded_label(lease.task, summaries)
        known = summaries.get(task, LeaseSummary(task, 0, 0))
        age = self.deadlines.age_of(lease, now)
        ages = [each for each in (known.oldest, age) if each is not None]
        summaries[task] = LeaseSummary(task, known.count + 1, known.rows + len(lease.rows), max(ages, default=None))

    def series(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Return the counters by name and label values, for `metrics.samples.series`."""
        return {
            "leases_granted": {(task,): count for task, count in self.granted.items()},
            "acknowledged_rows": {(task,): count for task, count in self.acknowledged.items()},
            "redelivered_rows": {(task, reason): count for (task, reason), count in self.redelivered.items()},
        }


def _bounded_label(task: str, known: Collection[str]) -> str:
    return task if task in known or len(known) < MAX_NAMES else OTHER


# ------------------------------------------------------------ decisions


def lease_rows(
    state: State, plan: ClaimPlan, claims: Sequence[OpenClaim], batches: list[np.ndarray], records: list[r.AnyRecord]
) -> list[int]:
    """Add the leases of claims to their records, or that rows are consumed without a lease, and return the tokens."""
    partition = cast(Partition, plan.partition)
    deals = [record for record in records if isinstance(record, r.Dealt)]
    fresh = np.concatenate([NONE, *(np.frombuffer(deal.consumed, "<i8") for deal in deals)])
    keys = {share.rows: (share.dp_rank, deal.batch_index) for deal in deals for share in deal.shares}
    leases: list[r.RowsLeased] = []
    for each, rows in zip(claims, batches, strict=True):
        claim, leased = each.claim, np.unique(rows)
        batch: tuple[int, int] | None = None
        if deals:
            rank, batch_index = keys.get(rows.tobytes(), (0, None))
            batch = None if batch_index is None else (rank, batch_index)
            if plan.user is not None:
                leased = np.intersect1d(fresh, leased)
        else:
            positions = partition.rows.positions_of(leased)
            leased = leased[(positions >= 0) & (partition.consumption_states(plan.task, positions) == CLAIMED)]
            known = partition.batch_of(plan.task, partition.rows.position_of(int(leased[0]))) if len(leased) else None
            if known is None:
                return []  # a user's sampler returned rows again that other clients have
            batch = known[1:]
        if claim.lease is None:
            records.append(_acked_record(partition, plan.task, 0, leased, leased))
            return []
        if len(leased):
            replicas = (claim.replicas or partition.options.replicas) if batch is not None else 1
            token, column = state.next_token + len(leases), leased.tobytes()
            lease = r.RowsLeased(
                claim.partition, plan.task, token, each.caller.client, column, claim.lease, batch, replicas, plan.unit
            )
            leases.append(lease)
    tokens = [lease.token for lease in leases]
    first = np.frombuffer(leases[0].rows, "<i8") if leases else NONE
    for at, record in enumerate(records) if leases else ():
        # The leases are part of the record that deals their rows, so that dealt rows are never without a lease.
        if isinstance(record, r.Dealt) and np.isin(first, np.frombuffer(record.consumed, "<i8")).all():
            added: dict[str, Any] = {"lease": leases[0]} if len(leases) == 1 else {"leases": leases}
            records[at] = msgspec.structs.replace(record, **added)
            return tokens
    records += leases
    return tokens


def deliveries(partition: Partition, task: str, positions: np.ndarray) -> np.ndarray:
    """Return the delivery number of each row (i4), from 1, and 0 for a row that is cleared (position -1)."""
    counts = partition.leases.delivered.numbers_of(task, positions) + 1
    return np.where(positions < 0, 0, counts).astype("<i4")


def find_lease(state: State, name: str, token: int) -> tuple[Partition, RowLease] | None:
    """Return a lease, with its partition; None if there is no such lease."""
    partition = state.partitions.get(name)
    lease = None if partition is None else partition.leases.by_token.get(token)
    return None if partition is None or lease is None else (partition, lease)


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
    entry = find_lease(state, name, token)
    return [] if entry is None else end_lease(*entry, entry[1].rows, "nacked", 0, delivered=False)


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
    batches = [
        (partition, batch)
        for partition in state.partitions.values()
        for batch in partition.unseen_batches.by_token.values()
        if client is None or batch.client == client
    ]
    done = marked() if batches else ()
    over = [r.HandedOver(partition.name, batch.token) for partition, batch in batches if batch.token in done]
    if client is None:
        return list(over)
    return [*over, *(take_back(*each, reason) for each in batches if each[1].token not in done)]


def decide_ack(state: State, request: Ack) -> list[r.AnyRecord]:
    """Return the record that acknowledges those of these rows that the lease has; none if it has ended."""
    leased = _find_leased(state, request.partition, request.token, request.rows)
    if leased is None:
        return []
    partition, lease, acked = leased
    done = acked
    if lease.replicas > 1:
        before = partition.leases.acked.numbers_of(lease.task, partition.rows.positions_of(acked))
        done = acked[before + 1 >= lease.replicas]
    return [_acked_record(partition, lease.task, lease.token, acked, done)]


def decide_nack(state: State, request: Nack, limit: int) -> list[r.AnyRecord]:
    """Return the records that return those of these rows that the lease has. limit: see `end_lease`.

    A batch that was not handed over is returned as a whole.
    """
    unseen = find_unseen(state, request.partition, request.token)
    if unseen is not None:
        return [take_back(*unseen)]
    leased = _find_leased(state, request.partition, request.token, request.rows)
    if leased is None:
        return []
    return end_lease(*leased, "nacked", limit, delivered=request.delivered)


def _find_leased(state: State, name: str, token: int, rows: bytes) -> tuple[Partition, RowLease, np.ndarray] | None:
    """Return the partition, the lease and those of these rows that it has; None if it has none.

    Raises InvalidArgumentError if the rows are only a part of a group.
    """
    entry = find_lease(state, name, token)
    if entry is None:
        return None
    partition, lease = entry
    live = partition.leases.live_rows(lease)
    leased = np.intersect1d(live, indexes_in(rows))
    if not len(leased):
        return None
    if lease.unit:
        groups = partition.groups.groups_of(partition.rows.positions_of(live), lease.unit)
        named = np.isin(live, leased)
        split = np.isin(groups, groups[named]) & ~named & (groups >= 0)
        if split.any():
            raise InvalidArgumentError(
                f"the samples {live[split][:5].tolist()} are missing: other samples of their groups are acknowledged "
                f"or returned here; acknowledge or return complete groups (of {lease.unit} samples)"
            )
    return partition, lease, leased


def _acked_record(partition: Partition, task: str, token: int, rows: np.ndarray, done: np.ndarray) -> r.LeaseAcked:
    free = NONE
    if token:
        free = done[partition.holds.finished_rows(partition.rows.positions_of(done), task, skips=True)]
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
    poison = _poisoned_rows(partition, lease, counted, limit)
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


def _poisoned_rows(partition: Partition, lease: RowLease, counted: np.ndarray, limit: int) -> np.ndarray:
    """Return those of these rows, in complete groups, that reach the limit of deliveries with this delivery.

    limit: the system's; that of the partition counts if it has one.
    """
    own = partition.options.max_deliveries
    limit = limit if own is None else own
    if not limit or not len(counted):
        return NONE
    positions = partition.rows.positions_of(counted)
    bad = partition.leases.delivered.numbers_of(lease.task, positions) + 1 >= limit
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
        uncounted = np.setdiff1d(np.intersect1d(rows, lease.rows), counted)
        counted = np.union1d(counted, uncounted)
        poison = np.union1d(poison, _poisoned_rows(partition, lease, uncounted, limit))
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
