"""Samplers as users write them: their arguments, their results and their errors."""

from __future__ import annotations

import contextlib
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest
from harness import Harness, rows_of
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.core.state.check import check_state
from transfer_queue.errors import BatchGoneError, InvalidArgumentError, SamplerError
from transfer_queue.messages.partitions import ClearPartition, Seal
from transfer_queue.messages.system import Status
from transfer_queue.sampler import BaseSampler, GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler


class Mine(BaseSampler):
    """Calls `act`; by default deals the newest rows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, int, dict[str, Any]]] = []
        self.act: Any = None
        self.cached = False
        self.cleared: list[str] = []

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((ready_indexes, batch_size, kwargs))
        if self.act is not None:
            return self.act(ready_indexes, batch_size, **kwargs)
        rows = ready_indexes[::-1][:batch_size]
        return rows, rows

    def has_cached_result(self, partition_id: str, task_name: str, sampling_config: Any) -> bool:
        return self.cached

    def clear_cache(self, partition_id: str) -> None:
        self.cleared.append(partition_id)


def raising(error: BaseException) -> Any:
    """Return a function for `Mine.act` that raises this error."""

    def act(*args: Any, **more: Any) -> None:
        raise error

    return act


@pytest.fixture(autouse=True, params=[False, True], ids=["inline", "process"])
def isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs with a sampler in the controller's process and with one in a process of its own."""
    monkeypatch.setattr(Harness, "isolated", request.param)


@pytest.fixture
def mine() -> Mine:
    return Mine()


@pytest.fixture
def u(mine: Mine) -> Harness:
    return Harness(mine)


@pytest.mark.design("a user's sampler that wants a list gets one")
def test_the_arguments_of_a_call(u: Harness, mine: Mine) -> None:
    def act(ready: Any, size: int, *, partition: Any, **_: object) -> Any:
        assert (partition.partition_id, partition.group_size, partition.policy_version) == ("p", None, 0)
        assert partition.get_custom_meta([2, 1, 77]) == {2: {"n": 3}, 1: {}}
        partition.get_custom_meta([2])[2]["n"] = 0
        assert partition.get_custom_meta([2]) == {2: {"n": 3}}, "what it is shown is its own copy"
        return ready[::-1][:size], ready[::-1][:size]

    mine.act = act
    u.put(3, tags=[{"n": 1}, {}, {"n": 3}])
    assert u.dealt(2, dp_rank=4, anything={"a": [1]}) == [2, 1]
    ((ready, batch_size, keywords),) = mine.calls
    assert (ready, type(ready), batch_size) == ([0, 1, 2], list, 2)
    del keywords["partition"]
    assert keywords == {"task_name": "t", "partition_id": "p", "dp_rank": 4, "anything": {"a": [1]}}


def test_too_few_rows_are_not_offered(u: Harness, mine: Mine) -> None:
    u.put(1)
    assert u.dealt(2) == []
    assert mine.calls == []


def test_sampled_without_consumed(u: Harness, mine: Mine) -> None:
    mine.act = lambda ready, size, **_: (ready[:size], [])
    u.put(2)
    assert u.dealt(2) == u.dealt(2) == [0, 1]
    assert u.state.partitions["p"].tasks == {}


def test_more_consumed_than_sampled(u: Harness, mine: Mine) -> None:
    mine.act = lambda ready, size, **_: (ready[:1], ready)
    u.put(4)
    assert u.dealt(2) == [0]
    assert u.dealt(1) == []
    assert u.state.partitions["p"].tasks == {"t": 4}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (([0, 0], [0]), r"more than once as sampled, among them \[0\]"),
        (([0], [1, 0, 1]), r"more than once as consumed, among them \[1\]"),
        (([0, 1, 2], [0, 1, 2]), "sampled 3 rows.* batch_size is 2"),
        (([True], []), "True is a bool"),
        (([np.True_], []), "is a bool"),
        (([0], [False]), "False is a bool"),
        (([1.0], [1]), "float"),
        ((np.array([1.0]), [1]), "float"),
        ((np.array([True]), [1]), "is a bool"),
        (({0: 1}, [0]), "dict is not a list"),
        ((b"01", []), "bytes is not a list"),
        *(
            (wrong, r"Mine.sample must return \(sampled, consumed\).*nothing was dealt")
            for wrong in (
                None,
                7,
                [1],
                ([1], [2], [3]),
                ([1.5], []),
                (["0"], []),
                ([0], None),
                ([0], [1 << 70]),
                ([None], []),
            )
        ),
    ],
    ids=repr,
)
def test_every_part_of_its_result_is_checked(u: Harness, mine: Mine, wrong: object, words: str) -> None:
    mine.act = lambda ready, size, **_: wrong
    u.put(4)
    with u.refuses(SamplerError, words):
        u.dealt(2)


