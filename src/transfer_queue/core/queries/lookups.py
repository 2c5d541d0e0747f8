"""Looks up rows: their metadata, which fields they have, which tasks consumed them, and where their values are."""

from __future__ import annotations

import sys
from collections.abc import Collection

import msgspec
import numpy as np

from transfer_queue.core.context import Context
from transfer_queue.core.events.registry import Caller, handles
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State, require_partition
from transfer_queue.core.tables.fields import MIXED_RANK, mixed_shapes, value_layouts
from transfer_queue.core.tables.rows import indexes_in
from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.messages import queries
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import ClaimReply
from transfer_queue.messages.descriptors import NESTED, SEPARATOR, FieldType, Placement, parents
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.partitions import ListPartitions
from transfer_queue.messages.queries import Lookup, LookupReply
from transfer_queue.messages.tag_table import tag_rows


def meta_reply(
    partition: Partition, positions: np.ndarray, rows: np.ndarray, fields: list[str], produced: np.ndarray | None = None
) -> ClaimReply:
    """Return the metadata of these rows. rows: their global indexes, also of cleared rows (position -1)."""
    is_live = positions >= 0
    whole = 0 not in is_live.tobytes()  # faster than `all` for the rows of a batch
    live = positions if whole else positions[is_live]
    types: list[FieldType] = []
    shapes: dict[str, bytes] = {}
    dtypes: dict[str, bytes] = {}
    known, ranked = partition.fields, partition.field_ranks.names
    for name in fields:
        field = known.get(name)
        if field is None or not field.live:
            continue
        ranks = partition.field_ranks.ranks_of(name, *partition.blocks_of(name, live)) if name in ranked else ()
        field_type = field.to_field_type(ranks)
        types.append(field_type)
        if field_type.differs and whole and not field_type.mixed_rank:
            shapes[name] = row_shapes(partition, field_type, positions).tobytes()
        if field_type.dtypes and whole:
            dtypes[name] = row_dtypes(partition, field_type, positions).tobytes()
    tags = partition.packed_tags_of(live)
    if tags is not None and not whole:
        living = iter(tag_rows(tags, len(live)))
        tags = [next(living) if t else {} for t in is_live.tolist()]
    return ClaimReply(
        rows=rows.tobytes(), fields=types,
        produced=None if produced is None else produced.astype("i1").tobytes(), tags=tags, shapes=shapes,
        epoch=partition.epoch, dtypes=dtypes,
    )  # fmt: skip


def row_dtypes(partition: Partition, field: FieldType, positions: np.ndarray) -> np.ndarray:
    """Return, for each row, the position of its dtype in `field.dtypes`, i1 [rows]; 0 if a row has no value."""
    numbers, _ = partition.blocks_of(field.name, positions)
    codes = np.zeros(len(positions), "i1")
    for where, spec, _ in value_layouts(partition.blocks, field.name, numbers):
        codes[where] = field.dtypes.index(spec.dtype)
    return codes


def row_shapes(partition: Partition, field: FieldType, positions: np.ndarray) -> np.ndarray:
    """Return the row shapes of one field, i8 [rows, ndim]; -1 for a row without a value."""
    out = np.full((len(positions), field.ndim), -1, "i8")
    numbers, slots = partition.blocks_of(field.name, positions)
    for where, spec, dims in value_layouts(partition.blocks, field.name, numbers):
        if spec.ndim == MIXED_RANK:
            shapes = mixed_shapes(dims)
            out[where] = [shapes[slot] for slot in slots[where].tolist()]
        else:
            rows = dims.reshape(-1, field.ndim)
            out[where] = rows[slots[where]] if spec.ragged else rows[0]
    return out


