"""Leases in any order of events, against a ledger: no row is acknowledged twice, none is lost, tokens only fence.

The model knows what is consumed, who has what until when, and how often a row was delivered in vain. After every event
the harness checks the state's invariants, and each run ends with a replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import Harness, column, rows_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from differential import stateful
from transfer_queue.core.claims.row_leases import Leases
from transfer_queue.errors import BatchGoneError, InvalidArgumentError
from transfer_queue.messages.claims import Ack, Cancel, Claim, ClaimReply, Nack, RankGone, Renew, ResetConsumption
from transfer_queue.messages.partitions import ClearPartition, Seal
from transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)

GROUP, RANKS = 2, 2
SAMPLERS: dict[str, Callable[[], BaseSampler]] = {
    "sequential": SequentialSampler,
    "groups": lambda: GRPOGroupNSampler(GROUP),
    "rank_aware": RankAwareSampler,
    "balanced": lambda: SeqlenBalancedSampler(GROUP, RANKS),
}
CLIENTS = st.sampled_from(["a", "b", "c"])
WHICH = st.integers(0, 1 << 16)

Key = tuple[int, int]


class Held:
    """A lease as its client knows it. rows: all its rows. open: rows that are not acknowledged and have not ended."""

    def __init__(self, token: int, rows: list[int], seconds: float, now: float, key: Key | None) -> None:
        self.token, self.rows, self.seconds, self.end, self.key = token, rows, seconds, now + seconds, key
        self.open = set(rows)
        self.request = ("", 0)  # its client and sequence


class Ledger(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.h = Harness()
        self.live: list[int] = []
        self.held: list[Held] = []  # all leases ever, those that are over too
        self.over: set[int] = set()  # rows consumed, acknowledged or set aside
        self.ledger: set[int] = set()  # rows acknowledged since the last reset
        self.vain: dict[int, int] = {}
        self.acks: Counter[int] = Counter()  # of rows that more replicas have to acknowledge
        self.counts = self.no_counts()  # as the metrics have them
        self.waits: tuple[int, Claim] | None = None  # a claim of client "z" that waits
        self.batches: dict[Key, list[int]] = {}
        self.limit = 0
        self.top = 0

    @initialize(
        sampler=st.sampled_from(sorted(SAMPLERS)), limit=st.sampled_from([None, None, 0, 1, 2]),
        system=st.integers(0, 2), replicas=st.integers(1, 2), frees=st.booleans(),
    )  # fmt: skip
    def begin(self, sampler: str, limit: int | None, system: int = 0, replicas: int = 1, frees: bool = False) -> None:
        self.kept = sampler in ("rank_aware", "balanced")
        self.together = sampler == "balanced"
        self.unit = GROUP if sampler in ("groups", "balanced") else 1
        self.h = Harness(SAMPLERS[sampler](), max_deliveries=system)
        self.limit, self.own_limit = system if limit is None else limit, limit
        self.replicas, self.frees = replicas if self.kept else 1, frees
        self.make()

    def make(self) -> None:
        """Make the partition. Its limit of deliveries is that of the system, or its own."""
        self.h.create(max_deliveries=self.own_limit, free_when=["t"] if self.frees else [])

    @staticmethod
    def no_counts() -> dict[str, Counter[tuple[str, ...]]]:
        return {name: Counter() for name in ("leases_granted", "acknowledged_rows", "redelivered_rows")}

    # ------------------------------------------------------------ events

    def put(self, groups: int) -> None:
        if self.sealed or not groups:
            return
        count = groups * GROUP
        self.live += self.h.put(count, tags=[{"total_lengths": 5}] * count)
        self.a_claim_waits_only_for_rows()

    @invariant()
    def a_claim_waits_only_for_rows(self) -> None:
        if self.waits is None:
            return
        sequence, claim = self.waits
        if not self.h.parked(sequence, "z"):
            self.waits = None
            self.note_leased(self.h.result(sequence, "z"), 1000.0, None, ("z", sequence))
            return
        taken = self.over.union(*(held.open for held in self.held))
        ready = [row for row in self.live if row not in taken]
        whole = [row for row in ready if self.unit == 1 or {row ^ 1} & set(ready)]
        assert len(whole) < claim.count, "its rows are ready"

    @rule(new=st.sampled_from([0, 2, 2, 4]), groups=st.integers(1, 2), rank=st.sampled_from([0, 0, 1]),
          number=st.sampled_from([0, 0, 0, 1, 2]), client=CLIENTS, seconds=st.sampled_from([2.0, 4.0]),
          leased=st.integers(0, 5), also=st.sampled_from([0.0, 2.0, 4.0]))  # fmt: skip
    def claim(
        self, new: int, groups: int, rank: int, number: int, client: str, seconds: float, leased: int, also: float = 0.0
    ) -> None:
        """Most claims come after a put, because a claim of nothing shows nothing. also: the lease of a second one."""
        self.put(new)
        self.claim_once(groups, rank, number, client, seconds, leased)
        if also:
            self.claim_once(groups, rank, number, "b", also, 1)

    def claim_once(self, groups: int, rank: int, number: int, client: str, seconds: float, leased: int) -> None:
        key = (rank, number) if self.kept else None
        count = GROUP if self.kept else groups * GROUP
        sampling = {"dp_rank": rank, "batch_index": number} if self.kept else {}
        lease = seconds if leased or self.frees else None
        if self.replicas > 1 and lease is not None:
            sampling["replicas"] = self.replicas
        sequence = self.h.claim(count, name=client, lease=lease, **sampling)
        try:
            reply = self.h.result(sequence, client)
        except BatchGoneError:
            assert key is not None
            known = self.batches.get(key)
            assert known is None or set(known) & self.over or not set(known) & set(self.live)
            return
        assert isinstance(reply, ClaimReply)
        rows = rows_of(reply)
        if not rows:
            return
        if lease is not None:
            self.note_leased(reply, seconds, key, (client, sequence))
            return
        known = self.note_dealt(rows, key)
        assert reply.token == 0
        self.through({row for row in rows if row not in self.over}, key)
        if not known and key is not None:  # what others are to get of the same deal is consumed with it
            self.through(self.shares(key[1]) - self.over, key)

    def note_dealt(self, rows: list[int], key: Key | None) -> bool:
        """Check the rows that a claim got. Returns whether its batch is known."""
        known = self.batches.get(key) if key is not None else None
        if known is not None:
            assert rows == known, "a batch is the same for all who ask"
        else:
            busy = set().union(*(held.open for held in self.held), *self.batches.values())
            assert not set(rows) & (busy | self.over), "a row is given to two at a time"
            self.dealt(key, rows)
        return known is not None

    def note_leased(self, reply: ClaimReply, seconds: float, key: Key | None, request: tuple[str, int]) -> None:
        rows = rows_of(reply)
        known = bool(rows) and self.note_dealt(rows, key)
        told = None if reply.deliveries is None else np.frombuffer(reply.deliveries, "<i4").tolist()
        if reply.token:
            assert reply.token > self.top, "tokens never go back"
            self.top = reply.token
            assert (told or [1] * len(rows)) == [self.vain.get(row, 0) + 1 if row in self.live else 0 for row in rows]
            open_ = [row for row in rows if row in self.live and row not in self.over]
            self.held.append(Held(reply.token, open_, seconds, self.h.now, key))
            self.held[-1].request = request
            self.counts["leases_granted"]["t",] += 1
        else:
            assert known or not rows, "rows of a new batch have a lease"
            assert set(rows) & set(self.live) <= self.over

    def dealt(self, key: Key | None, rows: list[int]) -> None:
        """What the core keeps, it says itself: a balanced deal has the other rank's share, too."""
        if key is None:
            return
        self.batches[key] = rows
        found = self.h.state.partitions["p"].dealt["t"]
        for other, number in found.by_key.items():
            self.batches.setdefault(other, found.batches[number].rows.tolist())
        every = [row for batch in self.batches.values() for row in batch]
        assert len(set(every)) == len(every), "a row is in two batches"

    def shares(self, number: int) -> set[int]:
        """Return the rows of all ranks' batches of one deal of a balanced sampler."""
        return {row for key, rows in self.batches.items() if key[1] == number and self.together for row in rows}

    @rule(which=WHICH, cut=st.integers(0, 5))
    def ack(self, which: int, cut: int) -> None:
        held, rows = self.some(which, cut)
        if held is None:
            return
        expected = held.open & set(rows)
        try:
            counts = self.h.ask(Ack("p", held.token, column(rows)), "a").value
        except InvalidArgumentError:
            assert self.splits(held, expected)
            return
        assert counts == bool(expected)
        held.open -= expected
        self.acks.update(expected)
        done = {row for row in expected if self.acks[row] >= self.replicas}
        assert not done & self.ledger, "a row is acknowledged twice"
        self.ledger |= done
        self.counts["acknowledged_rows"]["t",] += len(expected)
        self.through(done, held.key)

    @rule(which=WHICH, cut=st.integers(0, 5), reason=st.sampled_from(["nacked", "nacked", "", "cancelled"]))
    def nack(self, which: int, cut: int, reason: str) -> None:
        """A client returns rows that it has got or not, or cancels the claim, whose reply it has not seen."""
        held, rows = self.some(which, cut)
        if held is None:
            return
        if reason == "cancelled":
            client, sequence = held.request
            undone = self.h.ask(Cancel(sequence), client).value
            assert undone or not held.open
            self.back(held, set(held.open), "")
            return
        expected = held.open & set(rows)
        try:
            counts = self.h.ask(Nack("p", held.token, column(rows), bool(reason)), "a").value
        except InvalidArgumentError:
            assert self.splits(held, expected)
            return
        assert counts == bool(expected)
        self.back(held, expected, reason)

    @rule(which=WHICH)
    def renew(self, which: int) -> None:
        held, _ = self.some(which, 0)
        if held is None:
            return
        assert self.h.ask(Renew([("p", held.token)]), "a").value == [bool(held.open)]
        if held.open:
            held.end = self.h.now + held.seconds

    @rule(seconds=st.sampled_from([1.0, 3.0, 3.0, 20.0]))  # 3 s end the shorter leases only
    def wait(self, seconds: float) -> None:
        now = self.h.now + seconds
        for held in sorted((h for h in self.held if h.open and h.end <= now), key=lambda h: (h.end, h.token)):
            self.back(held, set(held.open), "expired")
        self.h.tick(now)

    @rule(which=WHICH)
    def clear(self, which: int) -> None:
        if self.live:
            row = self.live.pop(which % len(self.live))
            self.h.clear([row])
            for held in self.held:
                held.open.discard(row)
            self.forget_dead()

    @rule(rank=st.integers(0, RANKS - 1))
    def gone(self, rank: int) -> None:
        if not self.kept:
            return
        open_ = {k: [r for r in rows if r in self.live and r not in self.over] for k, rows in self.batches.items()}
        mine = {key: rows for key, rows in open_.items() if key[0] == rank and rows}
        for held in [h for h in self.held if h.key is not None and h.key[0] == rank]:
            self.back(held, set(held.open), "rank gone")
        rows = {row for rows in mine.values() for row in rows}
        assert self.h.ask(RankGone("p", "t", rank)).value == len(rows - self.over)
        for key in mine:
            self.batches.pop(key, None)
        for row in rows:
            del self.acks[row]

    @rule(
        event=st.sampled_from(["wait", "wait", "restart", "replay", "reset", "drop", "seal", "leave"]), client=CLIENTS
    )
    def seldom(self, event: str, client: str) -> None:
        if event == "reset":
            self.h.ask(ResetConsumption("p", "t"))
            self.begin_anew()
        elif event == "drop":
            self.h.ask(ClearPartition("p"))
            self.live = []
            self.make()
            self.begin_anew()
        elif event == "wait":
            self.wait_for_rows(4 if client == "a" else 2)
        elif event in ("restart", "replay"):
            self.restart(event == "replay")
        elif event == "leave":
            self.h.client(client)
            self.h.disconnect(client)
            self.h.connect(client)
        elif not self.kept:  # with ranks a seal deals remainders of its own
            self.h.ask(Seal("p"))

    def wait_for_rows(self, count: int) -> None:
        if self.waits is None and not self.kept:
            claim = Claim("p", "t", ["x"], count, {}, 1e9, lease=1000.0)
            self.waits = self.h.send(claim, "z"), claim

    def restart(self, replays: bool) -> None:
        """All leases have their whole time again."""
        self.h.restart(replays=replays)
        for held in self.held:
            held.end = self.h.now + held.seconds
        self.counts = self.no_counts()
        if self.waits is not None:
            sequence, claim = self.waits
            self.h.send(claim, "z", sequence)

    # ------------------------------------------------------------ the model

    @property
    def sealed(self) -> bool:
        return self.h.state.partitions["p"].sealed

    def some(self, which: int, cut: int) -> tuple[Held | None, list[int]]:
        """Draw a lease, in two of three cases an open one, and some of its rows, usually all."""
        if not self.held:
            return None, []
        open_ = [held for held in self.held if held.open and which % 3]
        held = (open_ or self.held)[which % len(open_ or self.held)]
        return held, held.rows[: len(held.rows) - 1] if cut in (1, 2) else held.rows

    def splits(self, held: Held, rows: set[int]) -> bool:
        return self.unit > 1 and bool(rows) and rows != held.open

    def through(self, rows: set[int], key: Key | None) -> None:
        """Mark rows as consumed, and fence all other leases on them."""
        self.over |= rows
        for held in self.held:
            if held.open & rows:
                assert held.key == key, "a row was open in another batch"
                held.open -= rows
        self.free(rows)

    def free(self, rows: set[int]) -> None:
        if self.frees:
            self.live = [row for row in self.live if row not in rows]
            self.forget_dead()

    def back(self, held: Held, rows: set[int], reason: str) -> None:
        """Rows of a lease end. reason: "" if they were not delivered."""
        held.open -= rows
        alone = rows - set().union(*(other.open for other in self.held if other.key == held.key))
        if not reason:
            return
        self.counts["redelivered_rows"]["t", reason] += len(alone)
        for row in alone:
            self.vain[row] = self.vain.get(row, 0) + 1
        poison = {row for row in alone if self.limit and self.vain[row] >= self.limit}
        if self.unit > 1 and poison:
            firsts = {self.group(row) for row in poison}
            poison = {row for row in alone if self.group(row) in firsts}
        self.over |= poison
        for row in poison:
            del self.acks[row]
        self.free(poison)

    def group(self, row: int) -> int:
        return row // GROUP

    def forget_dead(self) -> None:
        self.batches = {key: rows for key, rows in self.batches.items() if set(rows) & set(self.live)}

    def begin_anew(self) -> None:
        for held in self.held:
            held.open.clear()
        self.over, self.ledger, self.vain, self.acks, self.batches = set(), set(), {}, Counter(), {}

    @invariant()
    def nothing_is_lost(self) -> None:
        """Each live row is ready, open in a lease or in a dealt batch, or finished, as in the core."""
        partition = self.h.state.partitions.get("p")
        if partition is None:
            return
        positions = partition.rows.live_positions()
        rows: list[Any] = partition.rows.indexes_of(positions).tolist()
        assert rows == self.live
        taken = dict(zip(rows, partition.consumption_states("t", positions).tolist(), strict=True))
        busy = set().union(*(held.open for held in self.held), *self.batches.values())
        for row in rows:
            assert taken[row] == (1 if row in self.over else 2 if row in busy else 0), row

    @invariant()
    def the_metrics_count_the_same(self) -> None:
        if self.h.state.partitions:  # before that, the service does not exist
            series = self.h.controller.context.services[Leases].series()
            assert {name: Counter(counts) for name, counts in series.items()} == self.counts


