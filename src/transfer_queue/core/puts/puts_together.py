"""Puts of new samples by several clients that arrive at the same time are decided, recorded and applied together.

The limits and columns of the partition, the ready sets and the requests that wait are then read once for all of
them. This is only for puts that are usual and alike. Every other put is handled by itself (`put_handlers`), and so is
each of these puts if any of them would be refused or would wait, so that each gets its own result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from transfer_queue.core.activity import Activity
from transfer_queue.core.context import Context
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.events.registry import Caller
from transfer_queue.core.puts import put_decisions
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.field_types import check_block, check_number, shape_of
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.core.units.location_checks import check_places, fit_together
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.descriptors import NewBlock
from transfer_queue.messages.puts import Publish, PublishReply
from transfer_queue.messages.tag_table import TagTable


def alike_puts(callers: Iterable[Caller]) -> list[list[Caller]]:
    """Return puts of different clients in lists, of which those with several puts may be decided together."""
    alone: list[list[Caller]] = []
    alike: dict[tuple[str, bool, int], list[Caller]] = {}
    for caller in callers:
        request = _put_of(caller)
        if request.block is not None and _is_usual(request, request.block):
            key = request.partition, request.keys is None, len(request.block.schema)
            alike.setdefault(key, []).append(caller)
        else:
            alone.append([caller])
    return [*alone, *alike.values()]


def _put_of(caller: Caller) -> Publish:
    request = caller.envelope.body
    assert isinstance(request, Publish)
    return request


def _is_usual(request: Publish, block: NewBlock) -> bool:
    """Whether a put has one block of values and nothing that needs a look at other samples, blocks or locks."""
    return (
        request.rows is None
        and request.groups is None
        and request.expected is None
        and request.fence is None
        and not (request.further or request.equal or request.closes or request.converted)
        and not isinstance(request.tags, TagTable)
        and block.slots is None
        and not (block.parts or block.copies)
    )


def has_fields(state: State, caller: Caller) -> bool:
    """Return whether the partition of a put exists and has fields, without which `decide` returns None."""
    partition = state.partitions.get(_put_of(caller).partition)
    return partition is not None and bool(partition.fields)


def decide(state: State, callers: Sequence[Caller]) -> r.RowsPutTogether | None:
    """Return the record of the puts of one list of `alike_puts`; None if each must be handled by itself."""
    first = _put_of(callers[0])
    partition = state.partitions.get(first.partition)
    if partition is None or partition.waiting or first.block is None or not partition.fields:
        return None
    puts: list[r.PutOfClient] = []
    keys: list[str] = []
    tags: list[dict[str, object] | None] = []
    tagged, all_next = False, True
    try:
        put_decisions.check_types(partition.fields, [first.block], [])
        check_number(partition.name, partition.fields, [spec.name for spec in first.block.schema])
        for caller in callers:
            request = _put_of(caller)
            block = request.block
            if block is None or block.schema != first.block.schema or not _is_first(state, caller):
                return None
            # blocks that come next in extents of different writers never overlap each other
            all_next &= _check_put(state, partition, caller.client, request, block)
            puts.append(r.PutOfClient(caller.client, block))
            keys += request.keys or ()
            if request.tags is None:
                tags += [None] * request.count
            else:
                sent = put_decisions.without_deletes(request.tags)
                assert isinstance(sent, list)
                tags += sent
                tagged = True
        put_decisions.check_new(state, partition, len(tags))
    except TransferQueueError:
        return None
    if not (all_next or fit_together(state, [put.block for put in puts])):
        return None
    if keys and not (len(set(keys)) == len(keys) and partition.keys.keys().isdisjoint(keys)):
        return None
    return r.RowsPutTogether(
        partition.name, state.next_index, state.next_block, puts, keys or None, tags if tagged else None
    )


def _is_first(state: State, caller: Caller) -> bool:
    """Whether a request was not sent before: it has no reply yet, does not wait, and was not given up."""
    if caller.waiter in state.waiting.by_waiter:
        return False
    kept, sequence = state.clients.get(caller.client), caller.envelope.sequence
    return kept is None or not (sequence in kept.replies or kept.is_finished(sequence))


def _check_put(state: State, partition: Partition, writer: str, request: Publish, block: NewBlock) -> bool:
    """Raise an error if a put is refused when no other put comes before it. Returns the result of `check_places`."""
    state.check_epoch(request)
    put_decisions.check_writer(state, writer)
    put_decisions.check_shape(request)
    check_block(block, request.count, partition.learnt == shape_of(block))
    return check_places(state, writer, block)


def carry_out(context: Context, callers: Sequence[Caller], record: r.RowsPutTogether) -> list[Effect]:
    """Apply the record of `decide`, and reply to each put."""
    for caller in callers:
        if caller.envelope.reads:
            context.services[TimelineRecorder].note_reads(caller.client, caller.envelope.reads)
        context.services[Activity].note_request(caller.client, caller.envelope.body)
    context.log.apply(record)
    partition = context.state.partitions[record.partition]
    effects: list[Effect] = []
    first = record.first_index
    for caller in callers:
        request = _put_of(caller)
        indexes = np.arange(first, first + request.count, dtype="<i8")
        first += request.count
        dtypes = partition.mixed_dtypes(request)
        reply = PublishReply(indexes.tobytes(), epoch=context.state.epoch, dtypes=dtypes, version=partition.version)
        effects += context.reply(caller, reply)
    context.measures.counters["published_rows"] += first - record.first_index
    return effects
