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
from transfer_queue.core.columns.intern_table import InternTable
from transfer_queue.core.queries import value_locations
from transfer_queue.messages.claims import ClaimReply
from transfer_queue.messages.descriptors import FieldType
from transfer_queue.messages.queries import Lookup, LookupReply, ShowRows

FIELDS = "abc"
DTYPES = {"a": "int8", "b": "float32", "c": "object"}


@pytest.fixture(autouse=True, scope="module")
def short_runs_are_long() -> Iterator[None]:
    """The short way of many rows that are one after the other is taken for a few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(value_locations, "LONG_RUN", 2)
        yield


@dataclass(frozen=True)
class Value:
    """The place of a value: the block's offset, which identifies the block, and the row in it."""

    offset: int
    slot: int
    shape: tuple[int, ...]


@dataclass
class Model:
    """rows: of each live row, its values by field. shapes: of each field with live values, those that were ever put."""

    rows: dict[int, dict[str, Value]] = field(default_factory=dict)
    shapes: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    blocks: dict[int, Any] = field(default_factory=dict)

    def put(self, rows: list[int], fields: dict[str, list[tuple[int, ...]]], offset: int) -> None:
        for name, shapes in fields.items():
            self.shapes.setdefault(name, []).extend(shapes)
            for slot, (row, shape) in enumerate(zip(rows, shapes, strict=True)):
                self.rows.setdefault(row, {})[name] = Value(offset, slot, shape)

    def clear(self, rows: list[int]) -> None:
        for row in rows:
            del self.rows[row]
        for name in list(self.shapes):
            if not any(name in values for values in self.rows.values()):
                del self.shapes[name]

    def type(self, name: str) -> FieldType:
        if DTYPES[name] == "object":
            return FieldType(name, "object", "object", 1, None, 0, False)
        shapes = self.shapes[name]
        first = shapes[0]
        mixed = any(len(shape) != len(first) for shape in shapes)
        differs = sum(
            1 << d for d in range(len(first))
            if any(len(shape) == len(first) and shape[d] != first[d] for shape in shapes)
        )  # fmt: skip
        known = None if mixed or differs else list(first)
        return FieldType(name, "tensor", DTYPES[name], len(first), known, differs, mixed)


@st.composite
def fields_of_put(draw: st.DrawFn, count: int) -> dict[str, list[tuple[int, ...]]]:
    names = draw(st.sampled_from(["a", "ab", "b", "ba", "abc", "c", "ac"]))
    found = {}
    for name in names:
        rank = draw(st.sampled_from([1, 1, 1, 2]))
        other = draw(small)
        found[name] = [(size, other)[:rank] for size in draw(row_lengths(count))]
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
    mixed = {each.name for each in reply.types if each.mixed_rank}
    for each in reply.types:
        wanted = model.type(each.name)
        if each.mixed_rank:
            assert wanted.mixed_rank
        else:
            assert each == wanted
    offsets = np.frombuffer(reply.blocks.offset, "<i8").tolist()
    places = zip(*(np.frombuffer(part, "<i4").tolist() for part in (reply.blocks.schema, reply.blocks.dims)))
    for offset, count, (schema, dims) in zip(offsets, np.frombuffer(reply.blocks.rows, "<i4").tolist(), places):
        put = model.blocks[offset]
        assert (count, reply.blocks.schemas[schema], reply.blocks.dims_values[dims]) == put
    check_shapes(h, model, [name for name in names if name not in mixed])


def check_shapes(h: Harness, model: Model, names: list[str]) -> None:
    """Return the expected shapes in the metadata of all rows, for fields whose rows differ."""
    shown = h.look(ShowRows("p", names))
    assert isinstance(shown, ClaimReply)
    live = np.frombuffer(shown.rows, "<i8").tolist()
    assert live == sorted(model.rows)
    for name, packed in shown.shapes.items():
        rank = len(model.shapes[name][0])
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
