"""A user's sampler in a process of its own: events during a call, and their effect on its answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from harness import Harness, load_state, saved_of

from transfer_queue.core.samplers.calls import name_of
from transfer_queue.errors import InvalidArgumentError, SamplerError, WaitTimeoutError
from transfer_queue.messages.checkpoints import BeginCheckpoint, BeginCheckpointReply, LoadState
from transfer_queue.messages.claims import ResetConsumption
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.messages.system import Status
from transfer_queue.sampler import BaseSampler, RankAwareSampler, SequentialSampler


class Mine(BaseSampler):
    """Deals the first rows that `picks` accepts, if there are enough."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[int]] = []
        self.picks: Any = None

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(ready_indexes)
        rows = [row for row in ready_indexes if self.picks is None or self.picks(row)][:batch_size]
        return (rows, rows) if len(rows) == batch_size else ([], [])


@pytest.fixture
def mine() -> Mine:
    return Mine()


@pytest.fixture
def h(mine: Mine, monkeypatch: pytest.MonkeyPatch) -> Harness:
    monkeypatch.setattr(Harness, "isolated", True)
    harness = Harness(mine)
    harness.asks_wait = True
    return harness


def test_other_requests_are_served_during_a_call(h: Harness) -> None:
    h.put(4)
    slow = h.claim(2)
    assert h.parked(slow)
    h.put(1)
    h.put(2, partition="q")
    assert h.dealt(1, "t", partition="q", name="b", sampler="SequentialSampler") == [5]
    assert h.dealt(1, "other", name="b", sampler="SequentialSampler") == [0]
    h.answer()
    assert h.got(slow) == [0, 1]


def test_the_call_is_repeated_if_its_rows_were_taken_meanwhile(h: Harness, mine: Mine) -> None:
    h.put(4)
    slow = h.claim(2)
    assert h.dealt(1, name="b", sampler="SequentialSampler") == [0]
    h.clear([1])
    mine.picks = lambda row: row < 2 or len(mine.calls) > 1
    ask = h.asks[0]
    assert ask.shown.total == 4
    h.answer()
    assert h.parked(slow)
    h.answer()
    assert h.got(slow) == [2, 3]
    assert mine.calls == [[0, 1, 2, 3], [2, 3]]


def test_an_invalid_answer_is_refused_although_rows_were_taken(h: Harness, mine: Mine) -> None:
    h.put(4)
    slow = h.claim(2)
    h.clear([1])
    mine.sample = lambda ready, size, **_: ([0, 77], [0, 77])  # type: ignore[method-assign,misc]
    h.answer()
    with pytest.raises(SamplerError, match="not offered, among them"):
        h.result(slow, "r")


def test_a_partition_that_is_dropped_and_made_again(h: Harness) -> None:
    h.put(2)
    slow = h.claim(2, wait=10)
    h.send(ClearPartition("p"))
    h.answer()
    assert h.parked(slow)
    h.put(2)
    while h.asks:
        h.answer()
    assert h.got(slow) == [2, 3]


def test_one_claim_at_a_time_calls_it_in_the_order_of_the_claims(h: Harness) -> None:
    h.put(4)
    first, second = h.claim(2, name="a"), h.claim(1, name="b")
    third = h.claim(1, "u", name="c")
    assert len(h.asks) == 1
    h.answer()
    assert (h.got(first, "a"), h.parked(second, "b"), h.parked(third, "c")) == ([0, 1], True, True)
    h.answer()
    assert h.got(second, "b") == [2]
    h.answer()
    assert h.got(third, "c") == [0]
    assert not h.asks


def test_a_change_during_a_call_that_deals_nothing_is_not_missed(h: Harness, mine: Mine) -> None:
    """The sampler is called again after a change, and not again without one."""
    mine.picks = lambda row: row >= 2
    h.put(2)
    first, second = h.claim(2, wait=10, name="a"), h.claim(2, wait=10, name="b")
    h.put(2)
    while h.asks:
        h.answer()
    assert h.got(first, "a") == [2, 3]
    assert h.parked(second, "b")
    assert len(mine.calls) <= 4


def test_a_wait_that_ends_or_a_connection_that_is_cut_during_a_call(h: Harness) -> None:
    h.put(4)
    late = h.claim(2, wait=1, name="a")
    h.tick(2)
    with pytest.raises(WaitTimeoutError):
        h.result(late, "a")
    h.claim(2, wait=10, name="gone")
    h.disconnect("gone")
    h.answer()
    assert h.state.partitions["p"].tasks.get("t", 0) == 0
    assert not h.asks
    kept = h.claim(2, name="b")
    h.answer()
    assert h.got(kept, "b") == [0, 1]


def test_an_answer_about_the_state_before_a_load_does_not_count(h: Harness) -> None:
    """Rows of the loaded state may have the global indexes of other rows of the one before."""
    other = Harness()
    other.extents = 50
    other.put(2)
    h.put(2)
    h.clear([0])
    slow = h.claim(1, wait=10)
    load_state(h, saved_of(other))
    h.answer()
    assert h.parked(slow)
    h.answer()
    assert h.got(slow) == [0]


@pytest.mark.parametrize("returns", [False, True])
def test_a_client_that_disconnects_while_its_load_waits_for_the_sampler(h: Harness, returns: bool) -> None:
    """The state is loaded once if the client requests it again, and not at all if the client does not return."""
    other = Harness()
    other.extents = 50
    other.put(2)
    state = msgspec.msgpack.encode({"states": {}})
    h.put(1)
    load_state(h, saved_of(other, {"name": name_of(h.controller.context.samplers.default), "state": state}))
    h.answer()
    h.disconnect("loader")
    if returns:
        h.connect("loader")
        request = RequestEnvelope(1, 0, LoadState("0" * 32))
        assert h.controller.handle("loader", h.clients["loader"].peer, request, h.now) == []
    while h.asks:
        h.answer()
    assert len(h.state.partitions["p"].rows.live_positions()) == (2 if returns else 1)
    if returns:
        h.result(1, "loader")
    assert not h.jobs