@handles(queries.ShowRows, reads=True)
def handle_show_rows(context: Context, caller: Caller, request: queries.ShowRows) -> AnyReply:
    """Return live rows, each with whether it has all the requested fields that exist."""
    partition = require_partition(context.state.partitions, request.partition)
    if request.rows is None:
        positions = partition.rows.first_positions()
    else:
        positions = partition.rows.live_positions_of(indexes_in(request.rows))
    if request.task is not None:
        positions = positions[partition.passed.codes.numbers_of(request.task, positions) == 0]
    fields = [name for name in request.fields if name in partition.fields]
    produced = np.zeros(len(positions), bool)
    if fields:
        produced[:] = partition.produced_flags(fields, positions).all(axis=1)
    return meta_reply(partition, positions, partition.rows.indexes_of(positions), fields, produced)


@handles(queries.RetrieveMeta, reads=True)
def handle_retrieve_meta(context: Context, caller: Caller, request: queries.RetrieveMeta) -> AnyReply:
    """Return the rows of those of the keys that exist, in the order of the keys, with their common fields."""
    partition = context.state.partitions.get(request.partition)
    if partition is None:
        return ClaimReply(rows=b"")
    positions = partition.positions_of_keys(request.keys)
    fields = partition.common_fields(positions)
    produced = np.full(len(positions), bool(fields))
    return meta_reply(partition, positions, partition.rows.indexes_of(positions), fields, produced)


@handles(queries.RetrieveKeys, reads=True)
def handle_retrieve_keys(context: Context, caller: Caller, request: queries.RetrieveKeys) -> AnyReply:
    """Return the key of each row; None for a row without a key."""
    partition = require_partition(context.state.partitions, request.partition)
    return Done(partition.keys_of(partition.rows.positions_of(indexes_in(request.rows))))


@handles(queries.ProductionStatus, reads=True)
def handle_production_status(context: Context, caller: Caller, request: queries.ProductionStatus) -> AnyReply:
    """Return which fields each live row has, int8 [rows, fields]."""
    partition = context.state.partitions.get(request.partition)
    if partition is None or any(name not in partition.fields for name in request.fields):
        return queries.StatusReply(known=False)
    positions = partition.rows.live_positions()
    matrix = partition.produced_flags(request.fields, positions)
    return queries.StatusReply(True, partition.rows.indexes_of(positions).tobytes(), matrix.tobytes())


@handles(queries.ConsumptionStatus, reads=True)
def handle_consumption_status(context: Context, caller: Caller, request: queries.ConsumptionStatus) -> AnyReply:
    """Return which live rows a task has consumed, int8 [rows]."""
    partition = context.state.partitions.get(request.partition)
    if partition is None:
        return queries.StatusReply(known=False)
    positions = partition.rows.live_positions()
    matrix = partition.consumed_flags(request.task, positions)
    return queries.StatusReply(True, partition.rows.indexes_of(positions).tobytes(), matrix.tobytes())


@handles(queries.CheckProduction, reads=True)
def handle_check_production(context: Context, caller: Caller, request: queries.CheckProduction) -> AnyReply:
    """Return whether every row has every field; False for unknown fields, and if there are no rows."""
    partition = context.state.partitions.get(request.partition)
    if partition is None or not partition.rows.count:
        return Done(False)
    fields = [partition.fields.get(name) for name in request.fields]
    return Done(all(field is not None and field.live == partition.rows.count for field in fields))


@handles(queries.CheckConsumption, reads=True)
def handle_check_consumption(context: Context, caller: Caller, request: queries.CheckConsumption) -> AnyReply:
    """Return whether the task has consumed rows and none is left; False for an unknown partition."""
    partition = context.state.partitions.get(request.partition)
    return Done(partition is not None and partition.is_wholly_consumed(request.task))


@handles(ListPartitions, reads=True)
def handle_list_partitions(context: Context, caller: Caller, request: ListPartitions) -> AnyReply:
    """Return the names of the partitions in order of creation."""
    return Done(list(context.state.partitions))


