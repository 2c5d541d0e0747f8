"""Groups of fields change nothing but the time: with and without them, the same requests give the same state."""

from __future__ import annotations

from typing import Any

import harness
import pytest
from harness import OBJECT, Harness, rows_of, tensor
from hypothesis import given
from hypothesis import strategies as st

from tests.differential import differential
from transfer_queue.core.columns import wide_schema
from transfer_queue.core.puts import wide_puts
from transfer_queue.core.tables import field_groups
from transfer_queue.errors import FieldTypeError
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.messages.queries import ShowRows
from transfer_queue.messages.reports.unit_reports import RegisterUnit

NAMES = [f"f{number}" for number in range(6)]
TYPES: list[Any] = [tensor(), tensor(shape=(7,)), tensor("float64"), tensor(shape=()), tensor(shape=(2, 7)), OBJECT]

fields = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(TYPES), min_size=1)
actions = st.one_of(
    st.tuples(st.just("put"), fields, st.integers(1, 3)),
    st.tuples(st.just("add"), fields, st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)),
    st.tuples(st.just("blocks"), st.permutations(NAMES), st.integers(1, 4)),
    st.tuples(st.just("clear"), st.just(None), st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True)),
    st.tuples(st.sampled_from(["restart", "lose", "drop", "grow"]), st.just(None), st.just(0)),
)


def carry_out(program: list[Any], many: int, wide: int) -> list[Any]:
    """Return what the requests of a program showed, and the state at its end."""
    shown: list[Any] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(field_groups, "MANY_FIELDS", many)
        patched.setattr(wide_puts, "WIDE", wide)
        patched.setattr(wide_puts, "STEP", 2)
        patched.setattr(wide_schema, "WIDE", 3)  # in both runs, because the schemas are compared
        h = Harness()
        rows: list[int] = []
        for kind, what, much in program:
            try:
                rows = act(h, rows, kind, what, much)
            except FieldTypeError as error:
                shown.append(str(error))
            if "p" in h.state.partitions:
                shown += [h.ask(ShowRows("p", [name])).fields for name in NAMES]
                shown.append([row.keys() for row in h.lookup(rows, None)] if rows else [])
        h.check_saving()
        h.replay()
        harness.made.remove(h)  # it is replayed under these limits only
        return [*shown, comparable(h)]


def act(h: Harness, rows: list[int], kind: str, what: Any, much: Any) -> list[int]:
    if kind == "put":
        return rows + put(h, h.publish(much, what))
    if kind == "blocks":
        blocks = [(what[:much], None), (what[much:], None)]
        return rows + put(h, h.publish_blocks(1, *blocks))
    if kind == "add":
        chosen = [rows[place] for place in much if place < len(rows)]
        if chosen:
            put(h, h.publish(len(chosen), what, rows=chosen))
    elif kind == "clear":
        gone = {rows[place] for place in much if place < len(rows)}
        h.clear(gone)
        return [row for row in rows if row not in gone]
    elif kind == "restart":
        h.restart()
    elif kind == "lose":
        h.ask(RegisterUnit("unit.sock", "/arena", "another boot"), "unit-0")
    elif kind == "drop":
        h.ask(ClearPartition("p"))
        return []
    elif kind == "grow":
        return rows + put(h, h.publish(30, NAMES))
    return rows


def put(h: Harness, request: Any) -> list[int]:
    sequence = h.send(request)
    while h.controller.wide_puts.jobs:
        h.tick(h.now)
    h.result(sequence)
    return rows_of(h.reply(sequence))


def comparable(h: Harness) -> Any:
    """Return the state without the replies that clients keep."""
    return {key: value for key, value in h.state.snapshot().items() if key != "clients"}


@differential(100)
@given(program=st.lists(actions, min_size=1, max_size=12), wide=st.sampled_from([1, 3, 10_000]))
def test_with_and_without_groups_the_state_is_the_same(program: list[Any], wide: int) -> None:
    assert carry_out(program, 2, wide) == carry_out(program, 10_000, 10_000)
