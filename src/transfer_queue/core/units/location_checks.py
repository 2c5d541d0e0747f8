"""Checks the locations that writers and storage units report.

Each block must lie in an open extent of its writer, and must not overlap another block. This module only reads the
state. Only the unit knows all its leases, so the first block in an extent must have the proof of the lease. From then
on the state knows the writer and the bytes of the extent, and where its blocks lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.blocks import MAX_PLACES, places_of
from transfer_queue.core.tables.extents import MAX_BYTES, MAX_EXTENTS
from transfer_queue.core.tables.fields import check_block
from transfer_queue.errors import InvalidArgumentError, ProtocolError, UnitLostError
from transfer_queue.messages.descriptors import BlockLocation, NewBlock
from transfer_queue.messages.reports.unit_reports import BlocksMovedReport, Move
from transfer_queue.messages.storage import lease_proof


def no_unit_text(unit: int, units: Iterable[int]) -> str:
    """Return "storage unit 7 does not exist", with the units that exist."""
    listed = ", ".join(map(str, sorted(units)))
    return f"storage unit {unit} does not exist ({f'the units are: {listed}' if listed else 'no unit is connected'})"


def check_places(state: State, writer: str, block: NewBlock) -> bool:
    """Raise an error if a block cannot lie where its writer reports it.

    Returns whether it comes after all others in known extents of its writer, which is the usual case.
    """
    if block.copies:
        places = places_of(block)
        if len({place.unit for place in places}) != len(places) or len(places) > MAX_PLACES:
            raise InvalidArgumentError(
                f"a block must have at most {MAX_PLACES} locations, each in another storage unit, got units "
                f"{[place.unit for place in places]}"
            )
    are_next = _check_place(state, writer, block, block.nbytes)
    for copy in block.copies:
        are_next &= _check_place(state, writer, copy, block.nbytes)
    return are_next


def check_apart(state: State, writer: str, blocks: Sequence[NewBlock]) -> None:
    """Raise ProtocolError if the blocks of one put cannot lie together where their writer reports them.

    In an arena they lie in one extent, one after the other. In an external store each has an extent of its own.
    """
    by_unit: dict[int, list[tuple[BlockLocation | NewBlock, int]]] = {}
    for block in blocks:
        by_unit.setdefault(block.unit, []).append((block, block.nbytes))
        for copy in block.copies:
            by_unit.setdefault(copy.unit, []).append((copy, block.nbytes))
    table = state.blocks
    leased, live = table.leased, table.live_bytes
    for unit, places in by_unit.items():
        apart, lengths = bool(state.units[unit].store), {place.extent: place.length for place, _ in places}
        if len(lengths) != (len(places) if apart else 1):
            raise ProtocolError(
                f"the blocks of a put are in the extents {sorted(lengths)} of unit {unit}; nothing was put. They must "
                f"be in {'an extent each' if apart else 'one extent'}"
            )
        leased += sum(length for number, length in lengths.items() if (unit, number) not in table.extents)
        live += sum(nbytes for _, nbytes in places)
        if not apart:
            _check_run(state, writer, places)
    if max(leased, live) > MAX_BYTES:
        raise ProtocolError(f"the blocks of a put exceed {MAX_BYTES} bytes; nothing was put. Put less at a time")


def _check_run(state: State, writer: str, places: list[tuple[BlockLocation | NewBlock, int]]) -> None:
    """Raise ProtocolError if blocks, given with their bytes, do not fit into their extent one after the other."""
    places = sorted(places, key=lambda each: each[0].offset)
    if any(place.offset + nbytes > after.offset for (place, nbytes), (after, _) in pairwise(places)):
        raise ProtocolError(f"the blocks of a put overlap each other in unit {places[0][0].unit}; nothing was put")
    first, (last, nbytes) = places[0][0], places[-1]
    _check_place(state, writer, first, last.offset + nbytes - first.offset)


def fit_together(state: State, blocks: Sequence[NewBlock]) -> bool:
    """Return whether blocks of different writers, each of which `check_places` accepts, also fit one after the other.

    If not, they may still fit in another order. The blocks have one location each.
    """
    table, places, ranges = state.blocks, set[tuple[int, int]](), list[tuple[int, int, int]]()
    leased, live, last = table.leased, table.live_bytes, 0
    for block in blocks:
        place, start, end = (block.unit, block.extent), block.offset, block.offset + block.nbytes
        extent = table.extents.get(place)
        leased += block.length if extent is None else 0
        live += block.nbytes
        last = max(last, end)
        places.add(place)
        if not state.units[block.unit].store:
            if start == end or (extent is not None and extent.low == extent.top >= 0):
                return False  # extents without a byte fit beside others in some orders only
            if extent is not None and extent.top >= 0:  # its blocks are between these bytes
                start, end = min(start, extent.low), max(end, extent.top)
            ranges.append((block.unit, start, end))
    ranges.sort()
    apart = len(places) == len(blocks) and max(leased, last + live) <= MAX_BYTES
    return apart and all(a != b or end <= start for (a, _, end), (b, start, _) in pairwise(ranges))


def _check_place(state: State, writer: str, place: BlockLocation | NewBlock, nbytes: int) -> bool:
    """Raise an error if a block cannot lie in this unit and extent, or overlaps another block.

    Returns whether it comes after all others in a known extent of its writer.
    """
    blocks, unit, number = state.blocks, place.unit, place.extent
    if unit in state.lost_units:
        raise UnitLostError(
            f"storage unit {unit} was lost ({state.lost_units[unit]}) before the block that was written there was "
            f"published; nothing was put, write it again"
        )
    if unit not in state.units:
        raise InvalidArgumentError(
            f"{no_unit_text(unit, state.units)}, but a block names it as its location; nothing was put, write it into "
            f"a unit that exists"
        )
    if place.session and place.session in state.fenced:
        raise UnitLostError(
            f"storage unit {unit} has taken back the extents of its writer on another node, because the connection "
            f"between them ended; nothing was put, write it again"
        )
    extent = blocks.extents.get((unit, number))
    if extent is None:
        _check_new_extent(state, place, nbytes)
    elif extent.closed or extent.writer != writer:
        raise ProtocolError(
            f"extent {number} of unit {unit} is closed or belongs to another writer; nothing was put. A block must be "
            f"in an open extent of its writer"
        )
    elif extent.top <= place.offset <= extent.limit - nbytes and place.generation >= 0:
        return True
    if state.lease_key is not None and (extent is None or extent.begin < 0):
        _check_lease(state.lease_key, writer, place, nbytes)
    if min(place.offset, place.generation) < 0 or place.offset + nbytes + blocks.live_bytes > MAX_BYTES:
        raise ProtocolError(
            f"a block of {nbytes} bytes cannot be at byte {place.offset} of unit {unit}, generation "
            f"{place.generation}; nothing was put"
        )
    other = blocks.find_overlap(unit, number, place.offset, nbytes, not state.units[unit].store)
    if other is not None:
        raise ProtocolError(
            f"a block of {nbytes} bytes at byte {place.offset} of unit {unit}, in extent {number}, reaches beyond the "
            f"end of the extent, or overlaps blocks of extent {other}; nothing was put"
        )
    return False


def _check_lease(key: bytes, writer: str, place: BlockLocation | NewBlock, nbytes: int) -> None:
    """Raise ProtocolError if the unit has not leased these bytes to the writer."""
    owner, length = place.session or writer, place.length
    lease = lease_proof(key, place.unit, owner, place.extent, place.begin, length, place.generation)
    is_own = owner == writer or owner.startswith(f"{writer}/")
    if not (is_own and place.proof == lease and 0 <= place.offset - place.begin <= length - nbytes):
        raise ProtocolError(
            f"the block does not prove that unit {place.unit} has leased extent {place.extent} with the bytes "
            f"{place.offset} to {place.offset + nbytes} to {owner!r}; nothing was put. A block must be in an extent "
            f"that its unit has leased to its writer"
        )


def find_overwritten(state: State, writer: str, blocks: Sequence[NewBlock]) -> list[r.AnyRecord]:
    """Return the records of what lies where a writer has written the blocks of a put.

    Raises ProtocolError if the writer does not prove that the space is its own.
    """
    records: list[r.AnyRecord] = []
    for block in blocks if state.lease_key is not None else ():
        for place in places_of(block):
            _check_lease(state.lease_key or b"", writer, place, block.nbytes)
            if place.unit in state.units and not state.units[place.unit].store:
                records += _overwritten(state, place, place.offset, place.offset + block.nbytes)
            known = state.blocks.extents.get((place.unit, place.extent))
            if known is not None and known.writer != writer:
                records.append(_lost(place.unit, [place.extent]))
    return records


def _overwritten(state: State, place: BlockLocation, start: int, end: int) -> list[r.AnyRecord]:
    """Return the record of extents that are lost because their unit has leased these bytes of theirs again.

    A unit numbers its extents in the order of their leases, so that it has freed the older one of two extents with the
    same bytes. Only a wrong message, for example one that is repeated, puts blocks into an extent that was freed.
    """
    others = [number for number in state.blocks.between(place.unit, start, end) if number != place.extent]
    if not others or max(others) > place.extent:
        return []
    return [_lost(place.unit, others)]


def _lost(unit: int, extents: list[int]) -> r.ExtentsLost:
    return r.ExtentsLost(unit, np.array(extents, "i8").tobytes(), "its space was leased again")


def _check_new_extent(state: State, place: BlockLocation | NewBlock, nbytes: int = 0) -> None:
    """Raise an error if the unit cannot have leased this extent, in which a writer puts the first block."""
    blocks, unit = state.blocks, state.units[place.unit]
    if (place.unit, place.extent) in blocks.freed:
        raise ProtocolError(f"extent {place.extent} of unit {place.unit} was freed; a block must be in a leased extent")
    most = MAX_BYTES - blocks.leased
    if unit.capacity and not unit.store:
        most = min(most, unit.capacity)
    if not (0 <= place.extent < MAX_EXTENTS and 0 <= place.length <= most and nbytes <= (place.length or most)):
        raise ProtocolError(
            f"extent {place.extent} of unit {place.unit} cannot be {place.length} bytes long; a block must be in an "
            f"extent that its unit has leased to its writer"
        )


def close_extents(
    state: State, writer: str, extents: list[tuple[int, int]], blocks: Sequence[NewBlock] = ()
) -> tuple[list[r.AnyRecord], list[tuple[int, int]]]:
    """Return the records that close these extents of the writer, and those in which no block is known.

    The latter are not closed, because only their units know whose they are.

    Args:
        state: The state.
        writer: The writer.
        extents: The (unit, extent) to close.
        blocks: Further blocks of the writer, which are put before the extents are closed.
    """
    for place in extents:
        extent = state.blocks.extents.get(place)
        if extent is not None and extent.writer != writer:
            raise ProtocolError(
                f"extent {place[1]} of unit {place[0]} belongs to another writer, so this client cannot close it"
            )
    places = [place for place in dict.fromkeys(extents) if place[0] not in state.lost_units]
    for unit, number in places:
        if unit not in state.units:
            raise InvalidArgumentError(
                f"extent {number} cannot be closed: {no_unit_text(unit, state.units)}; close extents that this client "
                f"has leased"
            )
        check_extent_number(number)
    own = {(place.unit, place.extent) for block in blocks for place in places_of(block)}
    known = [place for place in places if place in state.blocks.extents or place in own]
    unknown = [place for place in places if place not in known and place not in state.blocks.freed]
    return [r.ExtentsClosed(known)] if known else [], unknown


def check_extent_number(number: int) -> None:
    """Raise ProtocolError if this is not the number of an extent."""
    if not 0 <= number < MAX_EXTENTS:
        raise ProtocolError(f"the number of an extent must be from 0 to {MAX_EXTENTS - 1}, got {number}")


def close_reported_extents(
    state: State, unit: int, numbers: list[int], lengths: list[int] | None = None
) -> list[r.AnyRecord]:
    """Return the records that close extents as their unit reports. lengths: their new lengths, if they are shorter."""
    for number in numbers:
        check_extent_number(number)
    if min(lengths or [0]) < 0:
        raise ProtocolError(f"an extent of unit {unit} cannot be {min(lengths or [0])} bytes long")
    new = [at for at, number in enumerate(numbers) if (unit, number) not in state.blocks.freed]
    places = [(unit, numbers[at]) for at in new]
    return [r.ExtentsClosed(places, [] if lengths is None else [lengths[at] for at in new])] if new else []


def check_moved(state: State, order: Move, reply: BlocksMovedReport) -> list[r.AnyRecord]:
    """Raise ProtocolError if a unit cannot have carried out an order as it reports.

    Returns the records of what lies where it has copied the blocks.
    """
    place = BlockLocation(reply.unit, reply.extent, 0, reply.generation, reply.length)
    if (place.unit, place.extent) in state.blocks.extents:
        raise ProtocolError(f"blocks were moved into extent {place.extent} of unit {place.unit}, which is in use")
    _check_new_extent(state, place)
    repacked = [repack.at for repack in order.repacks]
    sizes = np.delete(np.frombuffer(order.blocks.nbytes, "<i8"), repacked)
    offsets = np.frombuffer(reply.offsets, "<i8") if len(reply.offsets) == 8 * len(sizes) else None
    if offsets is None or len(reply.repacked) != len(repacked):
        raise ProtocolError(
            f"move {reply.move} was for {len(sizes)} blocks and rows of {len(repacked)} other blocks, but the report "
            f"has {len(reply.offsets) // 8} and {len(reply.repacked)}"
        )
    starts, ends = [offsets[offsets >= 0]], [(offsets + sizes)[offsets >= 0]]
    for repack, block in zip(order.repacks, reply.repacked, strict=True):
        if block is not None:
            _check_repacked(place, repack.fields, len(repack.slots) // 4, block)
            starts.append(np.array([block.offset]))
            ends.append(np.array([block.offset + block.nbytes]))
    start, end = np.concatenate(starts), np.concatenate(ends)
    order_of = np.argsort(start)
    start, end = start[order_of], end[order_of]
    if not len(start):
        return []
    low, top = int(start[0]), int(end.max())
    apart = bool((start[1:] >= end[:-1]).all()) and place.generation >= 0 and int(start[-1]) < MAX_BYTES
    overlaps = state.blocks.find_overlap(place.unit, place.extent, low, top - low) is not None
    lost = _overwritten(state, place, low, top) if overlaps else []
    if not apart or (overlaps and not lost):
        raise ProtocolError(
            f"moved blocks overlap each other or other blocks, between bytes {low} and {top} of unit {place.unit}"
        )
    if place.length and top - low > place.length:
        raise ProtocolError(
            f"extent {place.extent} of unit {place.unit} has {place.length} bytes, but {top - low} were moved there"
        )
    return lost


def are_apart(state: State, made: list[NewBlock]) -> bool:
    """Return whether the blocks that units have made are still in extents that no other blocks use."""
    table = state.blocks
    return not any(
        (place.unit, place.extent) in table.freed
        or (place.unit, place.extent) in table.extents
        or table.find_overlap(place.unit, place.extent, place.offset, block.nbytes) is not None
        for block in made
        for place in places_of(block)
    )


def _check_repacked(place: BlockLocation, fields: list[str], rows: int, block: NewBlock) -> None:
    """Raise ProtocolError if rows cannot be in a new block as a unit reports."""
    try:
        check_block(block, rows)
    except InvalidArgumentError as error:
        raise ProtocolError(f"rows were moved into a block that is not valid: {error}") from None
    is_same = (block.unit, block.extent, block.generation, block.length) == (
        place.unit, place.extent, place.generation, place.length,
    )  # fmt: skip
    if not is_same or block.copies or {spec.name for spec in block.schema} != set(fields):
        raise ProtocolError(
            f"rows were moved into a block outside extent {place.extent}, or with other fields than ordered"
        )
