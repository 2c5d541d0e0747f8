"""Lookups return the block and the row of each value that was put last, and the types of all live values.

The model is a dict a row. Between it and what is compared stand interned schemas and dims, the short ways of puts of
new rows, of blocks like the one before, of rows in one chunk or one block, and of fields that lie alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import harness
import numpy as np
import pytest
from harness import Harness, column, schema_of, tensor
from hypothesis import given
from hypothesis import strategies as st

from differential import differential, row_lengths, small
from transfer_queue.core.columns.kinds import InternTable
from transfer_queue.core.state import partition
from transfer_queue.messages.claims import ClaimReply
from transfer_queue.messages.descriptors import FieldType
from transfer_queue.messages.queries import Lookup, LookupReply, ShowRows

FIELDS = "abc"
DTYPES = {"a": "int8", "b": "float32", "c": "object"}


@pytest.fixture(autouse=True, scope="module")
def short_runs_are_long() -> Iterator[None]:
    """The short way of many rows that are one after the other is taken for a few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "LONG_RUN", 2)
        yield


@dataclass(frozen=True)
class Value:
    """The place of a value: the block's offset, which identifies the block, and the row in it."""

    offset: int
    slot: int
    shape: tuple[int, ...]


@dataclass
class Model:
    """rows: of each live row, its values by field. shapes: all that were put of each (field, rank) with live values."""

    rows: dict[int, dict[str, Value]] = field(default_factory=dict)
    shapes: dict[tuple[str, int], list[tuple[int, ...]]] = field(default_factory=dict)
    blocks: dict[int, Any] = field(default_factory=dict)

    def put(self, rows: list[int], fields: dict[str, list[tuple[int, ...]]], offset: int) -> None:
        for name, shapes in fields.items():
            for shape in shapes:
                self.shapes.setdefault((name, len(shape)), []).append(shape)
            for slot, (row, shape) in enumerate(zip(rows, shapes, strict=True)):
                self.rows.setdefault(row, {})[name] = Value(offset, slot, shape)
        self.forget_empty()

    def clear(self, rows: list[int]) -> None:
        for row in rows:
            del self.rows[row]
        self.forget_empty()

    def forget_empty(self) -> None:
        live = {(name, len(value.shape)) for values in self.rows.values() for name, value in values.items()}
        self.shapes = {key: shapes for key, shapes in self.shapes.items() if key in live}

    def type(self, name: str, rows: list[int]) -> FieldType | None:
        """The type of a field in a reply with the values of these rows; None if they differ in rank."""
        if DTYPES[name] == "object":
            return FieldType(name, "object", "object", 1, None, 0, False)
        ranks = {len(self.rows[row][name].shape) for row in rows if name in self.rows[row]}
        if len(ranks) > 1:
            return None
        first, *others = self.shapes[name, ranks.pop()]
        differs = sum(1 << d for d in range(len(first)) if any(shape[d] != first[d] for shape in others))
        return FieldType(name, "tensor", DTYPES[name], len(first), None if differs else list(first), differs, False)

    def check(self, found: FieldType, rows: list[int]) -> None:
        wanted = self.type(found.name, rows)
        assert found.mixed_rank is (wanted is None)
        assert wanted in (None, found)


@st.composite
def fields_of_put(draw: st.DrawFn, count: int) -> dict[str, list[tuple[int, ...]]]:
    names = draw(st.sampled_from(["a", "ab", "b", "ba", "abc", "c", "ac"]))
    found = {}
    for name in names:
        ranks = st.sampled_from([0, 1, 1, 1, 2])
        rank, other, apart = draw(ranks), draw(small), draw(st.sampled_from([False, False, False, True]))
        sizes = draw(row_lengths(count))
        found[name] = [(size, other)[: draw(ranks) if apart and name != "c" else rank] for size in sizes]
        if name == "c":
            found[name] = [(size,) for size in sizes]
    return found


