"""What controller and storage units compare when a unit registers."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from harness import BLOCKS_AN_EXTENT, Harness, column
from msgspec.structs import replace

from transfer_queue.core.units.unit_handlers import lose_units_of_nodes
from transfer_queue.errors import ProtocolError, StorageKeyNotFoundError, UnitLostError
from transfer_queue.messages.base import Done
from transfer_queue.messages.puts import CloseExtents
from transfer_queue.messages.reports.unit_reports import (
    ExtentsFreedReport,
    ExtentsRecalledReport,
    RegisterUnit,
    SpaceShortReport,
)
from transfer_queue.messages.reports.unit_reports import WriterGone as Gone
from transfer_queue.messages.system import Topology, TopologyReply


class Unit:
    """A unit of the harness, which gets orders to free extents and reports what is leased."""

    def __init__(self, h: Harness, name: str = "A", boot_id: str = "a") -> None:
        self.h, self.name, self.boot_id = h, name, boot_id

    def register(self, *extents: int) -> int:
        """Register on a new connection. Returns the unit's number."""
        if self.name in self.h.clients:
            self.h.disconnect(self.name)
            self.h.connect(self.name)
        self.h.freed.clear()
        request = RegisterUnit("sock", "/arenas", self.boot_id, self.name, "noon", column(extents))
        reply = self.h.ask(request, self.name)
        assert isinstance(reply, Done)
        return int(reply.value)

    def confirm(self, unit: int, *extents: int) -> None:
        assert self.h.ask(ExtentsFreedReport(unit, column(extents)), self.name) == Done()


@pytest.fixture
def h() -> Harness:
    h = Harness()
    h.unit = Unit(h).register()
    return h


def units(h: Harness) -> list[tuple[int, str, str]]:
    reply = h.ask(Topology())
    assert isinstance(reply, TopologyReply)
    return [(unit.unit, unit.boot_id, unit.name) for unit in reply.units]


def test_an_arena_keeps_its_number_and_another_gets_a_new_one(h: Harness) -> None:
    first = h.unit
    assert Unit(h).register() == first
    assert Unit(h, boot_id="b").register() == first + 1
    assert (first, "a", "A") not in units(h)
    assert (first + 1, "b", "A") in units(h)
    assert Unit(h, "B", "c").register() == first + 2, "of another name: nobody is replaced"
    assert (first + 1, "b", "A") in units(h)
    assert Unit(h, boot_id="a").register() == first + 3, "a number is never used again"


def test_extents_that_the_unit_did_not_confirm_are_freed_again(h: Harness) -> None:
    unit = h.unit
    h.put(1)
    extent = h.clients["w"].extent
    h.ask(CloseExtents([(unit, extent)]))
    h.clear([0])
    assert h.freed == [(unit, extent)]
    assert Unit(h).register(extent) == unit
    assert h.freed == [(unit, extent)], "it is leased there still"
    assert Unit(h).register() == unit
    assert h.freed == [], "it is free there"
    assert not h.state.blocks.freed
    assert Unit(h).register(extent) == unit
    assert h.freed == [], "which nobody says any more"


def test_a_confirmed_extent_is_forgotten(h: Harness) -> None:
    unit = h.unit
    for _ in range(2 * BLOCKS_AN_EXTENT):
        h.put(1)
    h.clear(range(2 * BLOCKS_AN_EXTENT))
    first, second = h.freed
    Unit(h).confirm(unit, first[1], 77)
    assert list(h.state.blocks.freed) == [second]
    Unit(h).register(second[1])
    assert h.freed == [second]
    with pytest.raises(ProtocolError, match="only the unit itself"):
        h.ask(ExtentsFreedReport(unit, column([6])), "w")


def test_extents_of_a_dead_writer_are_freed_after_all_processes_died(h: Harness) -> None:
    unit = h.unit
    h.put(1)
    extent = h.clients["w"].extent
    h.disconnect("w")
    Unit(h).register(extent, extent + 1, extent + 2)
    assert h.freed == [], "nobody has said that the writer is dead"
    h.ask(Gone("w", unit, [extent, extent + 1]), "A")
    assert h.freed == [(unit, extent + 1)], "one extent holds a needed block, and one is another's"
    Unit(h).register(extent, extent + 1, extent + 2)
    assert h.freed == [(unit, extent + 1)]
    h.ask(Gone("w", unit, [extent, extent + 1]), "A")
    h.clear([0])
    assert h.freed == [(unit, extent + 1), (unit, extent)]


