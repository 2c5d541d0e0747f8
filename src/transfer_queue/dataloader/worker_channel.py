"""The pipes between a loader and its worker processes, in addition to torch's queues: orders, turns and the end.

Pipes are used so that a message wakes a worker that waits for rows:

    closing       one pipe to all, never read: readable means that the loader orders its workers to end, or has ended
    orders[w]     from the loader to worker w: the batch at which to begin
    turns[w]      from the previous worker to worker w: the batch that it may claim now
    places[w]     from the loader to worker w: the batch that it needs now; later ones are fetched ahead

Workers claim batches one after the other, in the order of the batch numbers. Otherwise the rows of a batch would depend
on which worker is faster, and the sequence on the number of workers. It is also the order in which torch takes the
items of workers: if torch waited for a later batch first, and that batch could not be complete before the loader
acknowledges an earlier one, both would wait forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

# seconds that functions in a worker have to return when the loader is deleted: torch's time, and that of a custom fetch
GRACE_SECONDS = 5.0
GRACE_SECONDS_OF_FETCHES = 1.0


class StartFetching(NamedTuple):
    """An order: the workers fetch the batches of a partition from number `start` on."""

    version: int
    """The number of the order, from 1. Batches that were fetched for an older order are not used any more."""
    partition_id: str
    start: int
    given: int = 0
    """Of the previous order, the batches below this number were delivered to the iterating process."""
    item: int = 0
    """The number of torch's item that is batch `start`; the items after it are the batches after it
    (`WorkerChannelEnd.item`). Items before it may have been made for an older order."""
    received: int = 0
    """The batches below this number were received before. They are returned again; nothing new is dealt for them."""


class StopWorkers(NamedTuple):
    """The last order: the workers end."""

    given: int
    """See `StartFetching`."""


class FetchTurn(NamedTuple):
    """The permission to claim batch `number`."""

    version: int
    number: int
    ended: bool
    """True if neither this batch nor a later one will exist."""


class Interrupted(Exception):
    """There is a newer order, or the workers must end."""


class Channel:
    """The pipes of one set of workers. The loader makes it and sends it to each worker.

    A worker takes its `WorkerChannelEnd` from it.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.closing = Pipe(duplex=False)
        self.orders = [Pipe(duplex=False) for _ in range(workers)]
        self.turns = [Pipe(duplex=False) for _ in range(workers)]
        self.places = [Pipe(duplex=False) for _ in range(workers)]

    def send_order(self, begin: StartFetching) -> None:
        """Send an order to every worker, and wake workers that wait for rows."""
        for _, pipe in self.orders:
            with contextlib.suppress(OSError):  # the worker has died; torch raises an error when its next batch is due
                pipe.send(begin)

    def send_wanted(self, version: int, number: int) -> None:
        """Send every worker the batch that the loader needs now. They read it when they check for orders."""
        for _, pipe in self.places:
            with contextlib.suppress(OSError):
                pipe.send((version, number))

    def close(self, given: int) -> None:
        """End the workers, also those that wait for rows. Further calls do nothing. given: See `StopWorkers`."""
        if self.closing[1].closed:
            return
        for _, pipe in self.orders:
            with contextlib.suppress(OSError):
                pipe.send(StopWorkers(given))
        with contextlib.suppress(OSError):
            # a message, not only the end of the pipe, because processes that were forked meanwhile may hold this end,
            # too
            self.closing[1].send_bytes(b"end")
        self.keep()

    def keep(self, *ends: Connection[Any, Any]) -> None:
        """Close all ends except these in this process."""
        for pipe in (self.closing, *self.orders, *self.turns, *self.places):
            for end in pipe:
                if end not in ends:
                    end.close()


