"""A network of ordered connections whose messages arrive in an order drawn by a seed.

Each direction of a connection is a queue of frames. `deliver` picks one of the queues that hold something, at
random but repeatably, and hands over its oldest frame. Messages of one connection keep their order, those of
different ones do not, which is what a real network promises. `hold` lets a direction of a connection be slow for
as long as a test wants.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

Receiver = Callable[[bytes], None]


class Network:
    """Queues by (connection, direction); `links` maps each to who receives there. delivered: how many frames were.

    held: directions whose frames wait.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.links: dict[tuple[int, str], Receiver] = {}
        self._queues: dict[tuple[int, str], deque[bytes]] = {}
        self._next = 1
        self.delivered = 0
        self.held: set[tuple[int, str]] = set()

    def connect(self, server: Receiver, client: Receiver) -> int:
        """A new connection; its number. server: gets what goes "up", client: what comes "down"."""
        number = self._next
        self._next += 1
        self.links[number, "up"] = server
        self.links[number, "down"] = client
        return number

    def send(self, connection: int, direction: str, frame: bytes) -> None:
        """Puts a frame on its way; to a connection that ended it is lost."""
        if (connection, direction) in self.links:
            self._queues.setdefault((connection, direction), deque()).append(frame)

    def cut(self, connection: int) -> None:
        """Ends a connection; what is on its way is lost."""
        for direction in ("up", "down"):
            self.links.pop((connection, direction), None)
            self._queues.pop((connection, direction), None)
            self.held.discard((connection, direction))

    def hold(self, connection: int, direction: str) -> None:
        """Frames of this direction wait until `release`."""
        self.held.add((connection, direction))

    def release(self, connection: int, direction: str) -> None:
        """Frames of this direction go on, in their order."""
        self.held.discard((connection, direction))

    def deliver(self) -> bool:
        """Hands over one frame; False where none is on its way, but for held ones."""
        waiting = sorted(self._queues.keys() - self.held)
        if not waiting:
            return False
        link = self.random.choice(waiting)
        queue = self._queues[link]
        frame = queue.popleft()
        if not queue:
            del self._queues[link]
        self.delivered += 1
        self.links[link](frame)
        return True
