"""Chooses the waiting claims to decide again after a change, in lists of claims that are met together.

A thousand claims may wait, and most still lack rows. Claims of a list have one plan, and differ only in their rank.
They are met together if the sampler would deal the same rows to one large claim as to these claims one after the other,
or if their batches were dealt before. At most MAX_GROUP claims are met at once, so that the replies to the first ones
are sent while the others are decided.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import cast

import msgspec

from transfer_queue.core.claims import row_leases
from transfer_queue.core.claims.plan import ClaimPlan, Plans
from transfer_queue.core.record_log import ChangeSet
from transfer_queue.core.samplers.calls import UserSampler
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import ClaimQueue, ParkedRequest, RequestKey, share_key
from transfer_queue.messages.claims import Claim

MAX_GROUP = 128  # claims
_REQUESTED = attrgetter(
    "count", "fields", "lease", "replicas", "hand_over", "since", "least", "probe", "ahead"
)  # what claims that are met together have in common


class Wake(msgspec.Struct):
    """A look at the waiting claims of one task in a partition, after a change."""

    plans: Plans
    partition: Partition | None
    """None if it has ended."""
    task: str
    queue: ClaimQueue
    connected: Container[RequestKey]
    """The requests whose clients are connected, so that they can get a reply."""

    def claims_to_retry(self, change: ChangeSet, gained: bool) -> Iterator[list[ParkedRequest]]:
        """Iterate over the claims that could be met now, or have come to their end, in lists that are met together.

        The caller decides each list before it takes the next one.

        Args:
            change: What has changed.
            gained: Whether rows became ready for the task.
        """
        if self.partition is None:
            yield from [[waiting] for _, waiting in self._each_claim()]
        elif change.everything or self.task in change.tasks:
            yield from self._all_claims(self.partition)
        else:
            yield from self._claims_of_change(self.partition, change, gained)

    def _each_claim(self) -> Iterator[tuple[int, ParkedRequest]]:
        """Iterate over the claims that still wait and have a connection, each with its position in `_queued`."""
        for at, (waiter, waiting) in enumerate(list(self.queue.claims.items())):
            if waiter in self.connected and waiter in self.queue.claims:  # it may have been met with another claim
                yield at, waiting

    def _all_claims(self, partition: Partition) -> Iterator[list[ParkedRequest]]:
        queued = list(self.queue.claims.values())
        for at, waiting in self._each_claim():
            plan = self.plans.of(partition, waiting.claim)
            if partition.sealed or plan.user is not None:
                yield [waiting]
            else:
                yield from self._claims_from(plan, queued, at, plan.available())

    def _claims_of_change(self, partition: Partition, change: ChangeSet, gained: bool) -> Iterator[list[ParkedRequest]]:
        queue = self.queue
        keys = change.shares.get(self.task, ())
        yield from self._claims_of_shares([waiting for key in keys for waiting in queue.claims_for_batch(key)])
        yield from [[queue.claims[waiter]] for waiter in queue.watchers]
        if self.task in change.consumed:
            yield from [[queue.claims[waiter]] for waiter in queue.finite]
        others = isinstance(self.plans.samplers.of_task(self.task), UserSampler)  # which may depend on anything
        is_sure = others or partition.sealed  # whether claims must be looked at although too few rows are ready
        if not (others or ((gained or change.joined) and (is_sure or self._has_enough_rows(partition)))):
            return
        final: dict[ClaimPlan, bool] = {}
        not_met: set[object] = set()  # no claim similar to one of these can be met
        queued = list(queue.claims.values())
        for at, waiting in self._each_claim():
            claim = waiting.claim
            plan = self.plans.of(partition, claim)
            similar = plan, claim.least, claim.sampling.get("batch_index") is None
            if plan.user is not None:
                yield [waiting]
            elif similar in not_met:
                continue
            elif (have := plan.available()) >= (claim.least or claim.count):
                yield from self._claims_from(plan, queued, at, have)
                if not partition.sealed and waiting.waiter in queue.claims and not claim.ahead:
                    not_met.add(similar)
                if not is_sure and not self._has_enough_rows(partition):
                    return
            elif partition.sealed:
                if plan not in final:
                    final[plan] = plan.is_final(plan.ready_set())
                if final[plan]:
                    yield [waiting]
        queue.tighten_bounds()

    def _has_enough_rows(self, partition: Partition) -> bool:
        """Return whether enough rows are ready for any claim."""
        wanted = self.queue.wanted.items()
        return any(partition.ready_set(self.task, fields).total >= least for fields, (_, least) in wanted)

    def _claims_from(
        self, plan: ClaimPlan, queued: Sequence[ParkedRequest], at: int, have: int
    ) -> Iterator[list[ParkedRequest]]:
        """Iterate over the claim at a position with those met with it, then over those with shares of its deal.

        have: the rows that can be dealt.
        """
        yield self._claims_of_a_deal(plan, queued, at, have)
        key, dealt = share_key(queued[at].claim.sampling), cast(Partition, plan.partition).dealt.get(self.task)
        if queued[at].waiter not in self.queue.claims and dealt is not None and key is not None:
            shares = [share for share in self.queue.shares if share[1] == key[1] and dealt.was_dealt(*share)]
            waiting_claims = [waiting for share in shares for waiting in self.queue.claims_for_batch(share)]
            yield from self._claims_of_shares(waiting_claims)

    def _claims_of_a_deal(
        self, plan: ClaimPlan, queued: Sequence[ParkedRequest], at: int, have: int
    ) -> list[ParkedRequest]:
        """Return the claim at a position, and the later ones to meet with it by one deal, which is cut."""
        claim, claims, partition = queued[at].claim, [queued[at]], cast(Partition, plan.partition)
        if have < 2 * plan.count or partition.sealed or not _is_simple(plan, claim) or not plan.cuts:
            return claims
        key, dealt, ranks = plan.key_of(claim), partition.dealt.get(self.task), set()
        if key is not None:  # a rank gets a batch once
            ranks = set() if dealt is None else {rank for rank, issued in dealt.issued.items() if key[1] in issued}
            if key[0] in ranks:
                return claims
            ranks.add(key[0])
        for waiting in islice(queued, at + 1, None):
            if len(claims) == MAX_GROUP or have < (len(claims) + 1) * plan.count or not _is_equal(claim, waiting.claim):
                break
            if waiting.waiter not in self.connected:
                continue
            if key is not None:
                rank = waiting.claim.sampling["dp_rank"]
                if rank in ranks:
                    continue  # the batch of another claim found here, or one that was dealt before
                ranks.add(rank)
            claims.append(waiting)
        return claims

    def _claims_of_shares(self, waits: Sequence[ParkedRequest]) -> Iterator[list[ParkedRequest]]:
        """Iterate over the claims that may ask for dealt batches, in lists that are answered together."""
        group: list[ParkedRequest] = []
        for waiting in waits:
            if waiting.waiter not in self.connected:
                continue
            claim = waiting.claim
            if group and (len(group) == MAX_GROUP or not _is_equal(group[0].claim, claim)):
                yield group
                group = []
            if group or _is_simple(self.plans.of(self.partition, claim), claim):
                group.append(waiting)
            else:
                yield [waiting]
        if group:
            yield group


def _is_simple(plan: ClaimPlan, claim: Claim) -> bool:
    """Return whether all rows of this claim have the same reply and records: no loss, ack or skipped row."""
    partition = plan.partition
    if plan.user is not None or partition is None or claim.probe or claim.ahead:
        return False
    acks = claim.lease is None and partition.claimed.get(plan.task)
    skips = partition.losses.counts or (plan.task, row_leases.POISON) in partition.passed.counts
    return claim.since is None and claim.least is None and not acks and not skips


def _is_equal(claim: Claim, other: Claim) -> bool:
    """Return whether another claim equals this simple one, except for the rank and the time for which it waits."""
    return (
        _REQUESTED(claim) == _REQUESTED(other)
        and len(claim.sampling) == len(other.sampling)
        and {**claim.sampling, "dp_rank": 0} == {**other.sampling, "dp_rank": 0}
    )
