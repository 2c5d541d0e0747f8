"""Handlers of the requests that read metadata, production and consumption of samples."""

from __future__ import annotations

import numpy as np

from transfer_queue.core.context import Context
from transfer_queue.core.events.registry import Caller, handles
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import require_partition
from transfer_queue.core.tables.fields import MIXED_RANK, mixed_shapes, value_layouts
from transfer_queue.core.tables.rows import indexes_in
from transfer_queue.messages import queries
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import ClaimReply
from transfer_queue.messages.descriptors import FieldType
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.partitions import ListPartitions
from transfer_queue.messages.tag_table import tag_rows


def meta_reply(
    partition: Partition, positions: np.ndarray, rows: np.ndarray, fields: list[str], produced: np.ndarray | None = None
) -> ClaimReply:
    """Return the metadata of these rows. rows: their global indexes, also of cleared rows (position -1)."""
    there = positions >= 0
    whole = 0 not in there.tobytes()  # faster than `all` for the rows of a batch
    live = positions if whole else positions[there]
    known = [name for name in fields if (field := partition.fields.get(name)) is not None and field.live]
    types = [partition.fields[name].to_field_type() for name in known]
    for at, name in enumerate(known) if partition.field_ranks.names else ():
        if name in partition.field_ranks.names:  # its rows have several ranks
            types[at] = partition.type_of_values(name, *partition.blocks_of(name, live))
    tags = partition.packed_tags_of(live)
    if tags is not None and not whole:
        living = iter(tag_rows(tags, len(live)))
        tags = [next(living) if t else {} for t in there.tolist()]
    shapes = {
        t.name: row_shapes(partition, t, positions).tobytes() for t in types if whole and t.differs and not t.mixed_rank
    }
    dtypes = {t.name: row_dtypes(partition, t, positions).tobytes() for t in types if whole and t.dtypes}
    return ClaimReply(
        rows=rows.astype("i8", copy=False).tobytes(), fields=types,
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
        positions = partition.rows.live_positions(waiting=False)
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
