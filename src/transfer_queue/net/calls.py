"""What an operation of the client asks its driver to do.

Operations are generators: they yield a `Call` and are sent the reply. A `Failure` is thrown into them
as the exception that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Union

from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.envelopes import AnyReply, AnyRequest
from transfer_queue.messages.system import Topology

CONTROLLER = ("controller", 0)

Outcome = Union[AnyReply, TransferQueueError]


@dataclass(slots=True)
class Call:
    """One request to be made.

    target: ("controller", 0) or ("unit", its number). timeout: seconds that the request may stay parked at the server
    by its own `wait`, on top of what the driver allows for a round trip; None for a request that is answered at once.
    within: seconds for the whole call instead, where the caller has set a limit. payload: bytes that go with the
    request. into: where the reply's payload goes, one part after the other, just as many bytes as it has. work: what
    is done instead of asking anybody, and answered with Done: it takes a while, and an event loop goes on meanwhile;
    where that is cancelled it is still done to its end. together: calls that are made instead, all at once; answered
    with Done when each of them has its outcome, the reply or the exception that it would have raised. turn: the tasks
    of an event loop make calls of equal turns one at a time. If a second task yields such a call meanwhile, the driver
    does not make it: when the first call has its reply, the second task gets `session.NOT_MADE`, and its operation
    checks again what it needs. If the first call fails, the second one is made. sequence: under which the driver
    has sent the request, so that its operation can take back one that was interrupted; 0 until then.
    """

    target: tuple[str, int]
    request: AnyRequest
    timeout: float | None = None
    within: float | None = None
    payload: memoryview | None = None
    into: Sequence[memoryview] = ()
    work: Callable[[], None] | None = None
    together: Sequence[Call] = ()
    turn: Hashable = field(default=None, compare=False)
    outcome: Outcome | None = field(default=None, compare=False)
    sequence: int = field(default=0, compare=False)


def parallel(calls: Sequence[Call]) -> Call:
    """Has all of these made at once."""
    return Call(CONTROLLER, Topology(), together=calls)


def replies_of(calls: Sequence[Call]) -> Generator[Call, AnyReply, list[AnyReply]]:
    """The replies to these, made at once. Raises as the first of them that failed."""
    if len(calls) == 1:
        return [(yield calls[0])]
    yield parallel(calls)
    return [_reply(call.outcome) for call in calls]


def _reply(outcome: Outcome | None) -> AnyReply:
    if isinstance(outcome, TransferQueueError):
        raise outcome
    assert outcome is not None
    return outcome
