"""The calls that an operation of the client asks its driver to make.

Operations are generators: they yield a `Call`, and the driver sends the reply into them. A `Failure` is thrown into
them as the exception that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, Protocol, Union

import msgspec

from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyReply, AnyRequest
from transfer_queue.messages.system import Topology

CONTROLLER = ("controller", 0)

Outcome = Union[AnyReply, TransferQueueError]


NOT_MADE = Done()
"""The result of a call that was not made, see `Call.turn` and `Call.join`. Compare it by identity, because servers send
`Done`, too."""


class Joiner(Protocol):
    """Carries out several operations of one client at once."""

    def run(self, calls: Sequence[Call]) -> Generator[Call, AnyReply, None]:
        """Carry out the operations whose calls have equal `join`, and set the `outcome` of each.

        `NOT_MADE` lets an operation go on alone. This operation raises no error of its requests.
        """


JoinKey = tuple[Joiner, tuple[Any, ...]]
"""The joiner, and what its operations must have in common to travel together, which is hashable."""


class Call(msgspec.Struct, eq=False):
    """One request to make, or work, other calls or a pause instead."""

    target: tuple[str, int]
    """("controller", 0), or ("unit", number)."""
    request: AnyRequest
    timeout: float | None = None
    """Seconds for which the request may stay parked at the server by its own `wait`, in addition to a round trip.

    None for a request that is not parked.
    """
    within: float | None = None
    """Seconds for the whole call instead, if the caller has set a limit."""
    payload: memoryview | None = None
    """The payload of the request."""
    into: Sequence[memoryview] = ()
    """The memory for the payload of the reply, one part after the other, together exactly as many bytes."""
    work: Callable[[], None] | None = None
    """A function to run instead of a request; the reply is `Done`.

    It may take long. An event loop continues meanwhile, and a cancelled task waits until the function has returned.
    """
    together: Sequence[Call] = ()
    """Calls to make instead, all at once; the reply is `Done` when each of them has its `outcome`."""
    pause: float | None = None
    """Seconds to let pass instead of a request; the reply is `Done`."""
    turn: Hashable = None
    """The tasks of an event loop make calls of equal turns one at a time.

    If a second task yields such a call meanwhile, the driver does not make it: when the first call has its reply, the
    second task gets `NOT_MADE`, and its operation checks again what it needs. If the first call fails, the
    second one is made.
    """
    join: JoinKey | None = None
    """Ask whether to join other operations instead of a request. See `net.drivers.join_queues`.

    The reply is `NOT_MADE` if the operation must go on alone, otherwise the `outcome` that the joiner has set. Drivers
    of a single operation always reply `NOT_MADE`.
    """
    ended: Callable[[], None] | None = None
    """Set by the driver of an operation with `join` that goes on alone because no others are under way.

    The operation calls it when it has ended, so that those that wait for it can leave.
    """
    part: Any = None
    """What the joiner needs of the operation, if `join` is set."""
    outcome: Outcome | None = None
    """Of a call in `together`: the reply, or the exception that the call alone would have raised.

    Of a call with `join`: what its operation gets; None if the joiner has not come to it.
    """
    is_notice: bool = False
    """Whether the request is a `ReportBatches` that is written at once and gets no reply; the result is `Done`."""
    late: BaseException | None = None
    """Set by the driver: the cancellation that came too late for this call. The next call of the operation raises it.
    """
    sequence: int = 0
    """The sequence of the request, with which its operation can cancel it; 0 until the driver has sent it."""


def parallel(calls: Sequence[Call]) -> Call:
    """Return the call that makes all of these calls at once."""
    return Call(CONTROLLER, Topology(), together=calls)


def pause(seconds: float) -> Call:
    """Return the call that lets this time pass."""
    return Call(CONTROLLER, Topology(), pause=seconds)


def replies_of(calls: Sequence[Call]) -> Generator[Call, AnyReply, list[AnyReply]]:
    """Make these calls at once and return their replies. Raises the error of the first call that failed."""
    if len(calls) == 1:
        return [(yield calls[0])]
    yield parallel(calls)
    return [_reply(call.outcome) for call in calls]


def _reply(outcome: Outcome | None) -> AnyReply:
    if isinstance(outcome, TransferQueueError):
        raise outcome
    assert outcome is not None
    return outcome
