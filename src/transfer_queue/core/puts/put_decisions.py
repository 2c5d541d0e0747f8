"""Decides what a put, a reservation or a seal does. Reads the state, changes nothing, gives records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import chain
from typing import Any

import numpy as np
from msgspec.msgpack import Ext

from transfer_queue.core.events import records as r
from transfer_queue.core.puts import clear_decisions, flow_control
from transfer_queue.core.state import unneeded_rows
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.state.validation import check_options
from transfer_queue.core.tables.field_types import check_block, shape_of
from transfer_queue.core.units.location_checks import check_places, close_extents
from transfer_queue.errors import (
    CapacityError,
    DuplicateError,
    FieldTypeError,
    InvalidArgumentError,
    ProtocolError,
    SealedError,
    StorageKeyNotFoundError,
)
from transfer_queue.messages.base import DELETE_CODE
from transfer_queue.messages.descriptors import FieldSpec, PartitionOptions
from transfer_queue.messages.partitions import CreatePartition
from transfer_queue.messages.puts import Publish, Reserve

NOBODYS = np.zeros(0, "i8")
MAX_RESERVED = 1 << 28  # rows of one request; a larger number is a mistake


def create_partition(state: State, request: CreatePartition) -> list[r.AnyRecord]:
    """A new partition with its pre-allocated rows."""
    check_options(request.options)
    if not 0 <= request.pre_allocate <= MAX_RESERVED:
        raise InvalidArgumentError(f"{request.pre_allocate} rows cannot be reserved at once")
    made: list[r.AnyRecord] = [r.PartitionMade(request.partition, request.options)]
    if request.pre_allocate:
        made.append(r.RowsReserved(request.partition, state.next_index, request.pre_allocate, pre_allocated=True))
    return made


def check_same_options(partition: Partition, options: PartitionOptions) -> None:
    """Raises InvalidArgumentError if options other than defaults differ from those of the partition."""
    defaults, its = PartitionOptions(), partition.options
    differing = [
        f"{name}: requested {getattr(options, name)!r}, but it was made with {getattr(its, name)!r}"
        for name in PartitionOptions.__struct_fields__
        if getattr(options, name) not in (getattr(defaults, name), getattr(its, name))
    ]
    if differing:
        raise InvalidArgumentError(
            f"the partition {partition.name!r} exists with other settings: {'; '.join(differing)}. The settings of a "
            f"partition never change: request the same settings everywhere, before the first put, or choose another "
            f"name"
        )


class NewRows:
    """Rows that a request adds, and the records that add them. indexes: their global indexes, in order."""

    def __init__(
        self,
        state: State,
        name: str,
        count: int,
        pre_allocate: int,
        keys: list[str] | None,
        groups: list[str] | None,
        client: str,
    ) -> None:
        partition = state.partitions.get(name)
        self.records: list[r.AnyRecord] = []
        first = state.next_index
        if partition is None:
            self.records = create_partition(state, CreatePartition(name, pre_allocate))
            free = np.arange(first, first + pre_allocate)
            first += pre_allocate
            check_capacity(state, count)
        else:
            _check_new(state, partition, count)
            free = NOBODYS
            if partition.waiting:
                free = partition.rows.indexes_of(np.array(partition.waiting[:count], "i8"))
        taken = min(count, len(free))
        fresh = count - taken
        self.indexes = np.arange(first, first + fresh)
        if taken:
            self.indexes = np.concatenate([free[:taken], self.indexes])
        if count:
            self.records.append(r.RowsReserved(name, first, fresh, taken, keys, groups, client=client))


def _check_new(state: State, partition: Partition, count: int) -> None:
    """Raises where a partition, or the system, does not take in `count` more rows."""
    if count and partition.sealed:
        raise SealedError(
            f"partition {partition.name!r} is sealed: it takes new fields of its rows, but no new rows. "
            f"Put the {count} rows into another partition."
        )
    flow_control.check_staleness(partition, count)
    check_capacity(state, count)


def _check_groups(partition: Partition, groups: list[str], rows: list[int]) -> None:
    """Raises where one of these rows (-1: a new one) cannot become a member of its group."""
    arriving: dict[str, int] = {}
    known = partition.groups.of(np.array(rows, "i8"), 1) if partition.groups.explicit else np.full(len(rows), -1)
    for name, number in zip(groups, known.tolist(), strict=True):
        if number < 0:
            arriving[name] = arriving.get(name, 0) + 1
        elif partition.groups.declared[number].name != name:
            raise InvalidArgumentError(
                f"a sample of group {partition.groups.declared[number].name!r} cannot join group {name!r}; "
                f"a sample is in one group for ever"
            )
    size = partition.groups.size
    if size is None:
        return
    for name, count in arriving.items():
        group = partition.groups.by_name.get(name)
        there = len(group.members) if group else 0
        if name in partition.groups.unborn:  # the missing samples of a dropped group are dropped, but no more samples
            there = size - partition.groups.unborn[name]
        if there + count > size:
            raise InvalidArgumentError(
                f"group {name!r} of partition {partition.name!r} has room for {size} samples (its group_size); "
                f"{there} are there and {count} more are put. Give the others another group_id."
            )


def check_capacity(state: State, count: int) -> None:
    """Raises CapacityError where `count` more rows do not fit."""
    if state.capacity is None or not count:
        return
    there = state.row_count
    if there + count > state.capacity:
        raise CapacityError(
            f"the capacity of {state.capacity} rows (backend.SimpleStorage.total_storage_size) is exceeded: "
            f"{there} rows are stored and {count} more are put. Clear rows that are no longer needed, raise the "
            f"limit, or give the put a timeout= to wait for room."
        )


def reserve(state: State, client: str, request: Reserve) -> tuple[list[r.AnyRecord], np.ndarray]:
    """Records, and the global indexes that answer the request."""
    partition = state.partitions.get(request.partition)
    if not 0 <= request.count <= MAX_RESERVED:
        raise InvalidArgumentError(f"{request.count} rows cannot be reserved at once")
    if request.groups is not None:
        if request.keys is not None or len(request.groups) != request.count:
            raise InvalidArgumentError("group_ids go with new rows without keys, one for each row")
        if partition is not None:
            _check_groups(partition, request.groups, [-1] * request.count)
    if request.keys is None:
        new = NewRows(state, request.partition, request.count, request.pre_allocate, None, request.groups, client)
        return new.records + clear_decisions.unborn(partition, request.groups, new.indexes), new.indexes
    known = partition.keys if partition is not None else {}
    unknown = list(dict.fromkeys(key for key in request.keys if key not in known))
    new = NewRows(state, request.partition, len(unknown), request.pre_allocate, unknown, None, client)
    return new.records, _indexes_of_keys(partition, request.keys, unknown, new.indexes)


def _indexes_of_keys(
    partition: Partition | None, keys: list[str], unknown: list[str], indexes: np.ndarray
) -> np.ndarray:
    if len(unknown) == len(keys):
        return indexes
    fresh = dict(zip(unknown, indexes.tolist(), strict=True))
    out = np.empty(len(keys), "i8")
    places = [i for i, key in enumerate(keys) if key not in fresh]
    if partition is not None:
        positions = np.array([partition.keys[keys[i]] for i in places], "i8")
        out[places] = partition.rows.indexes_of(positions)
    for i, key in enumerate(keys):
        if key in fresh:
            out[i] = fresh[key]
    return out


def publish(state: State, writer: str, request: Publish) -> tuple[list[r.AnyRecord], np.ndarray, bool]:
    """Records, the global indexes of the rows that are written, in the order of the put, and whether all are new."""
    if writer in state.fenced:
        raise ProtocolError("this writer was proven dead and its space taken back; it must not put any more")
    _check_shape(request)
    partition = state.partitions.get(request.partition)
    if request.block is not None:
        block, prepared = state.blocks.opened(request.block), state.blocks.prepared
        if prepared is not None and prepared.block is not block:
            prepared = None
        known = partition is not None and partition.learnt == shape_of(block)
        check_block(block, request.count, known or prepared is not None)
        check_places(state, writer, block)
        if not known:
            fields, typed = ({}, 0) if partition is None else (partition.fields, partition.typed)
            match = prepared is not None and prepared.matches(fields, typed)
            _check_types(partition, block.schema, request.converted, match)
    new = request.rows is None and (
        partition is None or request.keys is None or partition.keys.keys().isdisjoint(request.keys)
    )
    if new and partition is not None and not partition.waiting:
        records, indexes = _put_new(state, partition, writer, request)
    else:
        records, indexes = _put(state, partition, writer, request)
    if request.groups is not None:
        dropped = clear_decisions.unborn(partition, request.groups, indexes)
        records += dropped
        new = new and not dropped  # else there is less of them than was put
    if request.closes:
        records += close_extents(state, writer, request.closes)
    return records, indexes, new


def _check_types(partition: Partition | None, schema: list[FieldSpec], converted: list[str], match: bool) -> None:
    """Raises FieldTypeError if a value does not match the live values of its field. match: it is known that they do."""
    fields = {} if partition is None else partition.fields
    try:
        for name in converted:
            if name not in fields or fields[name].kind != "tensor":
                raise FieldTypeError(f"field {name!r} no longer holds tensors; nothing was put. Put it again.")
        for spec in () if match else schema:
            field = fields.get(spec.name)
            if field is not None:
                field.check(spec)
    except FieldTypeError as error:
        for spec in schema:
            field = fields.get(spec.name)
            if field is not None and field.kind == "tensor" and (spec.kind == "object" or spec.name in converted):
                error.tensors[spec.name] = [field.dtype, *field.others]
        raise


def _put_new(state: State, partition: Partition, writer: str, request: Publish) -> tuple[list[r.AnyRecord], np.ndarray]:
    """A put of new rows alone, none of them pre-allocated."""
    count, first, tags = request.count, state.next_index, request.tags
    if request.groups is not None:
        _check_groups(partition, request.groups, [-1] * count)
    _check_new(state, partition, count)
    if tags is not None:
        tags = _without_deletes(tags)
    number = 0 if request.block is None else state.next_block
    record = r.RowsPut(
        request.partition, writer, first, count, request.keys, request.groups, tags, number, request.block
    )
    return [record], np.arange(first, first + count)


def _without_deletes(tags: list[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
    """These tags of new rows, which have nothing that could be removed."""
    kinds = map(type, chain.from_iterable(map(dict.values, filter(None, tags))))
    if Ext not in kinds:
        return tags
    return [
        tag and {name: value for name, value in tag.items() if getattr(value, "code", None) != DELETE_CODE}
        for tag in tags
    ]


def _put(
    state: State, partition: Partition | None, writer: str, request: Publish
) -> tuple[list[r.AnyRecord], np.ndarray]:
    """Any other put."""
    groups_left = request.groups
    if request.rows is not None:
        made: list[r.AnyRecord] = []
        indexes = _existing(partition, request)
    elif request.keys is not None:
        known = partition.keys if partition is not None else {}
        unknown = [key for key in request.keys if key not in known]
        fresh_groups = None
        if request.groups is not None:
            if partition is not None:
                _check_groups(partition, request.groups, [known.get(key, -1) for key in request.keys])
            fresh_groups = [g for g, key in zip(request.groups, request.keys, strict=True) if key not in known]
            groups_left = None if len(unknown) == len(request.keys) else request.groups
        if partition is not None and not unknown:
            positions = np.fromiter(map(known.__getitem__, request.keys), "i8", len(request.keys))
            made, indexes = [], partition.rows.indexes_of(positions)
        else:
            new = NewRows(
                state, request.partition, len(unknown), request.pre_allocate, unknown or None, fresh_groups, writer
            )
            made, indexes = new.records, _indexes_of_keys(partition, request.keys, unknown, new.indexes)
    else:
        if partition is not None and request.groups is not None:
            _check_groups(partition, request.groups, [-1] * request.count)
        new = NewRows(state, request.partition, request.count, request.pre_allocate, None, request.groups, writer)
        made, indexes, groups_left = new.records, new.indexes, None
    if request.block is not None or request.tags is not None or groups_left is not None:
        made.append(
            r.Published(
                request.partition, indexes.tobytes(), writer, state.next_block if request.block is not None else 0,
                request.block, request.tags, request.replace_tags, groups_left,
            )
        )  # fmt: skip
    return made, indexes


def _twice(names: Collection[str] | Collection[int]) -> str:
    """Those that are there more than once, for a message: not too many of them."""
    found = [name for name, times in Counter[str | int](names).items() if times > 1]
    return f"{found[:5]!r}" + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def _check_shape(request: Publish) -> None:
    count = request.count
    if not 0 < count <= MAX_RESERVED:
        raise InvalidArgumentError(f"a put of {count} rows: at least one is needed")
    if request.keys is not None:
        if len(request.keys) != count:
            raise InvalidArgumentError(f"{len(request.keys)} keys for {count} rows")
        if len(set(request.keys)) != count:
            raise DuplicateError(f"Got duplicated keys in one put: {_twice(request.keys)}; every key names one sample")
    if request.rows is not None and request.keys is not None:
        raise InvalidArgumentError("a put names its samples by global index or by key, not by both")
    if request.rows is not None and len(request.rows) != 8 * count:
        raise InvalidArgumentError(f"{len(request.rows) // 8} rows are named for {count} rows of values")
    for what, column in (("tags", request.tags), ("group_ids", request.groups)):
        if column is not None and len(column) != count:
            raise InvalidArgumentError(f"{len(column)} {what} for {count} rows")
    if request.block is None and request.tags is None and request.groups is None:
        raise InvalidArgumentError("a put needs fields or tags; it has neither")


def _existing(partition: Partition | None, request: Publish) -> np.ndarray:
    assert request.rows is not None
    indexes = np.frombuffer(request.rows, "<i8")
    if len(indexes) > 1 and len(np.unique(indexes)) != len(indexes):
        raise DuplicateError(
            f"a put names samples twice: {_twice(indexes.tolist())}; each row of a put is another sample"
        )
    positions = np.full(len(indexes), -1) if partition is None else partition.rows.positions_of(indexes)
    if (positions < 0).any():
        gone = indexes[positions < 0][:5].tolist()
        raise StorageKeyNotFoundError(
            f"{int((positions < 0).sum())} of {len(indexes)} samples are not in partition {request.partition!r} "
            f"(cleared, or of another partition), among them {gone}; nothing was put"
        )
    assert partition is not None
    if partition.waiting and not set(partition.waiting).isdisjoint(positions.tolist()):
        raise InvalidArgumentError(
            f"a put names pre-allocated rows of partition {request.partition!r}, which belong to nobody yet; "
            f"rows are taken by inserting samples or by mode='insert'"
        )
    if request.groups is not None:
        _check_groups(partition, request.groups, positions.tolist())
    return indexes


def check_room(state: State, name: str, count: int) -> None:
    """Raises CapacityError where `count` more rows of this partition cannot be taken now."""
    check_capacity(state, count)
    partition = state.partitions.get(name)
    if partition is not None:
        flow_control.check_staleness(partition, count)


def seal(state: State, name: str, connected: Collection[str], pre_allocate: int = 0) -> list[r.AnyRecord]:
    """One producer seals; with the last, pre-allocated rows that nobody took vanish, and what nobody will put."""
    partition = state.partitions.get(name)
    if partition is None:
        made = create_partition(state, CreatePartition(name, pre_allocate))
        return [*made, r.SealCounted(name)]
    if partition.sealed:
        return []
    made = [r.SealCounted(name)]
    if partition.seals + 1 >= partition.options.producers and partition.waiting:
        waiting = partition.rows.indexes_of(np.array(partition.waiting, "i8"))
        made.append(r.RowsCleared(name, waiting.tobytes()))
    if partition.seals + 1 >= partition.options.producers:
        made += unneeded_rows.never_put(partition, connected)
    return made