class Deals(RankAwareSampler):
    """Returns the shares of `act`."""

    act: Any = None

    def deal(self, ready_indexes: Any, batch_size: int, **config: Any) -> Any:
        return self.act(list(ready_indexes[:]), batch_size)


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({0: ([0], [0]), 1: ([0], [0])}, "more than once as sampled"),
        ({0: ([0], [0]), 1: ([1], [0, 1])}, "more than once as consumed"),
        ({0: ([0, 1], [0])}, r"sampled the rows \[1\] for dp_rank 0 and did not return them as consumed"),
        ({0: ([0], [0]), -1: ([1], [1])}, "deal_key must return"),
        ({0: ([0], [0]), "a": ([1], [1])}, "deal_key must return"),
        ([([0], [0])], "must return a dict from dp_ranks to shares"),
        ({0: ([0, 1, 2], [0, 1, 2])}, "batch_size is 2"),
    ],
    ids=repr,
)
def test_no_row_is_in_the_shares_of_two_ranks(shares: object, words: str) -> None:
    sampler = Deals()
    h = Harness(sampler)
    h.put(4)
    sampler.act = lambda ready, size: shares
    with h.refuses(SamplerError, words):
        h.dealt(2, dp_rank=0, batch_index=0)


def test_rows_that_another_task_was_leased_are_not_taken_again(u: Harness, mine: Mine) -> None:
    """A batch that it reports as dealt before may have rows under a lease: these stay claimed."""
    u.put(3)
    reply = u.lease(2)
    mine.cached = True
    mine.act = lambda ready, size, **_: ([2, 1], [2, 1])
    assert u.dealt(2) == [2, 1]
    assert u.state.partitions["p"].claimed["t"] == 2
    assert u.ack(reply)
    mine.act = lambda ready, size, **_: ([99], [99])
    with pytest.raises(SamplerError, match="not offered, among them"):
        u.dealt(2)


GARBAGE_ROWS = st.lists(
    st.one_of(
        st.integers(-2, 9),
        st.sampled_from([1 << 63, 1 << 70, True, False, 0.0, None, "0", np.int64(1), np.float64(1), np.array(2), []]),
    ),
    max_size=5,
)
GARBAGE = st.one_of(
    st.tuples(GARBAGE_ROWS, GARBAGE_ROWS),
    st.tuples(GARBAGE_ROWS),
    st.none(),
    st.integers(),
    st.dictionaries(st.sampled_from([-1, 0, 1, 2, "a"]), st.tuples(GARBAGE_ROWS, GARBAGE_ROWS)),
    st.sampled_from([SystemExit(1), GeneratorExit(), KeyError("x"), ValueError("y"), StopIteration()]),
)


class Garbage(RankAwareSampler):
    """Returns a drawn value in every call."""

    drawn: Any = None

    def give(self, call: str) -> Any:
        found = self.drawn(call)
        if isinstance(found, BaseException):
            raise found
        return found

    def passes_over(self, ready_indexes: Any, **config: Any) -> Any:
        return self.give("passes_over")

    def has_cached_result(self, *args: Any) -> Any:
        return self.give("cached")

    def remainder(self, ready_indexes: Any, **config: Any) -> Any:
        return self.give("remainder")


class GarbageSamples(Garbage):
    def sample(self, *args: Any, **kwargs: Any) -> Any:
        return self.give("deal")


