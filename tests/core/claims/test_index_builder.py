"""The indexes that a claim needs of a large partition are built in parts, with other requests in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Harness, column, made
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.core.claims import deal_jobs
from transfer_queue.core.events import records as r
from transfer_queue.core.puts import partitions
from transfer_queue.core.tables.rows import CHUNK
from transfer_queue.messages.claims import Cancel, ResetConsumption
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.sampler import (
    BaseSampler,
    FreshnessSampler,
    GRPOGroupNSampler,
    PrioritySampler,
    RankAwareSampler,
)

ROWS = 2 * CHUNK + 400


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "STEP", ROWS)
    monkeypatch.setattr(deal_jobs, "SMALL", 0)
    for name in ("BUILT", "COUNTED", "COUNTED_DECLARED", "MARKED", "RANKED"):
        monkeypatch.setattr(deal_jobs, name, 1)


def filled(sampler: BaseSampler | None = None, **more: Any) -> Harness:
    """Return a harness with some chunks of rows, by two puts."""
    h = Harness(sampler)
    for first, last in ((0, ROWS - 100), (ROWS - 100, ROWS)):
        h.put(last - first, **{name: values[first:last] for name, values in more.items()})
    return h


def test_a_first_claim_waits_for_its_ready_set_and_is_met() -> None:
    h = filled()
    claim = h.claim(4)
    assert h.parked(claim), "it did not say that it waits, and is answered at once all the same when it can be"
    assert h.finish_jobs() == 2, "three chunks, of which the first was looked at at once"
    assert h.got(claim) == [0, 1, 2, 3]
    assert h.dealt(2) == [4, 5], "the next one finds it made"


def test_a_claim_that_cannot_be_met_is_answered_as_usual() -> None:
    h = filled()
    claim, probe, waits = h.claim(ROWS + 1), h.claim(1, probe=True), h.claim(ROWS + 1, wait=5.0)
    h.finish_jobs()
    assert h.got(claim) == []
    assert h.reply(probe) is not None
    assert h.parked(waits)
    h.put(1)
    assert h.got(waits) == list(range(ROWS + 1))


def test_other_requests_change_the_state_in_between() -> None:
    h = filled(GRPOGroupNSampler(4))
    other = h.claim(8, "u")
    claim = h.claim(8)
    h.clear(range(2, CHUNK, 2))  # of the chunk that was looked at, and of one that was not
    h.clear(range(2 * CHUNK, 2 * CHUNK + 6))  # two groups
    h.put(12, name="v")
    h.finish_jobs()
    assert h.got(claim) == [*range(CHUNK, CHUNK + 8)]
    assert h.got(other) == h.got(claim)
    last = h.claim(ROWS - CHUNK - 16, wait=1.0)
    assert h.got(last) == [*range(CHUNK + 8, 2 * CHUNK), *range(2 * CHUNK + 8, ROWS)]


def test_the_order_of_arrival_is_kept() -> None:
    h = filled(RankAwareSampler())
    first, second = h.claim(4, dp_rank=1, batch_index=0), h.claim(4, dp_rank=0, batch_index=0, name="s")
    h.finish_jobs()
    assert h.got(first) == [0, 1, 2, 3]
    assert h.got(second, "s") == [4, 5, 6, 7]


@pytest.mark.parametrize("end", ["drop", "reset", "cancel", "restart", "gone"])
def test_claims_and_partitions_that_end_in_between(end: str) -> None:
    h = filled()
    claim = h.claim(4, wait=60.0)
    assert h.parked(claim)
    if end == "drop":
        h.ask(ClearPartition("p"))
        assert h.parked(claim)
        first = h.put(4)
    elif end == "reset":
        h.ask(ResetConsumption("p", "t"), "v")
        first = [0, 1, 2, 3]
    elif end == "cancel":
        h.ask(Cancel(claim), "r")
        h.finish_jobs()
        claim, first = h.claim(4), [0, 1, 2, 3]
    elif end == "restart":
        h.restart()
        claim, first = h.claim(4, wait=60.0, name="s"), [0, 1, 2, 3]
    else:
        h.disconnect("r")
        claim, first = h.claim(4, name="s"), [0, 1, 2, 3]
    h.finish_jobs()
    assert h.got(claim, "s" if end in ("restart", "gone") else "r") == first


def tags(draw: np.random.Generator, rows: int) -> list[dict[str, Any]]:
    return [{"priority": n, "policy_version": 1} for n in draw.integers(0, 1000, rows).tolist()]


SAMPLERS = [
    lambda: PrioritySampler(),
    lambda: PrioritySampler(inner=GRPOGroupNSampler(4)),
    lambda: FreshnessSampler(PrioritySampler(inner=GRPOGroupNSampler(4)), 2),
]


@pytest.mark.parametrize(("which", "declared"), [(0, False), (1, False), (1, True), (2, False), (2, True)])
@settings(max_examples=2, deadline=None)
@given(data=st.data())
def test_indexes_built_in_parts_equal_those_built_at_once(which: int, declared: bool, data: st.DataObject) -> None:
    """Two controllers get the same events, and one builds indexes in parts: both deal the same rows."""
    made.clear()  # the last example is enough to replay
    draw = np.random.default_rng(0)
    more: dict[str, Any] = {"tags": tags(draw, ROWS)}
    if declared:
        more["groups"] = [f"g{n // 4}" for n in range(ROWS)]
    parts, whole = filled(SAMPLERS[which](), **more), filled(SAMPLERS[which](), **more)
    claims = [parts.claim(8, wait=60.0)]
    happening = st.sampled_from(["clear", "publish", "tag", "consume", "put"])
    for number in range(data.draw(st.integers(0, 5))):
        if not parts.parked(claims[0]):
            break  # what it needs is made, and it was met: what comes now, it cannot see
        what, at = data.draw(happening), data.draw(st.integers(0, 40)) * (ROWS // 41)
        if what in ("publish", "tag") and whole.state.partitions["p"].rows.positions_of(np.array([at])).item() < 0:
            continue  # the row was cleared before, so both would refuse the put
        for h in (parts, whole):
            if what == "clear":
                h.clear([at, at + 1])
            elif what == "publish":
                h.ask(h.publish(1, ("y",), rows=[at]))
            elif what == "tag":
                h.ask(h.publish(1, None, rows=[at], tags=[{"priority": 2000 + number}]))
            elif what == "consume":
                live = h.state.partitions["p"].rows.positions_of(np.arange(at, at + 3)) >= 0
                h.controller.context.log.apply(
                    r.Dealt("p", "t", None, 3, [], column(np.arange(at, at + 3)[live].tolist()))
                )
            else:
                h.put(4, tags=tags(np.random.default_rng(number), 4))
        parts.tick(parts.now)
    parts.finish_jobs()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(deal_jobs, "SMALL", 1 << 30)
        for number in range(4):
            if number:
                claims.append(parts.claim(8, wait=60.0))
            assert parts.got(claims[number]) == whole.dealt(8)
