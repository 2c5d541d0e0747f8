"""Stands in for the storage units of a controller's test: what lies where, as content and not as bytes."""

from __future__ import annotations

import numpy as np
from harness import schema_of

from transfer_queue.messages.descriptors import NewBlock
from transfer_queue.messages.queries import LookupReply
from transfer_queue.messages.reports.unit_reports import BlocksMovedReport, Move

GRANULE = 64 << 10
BYTES = 4096  # of every block that is put
Content = dict[str, list[int]]


class Units:
    """What lies in the units: (unit, extent) -> offset -> content."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], dict[int, Content]] = {}
        self.next_extent = 1

    def open(self, unit: int) -> int:
        """Return the number of a new extent."""
        self.next_extent += 1
        self.held[unit, self.next_extent] = {}
        return self.next_extent

    def write(self, unit: int, extent: int, content: Content) -> int:
        """Write a block. Returns its offset."""
        held = self.held[unit, extent]
        offset = (extent << 24) + BYTES * len(held)
        held[offset] = content
        return offset

    def at(self, unit: int, offset: int) -> Content:
        """Return the content at a location."""
        return next(blocks[offset] for (u, _), blocks in self.held.items() if u == unit and offset in blocks)

    def values(self, reply: LookupReply, field: str) -> list[int]:
        """Return the value of a field in each row of a lookup of this field alone."""
        units, offsets = np.frombuffer(reply.blocks.unit, "<i4"), np.frombuffer(reply.blocks.offset, "<i8")
        (placement,) = reply.placements
        at, slots = np.frombuffer(placement.block, "<i4"), np.frombuffer(placement.slot, "<i4")
        places = zip(at.tolist(), slots.tolist(), strict=True)
        return [self.at(int(units[block]), int(offsets[block]))[field][slot] for block, slot in places]

    def missing(self, order: Move) -> set[int]:
        """Return the blocks of an order that are not there any more: they ended while it was on its way."""
        units, offsets = np.frombuffer(order.blocks.unit, "<i4"), np.frombuffer(order.blocks.offset, "<i8")
        there = {(unit, offset) for (unit, _), blocks in self.held.items() for offset in blocks}
        places = zip(units.tolist(), offsets.tolist(), strict=True)
        return {at for at, place in enumerate(places) if place not in there}

    def carry_out(self, unit: int, order: Move, gone: set[int]) -> BlocksMovedReport:
        """Carry out a move; blocks in `gone` are reported as gone."""
        blocks = order.blocks
        where = list(
            zip(np.frombuffer(blocks.unit, "<i4").tolist(), np.frombuffer(blocks.offset, "<i8").tolist(), strict=True)
        )
        repacks = {repack.at: repack for repack in order.repacks}
        extent = self.open(unit)
        length = -(-len(where) * BYTES // GRANULE) * GRANULE
        offsets: list[int] = []
        made: list[NewBlock | None] = []
        for at, (source, offset) in enumerate(where):
            content = None if at in gone else self.at(source, offset)
            if at not in repacks:
                offsets.append(-1 if content is None else self.write(unit, extent, content))
            elif content is None:
                made.append(None)
            else:
                slots = np.frombuffer(repacks[at].slots, "<i4").tolist()
                assert slots == sorted(set(slots))
                assert slots
                some = {name: [content[name][slot] for slot in slots] for name in repacks[at].fields}
                schema, dims = schema_of(sorted(some), len(slots))
                place = self.write(unit, extent, some)
                made.append(NewBlock(unit, extent, place, 1, BYTES, len(slots), schema, dims, length))
        return BlocksMovedReport(order.number, unit, extent, length, 1, np.array(offsets, "<i8").tobytes(), made)
