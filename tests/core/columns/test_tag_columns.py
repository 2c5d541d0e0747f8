"""Tags in columns hold what a dict for each row would hold, whatever is put, merged, removed, saved and sent."""

from __future__ import annotations

import struct
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.core.tables import tags as tag_table
from transfer_queue.core.tables.tags import SPARE, ChunkTags, EntryValues, pack_tags
from transfer_queue.messages.base import DELETE_CODE
from transfer_queue.messages.tag_table import ABSENT, INT, EntryColumn, StoredTags, TagTable, tag_rows
from transfer_queue.sampler.numeric_tags import number
from transfer_queue.wire.objects.tag_rows import table_of_tags

CAPACITY = 12
DELETE = msgspec.msgpack.Ext(DELETE_CODE, b"")
Tag = dict[str, Any]

# few names and values, so that rows often share them
values = st.one_of(
    st.integers(-2, 2), st.booleans(), st.none(), st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf")]),
    st.sampled_from(["", "a", "b"]), st.sampled_from([b"a", [1], {"x": [None]}, 2**63, -(2**63), 2**63 - 1]),
)  # fmt: skip
names = st.sampled_from(["n", "m", "o", "p"])
changes = st.dictionaries(names, st.one_of(values, st.just(DELETE)), max_size=3)
places = st.lists(st.integers(0, CAPACITY - 1), min_size=1, max_size=CAPACITY, unique=True)
steps = st.tuples(
    st.sampled_from(["rows", "row", "row", "table", "clear", "load", "grow", "read"]), places, st.booleans(),
    st.lists(st.one_of(changes, st.none()), min_size=CAPACITY, max_size=CAPACITY),
    st.lists(st.tuples(values, st.one_of(values, st.just(DELETE))), min_size=CAPACITY, max_size=CAPACITY),
)  # fmt: skip


