"""Similar claims are met together, and get what they would get one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from harness import Harness, column
from hypothesis import example, given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.core.claims import answers, wake
from transfer_queue.core.events.records import Dealt, RepliesSent
from transfer_queue.messages.claims import Ack, Claim
from transfer_queue.messages.partitions import Seal
from transfer_queue.messages.puts import PublishReply
from transfer_queue.sampler import (
    GRPOGroupNSampler,
    PrioritySampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)


def kinds(h: Harness, kind: type) -> list[Any]:
    """Return the records of this kind."""
    return [record for record in h.records if isinstance(record, kind)]


def test_one_deal_meets_all_waiting_ranks_in_order() -> None:
    h = Harness(RankAwareSampler())
    waits = {f"r{n}": h.claim(2, name=f"r{n}", wait=9.0, dp_rank=n, batch_index=0) for n in range(20)}
    rows = h.put(40, tags=[{"n": n} for n in range(40)])
    got = [h.got(sequence, name) for name, sequence in waits.items()]
    assert got == [rows[at : at + 2] for at in range(0, 40, 2)]
    reply = h.result(waits["r3"], "r3")
    assert reply.tags == [{"n": 6}, {"n": 7}]
    assert [len(deal.shares) for deal in kinds(h, Dealt)] == [20]
    assert [len(answered.answers) for answered in kinds(h, RepliesSent)] == [20]
    assert h.dealt(2, name="late", dp_rank=7, batch_index=0) == rows[14:16]


def test_each_of_them_is_counted_as_a_request_that_has_waited() -> None:
    h = Harness(RankAwareSampler())
    for n in range(20):
        h.claim(2, name=f"r{n}", wait=9.0, dp_rank=n, batch_index=0)
    h.put(40)
    (waited,) = h.controller.context.measures.waits.timings()
    assert (waited.name, waited.task, sum(waited.counts)) == ("Claim", "t", 20)
    assert not h.state.waiting.by_waiter
    assert not h.controller.context.parked.peers


def test_the_first_claim_is_met_first_whatever_it_asks_for() -> None:
    h = Harness()
    first = h.claim(2, name="a", wait=9.0)
    other = h.claim(3, name="b", wait=9.0)
    last = [h.claim(2, name=name, wait=9.0) for name in ("c", "d")]
    rows = h.put(8)
    assert h.got(first, "a") == rows[:2]
    assert h.got(other, "b") == rows[2:5]
    assert h.got(last[0], "c") == rows[5:7]
    assert h.parked(last[1], "d")


def test_claims_with_a_lease_are_met_together_with_a_token_each() -> None:
    h = Harness(RankAwareSampler())
    waits = [h.claim(2, name=f"r{n}", wait=9.0, lease=5.0, dp_rank=n, batch_index=0) for n in range(5)]
    rows = h.put(10)
    (deal,) = kinds(h, Dealt)
    assert [len(answered.answers) for answered in kinds(h, RepliesSent)] == [5]
    assert [h.got(sequence, f"r{n}") for n, sequence in enumerate(waits)] == [rows[2 * n : 2 * n + 2] for n in range(5)]
    tokens = [h.result(sequence, f"r{n}").token for n, sequence in enumerate(waits)]
    assert [lease.token for lease in deal.leases] == tokens
    assert sorted(tokens) == list(range(tokens[0], tokens[0] + 5))
    h.ask(Ack("p", tokens[1], column(rows[2:4])))
    assert h.state.partitions["p"].claimed == {"t": 8}
    h.tick(4.0)
    assert len(h.state.partitions["p"].leases.by_token) == 4
    h.tick(6.0)
    assert not h.state.partitions["p"].leases.by_token, "each lease ends at its time"


@pytest.mark.parametrize("lease", [None, 5.0])
def test_all_claims_with_a_share_of_a_round_are_answered(lease: float | None) -> None:
    h = Harness(SeqlenBalancedSampler(dp_size=8))
    waits = [h.claim(2, name=f"r{n}", wait=9.0, lease=lease, dp_rank=n, batch_index=0) for n in range(8)]
    rows = h.put(19, tags=[{"total_lengths": n} for n in range(19)])
    assert sorted(row for n, sequence in enumerate(waits) for row in h.got(sequence, f"r{n}") or []) == rows[:16]
    assert [len(answered.answers) for answered in kinds(h, RepliesSent)] == [7], "all but the one who began the deal"
    leases = h.state.partitions["p"].leases.by_token
    assert {each.batch for each in leases.values()} == {("t", rank, 0) for rank in range(8 if lease else 0)}


def test_rows_that_are_delivered_again_together_have_the_numbers_of_their_deliveries() -> None:
    h = Harness()
    first = [h.claim(1, name=f"r{n}", wait=9.0, lease=1.0) for n in range(2)]
    h.put(2)
    h.tick(2.0)
    again = [h.claim(2, name=f"s{n}", wait=9.0, lease=1.0) for n in range(2)]
    assert h.got(again[0], "s0") == [h.got(sequence, f"r{n}")[0] for n, sequence in enumerate(first)]  # type: ignore[index]
    h.tick(4.0)  # both rows are ready again; two more let both claims be met
    third = h.claim(2, name="s2", wait=9.0, lease=1.0)
    h.put(2)
    counts = [h.result(sequence, name).deliveries for sequence, name in ((again[1], "s1"), (third, "s2"))]
    assert counts == [np.array([3, 3], "<i4").tobytes(), None]


def test_claims_with_different_leases_are_not_met_together() -> None:
    h = Harness()
    waits = [h.claim(1, name=f"r{n}", wait=9.0, lease=9.0 if n == 2 else None) for n in range(5)]
    rows = h.put(5)
    assert [h.got(sequence, f"r{n}") for n, sequence in enumerate(waits)] == [[row] for row in rows]
    assert h.state.partitions["p"].claimed == {"t": 1}


@contextmanager
def one_by_one() -> Iterator[None]:
    """No claim is met together with another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wake, "MAX_GROUP", 1)
        yield