def described(fields: dict[str, list[tuple[int, ...]]]) -> dict[str, Any]:
    """Fields as the harness takes them: one shape a block where all rows have it."""
    out: dict[str, Any] = {}
    for name, shapes in fields.items():
        if DTYPES[name] == "object":
            out[name] = harness.OBJECT
        else:
            out[name] = tensor(DTYPES[name], list(shapes) if len(set(shapes)) > 1 else shapes[0])
    return out


def check_rows(h: Harness, model: Model, rows: list[int]) -> None:
    names = sorted(set.intersection(*(set(model.rows[row]) for row in rows)))
    reply = h.look(Lookup("p", column(rows), fields=names or None))
    assert isinstance(reply, LookupReply)
    if not names:
        assert reply.types == []
        return
    found = harness.places(reply)
    assert found == [
        {name: (value.offset, value.slot) for name, value in model.rows[row].items() if name in names} for row in rows
    ]
    for each in reply.types:
        model.check(each, rows)
    offsets = np.frombuffer(reply.blocks.offset, "<i8").tolist()
    places = zip(*(np.frombuffer(part, "<i4").tolist() for part in (reply.blocks.schema, reply.blocks.dims)))
    for offset, count, (schema, dims) in zip(offsets, np.frombuffer(reply.blocks.rows, "<i4").tolist(), places):
        put = model.blocks[offset]
        assert (count, reply.blocks.schemas[schema], reply.blocks.dims_values[dims]) == put
    check_shapes(h, model, names)


def check_shapes(h: Harness, model: Model, names: list[str]) -> None:
    """Return the expected shapes in the metadata of all rows, for fields whose rows differ."""
    shown = h.look(ShowRows("p", names))
    assert isinstance(shown, ClaimReply)
    live = np.frombuffer(shown.rows, "<i8").tolist()
    assert live == sorted(model.rows)
    ranks = {each.name: each.ndim for each in shown.fields}
    for each in shown.fields:
        model.check(each, live)
    for name, packed in shown.shapes.items():
        rank = ranks[name]
        shapes = np.frombuffer(packed, "<i8").reshape(len(live), rank).tolist()
        for row, shape in zip(live, shapes, strict=True):
            value = model.rows[row].get(name)
            assert shape == ([-1] * rank if value is None else list(value.shape))


@given(st.data())
@differential(25)
def test_a_lookup_returns_the_last_values(data: st.DataObject) -> None:
    h, model = Harness(), Model()
    for _ in range(data.draw(st.integers(2, 12))):
        live = list(model.rows)
        what = data.draw(st.sampled_from(["new", "again", "again", "clear", "look", "look"])) if live else "new"
        some = data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=8)) if live else []
        if what == "look":
            check_rows(h, model, some)
        elif what == "clear":
            gone = data.draw(st.sampled_from([live, sorted(set(some))]))
            h.clear(gone)
            model.clear(gone)
        else:
            rows = None if what == "new" else data.draw(st.permutations(sorted(set(some))))
            count = data.draw(st.integers(1, 4)) if rows is None else len(rows)
            fields = data.draw(fields_of_put(count))
            request = h.publish(count, described(fields), rows=rows)
            assert request.block is not None
            schema, dims = schema_of(described(fields), count)
            model.blocks[request.block.offset] = (count, schema, dims)
            put = harness.rows_of(h.ask(request))
            assert rows is None or put == rows
            model.put(put, fields, request.block.offset)
    if model.rows:
        check_rows(h, model, list(model.rows))
    h.replay()
    harness.made.clear()


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([b"", b"\0", b"\0\0", b"a", b"aa"])), max_size=40))
@differential(60)
def test_interned_values_equal_the_added_ones(steps: list[tuple[bool, bytes]]) -> None:
    table: InternTable[bytes] = InternTable()
    held: list[tuple[int, bytes]] = []
    for add, value in steps:
        if add or not held:
            held.append((table.add(value), value))
        else:
            table.drop(held.pop(len(value) % len(held))[0])
        assert [table[number] for number, _ in held] == [value for _, value in held]
        assert len({number for number, _ in held}) == len({value for _, value in held})
    again: InternTable[bytes] = InternTable()
    again.restore(table.to_tree())
    again.set_values([value or b"" for value in table.values])
    assert (again.number, again.values) == (table.number, table.values)
