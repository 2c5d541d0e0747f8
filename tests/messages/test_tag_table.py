"""Tables of tags that are not valid are refused, and valid ones can be cut."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.tag_table import (
    BOOL,
    DELETED,
    INT,
    POOLED,
    EntryColumn,
    SentTags,
    TagTable,
    has_entry,
    slice_tags,
    take_tags,
)

NUMBERS = EntryColumn("n", bytes([INT]), struct.pack("<10q", *range(10)))
TEXTS = EntryColumn("t", bytes([POOLED]), bytes([0, 1] * 5), ["a", "b"])


@pytest.mark.parametrize("column", [
    EntryColumn("n", b""),
    EntryColumn("n", bytes([INT] * 2), bytes(80)),
    EntryColumn("n", bytes([INT]), bytes(9)),
    EntryColumn("n", bytes([7]), bytes(80)),
    EntryColumn("n", bytes([POOLED]), bytes(10)),
    EntryColumn("n", bytes([POOLED]), b"", []),
    EntryColumn("n", bytes([POOLED]), bytes([0] * 9 + [2]), ["a", "b"]),
    EntryColumn("n", bytes([POOLED]), struct.pack("<10q", *[0] * 9, -1), ["a", "b"]),
    EntryColumn("n", bytes([INT] * 9 + [POOLED]), struct.pack("<10q", *range(10)), ["a"]),
])  # fmt: skip
def test_wrong_columns_are_refused(column: EntryColumn) -> None:
    with pytest.raises(InvalidArgumentError, match="tag 'n'"):
        TagTable(10, [column]).check()


def test_two_columns_of_a_name_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="two columns"):
        TagTable(10, [NUMBERS, NUMBERS]).check()


def test_a_table_takes_the_place_of_a_list_in_a_message() -> None:
    table = TagTable(10, [NUMBERS, TEXTS])
    table.check()
    for tags in (table, table.to_rows(), [None, {"n": 1}]):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(tags), type=SentTags) == tags


def test_cuts() -> None:
    table = TagTable(10, [NUMBERS, TEXTS])
    rows: list[Any] = [{"n": i, "t": "ab"[i % 2]} for i in range(10)]
    assert table.to_rows() == rows
    assert slice_tags(table, 1, 3) == rows[1:3]
    long = slice_tags(table, 1, 10)
    assert isinstance(long, TagTable)
    assert long.to_rows() == rows[1:]
    assert slice_tags(rows, 1, 3) == rows[1:3]
    assert slice_tags([{}, {}, {"n": 1}], 0, 2) is None
    assert slice_tags(None, 0, 2) is None
    taken = take_tags(table, np.array([5, 0]))
    assert isinstance(taken, TagTable)
    assert taken.to_rows() == [rows[5], rows[0]] == take_tags(rows, np.array([5, 0]))
    assert TagTable(10, []).take(np.array([5, 0])) == TagTable(2, [])
    assert has_entry(table, "n") and has_entry(rows, "n") and not has_entry(table, "m")  # noqa: PT018


def test_entries_to_remove_are_left_out_for_new_rows() -> None:
    some = EntryColumn("b", bytes([BOOL, DELETED] * 5), struct.pack("<10q", *[1] * 10))
    table = TagTable(10, [NUMBERS, some, EntryColumn("d", bytes([DELETED]))])
    wanted = [{"n": i, "b": True} if i % 2 == 0 else {"n": i} for i in range(10)]
    assert table.without_deletes().to_rows() == wanted
    assert NUMBERS in table.without_deletes().columns
