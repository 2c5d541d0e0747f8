"""Whether what writers and storage units say of places can be: each block in an open extent of its writer's, apart
from all others. Reads the state, changes nothing.

The unit alone knows what it has leased. The state knows whose an extent is from the first block in it on, and where
blocks lie; so that is what is checked.
"""

from __future__ import annotations

import numpy as np

from transfer_queue.core import records as r
from transfer_queue.core.blocks import MOST_PLACES, places_of
from transfer_queue.core.extents import MOST_BYTES, MOST_EXTENTS
from transfer_queue.core.fields import check_block
from transfer_queue.core.state import State
from transfer_queue.errors import InvalidArgumentError, ProtocolError, UnitLostError
from transfer_queue.messages import Move, Moved, NewBlock, Place


def check_places(state: State, writer: str, block: NewBlock) -> None:
    """Raises where a block cannot lie where its writer says."""
    places: list[Place | NewBlock] = [block]
    if block.copies:
        places += block.copies
    if len(places) > 1 and (len({place.unit for place in places}) != len(places) or len(places) > MOST_PLACES):
        raise InvalidArgumentError(f"a block has {MOST_PLACES} places at most, each in another storage unit")
    for place in places:
        if place.unit in state.lost_units:
            raise UnitLostError(
                f"storage unit {place.unit} was lost ({state.lost_units[place.unit]}) before the block that was "
                f"written there was published; nothing was put, write it again"
            )
        if place.unit not in state.units:
            raise InvalidArgumentError(f"there is no storage unit {place.unit}")
        if place.session and place.session in state.fenced:
            raise UnitLostError(
                f"storage unit {place.unit} has taken back what its writer on another node had leased, as the "
                f"connection between them had ended; nothing was put, write it again"
            )
        _check_extent(state, writer, place, block.nbytes)


def _check_extent(state: State, writer: str, place: Place | NewBlock, nbytes: int) -> None:
    """Raises where a block cannot lie in this extent of its writer's, or lies where another one does."""
    blocks, unit, number = state.blocks, place.unit, place.extent
    extent = blocks.extents.get((unit, number))
    if (
        extent is not None
        and extent.top <= place.offset <= extent.limit - nbytes
        and not extent.closed
        and extent.writer == writer
        and place.generation >= 0
    ):
        return  # as nearly every block: it comes after those that its writer has put there
    if extent is None:
        _check_new_extent(state, place, nbytes)
    elif extent.closed or extent.writer != writer:
        raise ProtocolError(
            f"extent {number} of unit {unit} is closed, or another writer's; "
            f"a block goes into an open extent of its writer's"
        )
    if min(place.offset, place.generation) < 0 or place.offset + nbytes + blocks.live_bytes > MOST_BYTES:
        raise ProtocolError(f"no block of {nbytes} bytes lies at byte {place.offset} of unit {unit}; nothing was put")
    other = blocks.overlapped(unit, number, place.offset, nbytes, not state.units[unit].store)
    if other is not None:
        raise ProtocolError(
            f"a block of {nbytes} bytes at byte {place.offset} of unit {unit}, in extent {number}, lies beyond the "
            f"extent's end, or where blocks of extent {other} lie; nothing was put"
        )


def _check_new_extent(state: State, place: Place | NewBlock, nbytes: int = 0) -> None:
    """Raises where a writer cannot have been leased the extent in which it puts a first block."""
    blocks, unit = state.blocks, state.units[place.unit]
    if (place.unit, place.extent) in blocks.freed:
        raise ProtocolError(f"extent {place.extent} of unit {place.unit} was freed; a block goes into a leased extent")
    most = MOST_BYTES - blocks.leased
    if unit.capacity and not unit.store:
        most = min(most, unit.capacity)
    if not (0 <= place.extent < MOST_EXTENTS and 0 <= place.length <= most and nbytes <= (place.length or most)):
        raise ProtocolError(
            f"extent {place.extent} of unit {place.unit} cannot be {place.length} bytes long; a block goes into an "
            f"extent that its unit has leased to its writer"
        )


