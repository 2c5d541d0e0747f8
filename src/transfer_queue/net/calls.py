"""What an operation of the client asks its driver to do: a `Call`, which is one of six small classes.

Operations are generators: they yield a `Call`, and the driver sends the reply into them. A `Failure` is thrown into
them as the exception that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Protocol, TypeVar, Union

import msgspec

from transfer_queue.errors import ProtocolError, TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import ReportBatches
from transfer_queue.messages.envelopes import AnyReply, AnyRequest

CONTROLLER = ("controller", 0)

Outcome = Union[AnyReply, TransferQueueError]

NOT_MADE = Done()
"""The result of a call that was not made, see `Request.turn` and `Join`. Compare it by identity, because servers send
`Done`, too."""


class Request(msgspec.Struct, eq=False):
    """Send a request, and wait for its reply."""

    target: tuple[str, int]
    """("controller", 0), or ("unit", number)."""
    body: AnyRequest
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
    turn: Hashable = None
    """The tasks of an event loop make requests of equal turns one at a time.

    If a second task yields such a request meanwhile, the driver does not make it: when the first one has its reply, the
    second task gets `NOT_MADE`, and its operation checks again what it needs. If the first request fails, the second
    one is made.
    """
    outcome: Outcome | None = None
    """In `Together`: the reply, or the exception that the request alone would have raised."""
    late: BaseException | None = None
    """Set by the driver: the cancellation that came too late for this request. The next call of the operation raises
    it."""
    sequence: int = 0
    """The sequence of the request, with which its operation can cancel it; 0 until the driver has sent it."""


class Notice(msgspec.Struct, eq=False):
    """Write a report to the controller at once. It gets no reply; the result is `Done`."""

    late: ClassVar[None] = None
    report: ReportBatches


class Work(msgspec.Struct, eq=False):
    """Run a function; the result is `Done`.

    It may take long. An event loop continues meanwhile, and a cancelled task waits until the function has returned.
    """

    function: Callable[[], object]
    is_users: bool = False
    """Whether the user has written the function.

    It may then wait for long, so an event loop runs it in a thread of its own instead of an executor, which would fill
    up. What it has fetched must not be lost: if the task is cancelled meanwhile, the operation continues after the
    function, and its next call, or its end, raises the cancellation.
    """
    late: BaseException | None = None
    """See `Request.late`."""
    outcome: Outcome | None = None
    """In `Together`: `Done`, or the exception that the function raised."""


class Pause(msgspec.Struct, eq=False):
    """Let time pass, or wait for a future; the result is `Done`."""

    late: ClassVar[None] = None
    seconds: float | None
    """The longest wait in seconds; None for no limit, if there is a future."""
    until: Future[Any] | None = None
    """Ends the pause when it is done. Any thread may complete it. It cannot be cancelled (it is running)."""
    outcome: Outcome | None = None
    """In `Together`: `Done`."""


class Together(msgspec.Struct, eq=False):
    """Make several calls at once; the result is `Done` when each of them has its `outcome`."""

    late: ClassVar[None] = None
    calls: Sequence[Request | Work | Pause]


class Joiner(Protocol):
    """Carries out several operations of one client at once."""

    def run(self, calls: Sequence[Join]) -> Operation[None]:
        """Carry out the operations whose calls have equal keys, and set the `outcome` of each.

        `NOT_MADE` lets an operation go on alone. This operation raises no error of its requests.
        """


JoinKey = tuple[Joiner, tuple[Any, ...]]
"""The joiner, and what its operations must have in common to travel together, which is hashable."""


class Join(msgspec.Struct, eq=False):
    """Ask whether to join other operations. See `net.drivers.join_queues`.

    The result is `NOT_MADE` if the operation must go on alone, otherwise the `outcome` that the joiner has set. Drivers
    of a single operation always reply `NOT_MADE`.
    """

    key: JoinKey
    part: Any
    """What the joiner needs of the operation."""
    ended: Callable[[], None] | None = None
    """Set by the driver of an operation that goes on alone because no others are under way.

    The operation calls it when it has ended, so that those that wait for it can leave.
    """
    outcome: Outcome | None = None
    """What the operation gets; None if the joiner has not come to it."""
    late: BaseException | None = None
    """See `Request.late`."""


Call = Union[Request, Notice, Work, Pause, Together, Join]

T = TypeVar("T")
Operation = Generator[Call, AnyReply, T]
"""An operation, which returns its result."""


class AskController(Protocol):
    """Makes requests to the controller, as one of the clients does it."""

    def __call__(self, request: AnyRequest, kind: type[T], timeout: float | None, /) -> Operation[T]:
        """Return the reply to a request, which must be of this kind."""


def ask_controller(request: AnyRequest, kind: type[T], timeout: float | None = None) -> Operation[T]:
    """Make a request that the controller answers at once, and return its reply, which must be of this kind."""
    reply = yield Request(CONTROLLER, request, within=timeout)
    if not isinstance(reply, kind):
        raise ProtocolError(f"the controller replied to {type(request).__name__} with {type(reply).__name__}")
    return reply


def replies_of(calls: Sequence[Request]) -> Operation[list[AnyReply]]:
    """Make these calls at once and return their replies. Raises the error of the first call that failed."""
    if len(calls) == 1:
        return [(yield calls[0])]
    yield Together(calls)
    return [_reply(call.outcome) for call in calls]


def _reply(outcome: Outcome | None) -> AnyReply:
    if isinstance(outcome, TransferQueueError):
        raise outcome
    assert outcome is not None
    return outcome