SAMPLERS = [
    SequentialSampler, RankAwareSampler, lambda: RankAwareSampler(dp_size=3), lambda: GRPOGroupNSampler(2),
    lambda: SeqlenBalancedSampler(2, dp_size=3), lambda: PrioritySampler(inner=RankAwareSampler()),
]  # fmt: skip
CLAIM = st.tuples(
    st.integers(0, 4), st.sampled_from([2, 2, 4]), st.sampled_from([("x",), ("x",), ("x", "y")]), st.integers(0, 1),
    st.sampled_from([None, None, 5.0]), st.booleans(),
)  # fmt: skip
PLAIN = (0, 2, ("x",), 0, None, False)
PUT = st.tuples(st.integers(1, 12), st.booleans())
STEPS = st.lists(st.one_of(st.lists(CLAIM, min_size=1, max_size=6), PUT, st.just("seal")), max_size=8)


def played(make: Any, free: bool, steps: list[Any], part: int | None = None, pause: bool = False) -> Harness:
    """Play the steps. pause: Whether the replies to each step are completed before the next step."""
    h = Harness(make(), part=part)
    h.create(free_when=["t"] if free else [])
    number = 0
    for step in steps:
        while pause and h.controller.unfinished:
            h.take(h.controller.settle_further())
        if step == "seal":
            h.ask(Seal("p"))
        elif isinstance(step, tuple):
            count, both = step
            fields = ("x", "y") if both else ("x",)
            h.send(h.publish(count, fields, tags=[{"priority": n, "total_lengths": n} for n in range(count)]))
        else:
            for rank, count, wanted, batch, lease, task in step:
                number += 1
                h.claim(
                    count, "t" if task else "s", wanted, name=f"r{number}", wait=99.0, lease=lease, dp_rank=rank,
                    batch_index=batch,
                )  # fmt: skip
    while h.controller.unfinished:
        h.take(h.controller.settle_further())
    return h


