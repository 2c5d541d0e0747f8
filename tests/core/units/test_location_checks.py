"""Blocks with one or two locations: their bytes, when extents are freed, and what is lost with a unit."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from harness import BYTES, Harness, column, schema_of
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.core.tables.blocks import CHUNK, BlockTable, pair_sums
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


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_locations_against_a_model_table(data: st.DataObject) -> None:
    """add, release, place, lose and close, with a dict of lists as the model."""
    table, model, owners = BlockTable(), dict[int, list[tuple[int, int]]](), dict[int, int]()
    closed: set[tuple[int, int]] = set()
    number, extent = CHUNK - 3, 1  # so that two chunks are used
    where = st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True)
    for step in data.draw(
        st.lists(st.sampled_from(["add", "add", "release", "relocate", "lose", "close"]), max_size=30)
    ):
        if step == "add":
            at = [(unit, extent + unit % 2) for unit in data.draw(where)]
            number += 1
            copies = [BlockLocation(*place, 0, 1, 64) for place in at[1:]]
            owners[number] = data.draw(st.integers(0, 2))
            table.add(number, "w", NewBlock(*at[0], 0, 1, number, 1, SPEC, b"", 64, copies), 1, owners[number])
            model[number] = at
        elif step == "release" and model:
            gone = data.draw(st.lists(st.sampled_from(sorted(model)), unique=True))
            table.release(np.array(gone, "i8"))
            for one in gone:
                del model[one]
        elif step == "relocate" and model:
            some = sorted(data.draw(st.lists(st.sampled_from(sorted(model)), unique=True)))
            left, unit = data.draw(st.integers(-1, 2)), data.draw(st.integers(0, 2))
            to = (unit, extent + unit % 2)
            table.relocate(np.array(some, "i8"), BlockLocation(*to, 0, 2, 64), np.arange(len(some)) * 64, left, "w")
            for one in some:
                units = [place[0] for place in model[one]]
                if left < 0 and len(units) == 1 and unit not in units:
                    model[one].append(to)
                elif left in units and (unit == left or unit not in units):
                    model[one][units.index(left)] = to
        elif step == "lose":
            lost_unit = data.draw(st.integers(0, 2))
            lost = table.remove_lost_locations(lambda units, extents, unit=lost_unit: units == unit)  # type: ignore[misc]
            alone = [n for n, at in sorted(model.items()) if all(unit == lost_unit for unit, _ in at)]
            assert lost.tolist() == alone
            for one, at in list(model.items()):
                if one not in alone:
                    model[one] = [place for place in at if place[0] != lost_unit]
        elif step == "close":
            known = sorted(set(table.extents) - closed)
            table.close(known)
            closed |= set(known)
            extent += 2
        used = {place for at in model.values() for place in at}
        assert {place for place, e in table.extents.items() if e.blocks} == used
        assert set(table.freed) == closed - used
        assert {n: [(p.unit, p.extent) for p in at] for n, _, at, _ in table.live_blocks()} == model
        assert table.leased == 64 * len(table.extents)
        stored = Counter[tuple[int, int]]()
        for one, at in model.items():
            stored.update({(owners[one], unit): one for unit, _ in at})
        told = {(owner, unit): n for owner, units in table.stored.items() for unit, n in units.items()}
        assert stored == Counter(told), "a block has as many bytes as its number says"
        table.count_stored()
        assert stored == Counter({(o, unit): n for o, units in table.stored.items() for unit, n in units.items()})


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1 << 40)), max_size=20))
def test_sums_of_pairs(entries: list[tuple[int, int, int]]) -> None:
    expected: dict[tuple[int, int], int] = {}
    for one, other, value in entries:
        expected[one, other] = expected.get((one, other), 0) + value
    columns = np.array(entries, "i8").reshape(-1, 3).T
    assert pair_sums(*columns) == [(*pair, total) for pair, total in sorted(expected.items())]