def close_extents(state: State, writer: str, extents: list[tuple[int, int]]) -> list[r.AnyRecord]:
    """The writer puts no more into these extents of its own."""
    for place in extents:
        extent = state.blocks.extents.get(place)
        if extent is not None and extent.writer != writer:
            raise ProtocolError(f"extent {place[1]} of unit {place[0]} is another writer's, and not to be closed")
    there = [place for place in dict.fromkeys(extents) if place[0] not in state.lost_units]
    for unit, number in there:
        if unit not in state.units:
            raise InvalidArgumentError(f"there is no storage unit {unit}, and no extent {number} of it to close")
        check_extent_number(number)
    new = [place for place in there if place not in state.blocks.freed]
    return [r.ExtentsClosed(new)] if new else []


def check_extent_number(number: int) -> None:
    """Raises ProtocolError for what is no number of an extent."""
    if not 0 <= number < MOST_EXTENTS:
        raise ProtocolError(f"{number} is not the number of an extent; these are from 0 to {MOST_EXTENTS - 1}")


def close_new(state: State, unit: int, numbers: list[int], lengths: list[int] | None = None) -> list[r.AnyRecord]:
    """Records that close extents by the word of their unit. lengths: of each, where it is shorter than it was."""
    for number in numbers:
        check_extent_number(number)
    if min(lengths or [0]) < 0:
        raise ProtocolError(f"an extent of unit {unit} cannot be {min(lengths or [0])} bytes long")
    new = [at for at, number in enumerate(numbers) if (unit, number) not in state.blocks.freed]
    places = [(unit, numbers[at]) for at in new]
    return [r.ExtentsClosed(places, [] if lengths is None else [lengths[at] for at in new])] if new else []


def check_moved(state: State, order: Move | None, reply: Moved) -> None:
    """Raises ProtocolError where a unit cannot have carried out an order as it says."""
    assert order is not None
    place = Place(reply.unit, reply.extent, 0, reply.generation, reply.length)
    if (place.unit, place.extent) in state.blocks.extents:
        raise ProtocolError(f"blocks were moved into extent {place.extent} of unit {place.unit}, which is in use")
    _check_new_extent(state, place)
    repacked = [repack.at for repack in order.repacks]
    sizes = np.delete(np.frombuffer(order.blocks.nbytes, "<i8"), repacked)
    offsets = np.frombuffer(reply.offsets, "<i8") if len(reply.offsets) == 8 * len(sizes) else None
    if offsets is None or len(reply.repacked) != len(repacked):
        raise ProtocolError(f"move {reply.move} was of {len(sizes)} blocks and of rows of {len(repacked)} others")
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
        return
    low, top = int(start[0]), int(end.max())
    apart = bool((start[1:] >= end[:-1]).all()) and place.generation >= 0 and int(start[-1]) < MOST_BYTES
    if not apart or state.blocks.overlapped(place.unit, place.extent, low, top - low) is not None:
        raise ProtocolError(
            f"blocks were moved to where others lie, between bytes {low} and {top} of unit {place.unit}"
        )
    if place.length and top - low > place.length:
        raise ProtocolError(f"extent {place.extent} of unit {place.unit} is too short for what was moved there")


def are_apart(state: State, made: list[NewBlock]) -> bool:
    """Whether blocks that units have made still are in extents that nobody else uses."""
    table = state.blocks
    return not any(
        (place.unit, place.extent) in table.freed
        or (place.unit, place.extent) in table.extents
        or table.overlapped(place.unit, place.extent, place.offset, block.nbytes) is not None
        for block in made
        for place in places_of(block)
    )


def _check_repacked(place: Place, fields: list[str], rows: int, block: NewBlock) -> None:
    """Raises ProtocolError where rows cannot be in a block of their own as a unit says."""
    try:
        check_block(block, rows)
    except InvalidArgumentError as error:
        raise ProtocolError(f"rows were moved into a block that there cannot be: {error}") from None
    there = (block.unit, block.extent, block.generation, block.length) == (
        place.unit, place.extent, place.generation, place.length,
    )  # fmt: skip
    if not there or block.copies or {spec.name for spec in block.schema} != set(fields):
        raise ProtocolError(
            f"rows were moved into a block elsewhere than in extent {place.extent}, or with other fields"
        )
