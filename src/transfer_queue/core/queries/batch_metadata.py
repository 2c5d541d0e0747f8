"""Answers to requests that change nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from transfer_queue.core.claims.consumer_state import missing
from transfer_queue.core.control.unknown_names import no_partition
from transfer_queue.core.puts import flow_control
from transfer_queue.core.queries.partition_view import list_keys, take_snapshot
from transfer_queue.core.queries.value_locations import lookup
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.field_types import dims_parts
from transfer_queue.core.tables.row_table import indexes_in
from transfer_queue.errors import UnknownPartitionError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import ClaimReply
from transfer_queue.messages.descriptors import MEMORY, FieldType
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.partitions import ListPartitions
from transfer_queue.messages.progress import (
    FieldProgress,
    PartitionProgress,
    PolicyProgress,
    SamplerCost,
    TaskProgress,
    UnitProgress,
)
from transfer_queue.messages.queries import (
    CheckConsumption,
    CheckProduction,
    ConsumptionStatus,
    ListKeys,
    Lookup,
    ProductionStatus,
    RetrieveKeys,
    RetrieveMeta,
    Show,
    StatusReply,
    TakeSnapshot,
)
from transfer_queue.messages.system import SystemStatus


def meta_reply(
    partition: Partition, positions: np.ndarray, rows: np.ndarray, fields: list[str], produced: np.ndarray | None = None
) -> ClaimReply:
    """What a BatchMeta says of these rows. rows: their global indexes, also of rows that are cleared (-1 position)."""
    there = positions >= 0
    whole = bool(there.all())
    live = positions if whole else positions[there]
    known = (partition.fields.get(name) for name in fields)
    types = [field.type() for field in known if field is not None and field.live]
    tags = partition.tags_of(live)
    if tags is not None and not whole:
        living = iter(tags)
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
    """i1 [rows]: the position in `field.dtypes` of the dtype of each row; 0 if a row has no value."""
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
    """i8 [rows, ndim]: the row shapes of one field; -1 where a row has no value."""
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


def show(state: State, request: Show) -> AnyReply:
    """All live rows; production over those of the fields that exist."""
    partition = _known(state, request.partition)
    positions = partition.rows.live_positions(waiting=False)
    fields = [name for name in request.fields if name in partition.fields]
    produced = np.zeros(len(positions), bool)
    if fields:
        produced[:] = partition.produced(fields, positions).all(axis=1)
    return meta_reply(partition, positions, partition.rows.indexes_of(positions), fields, produced)


def retrieve_meta(state: State, request: RetrieveMeta) -> AnyReply:
    """Rows of the known keys, in key order, with their common fields."""
    partition = state.partitions.get(request.partition)
    if partition is None:
        return ClaimReply(rows=b"")
    positions = np.array([partition.keys[key] for key in request.keys if key in partition.keys], "i8")
    fields = partition.common_fields(positions)
    produced = np.full(len(positions), bool(fields))
    return meta_reply(partition, positions, partition.rows.indexes_of(positions), fields, produced)


def retrieve_keys(state: State, request: RetrieveKeys) -> AnyReply:
    """A key or None for each row."""
    partition = _known(state, request.partition)
    return Done(partition.keys_of(partition.rows.positions_of(indexes_in(request.rows))))


def production_status(state: State, request: ProductionStatus) -> AnyReply:
    """int8 [rows, fields] of all live rows."""
    partition = state.partitions.get(request.partition)
    if partition is None or any(name not in partition.fields for name in request.fields):
        return StatusReply(known=False)
    positions = partition.rows.live_positions()
    matrix = partition.produced(request.fields, positions)
    return StatusReply(True, partition.rows.indexes_of(positions).tobytes(), matrix.tobytes())


def consumption_status(state: State, request: ConsumptionStatus) -> AnyReply:
    """int8 [rows] of all live rows."""
    partition = state.partitions.get(request.partition)
    if partition is None:
        return StatusReply(known=False)
    positions = partition.rows.live_positions()
    matrix = partition.consumed(request.task, positions)
    return StatusReply(True, partition.rows.indexes_of(positions).tobytes(), matrix.tobytes())


def check_production(state: State, request: CheckProduction) -> AnyReply:
    """Whether every row has every field; False for unknown ones and for no rows at all."""
    partition = state.partitions.get(request.partition)
    if partition is None or not partition.rows.count:
        return Done(False)
    fields = [partition.fields.get(name) for name in request.fields]
    return Done(all(field is not None and field.live == partition.rows.count for field in fields))


def check_consumption(state: State, request: CheckConsumption) -> AnyReply:
    """Whether the task has consumed every row that is left, and any at all; False for an unknown partition."""
    partition = state.partitions.get(request.partition)
    return Done(partition is not None and partition.wholly_consumed(request.task))


def list_partitions(state: State, request: ListPartitions) -> AnyReply:
    """Names in order of creation."""
    return Done(list(state.partitions))


def status(
    state: State, counters: dict[str, float], now: float, size: int, samplers: list[SamplerCost], trouble: str
) -> SystemStatus:
    """Progress of every partition by field and task. size: samples of a group where a partition does not say it."""
    partitions = [progress(state, partition, now, size) for partition in state.partitions.values()]
    leased = state.blocks.leased_in
    units = [
        UnitProgress(number, unit.told_tier, unit.capacity, leased.get(number, 0), number in state.draining)
        for number, unit in sorted(state.units.items())
    ]
    return SystemStatus(partitions, counters, samplers, trouble, units)


def progress(state: State, partition: Partition, now: float, size: int) -> PartitionProgress:
    """One partition. size: as above."""
    queues = state.waiting.of_partition(partition.name)
    tasks = []
    for task in sorted({*partition.tasks, *queues}):
        waiting = list(queues[task].claims.values()) if task in queues else []
        longest = max((now - w.since for w in waiting), default=0.0)
        ever = partition.consumed_ever.get(task, 0)
        consumed, claimed = partition.tasks.get(task, 0), partition.claimed.get(task, 0)
        tasks.append(TaskProgress(task, consumed, len(waiting), longest, ever, claimed))
    lost = partition.losses.counts
    fields = [FieldProgress(name, f.live, f.words(), f.ever, lost.get(name, 0)) for name, f in partition.fields.items()]
    orphaned = partition.groups.orphaned(partition.sealed)
    policy = None
    if partition.options.max_staleness is not None or partition.policy_version:
        policy = PolicyProgress(partition.policy_version, partition.admitted, flow_control.limit(partition))
    wanted = {task: (groups, missing(partition, task, size)) for task, groups in partition.wants.groups.items()}
    puts = sum(1 for waiting in state.waiting.space.values() if waiting.request.partition == partition.name)
    return PartitionProgress(
        partition.name, partition.row_count, len(partition.waiting), partition.sealed, partition.groups.size,
        partition.nbytes, fields, tasks, orphaned, dict(partition.drops.rows), partition.freed, policy, wanted, puts,
        passed={task: found for task in partition.tasks if (found := partition.passed.of(task))},
        stored=dict(stored(state, partition)),
    )  # fmt: skip


def stored(state: State, partition: Partition) -> Counter[str]:
    """Tier -> bytes of a partition there, every copy counted."""
    found: Counter[str] = Counter()
    for number, nbytes in state.blocks.stored.get(partition.number, {}).items():
        if nbytes:
            found[tier_of(state, number)] += nbytes
    return found


def tier_of(state: State, number: int) -> str:
    """The tier of a storage unit, as people are told."""
    unit = state.units.get(number)
    return MEMORY if unit is None else unit.told_tier


def _known(state: State, name: str) -> Partition:
    partition = state.partitions.get(name)
    if partition is None:
        raise UnknownPartitionError(no_partition(name, state.partitions))
    return partition


QUERIES: dict[type, Any] = {
    Show: show,
    RetrieveMeta: retrieve_meta,
    RetrieveKeys: retrieve_keys,
    Lookup: lookup,
    ListKeys: list_keys,
    ListPartitions: list_partitions,
    ProductionStatus: production_status,
    ConsumptionStatus: consumption_status,
    CheckProduction: check_production,
    CheckConsumption: check_consumption,
    TakeSnapshot: take_snapshot,
}
