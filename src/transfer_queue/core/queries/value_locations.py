"""Looks up the locations of values, which a get needs before it copies them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from transfer_queue.core.context import Context
from transfer_queue.core.events.registry import Caller, handles
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.rows import Indexer, indexes_in
from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.messages.descriptors import NESTED, SEPARATOR, Blocks, Placement, parents
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.queries import Lookup, LookupReply

# For the rows of a field: their block numbers (i8), and their row numbers inside these blocks (i4).
Places = tuple[np.ndarray, np.ndarray]
# The block numbers and row numbers as bytes -> the fields whose values are there.
Alike = dict[tuple[bytes, bytes], list[str]]

LONG_RUN = 256
"""The number of rows from which it is worth finding out whether they are one after the other."""


@handles(Lookup, reads=True)
def handle_lookup(context: Context, caller: Caller, request: Lookup) -> AnyReply:
    """Reply with the locations of the values of rows or keys."""
    state = context.state
    partition = state.partitions.get(request.partition)
    if request.rows is not None:
        return _locate_rows(state, partition, request, indexes_in(request.rows))
    asked = request.keys or []
    positions = np.zeros(0, "i8") if partition is None else partition.positions_of_keys(asked)
    reply = _locate_keys(state, partition, request, asked, positions)
    if not request.versions:
        return reply
    versions = b"" if partition is None else partition.changes.versions_of(positions).tobytes()
    return msgspec.structs.replace(reply, versions=versions, epoch=state.epoch)


def _locate_keys(
    state: State, partition: Partition | None, request: Lookup, asked: list[str], positions: np.ndarray
) -> LookupReply:
    if partition is None or not len(positions):
        return _empty_reply(state, 0)
    keys = partition.keys
    unknown = [] if len(positions) == len(asked) else list(dict.fromkeys(key for key in asked if key not in keys))
    _check_lost(partition, request.fields, positions)
    lacking: dict[str, int] = {}
    places = _common_places(partition, positions, request.fields, lacking)
    if places:
        reply = _reply_with_places(state, partition, len(positions), places, request)
    else:
        # count > 0 without types means that the keys have no common field
        shared = request.fields is not None and _common_places(partition, positions, None)
        reply = _empty_reply(state, -len(positions) if shared else len(positions))
    return msgspec.structs.replace(reply, unknown=unknown, lacking=lacking) if unknown or lacking else reply


def _locate_rows(state: State, partition: Partition | None, request: Lookup, rows: np.ndarray) -> LookupReply:
    positions = np.full(len(rows), -1, "i8") if partition is None else partition.rows.positions_of(rows)
    gone = rows[positions < 0]
    if len(gone):
        raise StorageKeyNotFoundError(
            f"{len(gone)} of {len(rows)} samples of partition {request.partition!r} are cleared (or never existed), "
            f"among them global indexes {gone[:5].tolist()}{_drop_reason(partition, int(gone[0]))}"
        )
    if partition is None or not len(rows):
        return _empty_reply(state, 0)
    _check_lost(partition, request.fields, positions)
    if request.fields is None:
        places = _common_places(partition, positions, None)
    else:
        names = list(dict.fromkeys(request.fields))
        places = _places_of_fields(partition, positions, with_nested(partition, names))
        for name in set(places).difference(names):  # nested fields that not all of these rows have
            if np.count_nonzero(places[name][0]) < len(positions):
                del places[name]
        for name in names:
            numbers = places[name][0]
            if np.count_nonzero(numbers) < len(positions):
                raise _missing_value_error(partition, name, positions[numbers == 0], len(positions))
    if not places:
        return _empty_reply(state, len(positions))
    return _reply_with_places(state, partition, len(positions), places, request)


def locate_claimed(state: State, partition: Partition, rows: np.ndarray, fields: list[str]) -> LookupReply | None:
    """Return the locations of values of newly dealt rows; None if rows or values are gone, which a lookup explains."""
    try:
        found = _locate_rows(state, partition, Lookup(partition.name, b"", None, fields), rows)
    except StorageKeyNotFoundError:
        return None
    return found if found.types else None


def _empty_reply(state: State, count: int) -> LookupReply:
    return LookupReply(count, [], state.blocks.describe(np.zeros(0, "i8")), [])


def _common_places(
    partition: Partition, positions: np.ndarray, wanted: list[str] | None, lacking: dict[str, int] | None = None
) -> dict[str, Places]:
    """Return the locations of the fields that all these rows have, sorted or in the order of `wanted`.

    lacking: receives the fields that are left out, see `LookupReply`.
    """
    asked = sorted(partition.fields) if wanted is None else list(dict.fromkeys(wanted))
    names = asked if wanted is None else with_nested(partition, asked)
    told = set(asked)
    common, count = {}, len(positions)
    for name, found in _places_of_fields(partition, positions, names).items():
        having = int(np.count_nonzero(found[0]))
        if having == count:
            common[name] = found
        elif lacking is not None and (having or wanted is not None) and name in told:
            lacking[name] = count - having
    return common


def with_nested(partition: Partition, names: list[str]) -> list[str]:
    """Return these fields, the fields inside them, and the fields that contain them."""
    fields = partition.fields
    nested = [name for name in names if name in fields and fields[name].kind == NESTED]
    inside = [name for name in fields if nested and SEPARATOR in name and not set(parents(name)).isdisjoint(nested)]
    around = [
        name
        for leaf in names
        if SEPARATOR in leaf
        for name in parents(leaf)
        if name in fields and fields[name].kind == NESTED
    ]
    return list(dict.fromkeys([*names, *inside, *around])) if nested or around else names


def _places_of_fields(partition: Partition, positions: np.ndarray, names: Iterable[str]) -> dict[str, Places]:
    """Return the locations of the values of these fields; block 0 for a row without a value."""
    parts = list(partition.rows.split(positions))
    if len(parts) == 1 and isinstance(parts[0][3], slice):  # all rows are in one chunk
        columns_of, at = parts[0][1].field.get, _run_or_places(parts[0][2])
        return {
            name: (np.zeros(len(positions), "i8"), np.zeros(len(positions), "i4"))
            if (columns := columns_of(name)) is None
            else (columns[0][at], columns[1][at])
            for name in names
        }
    places = {}
    for name in names:
        numbers, slots = np.zeros(len(positions), "i8"), np.zeros(len(positions), "i4")
        for _, chunk, at, where in parts:
            column = chunk.field.get(name)
            if column is not None:
                numbers[where], slots[where] = column[0][at], column[1][at]
        places[name] = numbers, slots
    return places


def _run_or_places(at: Indexer) -> Indexer:
    """Return many ascending places without gaps as a slice, which selects a part of a column without a copy."""
    if len(at) < LONG_RUN or int(at[-1]) - int(at[0]) != len(at) - 1 or not (at[1:] > at[:-1]).all():
        return at
    return slice(int(at[0]), int(at[-1]) + 1)


def _reply_with_places(
    state: State, partition: Partition, count: int, places: Mapping[str, Places], request: Lookup
) -> LookupReply:
    alike: Alike = {}
    last: tuple[bytes, bytes] | None = None
    names: list[str] = []
    for name, (numbers, slots) in places.items():
        key = numbers.tobytes(), slots.tobytes()
        if key != last:  # comparing with the field before is faster than hashing, and fields of one put are equal
            names, last = alike.setdefault(key, []), key
        names.append(name)
    if partition.field_ranks.names:
        types = [partition.type_of_values(name, *found) for name, found in places.items()]
    else:
        types = [partition.fields[name].to_field_type() for name in places]

    def described(blocks: np.ndarray) -> Blocks:
        if request.near or request.avoid:
            return state.blocks.describe_for(blocks, request.near, request.avoid)
        return state.blocks.describe(blocks)

    if all(numbers == numbers[:8] * count for numbers, _ in alike):
        # The rows of each field are in one block. Python numbers are faster than arrays here.
        firsts = [int.from_bytes(numbers[:8], sys.byteorder) for numbers, _ in alike]
        blocks = sorted(set(firsts))
        placements = [
            Placement(names, blocks.index(first).to_bytes(4, "little") * count, slots)
            for first, ((_, slots), names) in zip(firsts, alike.items())
        ]
        return LookupReply(count, types, described(np.array(blocks, "i8")), placements)
    named = np.frombuffer(b"".join(numbers for numbers, _ in alike), "i8")
    if (named[1:] > named[:-1]).all():  # each row and placement has its own block, in the order of the puts
        unique, inverse = named, np.arange(len(named), dtype="i4")
    else:
        unique, inverse = np.unique(named, return_inverse=True)
        inverse = inverse.astype("i4")
    placements = [
        Placement(names, inverse[i * count : (i + 1) * count].tobytes(), slots)
        for i, ((_, slots), names) in enumerate(alike.items())
    ]
    return LookupReply(count, types, described(unique), placements)


def _missing_value_error(partition: Partition, name: str, positions: np.ndarray, count: int) -> StorageKeyNotFoundError:
    rows = partition.rows.indexes_of(positions)
    return StorageKeyNotFoundError(
        f"field {name!r} is not produced for {len(rows)} of {count} samples of partition "
        f"{partition.name!r}, among them global indexes {rows[:5].tolist()}; "
        f"tq.get_client().explain(...) describes what they wait for"
    )


def _check_lost(partition: Partition, fields: list[str] | None, positions: np.ndarray) -> None:
    """Raise StorageKeyNotFoundError if values of these fields (None: of any field) were lost."""
    if not partition.losses.counts:
        return
    words = partition.losses.describe(sorted(partition.losses.counts) if fields is None else fields, positions)
    if words:
        raise StorageKeyNotFoundError(f"partition {partition.name!r}: {words}")


def _drop_reason(partition: Partition | None, row: int) -> str:
    """Return the reason for which a row was dropped, for a message; "" if it was not dropped."""
    reason = None if partition is None else partition.drops.reason(row)
    return "" if reason is None else f"; sample {row} was dropped: {reason}"
