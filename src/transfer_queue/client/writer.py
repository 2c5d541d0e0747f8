"""How a client puts values: it writes a block into leased space, and publishes it. A put that fails leaves nothing.

A put is traced and repeated here, and passes through *stages*, each of which hands it to the next one: deduplicate,
write. They are put together for the first put; a stage that the system's configuration does not need is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import starmap
from typing import Any

import msgspec
import numpy as np

from transfer_queue.client.attachment import UNCERTAIN, Attachment
from transfer_queue.client.conversion import arguments
from transfer_queue.client.conversion.arguments import Columns, DataParser, checked_parser_result, parser_columns
from transfer_queue.client.data import store_io
from transfer_queue.client.data.device_copies import KIND, MIN_REGISTERED
from transfer_queue.client.data.extent_allocator import aligned
from transfer_queue.client.data.remote_io import UnitSilentError, in_parallel, write_remote
from transfer_queue.client.space import FREEING_SECONDS, BlockGroup
from transfer_queue.client.tracing import trace_put
from transfer_queue.errors import (
    EqualValueGoneError,
    FieldTypeError,
    InvalidArgumentError,
    ProtocolError,
    TransferQueueError,
    UnitLostError,
)
from transfer_queue.messages.descriptors import BlockLocation, NewBlock
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.puts import Publish, PublishReply
from transfer_queue.messages.queries import EqualReply, FindEqual
from transfer_queue.messages.tag_table import SentTags
from transfer_queue.net.calls import CONTROLLER, Operation, Request
from transfer_queue.storage.protocols import Reserved
from transfer_queue.wire.blocks.encode import EncodedBlock, encode_put
from transfer_queue.wire.blocks.equal_rows import hash_put
from transfer_queue.wire.buffers.copies import U8, allocate, copy_bytes

KIND_ATTEMPTS = 4
"""Attempts of a put, if other clients change meanwhile whether its fields contain tensors."""
PUT_ATTEMPTS = 5
"""Attempts of a put whose storage unit is lost each time."""

Stage = Callable[[EncodedBlock | None, Publish, float | None], Operation[AnyReply]]
"""Puts a block (None: no values) with a request that has no blocks yet. The last argument: see `Request.within`."""


class Writer:
    """Puts the values of one client.

    Args:
        attachment: The attachment of the client.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._units = attachment.units
        self._space = attachment.space
        self._first_stage: Stage | None = None

    # ------------------------------------------------------------ values and tags

    def encode(self, columns: Columns, rows: int) -> EncodedBlock:
        """Return the columns of a put as they are written."""
        return encode_put(columns, rows, allow_pickle=self._attachment.settings.allow_pickle)

    def encode_tags(self, tags: Sequence[Mapping[str, Any] | None] | None) -> SentTags | None:
        """Return tags as they are sent. Warns of large ones."""
        if tags is None:
            return None
        sent = arguments.encoded_tags(tags, self._attachment.settings.allow_pickle)
        for name, message in arguments.large_tags(sent).items():
            self._attachment.warn(message, f"large tag {name}")
        return sent

    # ------------------------------------------------------------ the stages

    def publish(
        self, encoded: EncodedBlock | None, put: Publish, within: float | None = None
    ) -> Operation[PublishReply]:
        """Write a block, if there is one with fields, and publish it: `_publish`, which may have a span.

        Args:
            encoded: The block.
            put: The request without its blocks.
            within: See `Request`.
        """
        operation, tracer = self._publish(encoded, put, within), self._attachment.tracer()
        if tracer is None:
            return operation
        return trace_put(tracer, operation, encoded, put, self._attachment.introduction)

    def _publish(self, encoded: EncodedBlock | None, put: Publish, within: float | None) -> Operation[PublishReply]:
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
        kinds, stage = self._attachment.kinds, self._first_stage or self._make_stages()
        if encoded is not None:
            kinds.expect(put.partition, encoded)
        refused = lost = 0
        while True:
            try:
                reply = yield from stage(encoded, put, within)
                break
            except (UnitLostError, UnitSilentError):
                lost += 1
                if lost == PUT_ATTEMPTS:
                    raise
                yield from self._units.refresh()
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
            self._attachment.warn(reply.warning)
        return reply

    def _make_stages(self) -> Stage:
        """Put together the stages that the system's configuration needs, and return the first one."""
        stage: Stage = self._write
        if self._attachment.settings.dedup_fields:
            stage = partial(self._deduplicate, stage)
        self._first_stage = stage
        return stage

    def _deduplicate(
        self, stage: Stage, encoded: EncodedBlock | None, put: Publish, within: float | None
    ) -> Operation[AnyReply]:
        """Stage: of fields of `dedup.fields`, write only the values that are new."""
        hashed = None if encoded is None else hash_put(encoded, self._attachment.settings.deduplicates)
        if hashed is None:
            return (yield from stage(encoded, put, within))
        digests = [(field.name, b"".join(field.digests)) for field in hashed.fields]
        reply = yield from self._attachment.ask(FindEqual(put.partition, digests), EqualReply, None)
        known = hashed.known_digests(reply.known)
        try:
            put = msgspec.structs.replace(put, equal=hashed.describe(known))
            return (yield from stage(hashed.without(known), put, within))
        except EqualValueGoneError:  # such a value was freed meanwhile
            put = msgspec.structs.replace(put, equal=hashed.describe({}))
            return (yield from stage(hashed.without({}), put, within))

    def _write(self, encoded: EncodedBlock | None, put: Publish, within: float | None) -> Operation[AnyReply]:
        """Stage: write a block, if there is one with fields, and publish it."""
        wait, space = put.wait, self._space
        if encoded is None or not encoded.schema:
            return (yield Request(CONTROLLER, put, wait, within))
        groups = self.group(encoded)
        if len(groups) == len(groups[0].blocks) == 1:  # the usual put
            block = groups[0].blocks[0]
            spaces = [(yield from space.reserve(groups[0].backend, block.nbytes, wait))]
            placed = [(block, spaces[0])]
        else:
            spaces = yield from space.reserve_all(groups, wait)
            placed = [each for group, part in zip(groups, spaces) for each in _place_blocks(group.blocks, part)]
        try:
            for block, reserved in placed:
                yield from self.write_block(block, reserved, wait)
        except UnitLostError:
            yield from space.abandon(spaces, lost=True)
            raise
        except BaseException as error:
            # units on other nodes may still write the bytes that were sent
            yield from space.abandon(spaces, interrupted=not isinstance(error, Exception), sent=True)
            raise
        closes: list[tuple[int, int]] = []
        for reserved in spaces:
            closes += space.of(reserved).take_closes(reserved)
        first, *further = starmap(_describe_block, placed)
        put = msgspec.structs.replace(
            put, block=first, further=further, closes=closes, converted=list(encoded.converted)
        )
        try:
            reply = yield Request(CONTROLLER, put, wait, within)
        except TransferQueueError as error:
            refused = isinstance(error, ProtocolError)  # perhaps because of these extents
            space.restore_closes(spaces, closes, certain=not refused)
            if refused:
                for reserved in spaces:
                    space.of(reserved).mark_refused(reserved)
            elif isinstance(error, UNCERTAIN):
                space.mark_published(spaces, certain=False)
            else:
                yield from space.abandon(spaces, lost=isinstance(error, UnitLostError))
            raise
        except BaseException:  # cancelled or interrupted: the reply may still arrive
            space.restore_closes(spaces, closes)
            space.mark_published(spaces, certain=False)
            raise
        space.mark_published(spaces)
        return reply

    # ------------------------------------------------------------ blocks

    def group(self, encoded: EncodedBlock) -> list[BlockGroup]:
        """Return the blocks as which a put is written, in groups that get one reservation each."""
        return self._space.routes.group(encoded)

    def write_block(self, encoded: EncodedBlock, reserved: Reserved, wait: float | None) -> Operation[None]:
        """Write a block into its reserved space. The simulation stops writers in the middle of this method.

        Units on other nodes write the bytes that they are sent. Raises `UnitLostError` if a unit has taken the space
        back. `wait` is the time in seconds in which an external store must have space, at least FREEING_SECONDS.
        """
        external = self._units.external_store(reserved.unit)
        if external is not None:
            wait, patience = max(wait or 0.0, FREEING_SECONDS), self._attachment.settings.call_timeout
            yield from store_io.write(self._attachment.session, *external, encoded, reserved, wait, patience)
            return
        places = reserved.places
        here = [place for place in places if not place.session]
        if here:
            written = self._units.arena(here[0].unit).view(here[0].offset, encoded.nbytes)
            if encoded.nbytes >= MIN_REGISTERED and (device := encoded.device_of_kind(KIND)) is not None:
                copies = self._attachment.devices.copies_to(device)
                if copies is not None:
                    copies.register_space(here[0].unit, here[0].offset, encoded.nbytes)
        else:
            written = allocate(encoded.nbytes)
        encoded.write_into(written)
        for copy in here[1:]:
            copy_bytes(self._units.arena(copy.unit).view(copy.offset, encoded.nbytes), written)
        for place in places:
            if place.session:
                yield from self._write_remote(place, written, self._space.of(reserved).can_replace(reserved))

    def _write_remote(self, place: Reserved, written: U8, replaceable: bool) -> Operation[None]:
        """Send a block to a unit on another node, which is the last choice from now on if it does not reply in time."""
        unit, streams = place.unit, self._units.writes
        number = streams.numbers({unit: len(written)})[unit]
        size = aligned(-(-len(written) // number))
        parts = [(place.part(at, size), written[at : at + size]) for at in range(0, len(written), size)]
        writes = (write_remote(part, of_part, replaceable, number) for part, of_part in parts)
        begun = streams.clock()
        try:
            yield from in_parallel([self._units.watch_lost(each) for each in writes])
        except UnitSilentError:
            self._units.unreachable.add(unit)
            raise
        streams.note(unit, number, len(written), streams.clock() - begun)


def _place_blocks(group: Sequence[EncodedBlock], reserved: Reserved) -> list[tuple[EncodedBlock, Reserved]]:
    """Return each block of a group with its part of the reservation."""
    placed, start = [], 0
    for block in group:
        placed.append((block, reserved.part(start, block.nbytes)))
        start += aligned(block.nbytes)
    return placed


def _describe_block(encoded: EncodedBlock, reserved: Reserved) -> NewBlock:
    """Return the description of a block that was written into reserved space."""
    return NewBlock(
        reserved.unit, reserved.extent, reserved.offset, reserved.generation, encoded.nbytes, encoded.rows,
        encoded.schema, encoded.dims, reserved.length, list(map(_location_of, reserved.copies)), reserved.session, [],
        encoded.slots, *reserved.lease,
    )  # fmt: skip


def _location_of(copy: Reserved) -> BlockLocation:
    return BlockLocation(copy.unit, copy.extent, copy.offset, copy.generation, copy.length, copy.session, *copy.lease)


def apply_parser(data: Columns, rows: int, data_parser: DataParser | None) -> Columns:
    """Return the columns that the user's parser makes of these."""
    if data_parser is None:
        return data
    if not callable(data_parser):
        raise InvalidArgumentError(f"data_parser must be a function of a dict of columns, got {data_parser!r}")
    before = parser_columns(data, rows)
    return checked_parser_result(before, data_parser(dict(before)), rows)


def _first_mismatch(encoded: EncodedBlock, error: FieldTypeError, put: Publish) -> str:
    """Return a sentence that names the first value of a put because of which the controller refused it."""
    row, kind = encoded.first_mismatch(error.field, error.tensors.get(error.field, []))
    which = f"row {row} of the put" if put.keys is None else f"row {row} of the put (key {put.keys[row]!r})"
    if put.rows is not None:
        which = f"the sample with global index {int(np.frombuffer(put.rows, '<i8')[row])}"
    return f"The first value that does not match is that of {which}, which has the type {kind}."
