"""Long deals are computed in the background: only their own task waits for them, and their result is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Harness

from transfer_queue.core.claims import deal
from transfer_queue.errors import InvalidArgumentError, SamplerError, WaitTimeoutError
from transfer_queue.messages.claims import Cancel
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.messages.queries import Explain
from transfer_queue.sampler import SeqlenBalancedSampler

GROUP, RANKS = 2, 2


@pytest.fixture
def b(monkeypatch: pytest.MonkeyPatch) -> Harness:
    """A balanced sampler all of whose deals are long, and four groups."""
    monkeypatch.setattr(deal, "LONG", 0)
    h = Harness(SeqlenBalancedSampler(GROUP, RANKS))
    h.put(8, tags=[{"total_lengths": length} for length in (9, 1, 5, 5, 7, 3, 2, 2)])
    return h


def ask(h: Harness, rank: int, number: int = 0, name: str | None = None, **more: Any) -> int:
    arguments = {"wait": 10, "dp_rank": rank, "batch_index": number, **more}
    return h.claim(4, name=name or f"c{rank}", **arguments)


def all_rows(h: Harness, *asked: tuple[int, str]) -> list[int]:
    return sorted(row for sequence, name in asked for row in h.got(sequence, name) or [])


@pytest.mark.design("balancing runs off the loop as an effect whose result comes back as an event")
def test_a_long_deal_runs_in_the_background(b: Harness) -> None:
    first = ask(b, 0)
    assert [b.parked(first, "c0"), len(b.works)] == [True, 1]
    assert b.state.partitions["p"].tasks == {}, "nothing is dealt yet"
    second = ask(b, 1)
    assert len(b.works) == 1, "one deal of a task at a time"
    b.work()
    assert all_rows(b, (first, "c0"), (second, "c1")) == list(range(8))
    assert not b.works


def test_a_short_deal_is_made_at_once() -> None:
    h = Harness(SeqlenBalancedSampler(GROUP, RANKS))
    h.put(8)
    assert len(h.got(ask(h, 0), "c0") or []) == 4


def test_a_background_deal_equals_a_direct_one(b: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ask(b, 0)
    b.work()
    monkeypatch.setattr(deal, "LONG", 512)
    h = Harness(SeqlenBalancedSampler(GROUP, RANKS))
    h.put(8, tags=[{"total_lengths": length} for length in (9, 1, 5, 5, 7, 3, 2, 2)])
    assert b.got(asked, "c0") == h.got(ask(h, 0), "c0")


def test_other_requests_are_served_during_a_long_deal(b: Harness) -> None:
    waiting = ask(b, 0)
    assert b.put(2) == [8, 9]
    assert "has the field" in b.ask(Explain("p", row=0)).value
    b.put(2, partition="q")
    other = ask(b, 0, task="u", name="other")
    assert (len(b.works), b.parked(other, "other")) == (2, True), "another task's deal begins"
    assert ask(b, 0, name="elsewhere", partition="q")
    b.work()
    assert b.got(waiting, "c0") is not None
    b.work()
    assert b.got(other, "other") is not None


def test_a_claim_that_does_not_wait_is_answered_by_the_deal(b: Harness) -> None:
    first, second, other = ask(b, 0, wait=None), ask(b, 1, wait=None), ask(b, 1, 1, "late", wait=None)
    assert all(b.parked(sequence, name) for sequence, name in ((first, "c0"), (second, "c1"), (other, "late")))
    assert b.controller.next_deadline() is None
    b.tick(1e9)
    b.work()
    assert all_rows(b, (first, "c0"), (second, "c1")) == list(range(8))
    assert b.got(other, "late") == []


def test_a_claim_for_a_dealt_batch_does_not_wait(b: Harness) -> None:
    first = ask(b, 0)
    b.work()
    b.put(8)
    ask(b, 0, 1)
    assert len(b.works) == 1
    assert b.got(ask(b, 0, name="late"), "late") == b.got(first, "c0")


def test_a_probe_needs_no_deal(b: Harness) -> None:
    assert b.got(ask(b, 0, probe=True), "c0") == []
    assert not b.works


def test_a_claim_is_decided_again_if_a_row_was_cleared(b: Harness) -> None:
    b.put(2)
    asked = ask(b, 0)
    b.clear([3])
    b.work()
    assert (b.parked(asked, "c0"), len(b.works)) == (True, 1)
    b.work()
    assert all_rows(b, (asked, "c0"), (ask(b, 1), "c1")) == [0, 1, 4, 5, 6, 7, 8, 9]


def test_a_group_that_becomes_incomplete_during_a_deal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deal, "LONG", 0)
    h = Harness(SeqlenBalancedSampler(GROUP, RANKS))
    h.put(8, groups=list("aabbccdd"))
    asked = ask(h, 0)
    h.put(1, groups=["b"])
    h.work()
    assert h.parked(asked, "c0"), "a group of three is no group of two"
    h.put(2, groups=["e", "e"])
    h.work()
    assert all_rows(h, (asked, "c0"), (ask(h, 1), "c1")) == [0, 1, 4, 5, 6, 7, 9, 10]


@pytest.mark.parametrize("how", ["cancelled", "gone", "timed out"])
def test_other_claims_continue_if_the_starter_of_a_deal_disconnects(b: Harness, how: str) -> None:
    first, second = ask(b, 0, wait=5), ask(b, 1, wait=50)
    if how == "cancelled":
        b.ask(Cancel(first), "c0")
    elif how == "gone":
        b.disconnect("c0")
    else:
        b.tick(6)
        with pytest.raises(WaitTimeoutError):
            b.result(first, "c0")
    b.work()
    assert (b.parked(second, "c1"), len(b.works)) == (True, 1)
    b.work()
    assert len(b.got(second, "c1") or []) == 4


def test_an_error_of_a_deal_reaches_the_claim_that_started_it(b: Harness) -> None:
    b.put(2, tags=[{"total_lengths": "long"}, {}])
    b.clear([0])
    first, second = ask(b, 0), ask(b, 1)
    b.work()
    with pytest.raises(InvalidArgumentError, match="row 8 must be a finite number"):
        b.result(first, "c0")
    b.work()
    with pytest.raises(InvalidArgumentError, match="row 8"):
        b.result(second, "c1")
    third = ask(b, 0)
    work = b.works.pop()
    b.take(b.controller.on_outcome(work.number, MemoryError("no space"), b.now))
    with pytest.raises(SamplerError, match="no space"):
        b.result(third, "c0")


def test_a_long_deal_reads_only_copies(b: Harness) -> None:
    asked = ask(b, 0)
    work = b.works[0]
    before = work.run()
    b.put(8, None, rows=range(8), tags=[{"total_lengths": 10**row} for row in range(8)])
    again = work.run()
    assert all(np.array_equal(before[rank][0], again[rank][0]) for rank in range(RANKS))
    b.ask(ClearPartition("p"))
    assert work.run().keys() == before.keys()
    assert b.parked(asked, "c0")


def test_no_deadlock_is_reported_during_a_long_deal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deal, "LONG", 0)
    h = Harness(SeqlenBalancedSampler(GROUP, RANKS), capacity=8)
    h.put(8)
    asked = ask(h, 0)
    put = h.send(h.publish(2, wait=100.0))
    assert h.parked(put, "w")
    h.work()
    assert h.got(asked, "c0") is not None
    assert h.parked(put, "w")


@pytest.mark.parametrize("declared", [False, True])
def test_many_groups_leave_at_once(declared: bool) -> None:
    """The list of complete groups equals a recount, whichever groups are removed from it."""
    h = Harness(SeqlenBalancedSampler(GROUP, RANKS))
    groups = [str(row // GROUP) for row in range(600)]
    for start in range(0, 600, 100):
        h.put(100, groups=groups[start : start + 100] if declared else None)
    for number, count in enumerate((4, 150, 70)):
        sequence = h.claim(count, wait=10, name="a", dp_rank=0, batch_index=number)
        assert len(h.got(sequence, "a") or []) == count
        h.clear(range(599 - number * 30, 570 - number * 30, -3))
    ready = h.state.partitions["p"].ready_set("t", ("x",))
    assert len(ready.whole_groups(GROUP, h.state.partitions["p"].groups)) == 300 - 224 - 30
