"""Decides which operations of a client travel together. Sans-IO.

An operation that can join others asks for it with a `Join`, as its first call. If no other operation with an equal
key is under way, it goes on alone at once. Otherwise it waits until a *flight* begins that carries all waiting
operations in one request: at once if fewer than AT_ONCE flights are under way, otherwise when one of them ends, or
after LONGEST_WAIT. So no operation waits for others while a request could be sent, and the more operations wait, the
more of them share the cost of a request.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from transfer_queue.net.calls import Join, JoinKey

AT_ONCE = 2
"""Flights of equal keys that are under way at once: one is prepared while the server carries out the other."""
MAX_AT_ONCE = 4
"""The same if operations have waited for LONGEST_WAIT."""
MAX_JOINED = 256
"""Operations of one flight. The controller carries them out in one piece, which must not hold others up."""
LONGEST_WAIT = 0.001
"""Seconds that an operation waits for a flight to end, before another one begins. A round trip on one node is
shorter."""


class Waiter(Protocol):
    """An operation that waits for its flight."""

    @property
    def call(self) -> Join:
        """The call with which it asked."""

    @property
    def left(self) -> bool:
        """Whether it does not wait any more."""


W = TypeVar("W", bound=Waiter)


class JoinQueue(Generic[W]):
    """The flights under way with one key, and the operations that wait for the next one."""

    __slots__ = ("flights", "key", "waiting")

    def __init__(self, key: JoinKey) -> None:
        self.key = key
        self.flights = 0
        """The flights under way, also those of operations that went alone."""
        self.waiting: deque[W] = deque()
        """The operations that wait, in the order of their arrival."""

    @property
    def idle(self) -> bool:
        """Whether the queue is not needed any more."""
        return not self.flights and not self.waiting

    def take(self, most_at_once: int = AT_ONCE) -> list[W]:
        """Begin a flight and return its operations; an empty list if no flight can begin now."""
        taken: list[W] = []
        while self.flights < most_at_once and self.waiting and len(taken) < MAX_JOINED:
            waiter = self.waiting.popleft()
            if not waiter.left:
                taken.append(waiter)
        self.flights += bool(taken)
        return taken
