"""Values that were lost with their storage: which errors name them, which claims wait, and when they return."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from harness import Harness, column, rows_of

from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.messages.descriptors import BlockLocation
from transfer_queue.messages.queries import ChangeReply, CheckProduction, Explain, Lookup, ProductionStatus, Watch
from transfer_queue.messages.reports.unit_reports import RegisterUnit
from transfer_queue.messages.system import Status
from transfer_queue.sampler import GRPOGroupNSampler, RankAwareSampler


def lose(h: Harness, when: str = "at noon", left: Sequence[int] = ()) -> None:
    """Register the unit of the harness again with an arena that has these extents only."""
    h.disconnect("unit-0")
    h.connect("unit-0")
    h.ask(RegisterUnit("unit.sock", "/arena", when=when, extents=column(left)), "unit-0")


def numbers(values: bytes) -> list[int]:
    return np.frombuffer(values, "<i8").tolist()


@pytest.fixture
def h() -> Harness:
    """Return a harness with rows 0 to 3 that have x and y; y of the last two is in another extent."""
    h = Harness()
    h.put(4, ["x"], keys=["a", "b", "c", "d"])
    h.put(2, ["y"], rows=[0, 1])
    return h


def test_a_lost_value_is_not_produced(h: Harness) -> None:
    lose(h)
    assert h.dealt(1) == []
    reply = h.look(ProductionStatus("p", ["x", "y"]))
    assert np.frombuffer(reply.matrix, "i1").tolist() == [0] * 8
    assert h.look(CheckProduction("p", ["x"])).value is False
    progress = h.look(Status()).partitions[0]
    assert {f.name: (f.produced, f.lost) for f in progress.fields} == {"x": (0, 4), "y": (0, 2)}
    assert progress.rows == 4
    assert progress.nbytes == 0


def test_errors_of_lookups_say_what_was_lost_and_when(h: Harness) -> None:
    lose(h)
    for request in (
        Lookup("p", rows=column([1, 2]), fields=["x"]),
        Lookup("p", rows=column([1, 2])),
        Lookup("p", keys=["b", "c"], fields=["x"]),
        Lookup("p", keys=["b", "c"]),
    ):
        with pytest.raises(StorageKeyNotFoundError, match=r"'x' of 2 samples was lost with storage unit 0 \(at noon\)"):
            h.ask(request)
    with pytest.raises(StorageKeyNotFoundError, match=r"global indexes \[1\]"):
        h.lookup([1], ["y"])
    assert "lost with storage unit 0 (at noon)" in h.look(Explain("p", key="c")).value
    sequence = h.claim(1, wait=1.0)
    h.tick(2.0)
    with pytest.raises(TimeoutError, match="lost with storage unit 0"):
        h.got(sequence)


def test_a_value_that_is_put_again_answers_a_waiting_claim(h: Harness) -> None:
    lose(h)
    waiting = h.claim(2, wait=10.0)
    h.put(1, ["x"], keys=["b"])
    assert h.parked(waiting)
    h.put(1, ["x"], rows=[3])
    assert h.got(waiting) == [1, 3]
    assert h.lookup([1], ["x"])
    assert h.state.partitions["p"].losses.counts == {"x": 2, "y": 2}
    with pytest.raises(StorageKeyNotFoundError, match="of 2 samples"):
        h.lookup([0, 1, 2, 3], ["x"])


def test_losses_are_forgotten_with_their_rows(h: Harness) -> None:
    lose(h)
    h.clear([0, 1])
    assert h.state.partitions["p"].losses.counts == {"x": 2}
    h.clear([2])
    h.put(1, ["x"], rows=[3])
    assert not h.state.partitions["p"].losses.events
    assert "lost" not in h.look(Explain("p", key="d")).value
    lose(h, "later")
    assert "later" in h.look(Explain("p", key="d")).value


def test_consumed_rows_stay_consumed(h: Harness) -> None:
    assert h.dealt(2) == [0, 1]
    lose(h)
    h.put(4, ["x"], rows=[0, 1, 2, 3])
    assert h.dealt(4) == []
    assert h.dealt(2) == [2, 3]


def test_a_dealt_batch_is_the_same_when_its_values_are_put_again_and_until_then_names_the_rows() -> None:
    h = Harness(RankAwareSampler())
    h.put(4)
    share = {"dp_rank": 0, "batch_index": 0, "dp_size": 1}
    first = h.dealt(4, **share)
    lose(h)
    for ask in (lambda: h.dealt(4, **share), lambda: h.lookup(first or [], ["x"])):
        with pytest.raises(StorageKeyNotFoundError, match=r"global indexes \[0, 1, 2, 3\]"):
            ask()
    h.put(1, rows=[0])
    with pytest.raises(StorageKeyNotFoundError, match=r"global indexes \[1, 2, 3\]"):
        h.lookup(first or [], ["x"])
    h.put(3, rows=[1, 2, 3])
    assert h.dealt(4, **share) == first
    assert len(h.lookup(first or [], ["x"])) == 4


def test_a_group_with_a_lost_value_is_not_complete() -> None:
    h = Harness(GRPOGroupNSampler(n_samples_per_prompt=2))
    h.put(2, groups=["g", "g"])
    h.put(2, groups=["h", "h"])
    assert h.dealt(2) == [0, 1]
    h.state.partitions["p"].ready_set("t", ("x",)).whole_groups(2, h.state.partitions["p"].groups)
    lose(h)
    assert h.dealt(2) == []
    h.put(1, rows=[2])
    assert h.dealt(2) == []
    h.put(1, rows=[3])
    assert h.dealt(2) == [2, 3]


def test_watches_report_losses(h: Harness) -> None:
    since = h.look(Watch("p")).version
    waiting = h.send(Watch("p", since, wait=10.0), "r")
    picky = h.send(Watch("p", since, where={"a": 1}, wait=10.0), "r")
    lose(h)
    reply = h.reply(waiting, "r")
    assert isinstance(reply, ChangeReply)
    assert numbers(reply.lost) == [0, 1, 2, 3]
    assert reply.lost_keys == ["a", "b", "c", "d"]
    assert {name: np.frombuffer(lost, "?").tolist() for name, lost in reply.lost_fields.items()} == {
        "x": [True] * 4,
        "y": [True, True, False, False],
    }
    assert rows_of(h.ask(h.publish(1, ["y"], rows=[2]))) == [2]
    later = h.look(Watch("p", reply.version))
    assert (later.changed, later.lost, later.lost_fields) == (True, b"", {})
    assert h.parked(picky, "r"), "no row with these tags has changed"
    assert numbers(h.look(Watch("p")).lost) == [0, 1, 2, 3], "the first watch of a client returns what is lost now"


def test_a_block_with_another_location_is_not_lost() -> None:
    h = Harness()
    h.ask(RegisterUnit("other.sock", "/other", name="other"), "unit-1")
    request = h.publish(2)
    assert request.block is not None
    block = msgspec.structs.replace(request.block, copies=[BlockLocation(1, 9, 64, 1)])
    h.ask(type(request)("p", 2, block=block, pre_allocate=0))
    lose(h)
    assert h.lookup([0, 1], ["x"]) == [{"x": (64, 0)}, {"x": (64, 1)}]
    assert not h.state.partitions["p"].losses.counts
    h.ask(RegisterUnit("new.sock", "/new", name="other", when="at one"), "unit-2")
    with pytest.raises(StorageKeyNotFoundError, match=r"storage unit 1 \(at one\)"):
        h.lookup([0, 1], ["x"])


def test_losses_in_many_chunks_and_partitions_are_counted() -> None:
    h = Harness()
    h.put(5000, ["x"], "p")
    h.put(10, ["x"], "q")
    h.extents += 1
    h.clients["w"].blocks = 0
    kept = h.put(10, ["x"], "q")
    lose(h, left=[h.clients["w"].extent])
    assert {name: p.losses.counts for name, p in h.state.partitions.items()} == {"p": {"x": 5000}, "q": {"x": 10}}
    assert h.dealt(20, partition="q") == []
    assert h.dealt(10, partition="q") == kept
    h.clear(range(4500), "p")
    assert h.state.partitions["p"].losses.counts == {"x": 500}
