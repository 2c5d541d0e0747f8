"""Decides what a put, a reservation or a seal changes. Reads the state without changing it, and returns records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
from msgspec.msgpack import Ext

from transfer_queue.core.events import records as r
from transfer_queue.core.puts import equal_values, flow_control
from transfer_queue.core.puts.group_decisions import NO_GROUPS, join_groups
from transfer_queue.core.state import unneeded_rows
from transfer_queue.core.state.check import check_options
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.state.unknown_partitions import require_partition
from transfer_queue.core.tables.field_types import FieldStats, check_block, check_number, shape_of
from transfer_queue.core.units.location_checks import check_apart, check_places, close_extents
from transfer_queue.errors import (
    CapacityError,
    DuplicateError,
    FieldTypeError,
    InvalidArgumentError,
    LockLostError,
    ProtocolError,
    SealedError,
    StorageKeyNotFoundError,
    VersionConflictError,
)
from transfer_queue.messages.base import DELETE_CODE
from transfer_queue.messages.descriptors import NewBlock, PartitionOptions
from transfer_queue.messages.partitions import CreatePartition
from transfer_queue.messages.puts import Publish, Reserve
from transfer_queue.messages.tag_table import SentTags, TagTable

NOBODYS = np.zeros(0, "i8")
MAX_RESERVED = 1 << 28  # rows of one request; a larger number is a mistake


def create_partition(state: State, request: CreatePartition) -> list[r.AnyRecord]:
    """Return the records of a new partition with its pre-allocated rows."""
    check_options(request.options)
    if not 0 <= request.pre_allocate <= MAX_RESERVED:
        raise InvalidArgumentError(f"pre_allocate must be from 0 to {MAX_RESERVED} rows, got {request.pre_allocate}")
    made: list[r.AnyRecord] = [r.PartitionMade(request.partition, request.options)]
    if request.policy_version:
        made.append(r.PolicyAdvanced(request.partition, request.policy_version))
    if request.pre_allocate:
        made.append(r.RowsReserved(request.partition, state.next_index, request.pre_allocate, pre_allocated=True))
    return made


def check_same_options(partition: Partition, options: PartitionOptions) -> None:
    """Raise InvalidArgumentError if options other than defaults differ from those of the partition."""
    defaults, its = PartitionOptions(), partition.options
    differing = [
        f"{name}: requested {getattr(options, name)!r}, but it was created with {getattr(its, name)!r}"
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
    """Rows that a request adds, and the records that add them."""

    def __init__(
        self,
        state: State,
        name: str,
        count: int,
        pre_allocate: int,
        keys: list[str] | None,
        groups: list[str | None] | None,
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
            check_new(state, partition, count)
            free = NOBODYS
            if partition.waiting:
                free = partition.rows.indexes_of(np.array(partition.waiting[:count], "i8"))
        taken = min(count, len(free))
        fresh = count - taken
        self.indexes = np.arange(first, first + fresh)
        """The global indexes of the rows, in order."""
        if taken:
            self.indexes = np.concatenate([free[:taken], self.indexes])
        if count:
            self.records.append(r.RowsReserved(name, first, fresh, taken, keys, groups, client=client))


def check_new(state: State, partition: Partition, count: int) -> None:
    """Raise an error if the partition or the system does not admit `count` more rows."""
    if count and partition.sealed:
        raise SealedError(
            f"partition {partition.name!r} is sealed: it accepts new fields of its rows, but no new rows, and this put "
            f"adds {count}. Put new rows into another partition."
        )
    flow_control.check_staleness(partition, count)
    flow_control.check_max_rows(partition, count)
    check_capacity(state, count)


def check_capacity(state: State, count: int) -> None:
    """Raise CapacityError if `count` more rows exceed the capacity of the system."""
    if state.capacity is not None and (reason := _describe_capacity(state, count)):
        raise CapacityError(f"{reason} Clear rows that are not needed any more, or raise the limit.")


def _describe_capacity(state: State, count: int) -> str:
    """Return why `count` more rows exceed the capacity of the system; "" if they do not."""
    if state.capacity is None or not count or (there := state.row_count) + count <= state.capacity:
        return ""
    return (
        f"the capacity of {state.capacity} rows (backend.SimpleStorage.total_storage_size) is exceeded: {there} rows "
        f"are stored, and this put adds {count}."
    )


def reserve(state: State, client: str, request: Reserve) -> tuple[list[r.AnyRecord], np.ndarray, bool]:
    """Return the records of a reservation, the global indexes of its rows, and whether all of them are new."""
    partition = state.partitions.get(request.partition)
    if not 0 <= request.count <= MAX_RESERVED:
        raise InvalidArgumentError(f"a request can reserve from 0 to {MAX_RESERVED} rows, got {request.count}")
    if request.groups is not None and (request.keys is not None or len(request.groups) != request.count):
        raise InvalidArgumentError("group_ids are only for new rows without keys, and there must be one per row")
    if request.keys is None:
        joining = join_groups(partition, request.groups, [-1] * request.count)
        new = NewRows(state, request.partition, request.count, request.pre_allocate, None, joining.groups, client)
        dropped = joining.drop_late(request.partition, new.indexes)
        return new.records + dropped, new.indexes, not dropped
    positions, unknown = _find_keys(partition, request.keys)
    fresh = dict.fromkeys(unknown)
    new = NewRows(state, request.partition, len(fresh), request.pre_allocate, list(fresh), None, client)
    indexes = new.indexes
    if len(fresh) < len(unknown):  # an unknown key is repeated
        numbers = dict(zip(fresh, indexes.tolist(), strict=True))
        indexes = np.array([numbers[key] for key in unknown], "i8")
    return new.records, _indexes_of_keys(partition, positions, indexes), positions is None


def _find_keys(partition: Partition | None, keys: list[str]) -> tuple[np.ndarray | None, list[str]]:
    """Return the position of the row of each key, -1 for an unknown one, or None if all are; and the unknown keys."""
    if partition is None or partition.keys.keys().isdisjoint(keys):
        return None, keys
    found, known = partition.positions_of_keys(keys), partition.keys
    if len(found) == len(keys):
        return found, []
    return np.fromiter(map(known.get, keys, repeat(-1)), "i8", len(keys)), [key for key in keys if key not in known]


def _indexes_of_keys(partition: Partition | None, positions: np.ndarray | None, fresh: np.ndarray) -> np.ndarray:
    """Return the global index of the row of each key. positions: see `_find_keys`; fresh: those of unknown keys."""
    if partition is None or positions is None:
        return fresh
    if not len(fresh):
        return partition.rows.indexes_of(positions)
    out, known = np.empty(len(positions), "i8"), positions >= 0
    out[known], out[~known] = partition.rows.indexes_of(positions[known]), fresh
    return out


def publish(state: State, writer: str, request: Publish) -> tuple[list[r.AnyRecord], np.ndarray, bool, str | None]:
    """Decide a put.

    Returns its records, the global indexes of its rows, whether all of them are new and have its fields, and a warning
    for its client, if there is one.
    """
    check_writer(state, writer)
    check_shape(request)
    partition = state.partitions.get(request.partition)
    if not request.create:
        require_partition(state.partitions, request.partition, "Nothing was put. Create the partition first")
    _check_conditions(state, partition, request)
    blocks = request.blocks
    if blocks:
        _check_blocks(state, partition, writer, request, blocks)
    if request.equal or request.further or (blocks and blocks[0].slots is not None):
        equal_values.check_put(request, blocks)
    positions, unknown = (None, []) if request.keys is None else _find_distinct(partition, request.keys)
    new = request.rows is None and positions is None
    shared = equal_values.find_shared(state, partition, request) if request.equal else []
    waiting = request.pre_allocate > request.count if partition is None else partition.waiting
    existing = None if request.rows is None else _existing_rows(partition, request)
    joining = NO_GROUPS
    if request.groups is not None:
        joining = join_groups(partition, request.groups, _positions_of(request, positions, existing), request.puts)
    if new and not waiting and not shared:
        records, indexes = _put_new(state, partition, writer, request, joining.groups)
    else:
        targets = _Targets(existing, positions, unknown, joining.groups)
        records, indexes = _put(state, partition, writer, request, targets, shared)
    if request.equal:
        records += equal_values.note_digests(state, partition, request)
    warning = None
    if joining.late:
        records += joining.drop_late(request.partition, indexes)
        warning = None if partition is None else joining.warning(partition)
        new = False  # dropped rows have no fields
    if request.closes:
        records += close_extents(state, writer, request.closes, blocks)[0]
    return records, indexes, new, warning


def _positions_of(request: Publish, keyed: np.ndarray | None, existing: np.ndarray | None) -> Sequence[int]:
    """Return the position of each row of a put, -1 for a new one."""
    found = keyed if existing is None else existing
    return [-1] * request.count if found is None else found.tolist()


def check_writer(state: State, writer: str) -> None:
    """Raise ProtocolError if a writer must not put any more."""
    if writer in state.fenced:
        raise ProtocolError("this writer was proven dead and its space was freed; put with a new client")


def _check_blocks(
    state: State, partition: Partition | None, writer: str, request: Publish, blocks: list[NewBlock]
) -> None:
    """Raise an error if the blocks of a put are not valid, or their values do not match those of the partition."""
    alone = len(blocks) == 1
    known = alone and partition is not None and partition.learnt == shape_of(blocks[0])
    for block in blocks:
        check_block(block, request.count, known)
        check_places(state, writer, block)
    if not alone:
        check_apart(state, writer, blocks)
        names = [spec.name for block in blocks for spec in block.schema]
        if len(set(names)) != len(names):
            raise InvalidArgumentError(f"two blocks of a put have the same fields: {_repeated_names(names)}")
    if not known:
        fields = {} if partition is None else partition.fields
        check_types(fields, blocks, request.converted)
        check_number(request.partition, fields, [spec.name for block in blocks for spec in block.schema])


def check_types(fields: dict[str, FieldStats], blocks: list[NewBlock], converted: list[str]) -> None:
    """Raise FieldTypeError if a value does not match the live values of its field."""
    try:
        for name in converted:
            if name not in fields or fields[name].kind != "tensor":
                raise FieldTypeError(f"field {name!r} does not hold tensors any more; nothing was put. Put it again.")
        for block in blocks:
            for spec in block.schema:
                field = fields.get(spec.name)
                if field is not None:
                    field.check(spec)
    except FieldTypeError as error:
        for spec in chain.from_iterable(block.schema for block in blocks):
            field = fields.get(spec.name)
            if field is not None and field.kind == "tensor" and (spec.kind == "object" or spec.name in converted):
                error.tensors[spec.name] = [field.dtype, *field.others]
        raise


def _find_distinct(partition: Partition | None, keys: list[str]) -> tuple[np.ndarray | None, list[str]]:
    """Return the result of `_find_keys`. Raises DuplicateError if a key is repeated."""
    positions, unknown = _find_keys(partition, keys)
    if len(keys) > 1:
        # the keys of ascending rows are distinct, which is faster to see than to hash them
        ascending = positions is not None and not unknown and (positions[1:] > positions[:-1]).all()
        if not ascending and len(set(keys)) != len(keys):
            raise DuplicateError(f"Got duplicated keys in one put: {_repeated_names(keys)}; every key names one sample")
    return positions, unknown


def _put_new(
    state: State, partition: Partition | None, writer: str, request: Publish, groups: list[str | None] | None
) -> tuple[list[r.AnyRecord], np.ndarray]:
    """Decide a put that has only new rows, and no pre-allocated ones. groups: the group that each row joins."""
    count, first, tags = request.count, state.next_index, request.tags
    made: list[r.AnyRecord] = []
    if partition is None:  # rows to pre-allocate would be taken at once
        made = create_partition(state, CreatePartition(request.partition, 0))
        check_capacity(state, count)
    else:
        check_new(state, partition, count)
    if tags is not None:
        tags = without_deletes(tags)
    number = 0 if request.block is None else state.next_block
    record = r.RowsPut(
        request.partition, writer, first, count, request.keys, groups, tags, number, request.block,
        request.further,
    )  # fmt: skip
    return [*made, record], np.arange(first, first + count)


def without_deletes(tags: SentTags) -> SentTags:
    """Return the tags of new rows without the entries that remove a tag, since new rows have none."""
    if isinstance(tags, TagTable):
        return tags.without_deletes()
    kinds = map(type, chain.from_iterable(map(dict.values, filter(None, tags))))
    if Ext not in kinds:
        return tags
    return [
        tag and {name: value for name, value in tag.items() if getattr(value, "code", None) != DELETE_CODE}
        for tag in tags
    ]


class _Targets(NamedTuple):
    """The rows of a put."""

    existing: np.ndarray | None
    """The positions of the rows that it names; None if it names none."""
    positions: np.ndarray | None
    """The rows of its keys, see `_find_keys`; so is `unknown`."""
    unknown: list[str]
    groups: list[str | None] | None
    """See `Joining`."""


def _put(
    state: State,
    partition: Partition | None,
    writer: str,
    request: Publish,
    targets: _Targets,
    shared: list[r.SharedField],
) -> tuple[list[r.AnyRecord], np.ndarray]:
    """Decide any other put."""
    positions, unknown = targets.positions, targets.unknown
    groups_left = targets.groups
    if targets.existing is not None:
        assert partition is not None
        made: list[r.AnyRecord] = []
        indexes = partition.rows.indexes_of(targets.existing)
    elif request.keys is not None:
        fresh_groups = None
        if targets.groups is not None:
            rows = [-1] * request.count if positions is None else positions.tolist()
            fresh_groups = [group for group, row in zip(targets.groups, rows, strict=True) if row < 0]
            groups_left = None if positions is None else targets.groups
        made, fresh = [], NOBODYS
        if unknown:
            new = NewRows(state, request.partition, len(unknown), request.pre_allocate, unknown, fresh_groups, writer)
            made, fresh = new.records, new.indexes
        indexes = _indexes_of_keys(partition, positions, fresh)
    else:
        new = NewRows(state, request.partition, request.count, request.pre_allocate, None, targets.groups, writer)
        made, indexes, groups_left = new.records, new.indexes, None
    if shared:
        made.append(r.ValuesShared(request.partition, indexes.tobytes(), shared))
    if request.block is not None or request.tags is not None or groups_left is not None:
        made.append(
            r.Published(
                request.partition, indexes.tobytes(), writer, state.next_block if request.block is not None else 0,
                request.block, request.tags, request.replace_tags, groups_left, request.further,
            )
        )  # fmt: skip
    return made, indexes


def _repeated_names(names: Collection[str] | Collection[int]) -> str:
    """Return the names that occur more than once, for a message, at most 5 of them."""
    found = [name for name, times in Counter[str | int](names).items() if times > 1]
    return f"{found[:5]!r}" + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def check_shape(request: Publish) -> None:
    """Raise an error if the parts of a put do not fit together. The state is not needed for this."""
    count = request.count
    if not 0 < count <= MAX_RESERVED:
        raise InvalidArgumentError(f"a put must have from 1 to {MAX_RESERVED} rows, got {count}")
    if request.keys is not None and len(request.keys) != count:
        raise InvalidArgumentError(f"a put must have a key per row, got {len(request.keys)} keys for {count} rows")
    if request.rows is not None:
        if request.keys is not None:
            raise InvalidArgumentError("a put must name its samples by global index or by key, got both")
        if len(request.rows) != 8 * count:
            raise InvalidArgumentError(f"a put has {count} rows of values, but names {len(request.rows) // 8} rows")
    if request.tags is not None:
        if len(request.tags) != count:
            raise InvalidArgumentError(f"a put of {count} rows must have {count} tags, got {len(request.tags)}")
        if isinstance(request.tags, TagTable):
            request.tags.check()
    if request.groups is not None and len(request.groups) != count:
        raise InvalidArgumentError(f"a put of {count} rows must have {count} group_ids, got {len(request.groups)}")
    if request.puts and sum(request.puts) != count:
        raise InvalidArgumentError(f"joined puts of {sum(request.puts)} rows must have as many rows, got {count}")
    if request.block is None:
        if request.further:
            raise InvalidArgumentError("a put has further blocks, but no first one")
        if request.tags is None and request.groups is None and not request.equal:
            raise InvalidArgumentError("a put must have fields or tags, got neither")


def _check_conditions(state: State, partition: Partition | None, request: Publish) -> None:
    """Raise an error if the lock of a put is not in force, or a key does not have the version that it must have."""
    if request.fence is not None and request.fence not in state.locks.by_token:
        raise LockLostError(
            f"the lock with token {request.fence} is not in force any more: it was released, its lease ended, or a "
            f"checkpoint was loaded. Nothing was put. Take the lock again, and read again what the put depends on."
        )
    if request.expected is None:
        return
    keys, known = request.keys or [], {} if partition is None else partition.keys
    if request.keys is None or len(request.expected) != 8 * len(keys):
        raise InvalidArgumentError(
            f"a put with expected versions must have a key and a version per row, got {len(keys)} keys and "
            f"{len(request.expected)} bytes of versions"
        )
    versions = np.zeros(len(keys), "i8")
    there = [i for i, key in enumerate(keys) if key in known]
    if partition is not None:
        versions[there] = partition.changes.versions_of(np.array([known[keys[i]] for i in there], "i8"))
    differing = np.flatnonzero(versions != np.frombuffer(request.expected, "<i8")).tolist()
    if differing:
        raise VersionConflictError(
            f"{len(differing)} of {len(keys)} keys of partition {request.partition!r} were put, cleared or created "
            f"after they were read, among them {[keys[i] for i in differing[:5]]}; nothing was put. Read them again."
        )


def _existing_rows(partition: Partition | None, request: Publish) -> np.ndarray:
    """Return the positions of the rows that a put names."""
    assert request.rows is not None
    indexes = np.frombuffer(request.rows, "<i8")
    if len(indexes) > 1 and len(np.unique(indexes)) != len(indexes):
        raise DuplicateError(f"a put must name each sample once, but repeats {_repeated_names(indexes.tolist())}")
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
            f"a put names pre-allocated rows of partition {request.partition!r} that no producer has taken yet; "
            f"take them by inserting samples, or with mode='insert'"
        )
    return positions


def check_limits(state: State, name: str, count: int) -> None:
    """Raise CapacityError if the partition cannot admit `count` more rows now."""
    check_capacity(state, count)
    partition = state.partitions.get(name)
    if partition is not None:
        flow_control.check_staleness(partition, count)
        flow_control.check_max_rows(partition, count)


def describe_limits(state: State, name: str, count: int) -> str:
    """Return why the partition cannot admit `count` more rows now; "" if it can."""
    reason, partition = _describe_capacity(state, count), state.partitions.get(name)
    if reason or partition is None:
        return reason
    return flow_control.describe_staleness(partition, count) or flow_control.describe_max_rows(partition, count)


def seal(state: State, name: str, connected: Collection[str], pre_allocate: int = 0) -> list[r.AnyRecord]:
    """Return the records of a seal by one producer.

    The last seal clears pre-allocated rows that were not taken, and drops rows that no client can put any more.
    """
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
        made += unneeded_rows.drop_abandoned(partition, connected)
    return made