def test_a_reset_during_a_call(h: Harness) -> None:
    h.put(2)
    slow = h.claim(2)
    h.ask(ResetConsumption("p", "t"))
    h.answer()
    assert h.got(slow) == [0, 1]


def test_a_sampler_that_is_replaced_during_a_call(h: Harness) -> None:
    h.put(2)
    slow = h.claim(1, wait=10)
    saving = h.send(BeginCheckpoint("0" * 32), "s")
    ask = h.asks.pop()
    h.take(h.controller.use_sampler(SequentialSampler()))
    assert h.got(slow) == [0]
    with pytest.raises(SamplerError, match="was replaced"):
        h.result(saving, "s")
    h.take(h.controller.on_sampler_answer(ask.number, None, h.now))
    assert h.dealt(1) == [1]


def test_a_claim_that_does_not_wait_is_answered_when_its_sampler_is_replaced(h: Harness) -> None:
    """This holds also for a partition that does not exist: the sampler checks whether the claim is allowed."""
    keyed = h.claim(1, partition="nowhere", name="a", dp_rank=0, batch_index=0)
    queued = h.claim(1, partition="later", name="b", dp_rank=0, batch_index=0)
    assert (h.parked(keyed, "a"), h.parked(queued, "b")) == (True, True)
    ask = h.asks.pop()
    h.take(h.controller.use_sampler(SequentialSampler()))
    assert (h.got(keyed, "a"), h.got(queued, "b")) == ([], [])
    h.take(h.controller.on_sampler_answer(ask.number, None, h.now))
    assert not h.state.waiting.by_waiter


def test_an_undecided_claim_starts_again_with_the_next_sampler(h: Harness) -> None:
    """It wants no rows, and it says that its client is done with the rows that it was given before."""
    h.create(free_when=["t"])
    h.put(4)
    assert h.dealt(2, sampler="SequentialSampler") == [0, 1]
    next_one = h.claim(1, wait=10)
    nothing = h.claim(0, wait=10, dp_rank=0, batch_index=0, name="a")
    h.take(h.controller.use_sampler(SequentialSampler()))
    assert (h.got(next_one), h.got(nothing, "a")) == ([2], [])
    assert sorted(h.state.partitions["p"].holds.rows_of("t", "r", 0).tolist()) == [2]
    assert h.state.partitions["p"].rows.count == 2


@pytest.mark.parametrize("asked", [False, True])
def test_claims_that_the_next_sampler_refuses_fail_alone(h: Harness, mine: Mine, asked: bool) -> None:
    """A RankAwareSampler deals only to claims that name their rank and batch."""
    mine.picks = lambda row: False
    claims = [h.claim(1, wait=10, name=name) for name in "abc"]
    right = h.claim(1, wait=10, name="d", dp_rank=0, batch_index=0)
    h.put(8)
    while h.asks and not asked:
        h.answer()
    h.asks.clear()
    h.take(h.controller.use_sampler(RankAwareSampler()))
    for sequence, name in zip(claims, "abc", strict=True):
        with pytest.raises(InvalidArgumentError, match="needs dp_rank and batch_index"):
            h.result(sequence, name)
    assert h.got(right, "d") == [0]


def test_a_claim_that_is_decided_again_ends_nothing_that_its_client_got_meanwhile(h: Harness, mine: Mine) -> None:
    """A claim marks the earlier batches of its client as finished once, and no later ones."""
    mine.picks = lambda row: row > 100
    h.create(free_when=["t"])
    h.put(4)
    h.claim(1, wait=10)
    h.put(1)  # so that the claim is decided again
    h.answer()
    assert h.dealt(2, sampler="SequentialSampler", hold=True) == [0, 1]
    while h.asks:
        h.answer()
    held = h.state.partitions["p"].holds
    assert held.rows_of("t", "r", 0).tolist() == [0, 1]


def test_of_a_million_rows_only_those_that_are_read_are_sent(
    h: Harness, mine: Mine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer_queue.core.samplers.remote_calls.PAGE", 4)
    h.put(10)
    h.clear([3])
    slow = h.claim(2)
    assert len(h.asks[0].shown.rows) == 4 * 8
    h.answer()
    assert h.got(slow) == [0, 1]
    assert mine.calls == [[0, 1, 2, 4, 5, 6, 7, 8, 9]]


def test_its_reported_time_is_the_time_that_claims_wait(mine: Mine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Harness, "isolated", True)
    h = Harness(mine, timer=iter([1.0, 3.5]).__next__)
    h.asks_wait = True
    h.put(1)
    h.claim(1)
    h.answer()
    (cost,) = h.look(Status()).samplers
    assert (cost.name, cost.calls, cost.seconds, cost.restarts) == ("Mine", 1, 2.5, 0)


def test_a_save_that_is_requested_again_on_another_connection_is_written_once(h: Harness) -> None:
    """A file that was written twice would be removed after the first time, as nobody waits for it any more."""
    asked = h.send(BeginCheckpoint("0" * 32), "s")
    h.disconnect("s")
    h.connect("s")
    h.send(BeginCheckpoint("0" * 32), "s", asked)
    while h.asks:
        h.answer()
    (file,) = h.writes
    h.take(h.controller.on_outcome(file.number, None, h.now))
    assert isinstance(h.result(asked, "s"), BeginCheckpointReply)