class WorkerChannelEnd:
    """The ends of the pipes that one worker uses.

    The attribute `item` is the number of the item that torch takes from this worker next, among those of all workers.
    Torch takes the items w, w + n, w + 2n, ... from worker w of n. Every wait ends with `Interrupted` if there is a
    newer order or the workers must end.

    Args:
        channel: The channel.
        worker: The number of the worker.
        interval: The longest wait in seconds, after which the worker checks for orders.
    """

    def __init__(self, channel: Channel, worker: int, interval: float) -> None:
        following = (worker + 1) % channel.workers
        self.worker = worker
        self.workers = channel.workers
        self.item = worker
        self._interval = interval
        self._closing = channel.closing[0]
        self._orders = channel.orders[worker][0]
        self._turns = channel.turns[worker][0]
        self._following = channel.turns[following][1]
        self._places = channel.places[worker][0]
        self._place = (0, 0)  # version, number of the batch that the loader needs
        self._newest = StartFetching(0, "", 0)
        self._end: StopWorkers | None = None
        self._turn = FetchTurn(0, 0, False)
        self._loop = asyncio.new_event_loop()
        channel.keep(self._closing, self._orders, self._turns, self._following, self._places)

    def order(self, after: int) -> StartFetching | None:
        """Wait for an order that is newer than `after` and return the newest one; None if the workers must end."""
        try:
            while True:
                if self._read_messages() > after:
                    return self._newest
                wait([self._closing, self._orders], self._interval)
        except Interrupted:
            return None

    def take_turn(self, version: int, number: int) -> bool:
        """Wait until batch `number` may be claimed. Return False if neither this batch nor a later one will exist."""
        if self.workers == 1:
            return True
        while self._read_messages() == version and (self._turn.version, self._turn.number) != (version, number):
            wait([self._closing, self._orders, self._turns], self._interval)
        self.check(version)
        return not self._turn.ended

    def pass_turn(self, turn: FetchTurn) -> None:
        """Allow the next worker to claim."""
        if self.workers > 1:
            with contextlib.suppress(OSError):  # that worker has died; torch ends the others
                self._following.send(turn)

    def batches_ahead(self, version: int, number: int) -> int:
        """Return by how many batches this one is ahead of the batch that the loader needs."""
        self.check(version)
        needed = self._place[1] if self._place[0] == version else self._newest.start
        return max(0, number - needed)

    def wait(self, version: int, request: Coroutine[Any, Any, T]) -> T:
        """Return the result of a request. An interrupted request is cancelled, also at the controller."""
        try:
            return self._loop.run_until_complete(self._watched(request))
        except asyncio.CancelledError:
            self.check(version)
            raise

    async def _watched(self, request: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(request)
        for end in (self._closing, self._orders):
            self._loop.add_reader(end.fileno(), task.cancel)
        try:
            return await task
        finally:
            for end in (self._closing, self._orders):
                self._loop.remove_reader(end.fileno())

    def check(self, version: int) -> None:
        """Raise Interrupted if the order of this version is not the newest any more."""
        if self._read_messages() != version:
            raise Interrupted

    def _read_messages(self) -> int:
        """Read all messages, so that no pipe fills up and blocks its sender. Return the version of the newest order."""
        try:
            while self._end is None and self._orders.poll():
                order = self._orders.recv()
                if isinstance(order, StopWorkers):
                    self._end = order
                else:
                    self._newest = order
            while self._turns.poll():
                self._turn = max(self._turn, self._turns.recv())
            while self._places.poll():
                self._place = max(self._place, self._places.recv())
        except (EOFError, OSError):  # the other end is closed
            raise Interrupted from None
        if self._end is not None or self._closing.poll() or is_orphan():
            raise Interrupted
        return self._newest.version

    def last_delivered(self) -> int | None:
        """Return `StopWorkers.given` when this worker ends; None if the loader has not sent it."""
        with contextlib.suppress(Interrupted):
            self._read_messages()
        return None if self._end is None else self._end.given

    def end_with_the_loader(self, grace: float, leave: Callable[[], None]) -> None:
        """End this process `grace` seconds after the loader has ordered its end or was killed, if it is still running.

        A function of the user may delay it, and torch does not detect that the loader was killed before the worker had
        started. A loader that was collected as garbage together with torch's queues cannot order torch's end.

        Args:
            grace: The seconds.
            leave: Called before the end, to return the batches that the worker has fetched.
        """

        def end() -> None:
            wait([self._closing])
            time.sleep(grace)
            with contextlib.suppress(Exception):
                leave()
            os._exit(0)

        threading.Thread(target=end, daemon=True).start()


def is_orphan() -> bool:
    """Return whether this is a worker whose loader's process was killed."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()