def exact(value: Any) -> Any:
    """Return what equals that of another value only if types and bits are equal."""
    if isinstance(value, dict):
        return {name: exact(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [exact(entry) for entry in value]
    return type(value).__name__, struct.pack("<d", value) if isinstance(value, float) else value


def merge(model: list[Tag], at: list[int], tags: list[Tag | None], replace: bool) -> None:
    """Do what `ChunkTags.put` does, with a dict for each row."""
    for place, tag in zip(at, tags, strict=True):
        if tag is not None:
            before = {} if replace else model[place]
            model[place] = {name: value for name, value in {**before, **tag}.items() if value != DELETE}


def sent_table(pairs: list[tuple[Any, Any]]) -> tuple[TagTable, list[Tag]]:
    """Return the tags n and o of rows as columns of a message, and as dicts."""
    from transfer_queue.wire.objects.object_values import DELETE as REMOVED

    tags = [{"n": one, "o": REMOVED if other == DELETE else other} for one, other in pairs]
    table = table_of_tags(tags, True)
    assert table is not None
    table.check()
    return msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=TagTable), [
        {"n": one, "o": other} for one, other in pairs
    ]


def check_same(columns: ChunkTags, model: list[Tag]) -> None:
    """Check every way to read tags."""
    every, some = slice(0, CAPACITY), np.array([3, 1, 2])
    assert exact(columns.rows(every)) == exact(model)
    assert exact(columns.rows(some)) == exact([columns.row(at) for at in some.tolist()])
    assert columns.tagged(every).tolist() == [bool(tag) for tag in model]
    assert exact(tag_rows(columns.pack(CAPACITY), CAPACITY)) == exact(model)
    for name in ("n", "o", "none"):
        found = columns.values(name, every)
        assert exact([None if value is ABSENT else value for value in found]) == exact([t.get(name) for t in model])
        floats, wrong = columns.numbers(name, every)
        wanted = [number(tag.get(name)) for tag in model]
        assert wrong.tolist() == [value is None for value in wanted]
        assert np.array_equal(floats, [np.nan if value is None else value for value in wanted], equal_nan=True)


@differential(examples=150)
@given(st.lists(steps, max_size=8), st.sampled_from([64, 1, 0]), st.sampled_from([(64, 8), (64, 1), (4, 1), (1, 0)]))
def test_columns_hold_what_dicts_would_hold(program: list[Any], most: int, sizes: tuple[int, int]) -> None:
    """Also if tags of single rows are read later, and if they are then put into the columns together."""
    patch = mock.patch.multiple(tag_table, MAX_COLUMNS=most, MAX_PENDING=sizes[0], FEW=sizes[1])
    with patch:
        columns, capacity = ChunkTags(CAPACITY), CAPACITY
        model: list[Tag] = [{} for _ in range(CAPACITY)]
        for act, at, replace, tags, pairs in program:
            if act == "clear":
                columns.clear(np.array(at))
                merge(model, at, [{}] * len(at), True)
            elif act == "rows":
                columns.put(at, tags[: len(at)], replace)
                merge(model, at, tags[: len(at)], replace)
            elif act == "row":  # rows with the same names, one by one
                for place, (one, other) in zip(at, pairs, strict=False):
                    columns.put([place], [{"n": one, "o": other}], replace)
                    merge(model, [place], [{"n": one, "o": other}], replace)
            elif act == "table":
                table, sent = sent_table(pairs)
                columns.put_table(np.array(at), table, slice(0, len(at)), replace)
                merge(model, at, sent[: len(at)], replace)  # type: ignore[arg-type]
            elif act == "load":
                saved = msgspec.msgpack.encode(columns.pack(CAPACITY))
                columns = ChunkTags.from_saved(msgspec.msgpack.decode(saved, type=StoredTags), capacity)
            elif act == "grow":
                capacity += 3
                columns.grow(capacity)
            if act == "read":
                check_same(columns, model)
        check_same(columns, model)


@differential(examples=40)
@given(st.lists(steps, min_size=1, max_size=3), places)
def test_rows_of_several_chunks_are_sent_together(program: list[Any], at: list[int]) -> None:
    """The pools of the chunks have the same values at other places."""
    chunks, wanted, parts, done = [], [], [], 0
    for _, _, _, tags, pairs in program:
        chunk = ChunkTags(CAPACITY)
        chunk.put(range(CAPACITY), tags, True)
        chunk.put_table(slice(0, 4), sent_table(pairs)[0], slice(4, 8))
        chunks.append(chunk)
        parts.append((chunk, np.array(at), slice(done, done + len(at))))
        wanted += chunk.rows(np.array(at))
        done += len(at)
    table = pack_tags(parts, done)
    table.check()
    assert exact(table.to_rows()) == exact(wanted)
    select = np.arange(done)[::-2]
    assert exact(table.take(select).to_rows()) == exact(wanted[::-2])
    assert exact(table.to_rows(select)) == exact(wanted[::-2])


def test_values_that_no_row_has_any_more_are_dropped() -> None:
    column = EntryValues(4)
    for step in range(1000):
        column.put(step % 4, f"text {step}")
        column.put_column(np.array([3]), 5, np.array([0]), [f"of a table {step}"])
    assert len(column.pool) <= SPARE + 2 * 4
    assert column.values(slice(0, 4)) == ["text 996", "text 997", "text 998", "of a table 999"]
    for step in range(1000):
        column.put_values(np.array([0, 1]), [f"one {step}", f"other {step}"], {str})
    assert len(column.pool) <= SPARE + 2 * 4
    assert column.values(slice(0, 4)) == ["one 999", "other 999", "text 998", "of a table 999"]


def test_tags_of_a_row_are_merged_in_order_before_they_are_read() -> None:
    tags = ChunkTags(CAPACITY)
    for tag in ({"n": 1, "m": 1}, {"n": 2}, {"m": DELETE}, {"o": "a"}, {"o": DELETE}, {"o": "b"}):
        tags.put([3], [tag])
    assert tags.row(3) == {"n": 2, "o": "b"}
    tags.put([3], [{"p": 5}])
    tags.put([3], [{"m": 7}], replace=True)
    tags.put([3], [{"n": 8}])
    assert tags.rows(np.array([3])) == [{"m": 7, "n": 8}]
    tags.put([3], [{"n": 9}])
    tags.clear(np.array([3]))
    assert tags.row(3) == {}


def test_few_tags_are_not_in_columns_yet() -> None:
    """The others are put into the columns together."""
    tags = ChunkTags(4096)
    for at in range(200):
        tags.put([at], [{"n": at, "s": "text", "x": at / 2}])
        assert len(tags._pending) < tag_table.MAX_PENDING
    assert len(tags._pending) == 200 % tag_table.MAX_PENDING
    written = [{"n": at, "s": "text", "x": at / 2} for at in range(200)]
    assert [tags.row(at) for at in range(200)] == written
    assert tags._pending, "to read one row puts nothing into the columns"
    assert tags.rows(slice(0, 200)) == written
    assert not tags._pending


def test_a_row_whose_tag_is_pending_is_read_as_it_will_be_in_the_columns() -> None:
    tags = ChunkTags(16)
    tags.put(range(16), [{"n": at, "s": "text"} for at in range(16)])
    assert len(tags.columns["n"].kinds) == 16
    tags.put([3], [{"n": DELETE, "m": 1}])
    tags.put([3, 4], [{"m": 2, "x": [1]}, {"x": DELETE}])
    assert tags._pending
    single = [tags.row(at) for at in range(16)]
    assert single[2:5] == [{"n": 2, "s": "text"}, {"s": "text", "m": 2, "x": [1]}, {"n": 4, "s": "text"}]
    assert tags.rows(slice(0, 16)) == single


def test_names_beyond_the_columns_cost_no_column() -> None:
    """Rows whose names all differ would otherwise need a column each."""
    tags = ChunkTags(4096)
    tags.put(range(4096), [{f"name {at}": at} for at in range(4096)])
    assert len(tags.columns) == tag_table.MAX_COLUMNS
    assert tags.rows(slice(0, 4096)) == [{f"name {at}": at} for at in range(4096)]
    assert isinstance(tags.pack(4096), list)
    tags.put([4000], [{"name 4000": DELETE}])
    assert 4000 not in tags.rest
    tags.clear(slice(0, 4096))
    assert not tags.rest
    assert not tags.tagged(slice(0, 4096)).any()


@pytest.mark.parametrize("name", ["n", "text"])
def test_a_row_needs_nine_bytes_for_each_entry(name: str) -> None:
    tags = ChunkTags(4096)
    tags.put(range(4096), [{"n": at, "text": "running"} for at in range(4096)])
    column = tags.columns[name]
    assert column.kinds.nbytes + column.payload.nbytes == 9 * 4096
    assert len(column.pool) == (name == "text")


def test_a_pool_that_no_value_is_in_changes_nothing() -> None:
    """Only a wrong client sends one."""
    table = TagTable(2, [EntryColumn("n", bytes([INT]), np.array([0, 7], "<i8").tobytes(), ["unused"])])
    table.check()
    tags = ChunkTags(CAPACITY)
    tags.put_table(slice(0, 2), table, slice(None))
    assert [tags.row(place) for place in range(2)] == [{"n": 0}, {"n": 7}]