@handles(Lookup, reads=True)
def handle_lookup(context: Context, caller: Caller, request: Lookup) -> AnyReply:
    """Reply with the locations of the values of rows or keys, which a get needs before it copies them."""
    state = context.state
    partition = state.partitions.get(request.partition)
    if request.rows is not None:
        return _locate_rows(state, partition, request, indexes_in(request.rows))
    keys = request.keys or []
    positions = np.zeros(0, "i8") if partition is None else partition.positions_of_keys(keys)
    reply = _locate_keys(state, partition, request, keys, positions)
    if not request.versions:
        return reply
    versions = b"" if partition is None else partition.changes.versions_of(positions).tobytes()
    return msgspec.structs.replace(reply, versions=versions, epoch=state.epoch)


def _locate_keys(
    state: State, partition: Partition | None, request: Lookup, keys: list[str], positions: np.ndarray
) -> LookupReply:
    count = len(positions)
    if partition is None or not count:
        return _empty_reply(state, 0)
    known = partition.keys
    unknown = [] if count == len(keys) else list(dict.fromkeys(key for key in keys if key not in known))
    types, places, lacking = _common_places(partition, positions, request.fields)
    if types:
        reply = _reply_with_places(state, count, types, places, request)
    else:
        # count > 0 without types means that the keys have no common field
        shared = request.fields is not None and partition.common_fields(positions)
        reply = _empty_reply(state, -count if shared else count)
    return msgspec.structs.replace(reply, unknown=unknown, lacking=lacking) if unknown or lacking else reply


def _locate_rows(state: State, partition: Partition | None, request: Lookup, rows: np.ndarray) -> LookupReply:
    positions = np.full(len(rows), -1, "i8") if partition is None else partition.rows.positions_of(rows)
    cleared = rows[positions < 0]
    if len(cleared):
        raise StorageKeyNotFoundError(
            f"{len(cleared)} of {len(rows)} samples of partition {request.partition!r} are cleared (or never existed), "
            f"among them global indexes {cleared[:5].tolist()}{_drop_reason(partition, int(cleared[0]))}"
        )
    if partition is None or not len(rows):
        return _empty_reply(state, 0)
    return _locate_live(state, partition, request, positions)


def _locate_live(state: State, partition: Partition, request: Lookup, positions: np.ndarray) -> LookupReply:
    types, places, lacking = _common_places(partition, positions, request.fields)
    if lacking and request.fields is not None:
        raise _missing_value_error(partition, next(iter(lacking)), positions)
    if not types:
        return _empty_reply(state, len(positions))
    return _reply_with_places(state, len(positions), types, places, request)


def locate_claimed(state: State, partition: Partition, positions: np.ndarray, fields: list[str]) -> LookupReply | None:
    """Return the locations of values of newly dealt rows; None if rows or values are gone, which a lookup explains.

    positions: -1 for cleared rows.
    """
    if not len(positions) or (positions < 0).any():
        return None
    try:
        located = _locate_live(state, partition, Lookup(partition.name, b"", None, sorted(set(fields))), positions)
    except StorageKeyNotFoundError:
        return None
    return located if located.types else None


def _empty_reply(state: State, count: int) -> LookupReply:
    return LookupReply(count, [], state.blocks.describe(np.zeros(0, "i8")), [])


Places = dict[tuple[bytes, bytes], list[str]]
"""The block number and the row number of each value (i8 and i4) -> the fields whose values are there."""