TestLedger = stateful(Ledger, 60, 40)


@pytest.mark.parametrize("late", [False, True])
def test_the_rules_of_the_ledger_in_a_fixed_order(late: bool) -> None:
    """The rules of the state machine in one fixed order, so that a change that disables them fails here."""
    ledger = Ledger()
    ledger.begin("sequential", 0)
    ledger.claim(1, 1, 0, 0, "a", 1.0, 1)
    if late:
        ledger.wait(5.0)
    ledger.ack(0, 0)
    ledger.nothing_is_lost()
    assert ledger.ledger == (set() if late else {0, 1})


def test_the_ledger_of_a_batch_cleared_partly_and_then_completely() -> None:
    """A case that the state machine found: one row of a dealt batch is cleared after its lease has expired."""
    ledger = Ledger()
    ledger.begin("rank_aware", 0)
    ledger.claim(1, 1, 1, 0, "a", 1.0, 1)
    ledger.wait(1.0)
    ledger.clear(0)
    ledger.claim(0, 1, 1, 0, "a", 1.0, 1)
    assert [held.open for held in ledger.held] == [set(), {1}]
    ledger.ack(1, 0)
    ledger.nothing_is_lost()
    assert ledger.ledger == {1}
    ledger.clear(0)
    ledger.h.claim(GROUP, name="a", lease=1.0, dp_rank=1, batch_index=0)
    with pytest.raises(BatchGoneError):
        ledger.h.result(ledger.h.clients["a"].sequence, "a")
