"""Joins acknowledgements of leases: one request, and an answer for each."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from transfer_queue.client.data.data_path import UNCERTAIN, Operation
from transfer_queue.client.joining.shared_errors import share_error
from transfer_queue.errors import TransferQueueError, by_name
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Ack, AckMany
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.system import Topology
from transfer_queue.net.calls import CONTROLLER, NOT_MADE, Call


class AckJoiner:
    """Joins the acknowledgements of one client.

    Args:
        ask: Makes a request of acknowledgements and returns its reply.
    """

    def __init__(self, ask: Callable[[AckMany], Operation[Done]]) -> None:
        self._ask = ask

    def call_for(self, ack: Ack, timeout: float | None) -> Call | None:
        """Return the call with which an acknowledgement asks to join others; None if it must go alone."""
        return None if timeout is not None else Call(CONTROLLER, Topology(), join=(self, ()), part=ack)

    def run(self, calls: Sequence[Call]) -> Generator[Call, AnyReply, None]:
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
