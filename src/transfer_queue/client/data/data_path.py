"""The requests, puts and gets of which the operations of a client consist.

A put writes its block into leased space and publishes it. If it fails, it leaves nothing. A get copies the values that
a lookup names, and then checks that their blocks were not replaced meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from tensordict import TensorDict

from transfer_queue.client.conversion import arguments, replies
from transfer_queue.client.conversion.arguments import Columns, DataParser, checked_parser_result, parser_columns
from transfer_queue.client.data import store_io
from transfer_queue.client.data.block_groups import BlockGroup, describe_block, group_bytes, place_blocks
from transfer_queue.client.data.client_context import ClientContext
from transfer_queue.client.data.device_copies import KIND, LEAST_REGISTERED, DeviceCopies, HostArenas, copies_to
from transfer_queue.client.data.device_get import copy_to_device, get_to_device
from transfer_queue.client.data.extent_allocator import ExtentAllocator
from transfer_queue.client.data.lease_renewal import Renewals
from transfer_queue.client.data.remote_io import UnitSilentError, write_remote
from transfer_queue.client.data.timeline_reader import EVENTS_OF_A_LONG_WAIT, TimelineReader
from transfer_queue.client.operations.long_waits import LongWait, describe_call, report, with_verdict
from transfer_queue.client.tracing import MAX_NAMES, bytes_of
from transfer_queue.errors import (
    AuthenticationError,
    CapacityError,
    ConnectionLostError,
    DeadlockError,
    EqualValueGoneError,
    FieldTypeError,
    NotInitializedError,
    ProtocolError,
    StorageKeyNotFoundError,
    TransferQueueError,
    UnitLostError,
    WaitTimeoutError,
)
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Claim, ClaimReply, ReportBatches
from transfer_queue.messages.descriptors import NESTED
from transfer_queue.messages.envelopes import AnyReply, AnyRequest
from transfer_queue.messages.puts import Publish, PublishReply
from transfer_queue.messages.queries import EqualReply, ExplainWait, FindEqual, Lookup, LookupReply
from transfer_queue.messages.reports.timeline import TimelineReply
from transfer_queue.messages.system import Status, SystemStatus
from transfer_queue.messages.tag_table import SentTags
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.batch_columns import BatchLease
from transfer_queue.net.calls import CONTROLLER, Call, Notice, Pause, Request
from transfer_queue.storage.protocols import Reserved
from transfer_queue.wire.blocks.encode import EncodedBlock, encode_put
from transfer_queue.wire.blocks.equal_rows import hash_put
from transfer_queue.wire.blocks.gather import Views, gather, gather_objects, nest_tables
from transfer_queue.wire.blocks.gather_into import gather_into
from transfer_queue.wire.blocks.row_addressing import Memory
from transfer_queue.wire.buffers.copies import U8, allocate, copy_bytes

T = TypeVar("T")
Operation = Generator[Call, AnyReply, T]

KIND_ATTEMPTS = 4
"""Attempts of a put, if other clients change meanwhile whether its fields contain tensors."""
READ_ATTEMPTS = 8
"""Attempts to read values that are replaced while they are read."""
REREAD_SECONDS = 0.005
"""Half of the first pause before a block is read again that its storage did not have. The pauses double."""
FREEING_SECONDS = 0.25
"""Seconds until a unit knows that an extent is free, after the controller does."""
OFFLOAD_SECONDS = 2.0
"""Seconds that a put waits at most until blocks are moved to disk, before it is written to disk itself."""
REPORT_SECONDS = 2.0
"""Seconds in which the controller must reply to each request of the log of a long wait."""
HELD_SECONDS = 30.0
"""Seconds for which a batch is held without contact to the controller, until it is handed over."""
PUT_ATTEMPTS = 5
"""Attempts of a put whose storage unit is lost each time."""
UNCERTAIN = (ConnectionLostError, NotInitializedError, WaitTimeoutError, ProtocolError, AuthenticationError)
"""After these errors it is unknown whether a request was carried out. Any other error means that it was refused."""


class DataPath:
    """The requests, puts and gets of one client."""

    def __init__(self, state: ClientContext) -> None:
        self._state = state
        self._device_copies: dict[str, DeviceCopies] = {}
        """Kind of device -> the copies to and from such devices."""
        self.held: list[BatchLease] | None = None
        """The batches that were claimed through this object and that its user hands over itself (`_holding`).

        None: each call hands its batch over when it returns.
        """
        state.session.report = self._report_wait

    @property
    def renewals(self) -> Renewals:
        """The leases that this client renews."""
        return self._state.renewals

    def _ask(
        self, request: AnyRequest, kind: type[T], timeout: float | None, parked: float | None = None
    ) -> Operation[T]:
        """Return the reply to a request. The caller has validated `parked`, the wait of the request itself."""
        arguments.check_partition_id(getattr(request, "partition", ""))
        call = Request(CONTROLLER, request, parked, arguments.validated_seconds(timeout))
        yield from self._state.learn()
        reply = yield call
        if not isinstance(reply, kind):
            raise ProtocolError(f"the controller replied to {type(request).__name__} with {type(reply).__name__}")
        if isinstance(reply, (Done, ClaimReply)) and reply.warning is not None:
            self._state.warn(reply.warning)
        return reply

    @property
    def long_wait(self) -> LongWait:
        """A new `LongWait` on this client's clock, for a wait of many requests."""
        return LongWait(self.clock)

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of this client, in seconds."""
        return lambda: self._state.session.clock()

    def _report_wait(self, call: Request, waited: float) -> Operation[None]:
        """Log what a call waits for, unless it has its reply meanwhile. The last line is the verdict."""
        try:
            verdict = yield from self._bottleneck(REPORT_SECONDS)
            text = describe_call(call)
            if not text:
                text = str((yield from self._ask(ExplainWait(call.sequence), Done, REPORT_SECONDS)).value)
        except TransferQueueError as error:
            text, verdict = f"The controller did not say why {type(call.body).__name__} waits: {error}", ""
        if text:
            report(__name__, waited, with_verdict(text, verdict))

    def _bottleneck(self, timeout: float | None = None) -> Operation[str]:
        """Return the text of the verdict for the log of a long wait; "" if the system has no timeline.

        It is made of the newest events, unless this client has read the others before.
        """
        state = self._state
        if not state.settings.timeline_events:
            return ""
        reader = state.timeline
        if not reader.begun:
            reader = TimelineReader(lambda: state.session.clock(), EVENTS_OF_A_LONG_WAIT)
        status = yield from self._ask(Status(), SystemStatus, timeout)
        yield from reader.read(lambda request: self._ask(request, TimelineReply, timeout))
        return reader.judge(status).text

    @property
    def report_wait(self) -> float | None:
        """Seconds after which a wait is logged; None for never, and before the first call."""
        return self._state.report_wait

    def _look_up(self, request: Lookup, timeout: float | None) -> Operation[LookupReply]:
        near, avoid = self._state.unit_preferences()
        if near or avoid:
            request = msgspec.structs.replace(request, near=near, avoid=avoid)
        return (yield from self._ask(request, LookupReply, timeout))

    def _publish(
        self, encoded: EncodedBlock | None, put: Publish, within: float | None = None
    ) -> Operation[PublishReply]:
        """Write a block, if there is one with fields, and publish it: `_publish_block`, which may have a span.

        Args:
            encoded: The block.
            put: The request without its blocks.
            within: See `Request`.
        """
        operation, tracing = self._publish_block(encoded, put, within), self._state.tracing
        return operation if tracing is None else tracing.put(operation, encoded, put, self._state.introduction)

    def _publish_block(
        self, encoded: EncodedBlock | None, put: Publish, within: float | None
    ) -> Operation[PublishReply]:
        """Write a block, if there is one with fields, and publish it. A put that failed leaves nothing.

        If a field holds tensors and the block has other values of it, the client writes these as tensors. It learns
        this when the controller refuses the first such put, and remembers it, so that later puts are not refused.
        If the storage unit of the block is lost or stops to reply, the block is written into another one.

        Raises:
            UnitLostError: The storage unit was lost in each of PUT_ATTEMPTS attempts.
        """
        arguments.check_partition_id(put.partition)
        arguments.validated_seconds(put.wait)
        within = arguments.validated_seconds(within)
        kinds = self._state.kinds
        if encoded is not None:
            kinds.expect(put.partition, encoded)
        publish = self._publish_new_values if self._state.settings.dedup_fields else self._publish_written
        refused = lost = 0
        while True:
            try:
                reply = yield from publish(encoded, put, within)
                break
            except (UnitLostError, UnitSilentError):
                lost += 1
                if lost == PUT_ATTEMPTS:
                    raise
                yield from self._state.learn_again()
            except FieldTypeError as error:
                refused += 1
                if encoded is None or refused == KIND_ATTEMPTS or not encoded.hold_as_tensors(error.tensors):
                    if encoded is not None and error.field:
                        error.args = (f"{error} {_first_mismatch(encoded, error, put)}",)
                    raise
        if not isinstance(reply, PublishReply):
            raise ProtocolError(f"the controller replied to Publish with {type(reply).__name__}")
        if encoded is not None:
            kinds.learn(put.partition, encoded)
        if reply.dtypes:
            kinds.warn_of_dtypes(put.partition, reply.dtypes)
        if reply.warning is not None:
            self._state.warn(reply.warning)
        return reply

    def _publish_new_values(
        self, encoded: EncodedBlock | None, put: Publish, within: float | None
    ) -> Operation[AnyReply]:
        """Write a block and publish it. Of fields of `dedup.fields`, write only the values that are new."""
        hashed = None if encoded is None else hash_put(encoded, self._state.settings.deduplicates)
        if hashed is None:
            return (yield from self._publish_written(encoded, put, within))
        asked = [(field.name, b"".join(field.digests)) for field in hashed.fields]
        reply = yield from self._ask(FindEqual(put.partition, asked), EqualReply, None)
        known = hashed.known_digests(reply.known)
        try:
            put = msgspec.structs.replace(put, equal=hashed.describe(known))
            return (yield from self._publish_written(hashed.without(known), put, within))
        except EqualValueGoneError:  # such a value was freed meanwhile
            put = msgspec.structs.replace(put, equal=hashed.describe({}))
            return (yield from self._publish_written(hashed.without({}), put, within))

    def _publish_written(self, encoded: EncodedBlock | None, put: Publish, within: float | None) -> Operation[AnyReply]:
        """Write a block, if there is one with fields, and publish it."""
        wait = put.wait
        if encoded is None or not encoded.schema:
            return (yield Request(CONTROLLER, put, wait, within))
        groups = self._groups(encoded)
        backend, blocks = groups[0]
        if len(groups) == len(blocks) == 1:  # the usual put
            spaces = [(yield from self._reserve(backend, blocks[0].nbytes, wait))]
            placed = [(blocks[0], spaces[0])]
        else:
            spaces = yield from self._reserve_all(groups, wait)
            placed = [each for group, space in zip(groups, spaces) for each in place_blocks(group.blocks, space)]
        try:
            for block, reserved in placed:
                yield from self._write(block, reserved, wait)
        except UnitLostError:
            yield from self._abandon(spaces, lost=True)
            raise
        except BaseException as error:
            # units on other nodes may still write the bytes that were sent
            yield from self._abandon(spaces, interrupted=not isinstance(error, Exception), sent=True)
            raise
        closes = self._take_closes(spaces)
        first, *further = [describe_block(block, reserved) for block, reserved in placed]
        put = msgspec.structs.replace(
            put, block=first, further=further, closes=closes, converted=list(encoded.converted)
        )
        try:
            reply = yield Request(CONTROLLER, put, wait, within)
        except TransferQueueError as error:
            refused = isinstance(error, ProtocolError)  # perhaps because of these extents
            self._restore_closes(spaces, closes, certain=not refused)
            if refused:
                for reserved in spaces:
                    self._state.space_of(reserved).mark_refused(reserved)
            elif isinstance(error, UNCERTAIN):
                self._mark_published(spaces, certain=False)
            else:
                yield from self._abandon(spaces, lost=isinstance(error, UnitLostError))
            raise
        except BaseException:  # cancelled or interrupted: the reply may still arrive
            self._restore_closes(spaces, closes)
            self._mark_published(spaces, certain=False)
            raise
        self._mark_published(spaces)
        return reply

    def _groups(self, encoded: EncodedBlock) -> list[BlockGroup]:
        """Return the blocks as which a put is written, in groups that get one reservation each."""
        return self._state.routes.group(encoded)

    def _write(self, encoded: EncodedBlock, reserved: Reserved, wait: float | None) -> Operation[None]:
        """Write a block into its reserved space. The simulation stops writers in the middle of this method.

        Units on other nodes write the bytes that they are sent. Raises `UnitLostError` if a unit has taken the space
        back. `wait` is the time in seconds in which an external store must have space, at least FREEING_SECONDS.
        """
        external = self._state.external_store(reserved.unit)
        if external is not None:
            wait, patience = max(wait or 0.0, FREEING_SECONDS), self._state.settings.call_timeout
            yield from store_io.write(self._state.session, *external, encoded, reserved, wait, patience)
            return
        places = reserved.places
        here = [place for place in places if not place.session]
        if here:
            written = self._state.arena(here[0].unit).view(here[0].offset, encoded.nbytes)
            if encoded.nbytes >= LEAST_REGISTERED and (device := encoded.device_of_kind(KIND)) is not None:
                copies = copies_to(self._device_copies, self._state, device)
                if copies is not None:
                    copies.register_space(here[0].unit, here[0].offset, encoded.nbytes)
        else:
            written = allocate(encoded.nbytes)
        encoded.write_into(written)
        for copy in here[1:]:
            copy_bytes(self._state.arena(copy.unit).view(copy.offset, encoded.nbytes), written)
        for place in places:
            if place.session:
                yield from self._write_remote(place, written, self._state.space_of(reserved).can_replace(reserved))

    def _write_remote(self, place: Reserved, written: U8, replaceable: bool) -> Operation[None]:
        """Send a block to a unit on another node, which is the last choice from now on if it does not reply in time."""
        try:
            yield from self._state.watch_lost_units(write_remote(place, written, replaceable))
        except UnitSilentError:
            self._state.unreachable.add(place.unit)
            raise

    def _reserve_all(self, groups: Sequence[BlockGroup], wait: float | None) -> Operation[list[Reserved]]:
        """Reserve space for each group, or for none.

        While a put waits for space beyond FREEING_SECONDS, it has none of its other reservations, so that no two puts
        wait for each other.
        """
        clock = self._state.session.clock
        end = None if wait is None else clock() + wait
        order = list(range(len(groups)))
        while True:
            made: dict[int, Reserved] = {}
            try:
                for at in order:
                    patience = None if made or end is None else max(0.0, end - clock())
                    made[at] = yield from self._reserve(groups[at].backend, group_bytes(groups[at].blocks), patience)
                return [made[at] for at in range(len(groups))]
            except BaseException as error:
                yield from self._abandon(list(made.values()), interrupted=not isinstance(error, Exception))
                full = isinstance(error, CapacityError) and not isinstance(error, DeadlockError)
                if not full or not made or end is None or clock() >= end:
                    raise
            full_at = order[len(made)]
            order.sort(key=lambda at: at != full_at)  # the next attempt begins with what is full

    def _reserve(
        self, backend: str, nbytes: int, wait: float | None, patience: float = OFFLOAD_SECONDS
    ) -> Operation[Reserved]:
        """Reserve space in a backend. If there is none, this client first returns its leased and unfilled extents.

        It then waits at least FREEING_SECONDS, because space that was cleared just before becomes free within this
        time. If there are units on disk, blocks are moved there meanwhile. If this frees no space within `patience`,
        this block is written to disk.
        """
        space, minding = self._state.space(backend), self._state.watch_lost_units
        try:
            return (yield from minding(space.reserve(nbytes)))
        except CapacityError:
            yield from self._state.return_extents()
        try:
            if space.disks:
                return (yield from minding(self._reserve_beside_disk(space, nbytes, wait, patience)))
            return (yield from minding(space.reserve(nbytes, max(wait or 0.0, FREEING_SECONDS))))
        except CapacityError:
            with contextlib.suppress(TransferQueueError):  # return an extent that was leased for one of two replicas
                yield from space.return_extents()
            raise

    def _reserve_beside_disk(
        self, space: ExtentAllocator, nbytes: int, wait: float | None, patience: float
    ) -> Operation[Reserved]:
        """Reserve space in memory when blocks were moved out of it, else on disk, else in memory within the wait."""
        first = patience if wait is None else min(max(wait, FREEING_SECONDS), patience)
        with contextlib.suppress(CapacityError):
            return (yield from space.reserve(nbytes, first))
        try:
            return (yield from space.reserve_anywhere(nbytes))
        except CapacityError as error:
            if wait is None or wait <= first:
                raise
            told = error
        try:
            return (yield from space.reserve(nbytes, wait - first))
        except DeadlockError:
            raise
        except CapacityError:
            raise told from None

    def _take_closes(self, spaces: Sequence[Reserved]) -> list[tuple[int, int]]:
        """Take the extents that get no more blocks after this put. See `ExtentAllocator.take_closes`."""
        closes: list[tuple[int, int]] = []
        for reserved in spaces:
            closes += self._state.space_of(reserved).take_closes(reserved)
        return closes

    def _restore_closes(self, spaces: Sequence[Reserved], closes: list[tuple[int, int]], certain: bool = True) -> None:
        for space in {id(found): found for found in map(self._state.space_of, spaces)}.values():
            space.restore_closes(closes, certain)

    def _mark_published(self, spaces: Sequence[Reserved], certain: bool = True) -> None:
        for reserved in spaces:
            self._state.space_of(reserved).mark_published(reserved, certain)

    def _abandon(
        self, spaces: Sequence[Reserved], *, lost: bool = False, interrupted: bool = False, sent: bool = False
    ) -> Operation[None]:
        """End reservations whose blocks were certainly not published, and return extents that are then empty.

        Args:
            spaces: The reservations.
            lost: Whether units on other nodes may have taken the space back.
            interrupted: Whether the operation must make no further calls.
            sent: Whether units on other nodes may still write the bytes that were sent, so that this space is only
                closed.
        """
        for reserved in spaces:
            space = self._state.space_of(reserved)
            if sent and any(place.session for place in reserved.places):
                space.mark_published(reserved, certain=False)
                continue
            if lost:
                space.forget_remote_units(reserved)
            space.abandon(reserved)
        for reserved in () if interrupted else spaces:
            with contextlib.suppress(TransferQueueError):  # it stays queued; the error of the put is more important
                yield from self._state.space_of(reserved).return_extents()

    def _read(
        self,
        look: Callable[[], Operation[LookupReply]],
        layout: str,
        device: torch.device | None,
        partition: str,
        task: str | None = None,
        shared: bool = False,
        copy: bool = True,
        out: Mapping[str, torch.Tensor] | None = None,
    ) -> Operation[TensorDict]:
        """Return the values that a lookup names: `_read_values`, which the timeline notes and which may have a span.

        Args:
            look: The lookup.
            layout: See `get_data`.
            device: See `get_data`.
            partition: The partition.
            task: The task that has claimed the samples in the same operation, for the span.
            shared: See `get_data`.
            copy: See `get_data`.
            out: The caller's tensors, see `get_data`.
        """
        operation, tracing = self._read_values(look, layout, device, partition, shared, copy, out), self._state.tracing
        if self._state.settings.timeline_events:
            operation = self._noted(operation, partition)
        return operation if tracing is None else tracing.get(operation, partition, task)

    def _noted(self, operation: Operation[TensorDict], partition: str) -> Operation[TensorDict]:
        """Note a get, unless it has no values, so that the next request reports it to the timeline."""
        session = self._state.session
        began = session.clock()
        values = yield from operation
        names = [str(name) for name in islice(values.keys(), MAX_NAMES)]
        if names:
            nbytes = sum(map(bytes_of, values.values()))
            session.note_read(began, partition, names, values.batch_size[0], nbytes)
        return values

    def _read_values(
        self,
        look: Callable[[], Operation[LookupReply]],
        layout: str,
        device: torch.device | None,
        partition: str,
        shared: bool,
        copy: bool,
        out: Mapping[str, torch.Tensor] | None,
    ) -> Operation[TensorDict]:
        """Copy or view the values that a lookup names. If they were replaced or freed meanwhile, look them up again."""
        rereads = _Rereads()
        for _ in range(READ_ATTEMPTS):
            reply = yield from rereads.pause_if_equal((yield from look()))
            if not reply.types:
                return TensorDict({}, batch_size=0)
            tables = [field.name for field in reply.types if field.kind == NESTED]
            if layout == "jagged":
                self._state.kinds.warn_of_ranks(partition, reply.types)
            if device is not None:
                landed = yield from get_to_device(self._state, reply, device, layout, shared)
                if landed is not None:
                    return nest_tables(landed, tables)
            collect = partial(self._collect, layout=layout, shared=shared, device=device, copy=copy, out=out)
            found = yield from self._copy(reply, collect)
            if found is not None:
                values, reply = found
                return nest_tables(values if device is None else copy_to_device(values, reply, device), tables)
        raise rereads.error()

    def _collect(
        self,
        reply: LookupReply,
        memory: Memory,
        layout: str,
        shared: bool,
        device: torch.device | None,
        copy: bool,
        out: Mapping[str, torch.Tensor] | None,
    ) -> TensorDict:
        """Return the values of a lookup: copies, views, the caller's tensors, or tensors on a device."""
        allow_pickle = self._state.settings.allow_pickle
        if out is not None:
            return gather_into(reply, memory, out, layout, shared=shared, allow_pickle=allow_pickle)
        views: Views | None = None if copy or device is not None else self._state.hold_views
        if device is not None and (copies := copies_to(self._device_copies, self._state, device)) is not None:
            memory = HostArenas(copies, device, reply, memory)
        return gather(reply, memory, layout, shared=shared, allow_pickle=allow_pickle, views=views)

    def _read_objects(
        self, look: Callable[[], Operation[LookupReply]], partition: str, name: str
    ) -> Operation[tuple[list[Any], int]]:
        """Return the objects that a lookup of one field names, and the number of their bytes. The timeline notes it."""
        session, allow_pickle = self._state.session, self._state.settings.allow_pickle
        began = session.clock()
        rereads = _Rereads()
        for _ in range(READ_ATTEMPTS):
            reply = yield from rereads.pause_if_equal((yield from look()))
            found = yield from self._copy(reply, partial(gather_objects, allow_pickle=allow_pickle))
            if found is not None:
                values, nbytes = found[0]
                if self._state.settings.timeline_events:
                    session.note_read(began, partition, [name], len(values), nbytes)
                return values, nbytes
        raise rereads.error()

    def _copy(
        self, reply: LookupReply, collect: Callable[[LookupReply, Memory], T]
    ) -> Operation[tuple[T, LookupReply] | None]:
        """Return the values of a lookup, and where they were found; None if they were replaced or freed meanwhile."""
        brought = yield from self._state.fetch_values(reply)
        if brought is None:
            return None
        reply, memory = brought
        failure: Exception | None = None
        try:
            values = collect(reply, memory)
        except Exception as error:  # the bytes of another block may cause any error
            failure = error
        if not self._state.is_unchanged(reply):
            return None
        if failure is not None:
            raise failure
        return values, reply

    def _apply_parser(self, data: Columns, rows: int, data_parser: DataParser | None) -> Columns:
        arguments.check_data_parser(data_parser)
        if data_parser is None:
            return data
        before = parser_columns(data, rows)
        return checked_parser_result(before, data_parser(dict(before)), rows)

    def _encode(self, columns: Columns, rows: int) -> EncodedBlock:
        return encode_put(columns, rows, allow_pickle=self._state.settings.allow_pickle)

    def _tags(self, tags: Sequence[Mapping[str, Any] | None] | None) -> SentTags | None:
        if tags is None:
            return None
        sent = arguments.encoded_tags(tags, self._state.settings.allow_pickle)
        for name, words in arguments.large_tags(sent).items():
            self._state.warn(words, f"large tag {name}")
        return sent

    def _handing_over(self, claim: Claim, reply: ClaimReply, work: Operation[T], *, read: bool = False) -> Operation[T]:
        """Run what is left of a call whose claim was answered, and hand its batch over with the result.

        If it fails or is cancelled, the rows become ready again.

        Args:
            claim: The claim.
            reply: The reply to the claim.
            work: What is left of the call.
            read: Whether the rows may be removed afterwards (`create_partition(free_when=...)`). Default: False.
        """
        batch = [(claim.partition, reply.token)]
        try:
            result = yield from work
        except GeneratorExit:
            raise
        except BaseException:
            yield Notice(ReportBatches(returned=batch))
            raise
        if self.held is None and claim.lease is None:
            report = ReportBatches(finished=batch) if read else ReportBatches(handed_over=batch)
            if not self._state.note_handed_over(report):
                yield Notice(report)
        return result

    def _meta(self, partition_id: str, reply: ClaimReply, lease: float | None = None) -> BatchMeta:
        meta = replies.batch_meta(partition_id, reply, self._state.settings.allow_pickle)
        meta._holder = self._state.client_id if reply.held else None
        if reply.token and self.held is not None and lease is None:
            meta._leases = (BatchLease(partition_id, reply.token, HELD_SECONDS, meta._rows(), None, is_unseen=True),)
            self.held += meta._leases
        elif reply.token and lease is not None:
            told = None if reply.deliveries is None else np.frombuffer(reply.deliveries, "<i4")
            held = BatchLease(partition_id, reply.token, lease, meta._rows(), told)
            meta._leases = (held,)
            self._state.renewals.add(held)
        return meta


