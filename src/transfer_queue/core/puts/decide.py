"""Handles puts and reservations: decides what they change, and replies.

A put is decided, recorded and applied (`core.puts.apply`) in the same way, whether it comes alone or with puts of other
clients that arrived at the same time. Of several puts, the limits and columns of the partition, the ready sets and the
requests that wait are read once. If one of them would be refused or would wait, each is decided by itself, so that
each gets its own result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import repeat

import msgspec
import numpy as np

from transfer_queue.core.absent_clients import AbsentHolders
from transfer_queue.core.context import Context
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.events.registry import Caller, Decision, ParkDecision, handles
from transfer_queue.core.puts import equal_values, limits
from transfer_queue.core.puts.group_decisions import NO_GROUPS, join_groups
from transfer_queue.core.puts.partitions import create_partition
from transfer_queue.core.queries.lookups import meta_reply
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State, require_partition
from transfer_queue.core.tables.fields import FieldStats, check_block, check_number
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.core.units.location_checks import (
    check_apart,
    check_places,
    close_extents,
    find_overwritten,
    fit_together,
)
from transfer_queue.errors import (
    CapacityError,
    DuplicateError,
    FieldTypeError,
    InvalidArgumentError,
    LockLostError,
    PartitionFullError,
    ProtocolError,
    StalenessError,
    StorageKeyNotFoundError,
    TransferQueueError,
    VersionConflictError,
)
from transfer_queue.messages.descriptors import NewBlock
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.puts import Publish, PublishReply, Reserve
from transfer_queue.messages.tag_table import TagTable

NO_ROWS = np.zeros(0, "i8")
LIMITS = (PartitionFullError, StalenessError)
"""The errors of a partition that accepts no more rows. Rows that clients which are gone have reserved make space."""

# ------------------------------------------------------------ handlers


@handles(Reserve)
def handle_reserve(context: Context, caller: Caller, request: Reserve) -> Decision | ParkDecision:
    """Reserve rows. The reply has their metadata."""
    try:
        records, indexes, new = reserve(context.state, caller.client, request)
    except CapacityError as error:
        if isinstance(error, LIMITS) and context.services[AbsentHolders].drop_abandoned(request.partition):
            return handle_reserve(context, caller, request)
        return _wait_for_space(request, error)
    context.services[AbsentHolders].note_holder(caller.client)

    def reply() -> AnyReply:
        partition = context.state.partitions[request.partition]
        positions = partition.rows.positions_of(indexes)
        fields = partition.common_fields(positions)
        produced = np.full(len(positions), bool(fields))
        meta = meta_reply(partition, positions, indexes, fields, produced)
        return msgspec.structs.replace(meta, version=partition.version) if new else meta

    return Decision(records, reply)


@handles(Publish)
def handle_publish(context: Context, caller: Caller, request: Publish) -> Decision | ParkDecision:
    """Publish a put. The reply has the rows, and their tags and common fields if some of the keys existed before."""
    try:
        decided = decide(context.state, [(caller.client, request)])
    except CapacityError as error:
        if isinstance(error, LIMITS) and context.services[AbsentHolders].drop_abandoned(request.partition):
            return handle_publish(context, caller, request)
        return _wait_for_space(request, error)
    except ProtocolError:
        lost = find_overwritten(context.state, caller.client, request.blocks)
        if not lost:
            raise
        for record in lost:
            context.log.apply(record)
        return handle_publish(context, caller, request)
    if request.block is not None or request.equal:
        context.measures.counters["published_rows"] += request.count
    return Decision(decided.records, partial(_reply, context.state, request, decided))


def _wait_for_space(request: Publish | Reserve, error: CapacityError) -> ParkDecision:
    """Park a put that finds no space. Raises the error if it does not wait."""
    if request.wait is None or request.wait <= 0:
        raise limits.refused_put(error, request.wait) from None
    return ParkDecision(request, request.wait)


def _reply(state: State, request: Publish, decided: DecidedPut) -> PublishReply:
    """Return the reply to a put, which was applied."""
    partition, rows, epoch = state.partitions[request.partition], decided.rows, state.epoch
    dtypes = partition.mixed_dtypes(request.blocks) if partition.learnt is None else {}
    if decided.is_new or request.keys is None:
        version = partition.version if decided.is_new else 0
        return PublishReply(rows.tobytes(), epoch=epoch, dtypes=dtypes, warning=decided.warning, version=version)
    positions = decided.positions
    if positions is None:
        positions = partition.rows.positions_of(rows)
    fields = partition.common_fields(positions)
    as_sent = isinstance(request.tags, TagTable) and partition.has_no_other_tags(positions, request.tags)
    tags = None if as_sent else partition.packed_tags_of(positions)
    each = partition.common_fields_of_parts(positions, request.puts) if request.puts else []
    return PublishReply(rows.tobytes(), tags, fields, epoch, dtypes, each, as_sent, decided.warning)


# ------------------------------------------------------------ several puts


def group_puts(callers: Iterable[Caller]) -> list[list[Caller]]:
    """Return puts of different clients in lists, of which those with several puts may be published at once."""
    groups: dict[tuple[object, ...], list[Caller]] = {}
    for caller in callers:
        request = _put_of(caller)
        key: tuple[object, ...] = caller.waiter
        if _is_usual(request):
            fields = 0 if request.block is None else len(request.block.schema)
            key = request.partition, request.keys is None, request.rows is None, request.replace_tags, fields
        groups.setdefault(key, []).append(caller)
    return list(groups.values())


def _put_of(caller: Caller) -> Publish:
    request = caller.envelope.body
    assert isinstance(request, Publish)
    return request


def _is_usual(request: Publish) -> bool:
    """Whether a put has at most one block of values, and nothing that needs a look at other samples or locks."""
    block = request.block
    return (
        request.groups is None
        and request.expected is None
        and request.fence is None
        and not (request.further or request.equal or request.closes or request.converted)
        and not isinstance(request.tags, TagTable)
        and (block is None or (block.slots is None and not (block.parts or block.copies)))
    )


def has_fields(state: State, caller: Caller) -> bool:
    """Return whether the partition of a put exists and has fields. Otherwise the put is published by itself."""
    partition = state.partitions.get(_put_of(caller).partition)
    return partition is not None and bool(partition.fields)


def publish_several(context: Context, callers: Sequence[Caller]) -> list[Effect] | None:
    """Publish the puts of one list of `group_puts`; None if each must be handled by itself."""
    state = context.state
    puts = [(caller.client, _put_of(caller)) for caller in callers]
    partition = state.partitions.get(puts[0][1].partition)
    if partition is None or partition.waiting or not all(_is_first(context, caller) for caller in callers):
        return None
    try:
        for _, request in puts:
            state.check_epoch(request)
        decided = decide(state, puts)
    except TransferQueueError:
        return None
    if not decided.is_new and decided.positions is None:  # some of the samples are new, some are not
        return None
    context.measures.counters["requests"] += len(callers)
    for caller, (client, request) in zip(callers, puts, strict=True):
        if caller.envelope.reads:
            context.services[TimelineRecorder].note_reads(client, caller.envelope.reads)
        for observe in context.services.requests.get(Publish, ()):
            observe(client, request)
    for record in decided.records:
        context.log.apply(record)
    if puts[0][1].block is not None:
        context.measures.counters["published_rows"] += len(decided.rows)
    effects: list[Effect] = []
    done = 0
    for caller, (_, request) in zip(callers, puts, strict=True):
        part = slice(done, done + request.count)
        done += request.count
        positions = None if decided.positions is None else decided.positions[part]
        own = msgspec.structs.replace(decided, rows=decided.rows[part], positions=positions)
        effects += context.commit(caller, Decision([], partial(_reply, state, request, own)))
    return effects


def _is_first(context: Context, caller: Caller) -> bool:
    """Whether a request was not sent before: it has no reply yet, does not wait, and was not given up."""
    if caller.waiter in context.state.waiting.by_waiter:
        return False
    client, sequence = caller.client, caller.envelope.sequence
    return not any(
        kept is not None and (sequence in kept.replies or kept.is_finished(sequence))
        for kept in (context.state.clients.get(client), context.connections.unrecorded.get(client))
    )


def _join(state: State, puts: Sequence[Publish], are_next: bool) -> Publish:
    """Return a put of the rows of several puts. are_next: whether the block of each comes next in its extent.

    Raises ProtocolError if they must be decided one by one.
    """
    blocks = [put.block for put in puts if put.block is not None]
    if any(block.schema != blocks[0].schema for block in blocks):
        raise ProtocolError("the puts have different fields")
    if not (are_next or fit_together(state, blocks)):  # blocks that come next never overlap each other
        raise ProtocolError("the blocks of the puts may overlap each other")
    tags = [tag for put in puts for tag in put.tags or [None] * put.count]
    return msgspec.structs.replace(
        puts[0],
        count=sum(put.count for put in puts),
        rows=None if puts[0].rows is None else b"".join([put.rows or b"" for put in puts]),
        keys=None if puts[0].keys is None else [key for put in puts for key in put.keys or ()],
        tags=tags if any(put.tags is not None for put in puts) else None,
    )


# ------------------------------------------------------------ decisions


class _NewRows(msgspec.Struct, frozen=True):
    """The rows that a request takes and adds."""

    made: list[r.AnyRecord]
    """The records that make the partition."""
    indexes: np.ndarray
    """The global indexes of the rows, in order."""
    first_index: int
    taken: int


_NO_NEW_ROWS = _NewRows([], NO_ROWS, 0, 0)


def _new_rows(state: State, partition: Partition | None, name: str, count: int, pre_allocate: int) -> _NewRows:
    """Return the rows of a request for `count` ones. pre_allocate: the rows of a partition that it makes."""
    made: list[r.AnyRecord] = []
    first, free = state.next_index, NO_ROWS
    if partition is None:
        made = create_partition(state, name, pre_allocate)
        free = np.arange(first, first + pre_allocate)
        first += pre_allocate
    limits.check_new(state, partition, count)
    if partition is not None and partition.waiting:
        free = partition.rows.indexes_of(np.array(partition.waiting[:count], "i8"))
    if not len(free):
        return _NewRows(made, np.arange(first, first + count), first, 0)
    taken = min(count, len(free))
    return _NewRows(made, np.concatenate([free[:taken], np.arange(first, first + count - taken)]), first, taken)


def reserve(state: State, client: str, request: Reserve) -> tuple[list[r.AnyRecord], np.ndarray, bool]:
    """Return the records of a reservation, the global indexes of its rows, and whether all of them are new."""
    partition = state.partitions.get(request.partition)
    if not 0 <= request.count <= limits.MAX_RESERVED:
        raise InvalidArgumentError(f"a request can reserve from 0 to {limits.MAX_RESERVED} rows, got {request.count}")
    if request.groups is not None and (request.keys is not None or len(request.groups) != request.count):
        raise InvalidArgumentError("group_ids are only for new rows without keys, and there must be one per row")
    joining = join_groups(partition, request.groups, [-1] * request.count)
    count, keys = request.count, None
    positions: np.ndarray | None = None
    unknown: list[str] = []
    if request.keys is not None:
        positions, unknown = _find_keys(partition, request.keys)
        keys = list(dict.fromkeys(unknown))
        count = len(keys)
    new = _new_rows(state, partition, request.partition, count, request.pre_allocate)
    records = new.made
    if count:
        part = r.WriterPart(client, count)
        records.append(
            r.SamplesPut(
                request.partition, [part], new.first_index, count - new.taken, keys, joining.groups, taken=new.taken
            )
        )
    if keys is None:
        dropped = joining.drop_late(request.partition, new.indexes)
        return records + dropped, new.indexes, not dropped
    indexes = new.indexes
    if len(keys) < len(unknown):  # an unknown key is repeated
        numbers = dict(zip(keys, indexes.tolist(), strict=True))
        indexes = np.array([numbers[key] for key in unknown], "i8")
    return records, _indexes_of_keys(partition, positions, indexes), positions is None


def _find_keys(partition: Partition | None, keys: list[str]) -> tuple[np.ndarray | None, list[str]]:
    """Return the position of the row of each key, -1 for an unknown one, or None if all are; and the unknown keys."""
    if partition is None or partition.keys.keys().isdisjoint(keys):
        return None, keys
    positions = partition.positions_of_keys(keys)
    if len(positions) == len(keys):
        return positions, []
    unknown = [key for key in keys if key not in partition.keys]
    return np.fromiter(map(partition.keys.get, keys, repeat(-1)), "i8", len(keys)), unknown


def _indexes_of_keys(partition: Partition | None, positions: np.ndarray | None, fresh: np.ndarray) -> np.ndarray:
    """Return the global index of the row of each key. positions: see `_find_keys`; fresh: those of unknown keys."""
    if partition is None or positions is None:
        return fresh
    if not len(fresh):
        return partition.rows.indexes_of(positions)
    out, known = np.empty(len(positions), "i8"), positions >= 0
    out[known], out[~known] = partition.rows.indexes_of(positions[known]), fresh
    return out


class DecidedPut(msgspec.Struct, frozen=True):
    """What becomes of a put, or of several."""

    records: list[r.AnyRecord]
    rows: np.ndarray
    """The global index of each row."""
    is_new: bool
    """Whether all rows are new and have the fields of the put."""
    warning: str | None
    """For the client."""
    positions: np.ndarray | None
    """The position of each row if all of them existed before and stay; otherwise None."""


def decide(state: State, puts: Sequence[tuple[str, Publish]]) -> DecidedPut:
    """Decide a put, or the usual puts of several clients, each given with its client."""
    writer, request = puts[0]
    name = request.partition
    partition = state.partitions.get(name)
    parts, are_next = [], True
    for client, put in puts:
        part = r.WriterPart(client, put.count, put.blocks)
        are_next &= _check_put(state, partition, put, part)
        parts.append(part)
    if len(puts) > 1:
        request = _join(state, [put for _, put in puts], are_next)
    keys, count = request.keys, request.count
    positions: np.ndarray | None = None
    if keys is not None:
        positions, fresh = _find_keys(partition, keys)
        if len(keys) > 1:
            # the keys of ascending rows are distinct, which is faster to see than to hash them
            ascending = positions is not None and not fresh and (positions[1:] > positions[:-1]).all()
            if not ascending and len(set(keys)) != len(keys):
                repeated = _repeated_names(keys)
                raise DuplicateError(f"Got duplicated keys in one put: {repeated}; every key names one sample")
        keys, count = fresh or None, len(fresh)
    shared: list[r.SharedField] = []
    noted: list[r.NotedField] = []
    if request.equal:
        shared, noted = equal_values.find_equal(state, partition, request)
    if request.rows is not None:
        positions, count = _existing_rows(partition, request), 0
    joining = NO_GROUPS
    if request.groups is not None:
        members = [-1] * request.count if positions is None else positions.tolist()
        joining = join_groups(partition, request.groups, members, request.puts)
    new = _NO_NEW_ROWS
    if count:
        # the put would take rows of a new partition at once
        new = _new_rows(state, partition, name, count, request.pre_allocate if request.pre_allocate > count else 0)
    is_new, existing, warning = positions is None, None if count else positions, None
    indexes = new.indexes if is_new else _indexes_of_keys(partition, positions, new.indexes)
    records = [
        *new.made,
        r.SamplesPut(
            name,
            parts,
            new.first_index,
            count - new.taken,
            keys,
            joining.groups,
            request.tags,
            0 if request.block is None else state.next_block,
            None if is_new and not new.taken else indexes.tobytes(),
            new.taken,
            False,
            request.replace_tags and not is_new,
            shared,
            noted,
        ),
    ]
    if joining.late:
        records += joining.drop_late(name, indexes)
        is_new, existing, warning = False, None, None if partition is None else joining.warning(partition)
    if request.closes:
        records += close_extents(state, writer, request.closes, parts[0].blocks)[0]
    return DecidedPut(records, indexes, is_new, warning, existing)


def _check_put(state: State, partition: Partition | None, request: Publish, part: r.WriterPart) -> bool:
    """Raise an error if a put is refused, whatever its rows are. Returns the result of `check_places`."""
    if part.client in state.fenced:
        raise ProtocolError("this writer was proven dead and its space was freed; put with a new client")
    check_shape(request)
    if not request.create:
        require_partition(state.partitions, request.partition, "Nothing was put. Create the partition first")
    if request.fence is not None or request.expected is not None:
        _check_conditions(state, partition, request)
    are_next, first, blocks = True, request.block, part.blocks
    if first is not None:
        learnt = None if partition is None or request.further else partition.learnt
        known = learnt == (first.rows, first.dims, tuple(first.schema))
        for block in blocks:
            check_block(block, request.count, known)
            are_next &= check_places(state, part.client, block)
        if request.further:
            check_apart(state, part.client, blocks)
        if not known:
            _check_fields({} if partition is None else partition.fields, request, blocks)
    if request.equal or request.further or (first is not None and first.slots is not None):
        equal_values.check_put(request, blocks)
    return are_next


def _check_fields(fields: dict[str, FieldStats], request: Publish, blocks: list[NewBlock]) -> None:
    """Raise an error if a partition with these fields cannot have those of a put."""
    names = [spec.name for block in blocks for spec in block.schema]
    if len(blocks) > 1 and len(set(names)) != len(names):
        raise InvalidArgumentError(f"two blocks of a put have the same fields: {_repeated_names(names)}")
    known = [(fields[spec.name], spec) for block in blocks for spec in block.schema if spec.name in fields]
    try:
        for name in request.converted:
            if name not in fields or fields[name].kind != "tensor":
                raise FieldTypeError(f"field {name!r} does not hold tensors any more; nothing was put. Put it again.")
        for field, spec in known:
            field.check(spec)
    except FieldTypeError as error:
        for field, spec in known:
            if field.kind == "tensor" and (spec.kind == "object" or spec.name in request.converted):
                error.tensors[spec.name] = [field.dtype, *field.others]
        raise
    check_number(request.partition, fields, names)


def _repeated_names(names: Collection[str] | Collection[int]) -> str:
    """Return the names that occur more than once, for a message, at most 5 of them."""
    repeated = [name for name, times in Counter[str | int](names).items() if times > 1]
    return f"{repeated[:5]!r}" + (f" and {len(repeated) - 5} more" if len(repeated) > 5 else "")


def check_shape(request: Publish) -> None:
    """Raise an error if the parts of a put do not fit together. The state is not needed for this."""
    count = request.count
    if not 0 < count <= limits.MAX_RESERVED:
        raise InvalidArgumentError(f"a put must have from 1 to {limits.MAX_RESERVED} rows, got {count}")
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
    existing = [i for i, key in enumerate(keys) if key in known]
    if partition is not None:
        versions[existing] = partition.changes.versions_of(np.array([known[keys[i]] for i in existing], "i8"))
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
        missing = indexes[positions < 0][:5].tolist()
        raise StorageKeyNotFoundError(
            f"{int((positions < 0).sum())} of {len(indexes)} samples are not in partition {request.partition!r} "
            f"(cleared, or of another partition), among them {missing}; nothing was put"
        )
    assert partition is not None
    if partition.waiting and not set(partition.waiting).isdisjoint(positions.tolist()):
        raise InvalidArgumentError(
            f"a put names pre-allocated rows of partition {request.partition!r} that no producer has taken yet; "
            f"take them by inserting samples, or with mode='insert'"
        )
    return positions
