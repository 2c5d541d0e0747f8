"""The virtual clock, and a simulated network of ordered connections whose messages arrive in an order drawn by a seed.

Each direction of a connection is a queue of frames. `deliver` chooses one of the queues that are not empty, at random
but repeatably, and delivers its oldest frame. Messages of one connection keep their order, those of different
connections do not, which is what a real network guarantees. `hold` makes a direction of a connection slow for as long
as a test needs. `sever` breaks a connection as TCP does: part of what is on its way is lost, the rest still arrives,
and each end is notified after it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

Receiver = Callable[[bytes], None]
Ended = Callable[[], None]
Link = tuple[int, str]  # a connection's number, and "up" (to the server) or "down"


def _nothing() -> None:
    """Do nothing; the default callback of an end."""


class VirtualClock:
    """A clock that a test moves.

    Example:
        >>> from transfer_queue.testing import VirtualClock
        >>> clock = VirtualClock()
        >>> clock.move_to(2.5)
        >>> clock.now
        2.5
    """

    def __init__(self) -> None:
        self.now = 0.0
        """The virtual time in seconds, from 0."""
        """The virtual time in seconds, from 0."""

    def move_to(self, when: float) -> None:
        """Set the time. This has no other effect: the cluster ticks its servers.

        Args:
            when: The new time in seconds, not before the present one.

        Raises:
            ValueError: `when` is in the past.

        Example:
            >>> from transfer_queue.testing import VirtualClock
            >>> VirtualClock().move_to(2.5)
        """
        if when < self.now:
            raise ValueError(f"the time must not go back: it is {self.now} s, got {when} s")
        self.now = when


class Network:
    """Queues of frames by connection and direction: "up" to the server, or "down" to the client.

    Args:
        seed: Determines the order in which frames arrive.

    Example:
        >>> from transfer_queue.testing import Network
        >>> network = Network(seed=1)
        >>> connection = network.connect(print, print)
        >>> network.send(connection, "up", b"frame")
        >>> network.deliver()
        b'frame'
        True
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        """The generator of all random choices."""
        self.links: dict[Link, Receiver] = {}
        """The receiver of each direction of each connection."""
        self._ends: dict[Link, Ended] = {}
        self._severed: set[int] = set()
        self._queues: dict[Link, deque[bytes | None]] = {}  # None: here the connection ends
        self._next = 1
        self.delivered = 0
        """The number of frames that were delivered."""
        self.held: dict[Link, set[str]] = {}
        """The directions whose frames wait, with the reasons."""

    def connect(
        self, server: Receiver, client: Receiver, server_ended: Ended = _nothing, client_ended: Ended = _nothing
    ) -> int:
        """Make a connection.

        Args:
            server: Receives the frames that are sent "up".
            client: Receives the frames that are sent "down".
            server_ended: Called once when the server learns that the connection was severed. Default: nothing.
            client_ended: Called once when the client learns that the connection was severed. Default: nothing.

        Returns:
            The number of the connection.

        Example:
            >>> from transfer_queue.testing import Network
            >>> Network(seed=1).connect(print, print)
            1
        """
        number = self._next
        self._next += 1
        self.links[number, "up"], self.links[number, "down"] = server, client
        self._ends[number, "up"], self._ends[number, "down"] = server_ended, client_ended
        return number

    def send(self, connection: int, direction: str, frame: bytes) -> None:
        """Send a frame. It is lost if the connection has ended.

        Args:
            connection: The number of the connection.
            direction: "up" or "down".
            frame: The frame.

        Example:
            >>> from transfer_queue.testing import Network
            >>> network = Network(seed=1)
            >>> network.send(network.connect(print, print), "up", b"frame")
        """
        if (connection, direction) in self.links and connection not in self._severed:
            self._queues.setdefault((connection, direction), deque()).append(frame)

    def cut(self, connection: int) -> None:
        """End a connection without a notice to its ends. What is on its way is lost.

        Args:
            connection: The number of the connection.

        Example:
            >>> from transfer_queue.testing import Network
            >>> network = Network(seed=1)
            >>> connection = network.connect(print, print)
            >>> network.cut(connection)
            >>> network.is_open(connection)
            False
        """
        for direction in ("up", "down"):
            self._forget((connection, direction))
        self._severed.discard(connection)

    def sever(self, connection: int, up: int | None = None, down: int | None = None) -> None:
        """Break a connection as TCP does.

        Args:
            connection: The number of the connection.
            up: The number of frames on their way that still arrive at the server. Default: all.
            down: The number of frames on their way that still arrive at the client. Default: all.

        Example:
            >>> from transfer_queue.testing import Network
            >>> network = Network(seed=1)
            >>> connection = network.connect(print, print, lambda: print("the server knows"))
            >>> network.sever(connection)
            >>> network.deliver() and network.deliver()
            the server knows
            True
        """
        if connection in self._severed or not self.is_open(connection):
            return
        self._severed.add(connection)
        for direction, arriving in (("up", up), ("down", down)):
            if (connection, direction) not in self.links:
                continue
            queue = self._queues.setdefault((connection, direction), deque())
            while arriving is not None and len(queue) > arriving:
                queue.pop()
            queue.append(None)

    def is_open(self, connection: int) -> bool:
        """Return whether frames can still be sent, as far as the ends of a connection know.

        Args:
            connection: The number of the connection.

        Returns:
            True if so.

        Example:
            >>> from transfer_queue.testing import Network
            >>> Network(seed=1).is_open(1)
            False
        """
        return (connection, "up") in self.links or (connection, "down") in self.links

    def deafen(self, connection: int, direction: str) -> None:
        """Remove the receiver at one end: what arrives there is lost, and the other end gets no notice.

        Args:
            connection: The number of the connection.
            direction: The direction that loses its receiver.

        Example:
            >>> from transfer_queue.testing import Network
            >>> network = Network(seed=1)
            >>> network.deafen(network.connect(print, print), "up")
        """
        self._forget((connection, direction))

    def hold(self, connection: int, direction: str, why: str = "") -> None:
        """Let the frames of a direction wait until `release` with the same reason.

        Args:
            connection: The number of the connection.
            direction: "up" or "down".
            why: The reason. Default: "".

        Example:
            >>> from transfer_queue.testing import Network
            >>> network = Network(seed=1)
            >>> connection = network.connect(print, print)
            >>> network.send(connection, "up", b"frame")
            >>> network.hold(connection, "up")
            >>> network.deliver()
            False
        """
        if (connection, direction) in self.links:
            self.held.setdefault((connection, direction), set()).add(why)

    def release(self, connection: int, direction: str, why: str = "") -> None:
        """Let the frames of a direction continue, in their order, unless they wait for another reason, too.

        Args:
            connection: The number of the connection.
            direction: "up" or "down".
            why: The reason. Default: "".

        Example:
            >>> from transfer_queue.testing import Network
            >>> network = Network(seed=1)
            >>> network.release(network.connect(print, print), "up")
        """
        reasons = self.held.get((connection, direction), set())
        reasons.discard(why)
        if not reasons:
            self.held.pop((connection, direction), None)

    def deliver(self) -> bool:
        """Deliver one frame.

        Returns:
            False if no frame is on its way, except for those that wait.

        Example:
            >>> from transfer_queue.testing import Network
            >>> Network(seed=1).deliver()
            False
        """
        waiting = sorted(self._queues.keys() - self.held.keys())
        if not waiting:
            return False
        link = self.random.choice(waiting)
        queue = self._queues[link]
        frame = queue.popleft()
        if not queue:
            del self._queues[link]
        if frame is None:
            ended = self._ends[link]
            self._forget(link)
            ended()
            return True
        self.delivered += 1
        self.links[link](frame)
        return True

    def _forget(self, link: Link) -> None:
        self.links.pop(link, None)
        self._ends.pop(link, None)
        self._queues.pop(link, None)
        self.held.pop(link, None)
        if not self.is_open(link[0]):
            self._severed.discard(link[0])
