"""A request or a reply on its way."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Union

import msgspec

from transfer_queue.messages import (
    base,
    checkpoints,
    claims,
    partitions,
    puts,
    queries,
    storage,
    system,
    unit_reports,
)
from transfer_queue.messages.base import Message, Natural, Reply, Request

TOPICS = (base, checkpoints, claims, partitions, puts, queries, storage, system, unit_reports)


def messages_of(topic: ModuleType, kind: type[Message]) -> list[type[Message]]:
    """Return the messages of a kind that a module declares, in the order of their declaration."""
    declared = [each for each in vars(topic).values() if isinstance(each, type) and each.__module__ == topic.__name__]
    return [each for each in declared if issubclass(each, kind) and each is not kind]


REQUESTS = tuple(each for topic in TOPICS for each in messages_of(topic, Request))
REPLIES = tuple(each for topic in TOPICS for each in messages_of(topic, Reply))

if TYPE_CHECKING:
    AnyRequest = Request
    AnyReply = Reply
else:
    AnyRequest = Union[REQUESTS]
    AnyReply = Union[REPLIES]


class RequestEnvelope(msgspec.Struct, array_like=True, frozen=True):
    """A request on its way. acknowledged: replies up to this sequence of the client are not needed again.

    finished: (first, last) sequences beyond `acknowledged` whose replies the client does not need any more either,
    because it has finished them while an older request still waits for its reply. An envelope names a run of sequences
    when it has grown. If that envelope is lost, the replies are dropped when `acknowledged` passes them.
    """

    sequence: Natural
    acknowledged: Natural
    body: AnyRequest
    finished: list[tuple[Natural, Natural]] = []


class ReplyEnvelope(msgspec.Struct, array_like=True, frozen=True):
    """A reply on its way."""

    sequence: int
    body: AnyReply