class GarbageDeals(Garbage):
    def deal(self, *args: Any, **kwargs: Any) -> Any:
        return self.give("deal")


@differential(60, costly=True)
@given(data=st.data(), kind=st.sampled_from([GarbageSamples, GarbageDeals]))
def test_the_state_stays_sound_whatever_a_sampler_returns(data: st.DataObject, kind: type[Garbage]) -> None:
    """The harness recounts the state after each event, and replays and saves it at the end."""
    sampler = kind()
    h = Harness(sampler)

    def drawn(call: str) -> Any:
        if call == "cached":
            return data.draw(st.booleans())
        if call == "remainder":
            return data.draw(st.one_of(st.integers(-1, 4), st.sampled_from([None, 1.5, True, 1 << 80])))
        if call == "passes_over":
            kinds = [{}, {}, {"why": [0]}, {"why": [1, 1]}, {"why": [99]}, None, {"a": [2], "b": [2]}, {3: [1]}]
            return data.draw(st.sampled_from(kinds))
        return data.draw(GARBAGE)

    sampler.drawn = drawn
    h.put(data.draw(st.integers(1, 6)))
    for _ in range(data.draw(st.integers(1, 6))):
        act = data.draw(st.sampled_from(["claim", "claim", "lease", "clear", "put", "seal"]))
        live = h.live()
        if act in ("claim", "lease"):
            key = data.draw(st.sampled_from([{}, {"dp_rank": 0, "batch_index": 0}, {"dp_rank": 1, "batch_index": 1}]))
            with contextlib.suppress(SamplerError, InvalidArgumentError, BatchGoneError):
                h.result(h.claim(data.draw(st.integers(1, 3)), lease=10.0 if act == "lease" else None, **key), "r")
        elif act == "clear" and live:
            h.clear(live[:1])
        elif act == "put" and not h.state.partitions["p"].sealed:
            h.put(1)
        elif act == "seal":
            h.ask(Seal("p"))
    h.tick(h.now + 100)
    check_state(h.state)


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), BaseException("odd")], ids=repr)
def test_a_sampler_that_exits_fails_only_its_claim(u: Harness, mine: Mine, error: BaseException) -> None:
    mine.act = raising(error)
    u.put(1)
    with pytest.raises(SamplerError, match=f"the sampler Mine raised {type(error).__name__}"):
        u.dealt(1)
    mine.act = None
    assert u.dealt(1) == [0]


@pytest.mark.parametrize("method", ["validate", "has_cached_result", "clear_cache"])
def test_it_may_exit_in_any_of_its_functions(method: str) -> None:
    def leave(*args: Any) -> None:
        raise SystemExit

    h = Harness(type("Leaves", (Mine,), {method: leave})())
    h.put(1)
    if method == "clear_cache" and h.isolated:
        h.ask(ClearPartition("p"))  # the sampler is called afterwards, and its error is logged
        return
    with pytest.raises(SamplerError, match="the sampler Leaves raised SystemExit"):
        h.ask(ClearPartition("p")) if method == "clear_cache" else h.dealt(1)
    assert h.state.partitions["p"].tasks == {}


def test_a_keyboard_interrupt_is_not_an_error_of_the_sampler(u: Harness, mine: Mine) -> None:
    mine.act = raising(KeyboardInterrupt())
    u.put(1)
    with pytest.raises(KeyboardInterrupt):
        u.dealt(1)


@pytest.mark.parametrize("number", [np.int64(1), np.array(1)], ids=["numpy", "0-d array"])
def test_integers_of_any_type(u: Harness, mine: Mine, number: object) -> None:
    mine.act = lambda ready, size, **_: ((number,), {1})
    u.put(2)
    assert u.dealt(1) == [1]


@pytest.mark.parametrize("rows", [[5], [0], [-1], [1 << 60]], ids=["unknown", "consumed", "negative", "large"])
@pytest.mark.parametrize("where", ["sampled", "consumed"])
@pytest.mark.design("a sampler that returns rows it was not offered fails its caller; nothing is dealt")
def test_rows_not_offered(u: Harness, mine: Mine, rows: list[int], where: str) -> None:
    mine.act = lambda ready, size, **_: ([0], [0])
    u.put(3)
    u.dealt(1)
    mine.act = lambda ready, size, **_: (rows, []) if where == "sampled" else ([1], rows)
    with u.refuses(SamplerError, f"rows that it was not offered, among them .{rows[0]}"):
        u.dealt(1)


