"""Handlers of the requests that read metadata, production and consumption of samples."""

from __future__ import annotations

import numpy as np

from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.events.registry import Caller, handles
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.unknown_partitions import require_partition
from transfer_queue.core.tables.field_types import dims_parts
from transfer_queue.core.tables.row_table import indexes_in
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
    whole = bool(there.all())
    live = positions if whole else positions[there]
    known = (partition.fields.get(name) for name in fields)
    types = [field.to_field_type() for field in known if field is not None and field.live]
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
    unique, inverse = np.unique(numbers, return_inverse=True)
    codes = np.zeros(len(unique), "i1")
    for i, number in enumerate(unique.tolist()):
        if number:
            schema, _, _ = partition.blocks.shape_source(number)
            codes[i] = field.dtypes.index(next(spec.dtype for spec in schema if spec.name == field.name))
    out: np.ndarray = codes[inverse.reshape(-1)]
    return out


def row_shapes(partition: Partition, field: FieldType, positions: np.ndarray) -> np.ndarray:
    """Return the row shapes of one field, i8 [rows, ndim]; -1 for a row without a value."""
    out = np.full((len(positions), field.ndim), -1, "i8")
    numbers, slots = partition.blocks_of(field.name, positions)
    unique, inverse = np.unique(numbers, return_inverse=True)
    cache: dict[tuple[int, bytes], tuple[np.ndarray, bool]] = {}
    order = np.argsort(inverse, kind="stable")
    bounds = np.searchsorted(inverse[order], np.arange(len(unique) + 1))
    for i, number in enumerate(unique.tolist()):
        if not number:
            continue
        schema, dims, rows = partition.blocks.shape_source(number)
        found = cache.get((id(schema), dims))
        if found is None:
            parts = dims_parts(schema, np.frombuffer(dims, "<i8"), rows)
            at = next(k for k, spec in enumerate(schema) if spec.name == field.name)
            found = cache[id(schema), dims] = (parts[at].reshape(-1, field.ndim), schema[at].ragged)
        shapes, ragged = found
        where = order[bounds[i] : bounds[i + 1]]
        out[where] = shapes[slots[where]] if ragged else shapes[0]
    return out


@handles(queries.ShowRows, reads=True)
def handle_show_rows(context: ControllerContext, caller: Caller, request: queries.ShowRows) -> AnyReply:
    """Return live rows, each with whether it has all the requested fields that exist."""
    partition = require_partition(context.state.partitions, request.partition)
    if request.rows is None:
        positions = partition.rows.live_positions(waiting=False)
    else:
        positions = partition.rows.live_positions_of(indexes_in(request.rows))
    if request.task is not None:
        positions = positions[~partition.passed.skipped_by(request.task, positions)]
    fields = [name for name in request.fields if name in partition.fields]
    produced = np.zeros(len(positions), bool)
    if fields:
        produced[:] = partition.produced_flags(fields, positions).all(axis=1)
    return meta_reply(partition, positions, partition.rows.indexes_of(positions), fields, produced)


@handles(queries.RetrieveMeta, reads=True)
def handle_retrieve_meta(context: ControllerContext, caller: Caller, request: queries.RetrieveMeta) -> AnyReply:
    """Return the rows of those of the keys that exist, in the order of the keys, with their common fields."""
    partition = context.state.partitions.get(request.partition)
    if partition is None:
        return ClaimReply(rows=b"")
    positions = partition.positions_of_keys(request.keys)
    fields = partition.common_fields(positions)
    produced = np.full(len(positions), bool(fields))
    return meta_reply(partition, positions, partition.rows.indexes_of(positions), fields, produced)


@handles(queries.RetrieveKeys, reads=True)
def handle_retrieve_keys(context: ControllerContext, caller: Caller, request: queries.RetrieveKeys) -> AnyReply:
    """Return the key of each row; None for a row without a key."""
    partition = require_partition(context.state.partitions, request.partition)
    return Done(partition.keys_of(partition.rows.positions_of(indexes_in(request.rows))))


@handles(queries.ProductionStatus, reads=True)
def handle_production_status(context: ControllerContext, caller: Caller, request: queries.ProductionStatus) -> AnyReply:
    """Return which fields each live row has, int8 [rows, fields]."""
    partition = context.state.partitions.get(request.partition)
    if partition is None or any(name not in partition.fields for name in request.fields):
        return queries.StatusReply(known=False)
    positions = partition.rows.live_positions()
    matrix = partition.produced_flags(request.fields, positions)
    return queries.StatusReply(True, partition.rows.indexes_of(positions).tobytes(), matrix.tobytes())


@handles(queries.ConsumptionStatus, reads=True)
def handle_consumption_status(
    context: ControllerContext, caller: Caller, request: queries.ConsumptionStatus
) -> AnyReply:
    """Return which live rows a task has consumed, int8 [rows]."""
    partition = context.state.partitions.get(request.partition)
    if partition is None:
        return queries.StatusReply(known=False)
    positions = partition.rows.live_positions()
    matrix = partition.consumed_flags(request.task, positions)
    return queries.StatusReply(True, partition.rows.indexes_of(positions).tobytes(), matrix.tobytes())


@handles(queries.CheckProduction, reads=True)
def handle_check_production(context: ControllerContext, caller: Caller, request: queries.CheckProduction) -> AnyReply:
    """Return whether every row has every field; False for unknown fields, and if there are no rows."""
    partition = context.state.partitions.get(request.partition)
    if partition is None or not partition.rows.count:
        return Done(False)
    fields = [partition.fields.get(name) for name in request.fields]
    return Done(all(field is not None and field.live == partition.rows.count for field in fields))


@handles(queries.CheckConsumption, reads=True)
def handle_check_consumption(context: ControllerContext, caller: Caller, request: queries.CheckConsumption) -> AnyReply:
    """Return whether the task has consumed rows and none is left; False for an unknown partition."""
    partition = context.state.partitions.get(request.partition)
    return Done(partition is not None and partition.is_wholly_consumed(request.task))


@handles(ListPartitions, reads=True)
def handle_list_partitions(context: ControllerContext, caller: Caller, request: ListPartitions) -> AnyReply:
    """Return the names of the partitions in order of creation."""
    return Done(list(context.state.partitions))
