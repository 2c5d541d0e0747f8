"""Joins puts of one sample each, of equal partition and schema: one block, one request, and an answer for each.

A joined request is carried out as a whole or not at all. If it is refused, each of its puts goes on alone, so that each
gets its own error, and waits for space by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from transfer_queue.client.conversion import replies
from transfer_queue.client.data.client_context import ClientContext
from transfer_queue.client.data.data_path import UNCERTAIN, Operation
from transfer_queue.client.joining.shared_errors import share_error
from transfer_queue.config.environment import pre_alloc_sample_num
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.puts import PublishReply
from transfer_queue.net.calls import NOT_MADE, Call, JoinKey
from transfer_queue.wire.blocks.encode import EncodedBlock, encode_rows

MOST_FIELDS = 64
"""The number of fields of a put that joins others."""
MOST_BYTES = 1 << 16
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
        state: The client.
        publish: `DataPath._publish`.
        encode_tags: `DataPath._tags`.
    """

    def __init__(
        self,
        state: ClientContext,
        publish: Callable[..., Operation[PublishReply]],
        encode_tags: Callable[[Sequence[Mapping[str, Any] | None]], Any],
    ) -> None:
        self._state = state
        self._publish = publish
        self._encode_tags = encode_tags
        self._large: set[str] = set()
        """The fields that have had objects of more than MOST_BYTES. Puts with them do not join others."""

    def key_of(self, partition: str, fields: object, group: str | None) -> JoinKey | None:
        """Return what a put has in common with those that it may join; None if it must go alone."""
        tracing = self._state.tracing
        if self._state.settings.dedup_fields or (tracing is not None and tracing.tracer() is not None):
            return None
        shape: list[Any] = [partition, group is None]
        if fields is not None:
            if type(fields) is not dict or not 0 < len(fields) <= MOST_FIELDS:
                return None
            for name, value in fields.items():
                if type(name) is not str or name in self._large:
                    return None
                if type(value) is torch.Tensor:
                    if not value.is_cpu or value.is_nested or value.layout is not torch.strided:
                        return None
                    if value.nbytes > MOST_BYTES:
                        return None
                    shape += name, value.dtype, value.dim()
                elif isinstance(value, torch.Tensor):
                    return None
                else:
                    shape += name, None
        return self, tuple(shape)

    def run(self, calls: Sequence[Call]) -> Generator[Call, AnyReply, None]:
        """See `net.calls.Joiner.run`. Puts of the same key are sent one after the other, in their order."""
        for some in _with_distinct_keys(calls):
            if len(some) > 1:
                yield from self._put(some)
            else:
                some[0].outcome = NOT_MADE

    def _put(self, calls: Sequence[Call]) -> Generator[Call, AnyReply, None]:
        parts: list[PutPart] = [call.part for call in calls]
        try:
            encoded, sent = self._encode(parts)
            if encoded is not None and self._is_large(encoded):
                reply = None
            else:
                assert calls[0].join is not None
                reply = yield from self._publish(
                    encoded, None, partition=calls[0].join[1][0], count=len(parts), keys=[part.key for part in parts],
                    tags=sent, groups=None if parts[0].group is None else [part.group for part in parts],
                    pre_allocate=pre_alloc_sample_num(), puts=[1] * len(parts),
                )  # fmt: skip
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
        allow_pickle = self._state.settings.allow_pickle
        rows = [part.fields for part in parts if part.fields is not None]
        encoded = encode_rows(rows, allow_pickle=allow_pickle) if rows else None
        tags = [part.tag for part in parts]
        return encoded, None if tags.count(None) == len(tags) else self._encode_tags(tags)

    def _is_large(self, encoded: EncodedBlock) -> bool:
        """Whether some field has large objects. Puts with this field go alone from now on."""
        names = [
            spec.name
            for spec, _, nbytes, _, _ in encoded.columns
            if spec.kind != "tensor" and nbytes > MOST_BYTES * encoded.rows
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
        return list(zip(each, replies.tag_list(merged, count, self._state.settings.allow_pickle), strict=True))


def _with_distinct_keys(calls: Sequence[Call]) -> list[list[Call]]:
    """Return the calls in groups without repeated keys. A key is in the groups in the order of its puts."""
    groups: list[list[Call]] = []
    times: dict[str, int] = {}
    for call in calls:
        at = times[call.part.key] = times.get(call.part.key, -1) + 1
        if at == len(groups):
            groups.append([])
        groups[at].append(call)
    return groups
