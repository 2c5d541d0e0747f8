"""The envelopes of requests and replies, and the unions of all requests and of all replies."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Union

import msgspec

from transfer_queue.messages import base, checkpoints, claims, locks, partitions, puts, queries, storage, system
from transfer_queue.messages.base import Message, Natural, Reply, RequestBody, Seconds
from transfer_queue.messages.claims import ReportBatches
from transfer_queue.messages.reports import overview, samples, store_reports, timeline, unit_reports
from transfer_queue.messages.reports.timeline import ValueRead

TOPICS = (
    base, checkpoints, claims, locks, overview, partitions, puts, queries, samples, storage, store_reports, system,
    timeline, unit_reports,
)  # fmt: skip


def messages_of(topic: ModuleType, kind: type[Message]) -> list[type[Message]]:
    """Return the messages of a kind that a module declares, in the order of their declaration."""
    declared = [each for each in vars(topic).values() if isinstance(each, type) and each.__module__ == topic.__name__]
    return [each for each in declared if issubclass(each, kind) and each is not kind]


REQUESTS = tuple(each for topic in TOPICS for each in messages_of(topic, RequestBody))
REPLIES = tuple(each for topic in TOPICS for each in messages_of(topic, Reply))

if TYPE_CHECKING:
    AnyRequest = RequestBody
    AnyReply = Reply
else:
    AnyRequest = Union[REQUESTS]
    AnyReply = Union[REPLIES]


NOTICE = 0
"""The sequence of requests that get no reply."""


class RequestEnvelope(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request as it is sent."""

    sequence: Natural
    """The number of the request among the requests of its client, from 1."""
    acknowledged: Natural
    """The client does not need the replies to requests up to this sequence any more."""
    body: AnyRequest
    finished: list[tuple[Natural, Natural]] = []
    """Runs (first, last) of sequences beyond `acknowledged` whose replies the client does not need any more either.

    The client has finished these requests while an older one still waits for its reply. An envelope names a run of
    sequences when it has grown. If that envelope is lost, the replies are dropped when `acknowledged` passes them.
    """
    reads: list[ValueRead] = []
    """Gets that the client has made since its previous request, for the timeline. It does not repeat them."""
    report: Union[ReportBatches, None] = None
    """What became of batches that the client has got. It takes effect before the request does."""
    within: Union[Seconds, None] = None
    """Seconds in which the client needs the reply; None: the setting `timeouts.call`, after the request's own wait."""


class ReplyEnvelope(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A reply as it is sent."""

    sequence: int
    """The sequence of the request."""
    body: AnyReply
