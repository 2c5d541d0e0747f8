"""What goes between a loader and its worker processes beside torch's queues: where to begin, whose turn it is, the end.

Everything travels through pipes, so that a worker that waits for rows is woken by what happens here:

    closing       one pipe to all, never read: readable means that the loader wants its workers to end, or is gone
    orders[w]     from the loader to worker w: the batch at which to begin
    turns[w]      to worker w from the one before: the batch that it may ask for now
    places[w]     from the loader to worker w: the batch that it needs now; later ones are fetched ahead

Batches are asked for one after the other, in the order of their numbers, whichever workers fetch them. Otherwise the
rows of a batch would depend on which worker came first, and the sequence on the number of workers. It is also the order
in which torch takes the items of workers: if torch waited for a later batch first, and that one was not complete before
the loader has acknowledged an earlier one, neither would ever come.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Coroutine
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple

# what a worker's functions get to come back when its loader is deleted: torch's time, and that of a fetch that waits
GRACE_SECONDS = 5.0
GRACE_SECONDS_OF_FETCHES = 1.0


class StartFetching(NamedTuple):
    """An order: the workers fetch the batches of a partition from number `start` on.

    version: counts a loader's orders, from 1. What was fetched for an older one is of no use any more.
    given: of the order before, the batches below this number were given to who iterates.
    item: batch `start` is this item of torch's, and the items after it are the batches after it
    (`WorkerChannelEnd.item`). Items before it may have been made for an older order.
    """

    version: int
    partition_id: str
    start: int
    given: int = 0
    item: int = 0


class StopWorkers(NamedTuple):
    """The last order: the workers end. given: as in `StartFetching`."""

    given: int


class FetchTurn(NamedTuple):
    """Batch `number` may be asked for. ended: no batch of this number will come, nor a later one."""

    version: int
    number: int
    ended: bool


class Interrupted(Exception):
    """There is a newer order, or the loader wants its workers to end."""


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

    def order(self, begin: StartFetching) -> None:
        """Tells every worker where to begin, also one that waits for rows."""
        for _, pipe in self.orders:
            with contextlib.suppress(OSError):  # it has died; torch says so when its next batch is due
                pipe.send(begin)

    def want(self, version: int, number: int) -> None:
        """Send every worker the batch that the loader needs now. They read it whenever they look for orders."""
        for _, pipe in self.places:
            with contextlib.suppress(OSError):
                pipe.send((version, number))

    def close(self, given: int) -> None:
        """Ends the workers, also those that wait for rows. Idempotent. given: see `StopWorkers`."""
        if self.closing[1].closed:
            return
        for _, pipe in self.orders:
            with contextlib.suppress(OSError):
                pipe.send(StopWorkers(given))
        with contextlib.suppress(OSError):
            # a message, not only the end of the pipe: processes forked meanwhile may hold this end, too
            self.closing[1].send_bytes(b"end")
        self.keep()

    def keep(self, *ends: Connection[Any, Any]) -> None:
        """Closes, in this process, all ends but these."""
        for pipe in (self.closing, *self.orders, *self.turns, *self.places):
            for end in pipe:
                if end not in ends:
                    end.close()


class WorkerChannelEnd:
    """Worker `worker`'s place at the channel. interval: seconds of the longest wait, after which to look about.

    item: the number of the item that torch takes of this worker next, among those of all workers. Torch takes them in
    turn: of worker w of n the items w, w + n, w + 2n, ...

    Every wait ends with `Interrupted` where there is a newer order or the workers shall end.
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
        """The newest order, once there is one after that version; None where the workers shall end."""
        try:
            while True:
                if self._look() > after:
                    return self._newest
                wait([self._closing, self._orders], self._interval)
        except Interrupted:
            return None

    def take_turn(self, version: int, number: int) -> bool:
        """Waits until batch `number` may be asked for; False where none of this or a later number will come."""
        if self.workers == 1:
            return True
        while self._look() == version and (self._turn.version, self._turn.number) != (version, number):
            wait([self._closing, self._orders, self._turns], self._interval)
        self.check(version)
        return not self._turn.ended

    def pass_turn(self, turn: FetchTurn) -> None:
        """Lets the next worker ask."""
        if self.workers > 1:
            with contextlib.suppress(OSError):  # that one has died; torch ends the others
                self._following.send(turn)

    def ahead(self, version: int, number: int) -> int:
        """Return by how many batches this one is ahead of the batch that the loader needs."""
        self.check(version)
        wanted = self._place[1] if self._place[0] == version else self._newest.start
        return max(0, number - wanted)

    def ask(self, version: int, request: Coroutine[Any, Any, Any]) -> Any:
        """What a request of the client gives. It is cancelled, at the controller too, where the wait is interrupted."""
        try:
            return self._loop.run_until_complete(self._watched(request))
        except asyncio.CancelledError:
            self.check(version)
            raise

    async def _watched(self, request: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.ensure_future(request)
        for end in (self._closing, self._orders):
            self._loop.add_reader(end.fileno(), task.cancel)
        try:
            return await task
        finally:
            for end in (self._closing, self._orders):
                self._loop.remove_reader(end.fileno())

    def check(self, version: int) -> None:
        """Interrupts what is done for an order of this version, if it is not the newest any more."""
        if self._look() != version:
            raise Interrupted

    def _look(self) -> int:
        """Reads all that has come, so that no pipe fills up and holds up who sends; the version of the newest order."""
        with self._reading():
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
        if self._end is not None or self._closing.poll() or is_orphan():
            raise Interrupted
        return self._newest.version

    def given(self) -> int | None:
        """At the end of this worker: see `StopWorkers`; None where the loader has not said it."""
        with contextlib.suppress(Interrupted):
            self._look()
        return None if self._end is None else self._end.given

    @contextlib.contextmanager
    def _reading(self) -> Any:
        try:
            yield
        except (EOFError, OSError):  # the other end is gone
            raise Interrupted from None

    def end_with_the_loader(self, grace: float) -> None:
        """Ends this process so many seconds after the loader wants it to end, or was killed, if it then still runs.

        A function of the user's may hold it up; and torch does not see that the loader was killed where that was
        before the worker had started.
        """

        def end() -> None:
            wait([self._closing])
            time.sleep(grace)
            os._exit(0)

        threading.Thread(target=end, daemon=True).start()


def is_orphan() -> bool:
    """Whether this is a worker whose loader's process was killed."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()
