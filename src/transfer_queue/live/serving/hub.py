"""Computes one view for all viewers, while at least one is connected, and gives each the events of its stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import msgspec

from transfer_queue.client.control_client import ENDED_ERRORS
from transfer_queue.errors import WaitTimeoutError
from transfer_queue.live.answers import LanesAnswer
from transfer_queue.live.payload import SystemState, to_json
from transfer_queue.live.view.view_maker import Parts

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_VIEWERS = 8
SECONDS = 1.0  # between two views
OVERLOADED_SECONDS = 5.0  # the same while this process is overloaded
LATE_SECONDS = 0.05  # a loop that is later than this is overloaded
STEADY = 3  # views in time until the rate is normal again
QUEUED = 4  # events that a viewer may have unread; a slower one begins again with `full`
RETRY_SECONDS = 0.5  # between two attempts to reach a controller or to find a system
FORGET_SECONDS = 300.0  # after this time without viewers, the history begins again


class ViewSource(Protocol):
    """What a hub shows: the systems of one name, one after the other. Its methods run in one thread."""

    def make(self) -> tuple[float, Parts]:
        """Return the time and the parts of the next view; raises the errors of `SystemReader.read`."""

    def full_parts(self) -> Parts:
        """Return the parts of the last view that differ in a `full`. Default: none."""
        return {}

    def lanes(self, task: str, first: int, count: int, after: str) -> LanesAnswer | None:
        """Return ranks of a band as of the last view; None if there is no such band. See `ViewMaker.lanes`."""

    def renewed(self) -> bool:
        """Return whether the last view cannot be reached by a `delta`."""
        return False

    def describe_end(self) -> str:
        """Return when and why the system ended; "" if it has not."""
        return ""

    def find_successor(self) -> bool:
        """Begin with another system of this name. Returns whether there is one."""
        return False

    def forget(self) -> None:
        """Forget the history, because no viewer was connected for a long time. By default there is none."""
        return


class Viewer:
    """One stream. It waits for events; the hub never waits for it."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self.begins = True
        """Whether its next event must be `full`."""
        self.last = 0
        """The number of the last view that it was given."""
        self.closed = False
        """Whether the stream ends."""

    def begin(self, event: bytes, number: int) -> None:
        """Begin with a `full` event, once all earlier ones are read: a viewer that does not read gets no more."""
        if self._events:
            return
        self.begins, self.last = False, number
        self.push(event)

    def begin_again(self) -> None:
        """Require a `full` event instead of those that are unread."""
        self._events.clear()
        self.begins = True

    def push(self, event: bytes) -> None:
        """Add an event. If too many are unread, they are dropped, and the viewer begins again."""
        if len(self._events) >= QUEUED:
            self.begin_again()
        else:
            self._events.append(event)
        self._changed.set()

    def close(self) -> None:
        """End the stream after the events that it has."""
        self.closed = True
        self._changed.set()

    async def events(self) -> AsyncIterator[bytes]:
        """Iterate over the events."""
        while True:
            while self._events:
                yield self._events.pop(0)
            if self.closed:
                return
            self._changed.clear()
            await self._changed.wait()


