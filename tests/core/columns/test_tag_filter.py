"""The tags of many rows are compared column by column as those of a few are row by row."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from transfer_queue.core.tables import tags as tag_table
from transfer_queue.core.tables.tags import ChunkTags, equal_values, matching_rows

ROWS = 12
NAN = float("nan")

values = st.sampled_from([
    None, True, False, 0, 1, -1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 1.0, 1.5, -1.0,
    NAN, float("inf"), float(2**53), float(2**63), float(2**64), -float(2**63), "", "a", b"a", [1], [1.0], [NAN],
    {"x": 1}, {"x": 1.0}, {"x": True}, Ext(65, b"x"), Ext(65, b"y"),
])  # fmt: skip
tags = st.dictionaries(st.sampled_from(["n", "m", "o"]), values, max_size=3)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (1, 1, True), (1, 1.0, True), (1.5, 1, False), (2**63, float(2**63), True), (2**53 + 1, float(2**53), False),
        (True, True, True), (True, 1, False), (1, True, False), (False, 0.0, False), (0, None, False),
        (None, None, True), (float("nan"), float("nan"), True), ("a", "a", True), ("a", b"a", False), ("1", 1, False),
        ([1, 2], [1.0, 2], True), ([1], [True], False), ([1], [1, 2], False), ([], {}, False),
        ({"a": [1]}, {"a": [1.0]}, True), ({"a": 1}, {"a": 1, "b": 2}, False), ({"a": 1}, {"b": 1}, False),
        (Ext(65, b"x"), Ext(65, b"x"), True), (Ext(65, b"x"), Ext(65, b"y"), False), (Ext(65, b"x"), b"x", False),
    ],
)  # fmt: skip
def test_values_of_tags_compare_by_value(one: Any, other: Any, equal: bool) -> None:
    assert equal_values(one, other) is equal
    assert equal_values(other, one) is equal


@given(
    st.lists(tags, min_size=ROWS, max_size=ROWS), st.lists(tags, min_size=1, max_size=4), st.sampled_from([64, 1, 0]),
    st.lists(st.integers(0, ROWS - 1), unique=True),
)  # fmt: skip
def test_rows_match_if_all_entries_are_equal(
    of_rows: list[dict[str, Any]], conditions: list[dict[str, Any]], most: int, places: list[int]
) -> None:
    """Entries of the first names have a column, and those of other names are in a dict for each row."""
    with mock.patch.object(tag_table, "MAX_COLUMNS", most):
        chunk = ChunkTags(ROWS)
        chunk.put(range(ROWS), of_rows)
    at = np.array(places, "i8")
    for where in [*conditions, *of_rows[:4]]:
        wanted = [
            all(name in of_rows[place] and equal_values(of_rows[place][name], value) for name, value in where.items())
            for place in places
        ]
        assert matching_rows(chunk, where, at).tolist() == wanted


def test_only_values_of_these_rows_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = ChunkTags(1000)
    chunk.put(range(1000), [{"path": [at]} for at in range(1000)])
    decoded: list[bytes] = []
    decode = tag_table._decode

    def counted(value: bytes) -> Any:
        decoded.append(value)
        return decode(value)

    monkeypatch.setattr(tag_table, "_decode", counted)
    found = matching_rows(chunk, {"path": [7.0]}, np.array([3, 7, *range(900, 910)]))
    assert np.flatnonzero(found).tolist() == [1]
    assert len(decoded) == 12


def test_a_chunk_without_tags_matches_only_no_condition() -> None:
    assert matching_rows(None, {}, np.arange(3)).all()
    assert not matching_rows(None, {"n": None}, np.arange(3)).any()