def _common_places(
    partition: Partition, positions: np.ndarray, fields: list[str] | None
) -> tuple[list[FieldType], Places, dict[str, int]]:
    """Return the types and locations of the fields that all these rows have, sorted or in the order of `fields`.

    Also returns the fields that are left out, each with the number of rows that lack it, see `LookupReply`. Raises
    StorageKeyNotFoundError if values of these fields (None: of any field) were lost.
    """
    if partition.losses.counts:
        losses = partition.losses.describe(sorted(partition.losses.counts) if fields is None else fields, positions)
        if losses:
            raise StorageKeyNotFoundError(f"partition {partition.name!r}: {losses}")
    requested = dict.fromkeys(sorted(partition.fields) if fields is None else fields)
    names = requested if fields is None else with_nested(partition, requested)
    known, ranks = partition.fields, partition.field_ranks
    types: list[FieldType] = []
    places: Places = {}
    lacking: dict[str, int] = {}
    last: tuple[bytes, bytes] | None = None
    same: list[str] = []
    count = len(positions)
    having = 0
    for name, numbers, slots in partition.values_of(names, positions):
        place = numbers.tobytes(), slots.tobytes()
        if place != last:  # fields of one put are equal; comparing them is faster than counting and hashing
            last, having = place, int(np.count_nonzero(numbers))
            if having == count:
                same = places.setdefault(place, [])
        if having == count:
            same.append(name)
            types.append(known[name].to_field_type(ranks.ranks_of(name, numbers, slots) if ranks.names else ()))
        elif name in requested and (having or fields is not None):
            lacking[name] = count - having
    return types, places, lacking


def with_nested(partition: Partition, names: Collection[str]) -> Collection[str]:
    """Return these fields, the fields inside them, and the fields that contain them."""
    fields = partition.fields
    nested: set[str] = set()
    around: list[str] = []
    for name in names:
        if name in fields and fields[name].kind == NESTED:
            nested.add(name)
        if SEPARATOR in name:
            around += [outer for outer in parents(name) if outer in fields and fields[outer].kind == NESTED]
    if not nested and not around:
        return names
    inside = [name for name in fields if SEPARATOR in name and not nested.isdisjoint(parents(name))]
    return list(dict.fromkeys([*names, *inside, *around]))


def _reply_with_places(
    state: State, count: int, types: list[FieldType], places: Places, request: Lookup
) -> LookupReply:
    firsts: list[int] = []
    for numbers, _ in places:
        if numbers == numbers[:8] * count:
            firsts.append(int.from_bytes(numbers[:8], sys.byteorder))
    placements: list[Placement] = []
    if len(firsts) == len(places):
        # The rows of each field are in one block. Python numbers are faster than arrays here.
        ascending = sorted(set(firsts))
        blocks = np.array(ascending, "i8")
        for first, ((_, row_numbers), names) in zip(firsts, places.items(), strict=True):
            at = ascending.index(first).to_bytes(4, "little")
            placements.append(Placement(names, at * count, row_numbers))
    else:
        blocks = np.frombuffer(b"".join(numbers for numbers, _ in places), "i8")
        if (blocks[1:] > blocks[:-1]).all():  # each row and placement has its own block, in the order of the puts
            inverse = np.arange(len(blocks))
        else:
            blocks, inverse = np.unique(blocks, return_inverse=True)
        places_in_blocks = inverse.astype("i4").reshape(len(places), count)
        for row, ((_, row_numbers), names) in zip(places_in_blocks, places.items(), strict=True):
            placements.append(Placement(names, row.tobytes(), row_numbers))
    if request.near or request.avoid:
        return LookupReply(count, types, state.blocks.describe_for(blocks, request.near, request.avoid), placements)
    return LookupReply(count, types, state.blocks.describe(blocks), placements)


def _missing_value_error(partition: Partition, name: str, positions: np.ndarray) -> StorageKeyNotFoundError:
    numbers, _ = partition.blocks_of(name, positions)
    rows = partition.rows.indexes_of(positions[numbers == 0])
    return StorageKeyNotFoundError(
        f"field {name!r} is not produced for {len(rows)} of {len(positions)} samples of partition "
        f"{partition.name!r}, among them global indexes {rows[:5].tolist()}; "
        f"tq.get_client().explain(...) describes what they wait for"
    )


def _drop_reason(partition: Partition | None, row: int) -> str:
    """Return the reason for which a row was dropped, for a message; "" if it was not dropped."""
    reason = None if partition is None else partition.drops.reason(row)
    return "" if reason is None else f"; sample {row} was dropped: {reason}"