def unnumbered(h: Harness) -> dict[Any, Any]:
    """The replies without the version of the partition, which counts the records, and without the numbers of tokens."""
    replies: dict[Any, Any] = {}
    for key, reply in h.replies.items():
        if isinstance(reply, PublishReply):
            replies[key] = msgspec.structs.replace(reply, version=0)
        else:
            replies[key] = msgspec.structs.replace(reply, token=bool(reply.token)) if hasattr(reply, "token") else reply
    tokens = [reply.token for reply in h.replies.values() if getattr(reply, "token", 0)]
    assert len(set(tokens)) == len(tokens)
    return replies


OTHER_TOKENS = [[PLAIN] * 4 + [(n, 2, ("x",), 1, 5.0, False) for n in range(2)]]
OTHER_TOKENS += [[PLAIN] * 5 + [(0, 2, ("x",), 1, 5.0, False)], (6, False)]


@differential(50, costly=True)
@given(st.sampled_from(SAMPLERS), st.booleans(), STEPS)
@example(SequentialSampler, False, [[PLAIN] * 2, (4, False), [PLAIN], (1, False)])  # a put after claims
@example(SequentialSampler, False, [[PLAIN] * 4, (4, False), [PLAIN], "seal"])  # ends after other numbers of changes
@example(RankAwareSampler, False, OTHER_TOKENS)  # the leases of shares are numbered in another order
def test_claims_met_together_get_what_they_would_get_one_by_one(make: Any, free: bool, steps: list[Any]) -> None:
    at_once = played(make, free, steps)
    with one_by_one():
        alone = played(make, free, steps)
    assert unnumbered(at_once) == unnumbered(alone)
    assert sorted(at_once.state.waiting.by_waiter) == sorted(alone.state.waiting.by_waiter)


@differential(25, costly=True)
@given(st.sampled_from(SAMPLERS), st.booleans(), STEPS, st.integers(1, 3), st.booleans())
@example(RankAwareSampler, False, [[(n, 2, ("x",), 0, None, False) for n in range(5)], (10, False)], 1, False)
@example(SequentialSampler, False, [[PLAIN] * 5, (8, False), [PLAIN], (4, False)], 1, True)
def test_an_event_in_parts_has_the_same_records_as_a_whole_one(
    make: Any, free: bool, steps: list[Any], part: int, pause: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wake, "MAX_GROUP", 2)
        whole, parts = played(make, free, steps), played(make, free, steps, part, pause)
    assert parts.replies == whole.replies
    assert parts.records == whole.records


def test_the_first_replies_of_an_event_come_first_and_a_later_claim_is_behind_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wake, "MAX_GROUP", 4)
    h = Harness(part=4)
    waits = [h.claim(2, name=f"r{n}", wait=9.0) for n in range(10)]
    rows = h.put(20)
    assert [h.parked(sequence, f"r{n}") for n, sequence in enumerate(waits)] == [False] * 4 + [True] * 6
    assert h.controller.next_deadline() == h.now, "a server that is not called again soon continues at a deadline"
    h.take(h.controller.settle_further())
    assert [h.parked(sequence, f"r{n}") for n, sequence in enumerate(waits)] == [False] * 8 + [True] * 2
    late = h.claim(2, name="late", wait=9.0)
    got = [h.got(sequence, f"r{n}") for n, sequence in enumerate(waits)]
    assert got == [rows[2 * n : 2 * n + 2] for n in range(10)]
    assert h.parked(late, "late")
    assert not h.controller.unfinished


def test_replies_have_locations_unless_there_are_many_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PLACED", 3)
    h = Harness()
    for count, told in ((3, True), (4, False)):
        request = Claim("p", "t", ["x"], 2, wait=9.0, places=True)
        waits = [h.send(request, f"r{n}") for n in range(count)]
        h.put(2 * count)
        for n, sequence in enumerate(waits):
            places = h.result(sequence, f"r{n}").places
            assert (places is not None and places.count == 2) == told
            assert h.state.clients[f"r{n}"].replies[sequence].places is None, "they may have moved by then"