def test_values_in_extents_that_are_not_leased_are_lost(h: Harness) -> None:
    unit = h.unit
    for _ in range(2 * BLOCKS_AN_EXTENT):
        h.put(1)
    _, second = sorted(extent for of, extent in h.state.blocks.extents if of == unit)
    Unit(h).register(second)
    assert h.state.partitions["p"].losses.counts == {"x": BLOCKS_AN_EXTENT}
    assert [place for place in h.state.blocks.extents if place[0] == unit] == [(unit, second)]
    assert h.freed == [], "what is gone is not freed"
    Unit(h).register(second)
    assert h.state.losses == 1


def test_nothing_is_put_into_a_lost_unit(h: Harness) -> None:
    unit = h.unit
    h.put(1)
    late = h.publish(1)
    h.ask(CloseExtents([(unit, 99)]))
    h.ask(SpaceShortReport(unit, ["w"], 1), "A")
    new = Unit(h, boot_id="b").register()
    with pytest.raises(UnitLostError, match=f"unit {unit} was lost"):
        h.ask(late)
    assert h.freed == []
    assert not h.state.blocks.freed
    assert h.state.blocks.extents == {}
    h.unit, h.clients["w"].blocks = new, 0
    h.put(1)
    assert np.array_equal(h.state.partitions["p"].produced_flags(["x"], np.array([0, 1])), [[0], [1]])


def test_extents_leased_while_the_unit_registered_are_not_lost(h: Harness) -> None:
    """A writer publishes in an extent that was leased after the unit sent its report."""
    unit = h.unit
    h.put(1)
    newest = max(extent for of, extent in h.state.blocks.extents if of == unit)
    request = RegisterUnit("sock", "/arenas", "a", "A", "noon", b"", newest)
    assert h.ask(request, "A") == Done(unit)
    assert (unit, newest) in h.state.blocks.extents
    assert h.ask(msgspec.structs.replace(request, next_extent=newest + 1), "A") == Done(unit)
    assert (unit, newest) not in h.state.blocks.extents


def test_a_recalled_extent_takes_no_more_blocks_and_is_shorter(h: Harness) -> None:
    unit, publish = h.unit, h.publish(1)
    assert publish.block is not None
    h.ask(replace(publish, block=replace(publish.block, length=4096)))
    extent = publish.block.extent
    assert h.state.blocks.leased == 4096
    for _ in range(2):  # it is told again to each new controller
        assert h.ask(ExtentsRecalledReport(unit, column([extent]), column([64])), "A") == Done()
        assert h.state.blocks.leased == 64
        assert h.state.blocks.extents[unit, extent].closed
    h.ask(ExtentsRecalledReport(unit, column([extent]), column([1 << 20])), "A")
    assert h.state.blocks.extents[unit, extent].length == 64, "it never becomes longer"
    h.clear([0])
    assert h.freed == [(unit, extent)]
    assert h.state.blocks.leased == 0
    assert h.ask(CloseExtents([(unit, extent)])) == Done([]), "its writer says so, too, when it notices"
    assert h.freed == [(unit, extent)]


def test_a_recalled_extent_without_live_blocks_is_freed(h: Harness) -> None:
    unit = h.unit
    h.put(1)
    extent = h.clients["w"].extent
    h.clear([0])
    assert h.freed == [], "its writer may put more into it"
    h.ask(ExtentsRecalledReport(unit, column([extent]), column([64])), "A")
    assert h.freed == [(unit, extent)]


def test_only_the_unit_itself_may_report_what_it_has_recalled(h: Harness) -> None:
    with pytest.raises(ProtocolError, match="only the unit itself"):
        h.ask(ExtentsRecalledReport(h.unit, column([1]), column([64])), "w")
    with pytest.raises(ProtocolError, match="report of recalled extents has 2 extents but 1 lengths"):
        h.ask(ExtentsRecalledReport(h.unit, column([1, 2]), column([64])), "A")


def test_units_of_named_nodes_are_lost_when_a_system_of_one_node_continues() -> None:
    h = Harness()
    elsewhere = h.ask(RegisterUnit("/b", "/b", "b", "B", "noon", node="node-1"), "B").value
    h.unit = elsewhere
    rows = h.put(1)
    h.unit = 0
    kept = h.put(1)
    lose_units_of_nodes(h.controller.context, "noon")
    assert [unit.unit for unit in h.ask(Topology()).units] == [0]
    assert h.lookup(kept, ["x"])
    with pytest.raises(StorageKeyNotFoundError, match=rf"lost with storage unit {elsewhere} \(noon\)"):
        h.lookup(rows, ["x"])
