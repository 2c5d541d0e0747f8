"""Ready sets: kept up to date, removed and rebuilt, read lazily; complete groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Harness, tensor
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.core.state import partition as partition_module
from transfer_queue.core.state.partition import MAX_READY_SETS
from transfer_queue.core.tables.ready_sets import ReadySet, ReadySets, first_selected
from transfer_queue.core.tables.rows import CHUNK
from transfer_queue.messages.puts import Publish
from transfer_queue.sampler.base import ReadyIndexes


def ready_of(h: Harness, task: str = "t", fields: tuple[str, ...] = ("x",), partition: str = "p") -> ReadySets:
    found = h.state.partitions[partition]
    return found.sampler_view(found.ready_set(task, fields))


@differential(60)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=12).filter(any), st.integers(1, 14))
def test_the_first_ones_of_a_bitmap_are_those_of_all(bits: list[int], limit: int) -> None:
    expected = [at for at, bit in enumerate(bits) if bit][:limit]
    assert first_selected(np.arange(len(bits)), np.array(bits, "u1"), limit).tolist() == expected


def fragmented(h: Harness) -> list[int]:
    """Return the ready rows for (x, y) of three chunks in which every third row lacks `y`."""
    h.put(11, partition="q")
    rows = h.put(3 * CHUNK)
    with_y = [row for row in rows if row % 3]
    h.put(len(with_y), ("y",), rows=with_y)
    return with_y


@pytest.mark.design("built-in samplers work on a lazy sequence of ready indexes")
def test_ready_rows_are_a_lazy_sequence(h: Harness) -> None:
    expected = fragmented(h)
    ready = ready_of(h, fields=("x", "y"))
    assert isinstance(ready, ReadyIndexes)
    assert len(ready) == len(expected)
    assert list(ready) == ready[:] == expected
    for at in (0, 1, 2000, 5000, len(expected) - 1, -1, -len(expected), -4000):
        assert ready[at] == expected[at]
        assert type(ready[at]) is int
    for at in (
        slice(3), slice(0), slice(2000, 6000), slice(None, None, 700), slice(-5, None), slice(10, 3),
        slice(None, None, -1), slice(5, None, -2), slice(9 * CHUNK), slice(4, 100, 7),
    ):  # fmt: skip
        assert ready[at] == expected[at], at
    assert expected[77] in ready
    assert 0 not in ready
    assert ready.index(expected[3000]) == 3000
    for outside in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            ready[outside]


def test_ready_rows_may_be_empty(h: Harness) -> None:
    h.put(3, ("y",))
    ready = ready_of(h)
    assert (len(ready), list(ready), ready[:], ready[:5]) == (0, [], [], [])
    with pytest.raises(IndexError):
        ready[0]
    assert list(ready.whole_groups(1)) == []


@pytest.mark.design("least-recently-used ready sets are dropped and rebuilt")
def test_the_least_recently_used_set_is_removed(h: Harness) -> None:
    h.put(5)
    for number in range(MAX_READY_SETS):
        ready_of(h, f"t{number}")
    ready_of(h, "t0")
    ready_of(h, "one more")
    kept = [task for task, _ in h.state.partitions["p"].ready]
    assert len(kept) == MAX_READY_SETS
    assert "t0" in kept
    assert "t1" not in kept
    h.put(1)
    assert list(ready_of(h, "t1")) == [0, 1, 2, 3, 4, 5], "it is built again"


def test_a_set_for_which_a_claim_waits_is_never_removed(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_module, "MAX_READY_SETS", 4)
    h.create()
    waiting = {task: h.claim(2, task, wait=100) for task in "abcdefgh"}
    for number in range(10):
        ready_of(h, f"other{number}")
    assert {task for task, _ in h.state.partitions["p"].ready} >= set("abcdefgh")
    assert h.put(2) == [0, 1]
    assert {task: h.got(sequence) for task, sequence in waiting.items()} == {task: [0, 1] for task in "abcdefgh"}
    ready_of(h, "last")
    assert len(h.state.partitions["p"].ready) == 4


def test_complete_groups_by_order_are_found(h: Harness) -> None:
    rows = h.put(10)
    ready = ready_of(h)
    assert list(ready.whole_groups(4)) == [rows[0:4], rows[4:8]]
    assert list(ready.whole_groups(1)) == [[row] for row in rows]
    h.clear([rows[1]])
    assert list(ready.whole_groups(4)) == [rows[4:8]]
    assert list(ready.whole_groups(2)) == [rows[2:4], rows[4:6], rows[6:8], rows[8:10]]
    h.put(2)
    assert list(ready_of(h).whole_groups(4)) == [rows[4:8], [8, 9, 10, 11]]


def test_complete_groups_of_the_last_few_sizes_are_kept(h: Harness) -> None:
    """Claims choose the group size, and every put updates the counts of each size that is kept."""
    h.put(60)
    ready = ready_of(h)
    for size in range(2, 40):
        assert len(list(ready.whole_groups(size))) == 60 // size
        assert len(list(ready.whole_groups(2))) == 30
    kept = h.state.partitions["p"].ready_set("t", ("x",)).whole
    assert list(kept) == [33, 34, 35, 36, 37, 38, 39, 2]
    h.put(20)
    assert [len(list(ready_of(h).whole_groups(size))) for size in (2, 3, 39)] == [40, 26, 2]


def test_a_claim_for_an_unknown_field_finds_no_rows(h: Harness) -> None:
    h.put(2)
    assert list(ready_of(h, fields=("nobody",))) == []
    h.put(2, {"nobody": tensor()}, rows=[0, 1])
    assert list(ready_of(h, fields=("nobody",))) == [0, 1]


def test_a_ready_set_contains_its_rows() -> None:
    ready: Any = ReadySet("t", ("x",))
    assert 5 not in ready
    ready.bits[0] = np.array([0, 1], "u1")
    assert 1 in ready
    assert 0 not in ready
    assert 2 not in ready
    assert CHUNK + 1 not in ready


def test_tags_alone_make_no_row_ready(h: Harness) -> None:
    h.ask(Publish("p", 2, keys=["a", "b"], tags=[{"n": 1}, None], pre_allocate=0))
    assert len(ready_of(h)) == 0


@pytest.mark.design("a claim costs what its batch costs")
def test_a_claim_reads_only_the_chunks_of_its_rows(h: Harness) -> None:
    """The cost of a claim does not grow with the partition: the chunks before and after its rows are not read."""

    class Counted(dict[int, Any]):
        read: list[int]

        def __getitem__(self, key: int) -> Any:
            self.read.append(key)
            return super().__getitem__(key)

    rows = h.put(12 * CHUNK, ("y",))
    h.put(40, ("x",), rows=rows[-40:])
    ready = h.state.partitions["p"].ready_set("t", ("x", "y"))
    counted = Counted(ready.bits)
    counted.read = []
    ready.bits = counted
    assert ready_of(h, fields=("x", "y"))[:32] == rows[-40:-8]
    assert counted.read == [11]
