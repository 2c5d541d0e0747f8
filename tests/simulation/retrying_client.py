"""A client of the simulated cluster that retries after faults, as the drivers of `net` do.

If a connection breaks, the client sends its requests again, under their numbers, by the rules of
`net.session.RetryPolicy`; it gives up a request without a reply in time. It can be frozen like a stopped process, also
while it writes a block, and it can be killed. Its script is one generator, which may `sleep` between operations.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer_queue.client.attachment import Attachment
from transfer_queue.client.operations.operations import Operations
from transfer_queue.client.space import BlockGroup
from transfer_queue.client.writer import Writer
from transfer_queue.config.store_options import SIMPLE
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.claims import Cancel, Claim, ReportBatches
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.puts import Publish
from transfer_queue.messages.queries import LookupReply
from transfer_queue.net.calls import CONTROLLER, Call, Operation, Pause, Request
from transfer_queue.net.framing import FrameReader
from transfer_queue.net.session import RetryPolicy, Target
from transfer_queue.storage.protocols import Reserved
from transfer_queue.testing.simulated_client import Client, Task, outcome_of
from transfer_queue.wire.blocks.encode import EncodedBlock

if TYPE_CHECKING:
    from tests.simulation.faulty_cluster import FaultyCluster

MAX_WORK_SECONDS = 0.05  # of virtual time that a call of an external store takes


class Cancelled(Exception):
    """A task was cancelled. Operations get it as they get `asyncio.CancelledError`."""


Script = Callable[["RetryingClient"], Generator[Call, AnyReply, None]]


def sleep(seconds: float) -> Operation[None]:
    """Let time pass."""
    yield Pause(seconds)


def failure_of(error: TransferQueueError) -> Failure:
    """Return the reply by which an operation gets an error."""
    return Failure(type(error).__name__, str(error))


class TornWriter(Writer):
    """A writer whose writes may stop in the middle.

    A put of several fields may be written as several blocks.

    interrupt: Called at each write; returns the seconds to stop for, or None. go_on: Called after the stop.
    """

    def __init__(self, state: Attachment, interrupt: Callable[[], float | None], go_on: Callable[[], object]) -> None:
        super().__init__(state)
        self._interrupt = interrupt
        self._go_on = go_on
        self._draw = Random(state.client_id)

    def group(self, encoded: EncodedBlock) -> list[BlockGroup]:
        groups = super().group(encoded)
        fields = len(encoded.schema)
        if len(groups) > 1 or fields < 2 or self._draw.random() < 0.5:
            return groups
        cut = self._draw.randrange(1, fields)
        parts = encoded.with_columns(range(cut)), encoded.with_columns(range(cut, fields))
        blocks = [block for part in parts for block in part.split()]
        if groups[0].backend == SIMPLE:
            return [BlockGroup(SIMPLE, blocks)]
        return [BlockGroup(groups[0].backend, [block]) for block in blocks]  # in a store each is an object

    def write_block(self, encoded: EncodedBlock, reserved: Reserved, wait: float | None) -> Operation[None]:
        seconds = self._interrupt()
        if seconds is None:
            yield from super().write_block(encoded, reserved, wait)
            return
        if self._units.known[reserved.places[0].unit].store:  # it stops before the call of the store
            yield from sleep(seconds)
            yield from super().write_block(encoded, reserved, wait)
            self._go_on()
            return
        whole = np.empty(encoded.nbytes, np.uint8)
        encoded.write_into(whole)
        places = [self._units.arena(each.unit).view(each.offset, encoded.nbytes) for each in reserved.places]
        half = encoded.nbytes // 2
        for place in places:
            place[:half] = whole[:half]
        yield from sleep(seconds)
        for place in places:
            place[half:] = whole[half:]
        self._go_on()


class PutCancelled(Exception):
    """A put was cancelled, and nothing of it is left."""


class RetryingClient(Client):
    """See the module. frozen: Nothing reaches the client, and it does nothing. dead: It was killed."""

    _cluster: FaultyCluster

    def __init__(self, cluster: FaultyCluster, name: str) -> None:
        super().__init__(cluster, name)
        self.state.session.clock = lambda: cluster.clock.now
        self.operations = Operations(self.state, TornWriter(self.state, self._interruption, self._interrupted))
        self.frozen = self.dead = False
        self.torn: float | None = None  # seconds for which its next write stops in the middle
        self.late: float | None = None  # seconds between its next lookup and the copy
        self.cancels: float | None = None  # seconds after which the request of its next put is cancelled
        self._attempts: dict[int, RetryPolicy] = {}
        self._sent: dict[int, int] = {}  # sequence -> the connection on which it was sent last
        self._given_up: set[int] = set()  # cancelled requests, whose replies are ignored
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._planned = 0

    # ------------------------------------------------------------ faults

    def freeze(self) -> None:
        """Stop like a process after SIGSTOP. Its threads stop, too, so that it renews no lease."""
        self.frozen = True
        self.pause_renewals()
        for connection in self._connections.values():
            self._cluster.network.hold(connection, "down", "frozen")

    def thaw(self) -> None:
        """Continue; actions that were due meanwhile happen now."""
        self.frozen = False
        for connection in self._connections.values():
            self._cluster.network.release(connection, "down", "frozen")
        self.pause_renewals(False)
        self.tick()

    def die(self) -> None:
        """End like a killed process: its locks are released at once, and frames on their way may still arrive."""
        self.dead, self.frozen = True, False
        network = self._cluster.network
        for connection in self._connections.values():
            network.release(connection, "down", "frozen")
            network.deafen(connection, "down")
            network.sever(connection, up=network.random.choice([0, 1, None]))
        self._connections.clear()
        self._readers.clear()
        self._agenda.clear()
        self._attempts.clear()
        super().die()

    def _interruption(self) -> float | None:
        """Return for how many seconds to stop in the middle of a write. Connections to units may break meanwhile."""
        seconds, self.torn = self.torn, None
        if seconds is not None and self._cluster.network.random.random() < 0.8:
            for target, connection in list(self._connections.items()):
                if target[0] == "unit":
                    self._cluster.network.sever(connection)
                    self._cluster.network.hold(connection, "down", "torn")
        return seconds

    def _interrupted(self) -> None:
        """Continue the write, and receive the messages that arrived meanwhile."""
        for connection, direction in list(self._cluster.network.held):
            if connection in self._readers:
                self._cluster.network.release(connection, direction, "torn")

    # ------------------------------------------------------------ time

    def next_deadline(self) -> float | None:
        """Return when the next action is due."""
        if self.frozen or self.dead:
            return None
        times = [attempts.deadline for attempts in self._attempts.values()]
        times += [when for when, _, _ in self._agenda[:1]]
        return min(times, default=None)

    def tick(self) -> None:
        """Do due actions, and give up requests that have waited too long."""
        if self.frozen or self.dead:
            return
        now = self._cluster.clock.now
        while self._agenda and self._agenda[0][0] <= now:
            heapq.heappop(self._agenda)[2]()
        for sequence, attempts in list(self._attempts.items()):
            if attempts.deadline <= now and sequence in self._tasks:
                target, _ = self._frames[sequence]
                self._broke(sequence, TimeoutError("no reply before the deadline"))
                if target in self._connections and sequence not in self._tasks and not self.state.session.closed:
                    cancel, frame = self.state.session.begin_request(Cancel(sequence))
                    self._given_up.add(cancel)
                    self._cluster.network.send(self._connections[target], "up", frame)

    def _plan(self, seconds: float, action: Callable[[], object]) -> None:
        self._planned += 1
        heapq.heappush(self._agenda, (self._cluster.clock.now + seconds, self._planned, action))

    # ------------------------------------------------------------ requests

    def start(self, operation: Generator[Call, AnyReply, Any]) -> Task[Any]:
        """Start an operation, which may sleep."""
        return super().start(operation)

    def _work(self, task: Task[Any], function: Callable[[], object]) -> None:
        """Do the work of an external store. Meanwhile other things happen."""
        seconds = self._cluster.network.random.uniform(0, MAX_WORK_SECONDS)
        self._plan(seconds, lambda: task.resume(outcome_of(function)))

    def _ask_server(self, task: Task[Any], call: Request) -> None:
        attempts = RetryPolicy(self.state.session, call)
        sequence, frame = self.state.session.begin_request(call.body, 0, call.target, call.within)
        task.call, task.sequence = call, sequence
        self._tasks[sequence], self._frames[sequence] = task, (call.target, frame)
        self._attempts[sequence] = attempts
        if self.cancels is not None and isinstance(call.body, Publish):
            seconds, self.cancels = self.cancels, None
            self._plan(seconds, lambda: self._cancel_put(sequence, call))
        self._try(sequence)

    def _cancel_put(self, sequence: int, call: Request) -> None:
        """Cancel a put that has no reply yet, as the driver of event loops does; see `asyncio_driver._withdraw`."""
        task = self._tasks.pop(sequence, None)
        if task is None:
            return
        frame = self._frames.pop(sequence)
        del self._attempts[sequence]
        self._sent.pop(sequence, None)

        def withdraw() -> Operation[None]:
            try:
                reply = yield Request(call.target, Cancel(sequence))
            except TransferQueueError as error:
                self.state.session.finish(sequence)
                task.resume(failure_of(error))
                return
            assert isinstance(reply, Done)
            if reply.value:
                self.state.session.finish(sequence)
                task.resume(PutCancelled())
            else:
                self._tasks[sequence], self._frames[sequence] = task, frame
                self._attempts[sequence] = RetryPolicy(self.state.session, call)
                self._try(sequence)

        self.start(withdraw())

    def _try(self, sequence: int) -> None:
        if sequence not in self._tasks:
            return
        target, frame = self._frames[sequence]
        if sequence in self._sent:
            frame = self._attempts[sequence].frame_to_retry(sequence, frame)
        connection = self._connections.get(target)
        if connection is None:
            try:
                connection = self._cluster._connect(self, target)
            except TransferQueueError as told:  # the unit is lost
                self._end(sequence, failure_of(told))
                return
            except OSError as error:
                self._broke(sequence, error)
                return
            self._connections[target] = connection
            self._readers[connection] = FrameReader()
        self._sent[sequence] = connection
        self._cluster.network.send(connection, "up", frame)

    def _notify(self, report: ReportBatches) -> None:
        """Write a notice to the controller; if there is no connection, the next request carries it."""
        self.state.session.notices.add(report)
        connection = self._connections.get(CONTROLLER)
        if connection is not None:
            self._cluster.network.send(connection, "up", self.state.session.notices.frame())

    def cancel(self, task: Task[Any]) -> bool:
        """Cancel the request of an operation, as `asyncio.Task.cancel` does; return whether there is one."""
        if task.done or self._tasks.get(task.sequence) is not task:
            return False  # it pauses, or does work that is not interrupted
        sequence, call = task.sequence, task.call
        assert call is not None
        self._drop(sequence)
        self._abandon(sequence, call)
        task.resume(Cancelled())
        return True

    def _abandon(self, sequence: int, call: Request) -> None:
        """Do what the drivers do with a request whose reply nobody awaits any more."""
        if isinstance(call.body, Claim):
            self._notify(ReportBatches(withdrawn=[sequence]))
        else:
            self.state.session.finish(sequence)

    def _broke(self, sequence: int, error: OSError) -> None:
        """Handle a failed attempt of a request: try again, or end it with an error."""
        try:
            delay = self._attempts[sequence].next_delay(error)
        except TransferQueueError as told:
            task = self._drop(sequence)
            assert task.call is not None
            self._abandon(sequence, task.call)
            task.resume(failure_of(told))
        else:
            self._plan(delay, lambda: self._try(sequence))

    def connection_to(self, target: Target) -> int | None:
        """Return the connection to a server; None if there is none."""
        return self._connections.get(target)

    def note_severed(self, target: Target, connection: int) -> None:
        """Handle a connection that the network has severed."""
        self._on_connection_lost(target, connection)

    def _on_connection_lost(self, target: Target, connection: int) -> None:
        super()._on_connection_lost(target, connection)
        for sequence in [s for s, on in self._sent.items() if on == connection and s in self._tasks]:
            self._broke(sequence, ConnectionResetError("the server closed the connection"))

    def _on_frame(self, connection: int, frame: bytes) -> None:
        for body, _ in self._readers[connection].feed(frame):
            self._on_body(body)

    def _on_body(self, body: bytes) -> None:
        answer = self.state.session.decode_reply(body)
        if answer.sequence in self._given_up:
            self._given_up.discard(answer.sequence)
            self.state.session.finish(answer.sequence)
        elif answer.sequence in self._tasks:
            self._end(answer.sequence, answer.body)

    def _drop(self, sequence: int) -> Task[Any]:
        del self._frames[sequence], self._attempts[sequence]
        self._sent.pop(sequence, None)
        return self._tasks.pop(sequence)

    def _end(self, sequence: int, reply: AnyReply) -> None:
        task = self._drop(sequence)
        self.state.session.finish(sequence)
        if isinstance(reply, LookupReply) and self.late is not None:
            seconds, self.late = self.late, None
            self._plan(seconds, lambda: task.resume(reply))
        else:
            task.resume(reply)

    def return_extents(self) -> Operation[None]:
        """Return the space that the client has leased and not used."""
        yield from self.state.space.return_extents()

    def leave(self) -> Operation[None]:
        """End the client: it returns what it holds."""
        try:
            yield from self.state.leave()
        finally:  # what it could not return is recovered as from a dead client
            self.state.close()
            for connection in self._connections.values():
                self._cluster.network.sever(connection)
