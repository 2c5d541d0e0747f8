"""The function that handles each request, and the function that applies each record, registered where it is defined.

A handler gets the controller, the caller and the request. The type of its result says what happens:

    a reply               is sent. Nothing has changed.
    `Decision`            its records are applied, and its reply is sent and kept for retries.
    `ParkDecision`        the request waits.
    a list of effects     is carried out, in this order.
    `Begin`               its job is begun, see `core.jobs`.

An applier gets the state and the record.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import Enum
from typing import Any, NamedTuple, TypeVar, Union

import msgspec

from transfer_queue.core.events.effects import Effect
from transfer_queue.core.events.records import AnyRecord, Parkable
from transfer_queue.messages.envelopes import AnyReply, RequestEnvelope


class Caller(msgspec.Struct, frozen=True):
    """The client and connection from which a request came."""

    client: str
    peer: int
    """The connection on which the request is answered."""
    envelope: RequestEnvelope

    @property
    def waiter(self) -> tuple[str, int]:
        """The client and the sequence number of its request, which identify the request on every connection."""
        return self.client, self.envelope.sequence


class Decision(msgspec.Struct, frozen=True):
    """What a request changes."""

    records: list[AnyRecord]
    reply: Callable[[], AnyReply]
    """Makes the reply; called when the records are applied."""


class ParkDecision(msgspec.Struct, frozen=True):
    """The request waits, because it cannot be answered yet."""

    request: Parkable
    seconds: float
    """How long it waits at most."""


class Until(NamedTuple):
    """A job goes on after each event, and at this time at the latest."""

    time: float
    """On the controller's clock."""
    text: str = ""
    """What it waits for, for users."""


class BegunWork(NamedTuple):
    """A job goes on with the outcome of something that others do."""

    begin: Callable[[int, Callable[[Any], list[Effect]]], list[Effect]]
    """Begins it, and returns effects. Gets the number under which `Controller.on_outcome` reports the outcome, and a
    function that takes the outcome directly."""


class GivenUpError(Exception):
    """Raised in a job whose client is gone, with the outcome that it has waited for."""

    def __init__(self, outcome: Any) -> None:
        super().__init__()
        self.outcome = outcome


class Ends(Enum):
    """When a job is given up."""

    NEVER = 0
    WITH_CONNECTION = 1
    WITH_CLIENT = 2


Steps = Generator[Union[Until, BegunWork, None], Any, Any]
"""A job, see `core.jobs`."""


class Begin(NamedTuple):
    """The request takes several turns."""

    steps: Steps
    """What it returns is the reply, or the `Decision` of the last step."""
    ends: Ends = Ends.NEVER


Result = Union[AnyReply, Decision, ParkDecision, Begin, list[Effect]]
Handler = Callable[[Any, Caller, Any], Result]
Applier = Callable[[Any, Any], None]

Context = TypeVar("Context")
RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT", bound=Result)
StateT = TypeVar("StateT")
RecordT = TypeVar("RecordT")

HANDLERS: dict[type, Handler] = {}
"""Request type -> its handler."""
READS: set[type] = set()
"""The request types that change nothing."""
OF_AN_EPOCH: set[type] = set()
"""The request types that may name rows by metadata, which is valid in one epoch only (`State.check_epoch`)."""
APPLIERS: dict[type[Any], Applier] = {}
"""Record type -> its applier."""


def handles(
    request: type[RequestT], *, reads: bool = False
) -> Callable[[Callable[[Context, Caller, RequestT], ResultT]], Callable[[Context, Caller, RequestT], ResultT]]:
    """Register the decorated function as the handler of a request type.

    Args:
        request: The type of the requests.
        reads: Whether these requests change nothing, so that they are answered even if the journal cannot be written.
    """

    def register(
        function: Callable[[Context, Caller, RequestT], ResultT],
    ) -> Callable[[Context, Caller, RequestT], ResultT]:
        _add(HANDLERS, request, function)
        if reads:
            READS.add(request)
        if "epoch" in request.__struct_fields__:  # type: ignore[attr-defined]
            OF_AN_EPOCH.add(request)
        return function

    return register


def applies(record: type[RecordT]) -> Callable[[Callable[[StateT, RecordT], None]], Callable[[StateT, RecordT], None]]:
    """Register the decorated function as the applier of a record type, and the type as a record of journals."""

    def register(function: Callable[[StateT, RecordT], None]) -> Callable[[StateT, RecordT], None]:
        _add(APPLIERS, record, function)
        return function

    return register


def applies_to_partition(
    record: type[RecordT],
) -> Callable[[Callable[[Any, RecordT], None]], Callable[[Any, RecordT], None]]:
    """Register the decorated function as the applier of a record that changes one partition.

    The function gets the partition that the record names, which has a new version already, and the record. So it can
    stand beside the attributes that it changes.
    """

    def register(function: Callable[[Any, RecordT], None]) -> Callable[[Any, RecordT], None]:
        _add(APPLIERS, record, lambda state, applied: function(state.new_version(applied.partition), applied))
        return function

    return register


def _add(table: dict[type, Any], kind: type, function: Callable[..., Any]) -> None:
    if kind in table:
        raise ValueError(f"{kind.__name__} has two functions: {table[kind].__qualname__} and {function.__qualname__}")
    table[kind] = function