class Hub:
    """The viewers and the loop that computes for them. Everything but the source runs in the event loop."""

    def __init__(self, source: ViewSource, clock: Callable[[], float] = time.monotonic) -> None:
        self.source = source
        """What it shows. Only functions that `ask` calls may use it."""
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "live-view")
        self.viewers: list[Viewer] = []
        """The open streams."""
        self.every = SECONDS
        """The seconds between two views."""
        self.views = 0
        """The number of views so far."""
        self._wake = asyncio.Event()
        self._sent: dict[str, bytes] = {}
        self._seq = 0
        self._now = 0.0
        self._state = SystemState("restarting", time.time(), "The page has not reached the system yet.")
        self._in_time = 0
        self._left_at = clock()

    def join(self) -> Viewer | None:
        """Return a new viewer; None if there are too many."""
        if len(self.viewers) >= MAX_VIEWERS:
            return None
        viewer = Viewer()
        self.viewers.append(viewer)
        self._wake.set()
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Remove a viewer."""
        with contextlib.suppress(ValueError):
            self.viewers.remove(viewer)
        if not self.viewers:
            self._left_at = self._clock()

    def close(self) -> None:
        """End all streams, and say so."""
        self._state = SystemState(
            "ended", round(time.time(), 1), self._state.words or "The process that serves this page has ended."
        )
        for viewer in self.viewers:
            viewer.push(_event("bye", {"seq": self._seq + 1, "now": self._now}, {"state": to_json(self._state)}))
            viewer.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self) -> None:
        """Compute views while there are viewers, until the task is cancelled."""
        while True:
            while not self.viewers:
                self._wake.clear()
                await self._wake.wait()
                if self._clock() - self._left_at > FORGET_SECONDS:
                    await self.ask(self.source.forget)
            began = self._clock()
            await self._step()
            await self._pause(began)

    async def _pause(self, began: float) -> None:
        """Sleep until the next view is due. A viewer that joins before that gets the last view immediately."""
        due = began + (self.every if self._state.state in ("live", "empty") else RETRY_SECONDS)
        while (left := due - self._clock()) > 0 and self.viewers:
            self._wake.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), left)
                await self._begin_viewers()
        if self._clock() - due > LATE_SECONDS:
            self.every, self._in_time = OVERLOADED_SECONDS, 0
        elif self._in_time < STEADY:
            self._in_time += 1
        else:
            self.every = SECONDS

    async def complete_view(self) -> bytes:
        """Return the last view with all its parts, as JSON."""
        complete = await self.ask(self.source.full_parts)
        parts = self._sent | {name: to_json(part) for name, part in complete.items()}
        return _json({"seq": self._seq, "now": self._now}, parts)

    async def ask(self, question: Callable[[], T]) -> T:
        """Return the result of a function that uses the source, in its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, question)

    async def _step(self) -> None:
        """Compute a view, and push what has changed."""
        try:
            now, parts = await self.ask(self.source.make)
        except ENDED_ERRORS as error:
            await self._end(error)
        except WaitTimeoutError:
            text = "The controller does not reply: it is being restarted, or is overloaded."
            await self._publish({"state": self._same_state("restarting", self._now, text)})
        except Exception as error:  # the page says that it cannot be shown, and tries again
            logger.exception("the live page could not be computed")
            text = f"The page could not be computed: {type(error).__name__}: {error}"
            await self._publish({"state": self._same_state("restarting", self._now, text[:500])})
        else:
            self._now = now
            self.views += 1
            if await self.ask(self.source.renewed):
                for viewer in self.viewers:
                    viewer.begin_again()
            await self._publish(parts)

    async def _end(self, error: Exception) -> None:
        """Report that the system has ended, unless a new one has taken its place."""
        if await self.ask(self.source.find_successor):
            return
        text = await self.ask(self.source.describe_end)
        if text:
            await self._publish({"state": self._same_state("ended", time.time(), text)})
        else:
            await self._publish({"state": self._same_state("restarting", self._now, str(error)[:500])})

    def _same_state(self, state: str, since: float, text: str) -> SystemState:
        """Return a state, which began when it was first seen."""
        began = self._state.since if self._state.state == state else round(since, 2)
        return SystemState(state, began, text, self.every)

    async def _publish(self, parts: Parts) -> None:
        """Push what has changed to the viewers. Those that begin get everything."""
        state = parts["state"]
        assert isinstance(state, SystemState)
        self._state = msgspec.structs.replace(state, every=self.every)
        encoded = {name: to_json(part) for name, part in (parts | {"state": self._state}).items()}
        changed = {name: part for name, part in encoded.items() if self._sent.get(name) != part}
        if not parts.get("rates"):
            changed.pop("rates", None)
        self._sent |= encoded
        self._seq += 1
        await self._begin_viewers()
        event = _event("delta", {"seq": self._seq, "now": self._now}, changed)
        for viewer in self.viewers:
            if viewer.last < self._seq and not viewer.begins:
                viewer.push(event)
                viewer.last = self._seq

    async def _begin_viewers(self) -> None:
        """Send `full` to the viewers that need it."""
        waiting = [viewer for viewer in self.viewers if viewer.begins]
        if not waiting:
            return
        complete = await self.ask(self.source.full_parts)
        known = self._sent if self._sent else {"state": to_json(self._state)}
        parts = known | {name: to_json(part) for name, part in complete.items()}
        event = _event("full", {"seq": self._seq, "now": self._now}, parts)
        for viewer in waiting:
            viewer.begin(event, self._seq)


def _event(kind: str, numbers: dict[str, float], parts: Mapping[str, bytes]) -> bytes:
    """Return an event as it is sent."""
    return b"event: " + kind.encode() + b"\ndata: " + _json(numbers, parts) + b"\n\n"


def _json(numbers: dict[str, float], parts: Mapping[str, bytes]) -> bytes:
    return to_json({**numbers, **{name: msgspec.Raw(part) for name, part in parts.items()}})