@pytest.mark.design("a sampler that raises fails its caller; nothing is dealt")
def test_an_error_of_a_sampler_has_its_traceback(u: Harness, mine: Mine) -> None:
    mine.act = raising(KeyError("no such thing"))
    u.put(1)
    with pytest.raises(SamplerError) as raised:
        u.dealt(1)
    text = str(raised.value)
    assert text.startswith("the sampler Mine raised KeyError: 'no such thing'")
    assert "Traceback" in text
    assert "test_user_samplers.py" in text


def test_value_errors_of_a_sampler_stay_value_errors(u: Harness, mine: Mine) -> None:
    mine.act = raising(ValueError("batch_size must be even"))
    u.put(1)
    with pytest.raises(InvalidArgumentError, match="batch_size must be even") as raised:
        u.dealt(1)
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, RuntimeError), "as every error of a user's sampler"


def test_an_error_fails_the_waiting_claim_and_no_other(u: Harness, mine: Mine) -> None:
    first = u.claim(1, wait=10, name="a", fail=True)
    second = u.claim(1, wait=10, name="b")

    def act(ready: list[int], size: int, fail: bool = False, **_: object) -> Any:
        if fail:
            raise RuntimeError("as asked")
        return ready[:size], ready[:size]

    mine.act = act
    u.put(1)
    with pytest.raises(SamplerError, match="as asked"):
        u.result(first, "a")
    assert u.got(second, "b") == [0]


def test_a_claim_without_a_deal_waits_for_any_change(u: Harness, mine: Mine) -> None:
    """The sampler may read tags, so a put of only tags calls it, too."""

    def act(ready: list[int], size: int, partition: Any = None, **_: object) -> Any:
        good = [row for row, tag in partition.get_custom_meta(ready).items() if tag.get("good")][:size]
        return (good, good) if len(good) == size else ([], [])

    mine.act = act
    u.put(3)
    assert u.dealt(2) == []
    sequence = u.claim(2, wait=10)
    u.ask(u.publish(1, None, rows=[2], tags=[{"good": True}]))
    assert u.parked(sequence)
    u.ask(u.publish(1, None, rows=[0], tags=[{"good": True}]))
    assert u.got(sequence) == [0, 2]


def test_a_batch_that_it_dealt_before(u: Harness, mine: Mine) -> None:
    """The sampler announces the batch by has_cached_result. Its rows may be consumed, and some may be cleared."""
    u.put(4)
    first = u.dealt(2)
    assert first == [3, 2]
    mine.cached = True
    mine.act = lambda ready, size, **_: (first, first)
    assert u.dealt(2) == first, "also while enough others are ready"
    assert u.dealt(4) == first, "and while too few are"
    u.clear([3])
    sequence = u.claim(2)
    assert rows_of(u.result(sequence, "r")) == first
    assert u.state.partitions["p"].tasks == {"t": 1}


def test_the_remainder_after_a_seal(u: Harness, mine: Mine) -> None:
    u.put(3)
    u.ask(Seal("p"))
    assert u.dealt(2) == [2, 1]
    assert u.dealt(2) == [0]
    assert u.dealt(2) is None
    assert [size for _, size, _ in mine.calls] == [2, 1]


def test_a_claim_ends_if_nothing_of_the_remainder_is_dealt(u: Harness, mine: Mine) -> None:
    mine.act = lambda ready, size, **_: ([], [])
    u.put(3)
    u.ask(Seal("p"))
    assert u.dealt(2) == [], "two are ready, and it may change its mind"
    assert u.dealt(4) is None


def test_a_probe_does_not_call_the_sampler(u: Harness, mine: Mine) -> None:
    sequence = u.claim(2, wait=10, probe=True)
    u.put(2)
    assert u.got(sequence) == []
    assert mine.calls == []