class _Rereads:
    """The attempts of one read, each of which has failed.

    If values were replaced or freed, the next lookup names other blocks. If it names the same ones, their storage has
    lost them, and the controller does not know it yet: the reader gives it some time.
    """

    def __init__(self) -> None:
        self._before: LookupReply | None = None
        self._equal = 0
        """How many lookups in a row named the same blocks as the one before."""

    def pause_if_equal(self, reply: LookupReply) -> Operation[LookupReply]:
        """Return the reply of a lookup, after a pause if it names the same blocks as the one before."""
        equal = self._before is not None and self._before.blocks == reply.blocks
        self._equal, self._before = self._equal + 1 if equal else 0, reply
        if equal:
            yield Pause(REREAD_SECONDS * 2.0**self._equal)
        return reply

    def error(self) -> TransferQueueError:
        """Return the error for the caller when all attempts are over."""
        if self._equal:
            return ConnectionLostError(
                f"values could not be read in {READ_ATTEMPTS} attempts: their storage does not have them, and has not "
                f"reported them as lost yet; try again, and see tq status for servers that are down"
            )
        return StorageKeyNotFoundError(
            f"values were replaced in each of {READ_ATTEMPTS} attempts to read them; read them when their writers pause"
        )


def _first_mismatch(encoded: EncodedBlock, error: FieldTypeError, put: Publish) -> str:
    """Return a sentence that names the first value of a put because of which the controller refused it."""
    row, kind = encoded.first_mismatch(error.field, error.tensors.get(error.field, []))
    which = f"row {row} of the put" if put.keys is None else f"row {row} of the put (key {put.keys[row]!r})"
    if put.rows is not None:
        which = f"the sample with global index {int(np.frombuffer(put.rows, '<i8')[row])}"
    return f"The first value that does not match is that of {which}, which has the type {kind}."
