"""Rows in chunks: positions and indexes, interleaved partitions, cleared and foreign rows, dropped chunks."""

from __future__ import annotations

import numpy as np
import pytest
from harness import Harness, column
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.core.columns.kinds import IntervalSet
from transfer_queue.core.tables.rows import CHUNK, RowTable, indexes_in
from transfer_queue.errors import InvalidArgumentError, StorageKeyNotFoundError
from transfer_queue.messages.puts import ClearRows, Publish
from transfer_queue.messages.queries import Lookup, RetrieveKeys


def test_indexes_ascend_over_partitions(h: Harness) -> None:
    assert h.put(3) == [0, 1, 2]
    assert h.put(2, partition="q") == [3, 4]
    assert h.put(1) == [5]
    assert h.state.partitions["p"].rows.live_positions().tolist() == [0, 1, 2, 3]
    assert h.state.partitions["p"].rows.positions_of(np.arange(-1, 8)).tolist() == [-1, 0, 1, 2, -1, -1, 3, -1, -1]


def test_rows_fill_several_chunks(h: Harness) -> None:
    many = CHUNK + CHUNK // 2
    first = h.put(many)
    h.put(7, partition="q")
    second = h.put(many)
    rows = h.state.partitions["p"].rows
    assert list(rows.chunks) == [0, 1, 2]
    assert (first[0], second[0], rows.count, rows.end) == (0, many + 7, 2 * many, 2 * many)
    picked = [second[-1], first[0], second[0], first[-1], first[CHUNK]]
    assert rows.positions_of(np.array(picked)).tolist() == [2 * many - 1, 0, many, many - 1, CHUNK]
    assert rows.indexes_of(rows.positions_of(np.array(picked))).tolist() == picked
    looked = h.lookup(picked, ["x"])
    assert [place["x"][1] for place in looked] == [many - 1, 0, 0, many - 1, CHUNK]
    assert looked[0]["x"][0] == looked[2]["x"][0] != looked[1]["x"][0]


def test_positions_are_found_in_interleaved_partitions(h: Harness) -> None:
    for _ in range(40):
        h.put(300)
        h.put(300, partition="q")
    p, q = h.state.partitions["p"].rows, h.state.partitions["q"].rows
    everything = np.arange(24000)
    mine = everything % 600 < 300
    assert (p.positions_of(everything)[mine] == np.arange(12000)).all()
    assert (p.positions_of(everything)[~mine] == -1).all()
    assert (q.positions_of(everything)[~mine] == np.arange(12000)).all()


@pytest.mark.design("global indexes are never reused")
def test_cleared_rows_are_not_found(h: Harness) -> None:
    h.put(10)
    h.clear([3, 4, 4, 77, -5])
    assert h.state.partitions["p"].rows.positions_of(np.arange(10)).tolist() == [0, 1, 2, -1, -1, 5, 6, 7, 8, 9]
    with pytest.raises(StorageKeyNotFoundError, match=r"\[3, 4\]"):
        h.lookup([2, 3, 4], ["x"])
    assert h.dealt(8) == [0, 1, 2, 5, 6, 7, 8, 9]
    assert h.put(1) == [10], "an index is never used again"


def test_a_chunk_without_live_rows_is_removed(h: Harness) -> None:
    rows = h.put(3 * CHUNK)
    h.clear(rows[CHUNK : 2 * CHUNK])
    partition = h.state.partitions["p"]
    assert list(partition.rows.chunks) == [0, 2]
    assert h.dealt(CHUNK + 2) == [*rows[:CHUNK], *rows[2 * CHUNK : 2 * CHUNK + 2]]
    assert partition.rows.positions_of(np.array([rows[CHUNK], rows[2 * CHUNK]])).tolist() == [-1, 2 * CHUNK]
    h.clear(rows)
    assert partition.rows.chunks == {}
    assert partition.rows.count == 0
    assert h.put(5) == list(range(3 * CHUNK, 3 * CHUNK + 5))
    assert h.lookup([3 * CHUNK + 4], ["x"])[0]["x"][1] == 4


def test_an_endless_partition_stays_small(h: Harness) -> None:
    for _ in range(30):
        h.clear(h.put(1000))
    partition = h.state.partitions["p"]
    assert len(partition.rows.chunks) <= 1
    assert h.state.blocks.live_bytes == partition.nbytes == 0


def test_a_column_of_indexes_has_8_bytes_for_each_row() -> None:
    assert indexes_in(column([1, 2])).tolist() == [1, 2]
    with pytest.raises(InvalidArgumentError, match="9 bytes"):
        indexes_in(b"123456789")


@pytest.mark.parametrize(
    "request_", [ClearRows("p", b"123"), Lookup("p", b"123"), RetrieveKeys("p", b"1"), Publish("p", 1, b"12")], ids=repr
)
def test_columns_of_a_wrong_length_are_refused(h: Harness, request_: object) -> None:
    h.put(1)
    with pytest.raises(InvalidArgumentError):
        h.ask(request_)


@given(st.lists(st.integers(0, 3 * CHUNK), max_size=30), st.integers(1, 500))
def test_split_covers_everything_once(picked: list[int], step: int) -> None:
    rows = RowTable()
    while rows.end < 3 * CHUNK:
        rows.append(rows.end, min(step, 3 * CHUNK - rows.end))
    positions = np.array([p for p in picked if p < rows.end], "i8")
    out = np.full(len(positions), -1)
    for key, chunk, at, where in rows.split(positions):
        out[where] = chunk.index[at]
        assert (positions[where] >> 12 == key).all()
    assert (out == positions).all()


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(-2, 6))), st.integers(-1, 45))
def test_intervals_equal_a_set_of_integers(added: list[tuple[int, int]], dropped: int) -> None:
    intervals, expected = IntervalSet(), set()
    for first, more in added:
        intervals.add(first, first + more)
        expected |= set(range(first, first + more + 1))
        starts, ends = intervals.starts, intervals.ends
        assert all(a <= b for a, b in zip(intervals.starts, intervals.ends, strict=True))
        assert all(end + 1 < start for end, start in zip(ends, starts[1:], strict=False)), "adjacent intervals join"
        assert {v for v in range(-3, 60) if v in intervals} == expected
    intervals.drop_up_to(dropped)
    assert {v for v in range(-3, 60) if v in intervals} == {v for v in expected if v > dropped}
