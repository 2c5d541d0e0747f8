"""How a client gets values.

It copies the values that a lookup names, and then checks that their blocks were not replaced meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar, Union

import msgspec
import torch
from tensordict import TensorDict, TensorDictBase

from transfer_queue.client.attachment import Attachment
from transfer_queue.client.conversion import arguments
from transfer_queue.client.data.device_copies import HostArenas
from transfer_queue.client.data.device_get import copy_to_device, get_to_device
from transfer_queue.client.tracing import MAX_NAMES, trace_get
from transfer_queue.errors import ConnectionLostError, StorageKeyNotFoundError
from transfer_queue.messages.base import Done
from transfer_queue.messages.queries import LookupReply
from transfer_queue.net.calls import Operation, Pause
from transfer_queue.wire.blocks.gather import Views, gather, gather_each, gather_objects, nest_fields
from transfer_queue.wire.blocks.gather_into import gather_into
from transfer_queue.wire.blocks.row_addressing import Memory
from transfer_queue.wire.buffers.jagged import bytes_of

T = TypeVar("T")

Look = Callable[[], Operation[Union[LookupReply, Done]]]
"""Makes a lookup and returns its reply; or `Done` with the values, if they were read together with those of others."""
READ_ATTEMPTS = 8
"""Attempts to read values that are replaced while they are read."""
REREAD_SECONDS = 0.005
"""Half of the first pause before a block is read again that its storage did not have. The pauses double."""


class FetchOptions(msgspec.Struct, frozen=True):
    """The form in which a get returns values. `get_data` explains each option."""

    layout: str = "jagged"
    shared: bool = False
    device: torch.device | None = None
    copy: bool = True
    out: Mapping[str, torch.Tensor] | None = None

    @classmethod
    def of(
        cls,
        layout: str,
        shared: bool,
        device: torch.device | str | None,
        copy: bool,
        out: TensorDictBase | Mapping[str, Any] | None = None,
    ) -> FetchOptions:
        """Return the options that the caller of a get has given. Raises `InvalidArgumentError` if one is not valid."""
        target = None if device is None else arguments.validated_device(device)
        is_shared, is_copied = arguments.validated_bool(shared, "shared"), arguments.validated_bool(copy, "copy")
        tensors = None if out is None else arguments.validated_out(out, target, is_copied)
        return cls(layout, is_shared, target, is_copied, tensors)


class Reader:
    """Gets the values of one client.

    Args:
        attachment: The attachment of the client.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._units = attachment.units

    def read(
        self,
        look: Look,
        options: FetchOptions,
        partition: str,
        task: str | None = None,
    ) -> Operation[TensorDict]:
        """Return the values that a lookup names, copied or as views. The timeline notes it, and it may have a span.

        Args:
            look: The lookup.
            options: The form of the values.
            partition: The partition.
            task: The task that has claimed the samples in the same operation, for the span.
        """
        operation, tracer = self._read(look, options, partition), self._attachment.tracer()
        return operation if tracer is None else trace_get(tracer, operation, partition, task)

    def _read(self, look: Look, options: FetchOptions, partition: str) -> Operation[TensorDict]:
        session = self._attachment.session
        began = session.clock()
        values = yield from self._repeat(look, partial(self._get, options=options, partition=partition))
        if self._attachment.settings.timeline_events:
            names = list(map(str, islice(values.keys(), MAX_NAMES)))
            if names:
                nbytes = sum(map(bytes_of, values.values()))
                session.note_read(began, partition, names, values.batch_size[0], nbytes)
        return values

    def read_each(
        self, reply: LookupReply, counts: Sequence[int], options: FetchOptions, partition: str
    ) -> list[TensorDict] | None:
        """Return the values of several gets that one lookup names, each a number of its rows.

        Returns None if each get must read its values alone: they are not in arenas that this client has open, they are
        many or were replaced, or there is an error, which only the get that causes it must raise.
        """
        units = self._units
        if not units.has_open_arenas(reply) or not units.is_unchanged(reply):
            return None
        try:
            allow_pickle = self._attachment.settings.allow_pickle
            tables = gather_each(
                reply, counts, units.memory, options.layout, shared=options.shared, allow_pickle=allow_pickle
            )
        except Exception:  # the bytes of another block may cause any error
            return None
        if tables is None or not units.is_unchanged(reply):
            return None
        if options.layout == "jagged":
            self._attachment.kinds.warn_of_ranks(partition, reply.types)
        return [nest_fields(values, reply.types) for values in tables]

    def read_objects(self, look: Look, partition: str, name: str) -> Operation[tuple[list[Any], int]]:
        """Return the objects that a lookup of one field names, and the number of their bytes. The timeline notes it."""
        session, settings = self._attachment.session, self._attachment.settings
        began = session.clock()
        collect = partial(gather_objects, allow_pickle=settings.allow_pickle)
        (values, nbytes), _ = yield from self._repeat(look, partial(self._copy, collect=collect))
        if settings.timeline_events:
            session.note_read(began, partition, [name], len(values), nbytes)
        return values, nbytes

    def _repeat(self, look: Look, get: Callable[[LookupReply], Operation[T | None]]) -> Operation[T]:
        """Look up values and get them, unless the lookup has read them. If they were replaced meanwhile, do both again.

        If the next lookup names other blocks, they were replaced. If it names the same ones, their storage has lost
        them, and the controller does not know it yet: it gets some time.
        """
        before, equal = None, 0
        for _ in range(READ_ATTEMPTS):
            reply = yield from look()
            if isinstance(reply, Done):
                return reply.value  # type: ignore[no-any-return]
            if before is not None:
                equal = equal + 1 if before == reply.blocks else 0
                if equal:
                    yield Pause(REREAD_SECONDS * 2.0**equal)
            values = yield from get(reply)
            if values is not None:
                return values
            before = reply.blocks
        if equal:
            raise ConnectionLostError(
                f"values could not be read in {READ_ATTEMPTS} attempts: their storage does not have them, and has not "
                f"reported them as lost yet; try again, and see tq status for servers that are down"
            )
        raise StorageKeyNotFoundError(
            f"values were replaced in each of {READ_ATTEMPTS} attempts to read them; read them when their writers pause"
        )

    def _get(self, reply: LookupReply, options: FetchOptions, partition: str) -> Operation[TensorDict | None]:
        """Return the values of a lookup; None if they were replaced or freed meanwhile."""
        if not reply.types:
            return TensorDict({}, batch_size=0)
        if options.layout == "jagged":
            self._attachment.kinds.warn_of_ranks(partition, reply.types)
        device = options.device
        if device is not None:
            pickled = self._attachment.settings.allow_pickle
            landed = yield from get_to_device(self._units, reply, device, options.layout, options.shared, pickled)
            if landed is not None:
                return nest_fields(landed, reply.types)
        copied = yield from self._copy(reply, partial(self._collect, options=options))
        if copied is None:
            return None
        values, reply = copied
        return nest_fields(values if device is None else copy_to_device(values, reply, device), reply.types)

    def _collect(self, reply: LookupReply, memory: Memory, options: FetchOptions) -> TensorDict:
        """Return the values of a lookup: copies, views, the caller's tensors, or tensors on a device."""
        allow_pickle, layout, shared = self._attachment.settings.allow_pickle, options.layout, options.shared
        if options.out is not None:
            return gather_into(reply, memory, options.out, layout, shared=shared, allow_pickle=allow_pickle)
        device = options.device
        views: Views | None = None if options.copy or device is not None else self._units.hold_views
        if device is not None and (copies := self._attachment.devices.copies_to(device)) is not None:
            memory = HostArenas(copies, device, reply, memory)
        return gather(reply, memory, layout, shared=shared, allow_pickle=allow_pickle, views=views)

    def _copy(
        self, reply: LookupReply, collect: Callable[[LookupReply, Memory], T]
    ) -> Operation[tuple[T, LookupReply] | None]:
        """Return the values of a lookup, and where they were found; None if they were replaced or freed meanwhile."""
        fetched = yield from self._units.fetch_values(reply)
        if fetched is None:
            return None
        reply, memory = fetched
        failure: Exception | None = None
        try:
            values = collect(reply, memory)
        except Exception as error:  # the bytes of another block may cause any error
            failure = error
        if not self._units.is_unchanged(reply):
            return None
        if failure is not None:
            raise failure
        return values, reply
