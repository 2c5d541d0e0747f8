"""Joins operations of one client that are under way at the same time: one request, and an answer for each.

`net.drivers.join_queues` decides which operations travel together. Puts are joined into one block and one request, gets
into one lookup and one gather, and acknowledgements of leases into one request. If a joined request of puts is refused,
or anything is missing for one of the gets, each goes on alone, so that it gets its own error and waits by itself. So do
gets whose rows differ in rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from transfer_queue.client.attachment import UNCERTAIN, Attachment
from transfer_queue.client.conversion import replies
from transfer_queue.client.reader import FetchOptions
from transfer_queue.client.writer import Writer
from transfer_queue.config.environment import pre_alloc_sample_num
from transfer_queue.errors import TransferQueueError, by_name
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Ack, AckMany
from transfer_queue.messages.descriptors import Blocks, Placement
from transfer_queue.messages.puts import Publish, PublishReply
from transfer_queue.messages.queries import Lookup, LookupReply
from transfer_queue.net.calls import NOT_MADE, Join, JoinKey, Operation
from transfer_queue.wire.blocks.encode import EncodedBlock, encode_rows
from transfer_queue.wire.blocks.gather import LAYOUTS


def share_error(calls: Sequence[Join], error: TransferQueueError) -> None:
    """Let each operation raise the error, in an object of its own."""
    for call in calls:
        call.outcome = copy.copy(error)
        call.outcome.__cause__ = error.__cause__


MAX_FIELDS = 64
"""The number of fields of a put that joins others."""
MAX_BYTES = 1 << 16
"""The bytes of one value of a put that joins others. Larger ones are copied no faster together."""


class PutPart(NamedTuple):
    """One put of one sample."""

    key: str
    fields: Any
    """A dict of its values; None to change only its tag."""
    tag: Mapping[str, Any] | None
    group: str | None


class PutJoiner:
    """Joins the puts of one client.

    Args:
        attachment: The attachment of the client.
        writer: What puts its values.
    """

    def __init__(self, attachment: Attachment, writer: Writer) -> None:
        self._attachment = attachment
        self._writer = writer
        self._large: set[str] = set()
        """The fields that have had objects of more than MAX_BYTES. Puts with them do not join others."""

    def key_of(self, partition: str, fields: object, group: str | None) -> JoinKey | None:
        """Return what a put has in common with those that it may join; None if it must go alone."""
        if self._attachment.settings.dedup_fields or self._attachment.tracer() is not None:
            return None
        if type(partition) is not str:  # alone it gets its error
            return None
        shape: list[Any] = [partition, group is None]
        if fields is not None:
            if type(fields) is not dict or not 0 < len(fields) <= MAX_FIELDS:
                return None
            for name, value in fields.items():
                if type(name) is not str or name in self._large:
                    return None
                if type(value) is torch.Tensor:
                    if not value.is_cpu or value.is_nested or value.layout is not torch.strided:
                        return None
                    if value.nbytes > MAX_BYTES:
                        return None
                    shape += name, value.dtype, value.dim()
                elif isinstance(value, torch.Tensor):
                    return None
                else:
                    shape += name, None
        return self, tuple(shape)

    def run(self, calls: Sequence[Join]) -> Operation[None]:
        """See `net.calls.Joiner.run`. Puts of the same key are sent one after the other, in their order."""
        for group in _with_distinct_keys(calls):
            if len(group) > 1:
                yield from self._put(group)
            else:
                group[0].outcome = NOT_MADE

    def _put(self, calls: Sequence[Join]) -> Operation[None]:
        parts: list[PutPart] = [call.part for call in calls]
        try:
            encoded, sent = self._encode(parts)
            if encoded is not None and self._is_large(encoded):
                reply = None
            else:
                put = Publish(
                    calls[0].key[1][0], len(parts), keys=[part.key for part in parts], tags=sent,
                    groups=[part.group for part in parts if part.group is not None] or None,
                    pre_allocate=pre_alloc_sample_num(), puts=[1] * len(parts),
                )  # fmt: skip
                reply = yield from self._writer.publish(encoded, put)
        except UNCERTAIN as error:
            share_error(calls, error)
            return
        except Exception:  # each put gets its own error alone
            reply = None
        if reply is None:
            for call in calls:
                call.outcome = NOT_MADE
            return
        for call, (fields, tag) in zip(calls, self._results(encoded, sent, reply, len(parts)), strict=True):
            call.outcome = Done((fields, tag))

    def _encode(self, parts: Sequence[PutPart]) -> tuple[EncodedBlock | None, Any]:
        """Return the block of the puts, and their tags as they are sent."""
        allow_pickle = self._attachment.settings.allow_pickle
        rows = [part.fields for part in parts if part.fields is not None]
        encoded = encode_rows(rows, allow_pickle=allow_pickle) if rows else None
        tags = [part.tag for part in parts]
        return encoded, None if tags.count(None) == len(tags) else self._writer.encode_tags(tags)

    def _is_large(self, encoded: EncodedBlock) -> bool:
        """Whether some field has large objects. Puts with this field go alone from now on."""
        names = [
            column.spec.name
            for column in encoded.columns
            if column.spec.kind != "tensor" and column.nbytes > MAX_BYTES * encoded.rows
        ]
        self._large.update(names)
        return bool(names)

    def _results(
        self, encoded: EncodedBlock | None, sent: Any, reply: PublishReply, count: int
    ) -> list[tuple[list[str], dict[str, Any]]]:
        """Return the fields and the tag of the sample of each put."""
        merged = replies.merged_tags(reply, sent)
        if reply.fields is None:  # all keys are new, so their samples have the fields of the puts
            fields = [] if encoded is None else sorted(spec.name for spec in encoded.schema)
            each = [fields[:] for _ in range(count)]
        else:
            each = [fields[:] for fields in reply.each]
        return list(zip(each, replies.tag_list(merged, count, self._attachment.settings.allow_pickle), strict=True))


def _with_distinct_keys(calls: Sequence[Join]) -> list[list[Join]]:
    """Return the calls in groups without repeated keys. A key is in the groups in the order of its puts."""
    groups: list[list[Join]] = []
    times: dict[str, int] = {}
    for call in calls:
        at = times[call.part.key] = times.get(call.part.key, -1) + 1
        if at == len(groups):
            groups.append([])
        groups[at].append(call)
    return groups


MAX_KEYS = 16
"""The number of keys of a get that joins others."""
_I4 = 4  # bytes of an entry
_WIDTHS = {"unit": 4, "offset": 8, "generation": 8, "nbytes": 8, "rows": 4, "schema": 4, "dims": 4}


class GetJoiner:
    """Joins the gets of one client: their lookups, and what they copy if it is copied to memory of this node.

    Args:
        look_up: `Attachment.look_up`.
        read_each: `Reader.read_each`.
    """

    def __init__(
        self,
        look_up: Callable[[Lookup, float | None], Operation[LookupReply]],
        read_each: Callable[[LookupReply, Sequence[int], FetchOptions, str], list[TensorDict] | None],
    ) -> None:
        self._look_up = look_up
        self._read_each = read_each

    def call_for(self, request: Lookup, options: FetchOptions, timeout: float | None) -> Join | None:
        """Return the call with which a get asks to join others; None if it must go alone.

        Its outcome is `Done` with the values, or the reply of the lookup for the get alone.
        """
        keys, fields = request.keys, request.fields
        if timeout is not None or not keys or len(keys) > MAX_KEYS:
            return None
        if type(request.partition) is not str:  # alone it gets its error
            return None
        makes_copies = options.copy and options.device is None and options.out is None
        shared_options = options if makes_copies and options.layout in LAYOUTS else None
        key = self, (request.partition, None if fields is None else tuple(fields), shared_options)
        return Join(key, request)

    def run(self, calls: Sequence[Join]) -> Operation[None]:
        """See `net.calls.Joiner.run`."""
        requests: list[Lookup] = [call.part for call in calls]
        counts = [len(request.keys or ()) for request in requests]
        try:
            reply = None
            if len(calls) > 1:
                keys = [key for request in requests for key in request.keys or ()]
                reply = yield from self._look_up(Lookup(requests[0].partition, None, keys, requests[0].fields), None)
        except UNCERTAIN as error:
            share_error(calls, error)
            return
        except TransferQueueError:
            reply = None
        # the type of a field says whether these rows differ in rank, and those of one get may not
        if (
            reply is None or reply.count != sum(counts) or not reply.types or reply.lacking
            or any(field.mixed_rank for field in reply.types)
        ):  # fmt: skip
            for call in calls:
                call.outcome = NOT_MADE
            return
        options: FetchOptions | None = calls[0].key[1][2]
        values = options and self._read_each(reply, counts, options, requests[0].partition)
        ends = accumulate(counts)
        for number, (call, count, end) in enumerate(zip(calls, counts, ends, strict=True)):
            call.outcome = Done(values[number]) if values else part_of(reply, end - count, end)


def part_of(reply: LookupReply, start: int, end: int) -> LookupReply:
    """Return the reply about the rows from `start` to before `end`, with the blocks that these need."""
    blocks = [np.frombuffer(placed.block[_I4 * start : _I4 * end], "<i4") for placed in reply.placements]
    used, positions = np.unique(np.concatenate(blocks), return_inverse=True)
    renumbered = positions.astype("<i4").reshape(len(blocks), end - start)
    placements = [
        Placement(placed.fields, numbers.tobytes(), placed.slot[_I4 * start : _I4 * end])
        for placed, numbers in zip(reply.placements, renumbered, strict=True)
    ]
    return LookupReply(end - start, reply.types, _some_blocks(reply.blocks, used.tolist()), placements)


def _some_blocks(blocks: Blocks, used: list[int]) -> Blocks:
    columns = {
        name: b"".join([getattr(blocks, name)[width * at : width * (at + 1)] for at in used])
        for name, width in _WIDTHS.items()
    }
    return Blocks(**columns, schemas=blocks.schemas, dims_values=blocks.dims_values)


class AckJoiner:
    """Joins the acknowledgements of one client.

    Args:
        ask: Makes a request of acknowledgements and returns its reply.
    """

    def __init__(self, ask: Callable[[AckMany], Operation[Done]]) -> None:
        self._ask = ask

    def call_for(self, ack: Ack, timeout: float | None) -> Join | None:
        """Return the call with which an acknowledgement asks to join others; None if it must go alone."""
        return None if timeout is not None else Join((self, ()), ack)

    def run(self, calls: Sequence[Join]) -> Operation[None]:
        """See `net.calls.Joiner.run`."""
        if len(calls) == 1:
            calls[0].outcome = NOT_MADE
            return
        try:
            reply = yield from self._ask(AckMany([call.part for call in calls]))
        except UNCERTAIN as error:
            share_error(calls, error)
        except TransferQueueError:
            for call in calls:
                call.outcome = NOT_MADE
        else:
            for call, counts in zip(calls, reply.value, strict=True):
                call.outcome = Done(counts) if isinstance(counts, bool) else by_name(counts[0])(counts[1])
