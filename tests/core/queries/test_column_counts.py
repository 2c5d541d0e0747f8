"""Counts of a partition by columns: they equal those of a naive count for all widths, pages and clears."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from harness import Harness, tensor
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.core.queries import partition_view
from transfer_queue.core.tables.rows import CHUNK
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.reports.overview import MAX_COLUMNS, ColumnCounts, CountColumns

TAKES = {"t": ["x", "y"]}


def numbers(data: bytes, kind: str = "<i4") -> list[int]:
    return list(np.frombuffer(data, kind).tolist())


def count_all(h: Harness, request: CountColumns) -> dict[str, Any]:
    """All pages of a count, joined."""
    lines: dict[str, np.ndarray] = {}
    groups = np.zeros((0, 3), np.int64)
    pages, made, chunk, before = 0, None, 0, 0
    whole = lack_field = 0
    while True:
        page: ColumnCounts = h.look(
            CountColumns(
                request.partition, request.width, request.first, request.last, request.takes, request.group_task,
                made, chunk, before,
            )
        )  # fmt: skip
        assert page.known
        pages += 1
        found = {("field", name): data for name, data in page.produced.items()}
        found |= {("lost", name): data for name, data in page.lost.items()}
        for task, states in page.tasks.items():
            found |= {(task, state): data for state, data in zip(("ready", "claimed", "consumed", "passed"), states)}
        for key, data in found.items():
            line = np.frombuffer(data, "<i4")
            lines.setdefault(key, np.zeros(MAX_COLUMNS, np.int64))[page.column : page.column + len(line)] += line
        index = np.frombuffer(page.index, "<i8")
        seen = lines.setdefault("index", np.full(MAX_COLUMNS, -1))
        part = seen[page.column : page.column + len(index)]
        part[part < 0] = index[part < 0]
        whole, lack_field = whole + page.whole, lack_field + page.lack_field
        groups = np.concatenate([groups, np.frombuffer(page.parts, "<i8").reshape(-1, 3)])
        if page.chunk is None:
            break
        made, chunk, before = page.made, page.chunk, page.before
    used = int((lines["index"] >= 0).sum())
    lines = {key: line[:used].tolist() for key, line in lines.items()}
    return {"lines": lines, "pages": pages, "whole": whole, "lack_field": lack_field, "groups": groups.tolist()}


def naive(values: list[int], width: int) -> list[int]:
    return [sum(values[at : at + width]) for at in range(0, len(values), width)]


def test_fields_and_states_of_a_task_are_counted() -> None:
    h = Harness()
    h.put(10, ("x",))
    h.put(6, ("y",), rows=range(6))
    h.ask(Claim("p", "t", ["x", "y"], 2))
    h.ask(Claim("p", "t", ["x", "y"], 2, lease=60.0))
    lines = count_all(h, CountColumns("p", 3, takes=TAKES))["lines"]
    assert lines["index"] == [0, 3, 6, 9]
    assert lines["field", "x"] == [3, 3, 3, 1]
    assert lines["field", "y"] == [3, 3, 0, 0]
    assert lines["t", "consumed"] == [2, 0, 0, 0]
    assert lines["t", "claimed"] == [1, 1, 0, 0]
    assert lines["t", "ready"] == [0, 2, 0, 0]
    assert lines["t", "passed"] == [0, 0, 0, 0]


@differential(40, costly=True)
@given(
    cleared=st.sets(st.integers(0, 39)), width=st.integers(1, 50), first=st.integers(0, 45), length=st.integers(0, 60),
    with_y=st.sets(st.integers(0, 39)),
)  # fmt: skip
def test_columns_are_ranges_of_the_live_rows(
    cleared: set[int], width: int, first: int, length: int, with_y: set[int]
) -> None:
    h = Harness()
    h.put(40, ("x",))
    if with_y:
        h.put(len(with_y), ("y",), rows=sorted(with_y))
    if cleared:
        h.clear(sorted(cleared))
    live = [row for row in range(40) if row not in cleared]
    lines = count_all(h, CountColumns("p", width, first, first + length, TAKES))["lines"]
    shown = live[first : first + length]
    assert lines["index"] == shown[::width]
    if shown:
        assert lines["field", "x"] == naive([1] * len(shown), width)
        assert lines["t", "ready"] == naive([int(row in with_y) for row in shown], width)


def test_a_large_partition_is_counted_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_view, "CELLS", CHUNK)
    h = Harness()
    rows = 3 * CHUNK + 100
    h.put(rows, ("x",))
    found = count_all(h, CountColumns("p", 1000, takes=TAKES))
    assert found["pages"] == 4
    assert found["lines"]["field", "x"] == naive([1] * rows, 1000)
    assert found["lines"]["index"] == list(range(0, rows, 1000))
    part = count_all(h, CountColumns("p", 10, CHUNK - 5, CHUNK + 15))
    assert part["lines"]["field", "x"] == [10, 10]
    assert part["lines"]["index"] == [CHUNK - 5, CHUNK + 5]


def test_groups_are_complete_or_lack_a_field_or_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_view, "CELLS", 1)
    h = Harness()
    h.ask(h.publish(12, {"x": tensor()}, groups=[f"g{number // 4}" for number in range(12)]))
    h.ask(h.publish(2, {"x": tensor()}, groups=["late", "late"]))
    h.put(6, ("y",), rows=range(6))
    found = count_all(h, CountColumns("p", 100, takes=TAKES, group_task="t"))
    assert (found["whole"], found["lack_field"]) == (1, 2)
    assert [group[1:] for group in found["groups"]] == [[2, 0]]


def test_an_unchanged_partition_is_not_counted_again() -> None:
    h = Harness()
    h.put(3, ("x",))
    page = h.look(CountColumns("p", 1))
    again = h.look(CountColumns("p", 1, version=page.version))
    assert again.same
    assert not again.produced.get("x")
    h.put(1, ("x",))
    assert not h.look(CountColumns("p", 1, version=page.version)).same


def test_a_partition_that_is_unknown_or_made_again_has_no_counts() -> None:
    h = Harness()
    assert not h.look(CountColumns("p", 1)).known
    h.put(1, ("x",))
    made = h.look(CountColumns("p", 1)).made
    assert not h.look(CountColumns("p", 1, made=made + 1)).known


def test_any_numbers_are_answered() -> None:
    h, most = Harness(), (1 << 63) - 1
    h.put(10, ("x",))
    for width, first, last, chunk, before in product(
        (1, 3, most), (0, 5, most), (0, 7, most), (0, most), (0, 10, most)
    ):
        assert h.look(CountColumns("p", width, first, last, TAKES, "t", None, chunk, before)).known


def test_an_empty_partition_has_no_columns() -> None:
    h = Harness()
    h.put(2, ("x",))
    h.clear([0, 1])
    page = h.look(CountColumns("p", 1, takes={"t": ["x", "absent"]}))
    assert (page.known, page.rows, page.index, page.chunk) == (True, 0, b"", None)
