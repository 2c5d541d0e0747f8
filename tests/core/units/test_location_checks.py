"""Blocks with one or two locations: their bytes, when extents are freed, and what is lost with a unit."""

from __future__ import annotations

import numpy as np
import pytest
from harness import BYTES, Harness, column, schema_of
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.core.tables.blocks import BlockTable, pair_sums
from transfer_queue.errors import InvalidArgumentError, ProtocolError
from transfer_queue.messages.base import Done
from transfer_queue.messages.descriptors import BlockLocation, FieldSpec, NewBlock
from transfer_queue.messages.puts import CloseExtents, Publish
from transfer_queue.messages.queries import Lookup
from transfer_queue.messages.reports.unit_reports import RegisterUnit

SPEC = [FieldSpec("x", "tensor", "int8", 0, False)]


def block(unit: int, extent: int, *copies: tuple[int, int], offset: int = 0, rows: int = 1) -> NewBlock:
    schema, dims = schema_of(("x",), rows)
    places = [BlockLocation(u, e, offset, 1, 4096) for u, e in copies]
    return NewBlock(unit, extent, offset, 1, BYTES, rows, schema, dims, 4096, places)


def two_units(h: Harness) -> None:
    assert h.ask(RegisterUnit("other.sock", "/other"), "unit-1") == Done(1)


def test_a_block_with_two_locations_references_both_extents(h: Harness) -> None:
    two_units(h)
    h.ask(Publish("p", 2, block=block(0, 1, (1, 7), rows=2)))
    assert h.state.blocks.leased == 2 * 4096
    assert h.state.blocks.live_bytes == BYTES, "the same bytes count once"
    h.ask(CloseExtents([(0, 1), (1, 7)]))
    h.clear([0])
    assert h.freed == []
    h.clear([1])
    assert sorted(h.freed) == [(0, 1), (1, 7)]
    assert h.state.blocks.leased == 0


def test_a_lookup_returns_the_first_location(h: Harness) -> None:
    two_units(h)
    h.ask(Publish("p", 1, block=block(1, 3, (0, 2), offset=640)))
    reply = h.ask(Lookup("p", column([0])))
    assert np.frombuffer(reply.blocks.unit, "<i4").tolist() == [1]
    assert np.frombuffer(reply.blocks.offset, "<i8").tolist() == [640]


@pytest.mark.parametrize("wrong", [block(0, 1, (0, 2)), block(0, 1, (1, 2), (2, 2)), block(0, 1, (5, 2))])
def test_invalid_locations_are_refused(h: Harness, wrong: NewBlock) -> None:
    two_units(h)
    with pytest.raises(InvalidArgumentError):
        h.ask(Publish("p", 1, block=wrong))


def test_a_copy_goes_into_an_open_extent_of_its_writer(h: Harness) -> None:
    two_units(h)
    h.ask(Publish("p", 1, block=block(0, 1, (1, 1))))
    with pytest.raises(ProtocolError, match="extent 1 of unit 1"):
        h.ask(Publish("p", 1, block=block(0, 2, (1, 1), offset=1 << 16)), "another")
    h.ask(CloseExtents([(1, 1)]))
    with pytest.raises(ProtocolError, match="extent 1 of unit 1"):
        h.ask(Publish("p", 1, block=block(0, 1, (1, 1), offset=BYTES)))


def test_single_locations_need_no_further_columns() -> None:
    table = BlockTable()
    for number in range(1, 100):
        table.add(number, "w", NewBlock(0, 1, number * 64, 3, 1, 1, SPEC, b""), 1, 1)
    assert table.chunks[0].second == {}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1 << 40)), max_size=20))
def test_sums_of_pairs(entries: list[tuple[int, int, int]]) -> None:
    expected: dict[tuple[int, int], int] = {}
    for one, other, value in entries:
        expected[one, other] = expected.get((one, other), 0) + value
    columns = np.array(entries, "i8").reshape(-1, 3).T
    assert pair_sums(*columns) == [(*pair, total) for pair, total in sorted(expected.items())]
