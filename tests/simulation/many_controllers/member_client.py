"""MemberClient: the part of a client that talks to one of several controllers, with its own session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tests.simulation.retrying_client import RetryingClient, sleep
from transfer_queue.errors import WaitTimeoutError
from transfer_queue.net.calls import CONTROLLER, Operation
from transfer_queue.net.framing import FrameReader, pack_frame

if TYPE_CHECKING:
    from tests.simulation.many_controllers.member import Member
    from tests.simulation.many_controllers.routing_client import RoutingClient

ORDER = b"\xc1"  # the first byte of an order to a gate and of its reply; msgpack does not use it
POLL_SECONDS = 0.02  # between two looks for a reply
AGAIN = 10  # looks, until an order is sent again

_encode = msgspec.msgpack.Encoder().encode
_reply = msgspec.msgpack.Decoder(tuple[int, Any]).decode


class MemberClient(RetryingClient):
    """See the module. whole: The client of which this is a part."""

    whole: RoutingClient

    def __init__(self, member: Member, name: str) -> None:
        super().__init__(member, name)
        self._replies: dict[int, Any] = {}
        self._orders = 0

    def freeze(self) -> None:
        """Stop like a process after SIGSTOP, with all parts of the client."""
        self.whole.freeze()

    def thaw(self) -> None:
        """Continue, with all parts of the client."""
        self.whole.thaw()

    def freeze_part(self) -> None:
        """Stop this part only."""
        super().freeze()

    def thaw_part(self) -> None:
        """Continue this part only."""
        super().thaw()

    def next_sequence(self) -> int:
        """Return the number of the client's next request to this controller."""
        return self.state.session._next

    def order(self, name: str, *arguments: Any, within: float = 3.0) -> Operation[Any]:
        """Send an order to the gate of the controller until there is a reply, and return it.

        Raises:
            WaitTimeoutError: There was none in time. The order may have been carried out.
        """
        cluster = self._cluster
        self._orders += 1
        number, limit = self._orders, cluster.clock.now + within
        frame = pack_frame(ORDER + _encode((number, [name, *arguments])))
        while cluster.clock.now <= limit:
            self._send_order(frame)
            for _ in range(AGAIN):
                yield from sleep(0.0 if number in self._replies else POLL_SECONDS)
                if number in self._replies:
                    return self._replies.pop(number)
        raise WaitTimeoutError(f"the gate has not replied to {name} within {within} s; try again")

    def _send_order(self, frame: bytes) -> None:
        connection = self._connections.get(CONTROLLER)
        if connection is None:
            try:
                connection = self._cluster._connect(self, CONTROLLER)
            except OSError:
                return
            self._connections[CONTROLLER] = connection
            self._readers[connection] = FrameReader()
        self._cluster.network.send(connection, "up", frame)

    def _on_body(self, body: bytes) -> None:
        if body[:1] == ORDER:
            number, reply = _reply(body[1:])
            if number == self._orders:
                self._replies[number] = reply
        else:
            super()._on_body(body)