def test_a_dropped_partition_is_forgotten(u: Harness, mine: Mine) -> None:
    u.put(1)
    u.ask(ClearPartition("p"))
    u.ask(ClearPartition("nobody"))
    assert mine.cleared == ["p", "nobody"]


class Caching(RankAwareSampler):
    """A subclass that calls its base class and keeps its batches in `_states`, as older samplers did."""

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        return super().sample(*args, **kwargs)


def test_a_subclass_with_the_bases_cache() -> None:
    h = Harness(Caching())
    h.put(8)
    first = h.dealt(2, dp_rank=0, batch_index=0)
    assert first == h.dealt(2, dp_rank=0, batch_index=0) == [0, 1]
    assert h.dealt(2, dp_rank=1, batch_index=0) == [2, 3]
    h.ask(ClearPartition("p"))
    h.put(2)
    assert h.dealt(2, dp_rank=0, batch_index=0) == [8, 9]


@pytest.mark.design("a user's sampler is timed, and named in the metrics")
def test_a_users_sampler_is_timed_and_named() -> None:
    class Plain(BaseSampler):
        def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
            return ready_indexes[:batch_size], ready_indexes[:batch_size]

    clock = chain([0.0, 0.25, 1.0, 1.5], repeat(7.0))
    h = Harness(Plain(), timer=lambda: next(clock))
    h.put(2)
    assert h.dealt(1)
    assert h.dealt(1)
    assert h.dealt(1, "u", sampler="SequentialSampler") == [0]
    status = h.look(Status())
    (cost,) = status.samplers
    assert (cost.name, cost.calls, cost.seconds, cost.longest) == ("Plain", 2, 0.75, 0.5)
    assert list(h.controller.context.samplers.costs.values()) == [cost], "of which metrics are made"


class Balancing(SeqlenBalancedSampler):
    """A subclass that reads what it has dealt, as older samplers do."""

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        assert kwargs["batch_index"] not in self._states.get("p", {}).get("t", {}).get(kwargs["dp_rank"], {})
        return super().sample(*args, **kwargs)


@pytest.mark.design("_states on a sampler is a view of the dealt batches for old subclasses")
def test_the_core_keeps_the_batches_of_an_old_subclass() -> None:
    """The shares of all ranks are dealt at once and kept by the core; `_states` contains them and stays small."""
    sampler = Balancing(dp_size=2)
    h = Harness(sampler)
    for index in range(100):
        rows = h.put(4)
        first = h.dealt(2, dp_rank=0, batch_index=index)
        later = h.put(4)
        second = h.dealt(2, dp_rank=1, batch_index=index)
        assert sorted([*first, *second]) == rows, "the other rank's share was dealt with the first"
        assert sampler.save_checkpoint()["states"]["p"]["t"][1][index][0] == second
        assert h.dealt(2, dp_rank=0, batch_index=index) == first
        with pytest.raises(InvalidArgumentError, match="was dealt with batch_size 2"):
            h.dealt(3, dp_rank=0, batch_index=index)
        h.clear([*rows, *later])
    with pytest.raises(BatchGoneError):
        h.dealt(2, dp_rank=0, batch_index=99)
    kept = sampler.save_checkpoint()
    assert sum(map(len, kept["states"]["p"]["t"].values())) < 100, "what is gone is forgotten"
    assert len(kept["balanced_cache"]) < 100


class Groups(GRPOGroupNSampler):
    """A subclass of the group sampler with its own sample."""

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        return super().sample(*args, **kwargs)


def test_the_remainder_of_a_group_subclass_is_complete() -> None:
    h = Harness(Groups(2))
    h.put(7)
    assert h.dealt(4) == [0, 1, 2, 3]
    h.ask(Seal("p"))
    assert h.dealt(4) == [4, 5]
    assert h.dealt(4) is None


def test_validation_of_its_own() -> None:
    class Strict(Mine):
        def validate(self, batch_size: int, sampling_config: Any) -> None:
            raise TypeError("never")

    with pytest.raises(SamplerError, match="TypeError: never"):
        Harness(Strict()).dealt(1)
