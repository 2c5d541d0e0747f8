"""The virtual clock, and a network of ordered connections whose messages arrive in an order drawn by a seed.

Each direction of a connection is a queue of frames. `deliver` picks one of the queues that hold something, at
random but repeatably, and hands over its oldest frame. Messages of one connection keep their order, those of
different ones do not, which is what a real network promises. `hold` lets a direction of a connection be slow for
as long as a test wants. `sever` breaks a connection as TCP does: part of what is on its way is lost, the rest still
arrives, and each end learns of it behind that.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

Receiver = Callable[[bytes], None]
Ended = Callable[[], None]
Link = tuple[int, str]  # a connection's number, and "up" (to the server) or "down"


def _nothing() -> None:
    """What an end does that does not care."""


class VirtualClock:
    """now: seconds, from 0."""

    def __init__(self) -> None:
        self.now = 0.0
        """The virtual time in seconds, from 0."""

    def move_to(self, when: float) -> None:
        """It is `when` now. Nothing happens by it: the cluster ticks its servers."""
        if when < self.now:
            raise ValueError(f"time does not go back: it is {self.now} s, and {when} s is asked for")
        self.now = when


class Network:
    """Queues by (connection, direction); `links` maps each to who receives there. delivered: how many frames were.

    held: directions whose frames wait, and why.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.links: dict[Link, Receiver] = {}
        self._ends: dict[Link, Ended] = {}
        self._severed: set[int] = set()
        self._queues: dict[Link, deque[bytes | None]] = {}  # None: here the connection ends
        self._next = 1
        self.delivered = 0
        self.held: dict[Link, set[str]] = {}

    def connect(
        self, server: Receiver, client: Receiver, server_ended: Ended = _nothing, client_ended: Ended = _nothing
    ) -> int:
        """A new connection; its number. server: gets what goes "up", client: what comes "down".

        server_ended, client_ended: called once where that end learns that the connection was severed.
        """
        number = self._next
        self._next += 1
        self.links[number, "up"], self.links[number, "down"] = server, client
        self._ends[number, "up"], self._ends[number, "down"] = server_ended, client_ended
        return number

    def send(self, connection: int, direction: str, frame: bytes) -> None:
        """Puts a frame on its way; to a connection that ended it is lost."""
        if (connection, direction) in self.links and connection not in self._severed:
            self._queues.setdefault((connection, direction), deque()).append(frame)

    def cut(self, connection: int) -> None:
        """Ends a connection; what is on its way is lost, and nobody is told."""
        for direction in ("up", "down"):
            self._forget((connection, direction))
        self._severed.discard(connection)

    def sever(self, connection: int, up: int | None = None, down: int | None = None) -> None:
        """Ends a connection. up, down: how many of the frames on their way still arrive there; None: all of them."""
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
        """Whether frames can still be sent on it, as far as its ends know."""
        return (connection, "up") in self.links or (connection, "down") in self.links

    def deafen(self, connection: int, direction: str) -> None:
        """Nobody is at this end any more: what arrives there is lost, and its end is told to nobody."""
        self._forget((connection, direction))

    def hold(self, connection: int, direction: str, why: str = "") -> None:
        """Frames of this direction wait until `release` for the same reason."""
        if (connection, direction) in self.links:
            self.held.setdefault((connection, direction), set()).add(why)

    def release(self, connection: int, direction: str, why: str = "") -> None:
        """Frames of this direction go on, in their order, unless they are held for another reason, too."""
        reasons = self.held.get((connection, direction), set())
        reasons.discard(why)
        if not reasons:
            self.held.pop((connection, direction), None)

    def deliver(self) -> bool:
        """Hands over one frame; False where none is on its way, but for held ones."""
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
