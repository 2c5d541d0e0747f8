"""Bounds how many operations of an event loop are under way at once.

An operation under way holds about fifty objects that Python's garbage collector tracks. With thousands of operations
the collections cost more than the operations. An operation that waits for its place holds only a few objects.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 64
"""Operations of a loop that run at the same time: enough to keep a connection busy, and few enough that their objects
are freed before they reach the third generation of the collector."""
STALL_SECONDS = 1.0


class Admission:
    """The places for operations of one event loop, given in the order of arrival. Used only in the loop's thread.

    If no operation has left for STALL_SECONDS, for example because a server does not reply, all waiting operations are
    admitted, so that later ones do not wait for the deadlines of earlier ones.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._free = AT_ONCE
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = False
        """Whether an operation has left since the alarm was set."""
        self._alarm: asyncio.TimerHandle | None = None

    def try_enter(self) -> bool:
        """Take a free place; False if there is none."""
        if self._free <= 0:
            return False
        self._free -= 1
        return True

    async def enter(self) -> None:
        """Wait for a place."""
        place: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(place)
        if self._alarm is None:
            self._set_alarm()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # the place was handed over in the same turn of the loop
                self.leave()
            raise

    def leave(self) -> None:
        """Give a place back, to the operation that has waited longest."""
        self._left = True
        self._free += 1
        while self._waiting and self._free > 0:
            self._admit()

    def _admit(self) -> None:
        place = self._waiting.popleft()
        if not place.done():  # else its task was cancelled
            self._free -= 1
            place.set_result(None)

    def _set_alarm(self) -> None:
        self._left = False
        self._alarm = self._loop.call_later(STALL_SECONDS, self._look)

    def _look(self) -> None:
        self._alarm = None
        if not self._left:
            while self._waiting:
                self._admit()
        if self._waiting:
            self._set_alarm()
