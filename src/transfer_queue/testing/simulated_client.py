"""A client of the simulated cluster: the production's operations, its session, space and codec, over virtual time."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from transfer_queue.client.data.client_context import ClientState
from transfer_queue.client.data.data_path import Operation
from transfer_queue.client.operations.sample_operations import Operations
from transfer_queue.client.subscriptions import Subscriptions
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages import AnyReply, Done
from transfer_queue.net.calls import Call
from transfer_queue.net.framing import FrameReader
from transfer_queue.net.session import Target, outcome
from transfer_queue.testing.simulated_locks import Held

if TYPE_CHECKING:
    from transfer_queue.testing.cluster import Cluster

T = TypeVar("T")


class Task(Generic[T]):
    """An operation under way.

    done: it ended; `result()` gives what it returned or raises what it raised, error: None or that exception.
    call: what it waits for.
    """

    def __init__(self, client: Client, operation: Generator[Call, AnyReply, T]) -> None:
        self._client = client
        self._operation = operation
        self.done = False
        self.call: Call | None = None
        self.sequence = 0
        self._value: T | None = None
        self.error: BaseException | None = None

    def result(self) -> T:
        """What the operation returned."""
        assert self.done, "the operation has not ended; run the cluster first"
        if self.error is not None:
            raise self.error
        return cast(T, self._value)

    def resume(self, reply: AnyReply | None) -> None:
        """Goes on with the reply to its call (None: begins)."""
        try:
            if reply is None:
                call = next(self._operation)
            else:
                try:
                    value = outcome(reply)
                except TransferQueueError as error:
                    call = self._operation.throw(error)
                else:
                    call = self._operation.send(value)
        except StopIteration as stop:
            self.done, self._value, self.call = True, stop.value, None
        except Exception as error:
            self.done, self.error, self.call = True, error, None
        else:
            self._client._ask(self, call)


class _Address:
    """Where the simulated system is found."""

    controller = "controller"
    key = b"simulated"

    def __init__(self, states: Path) -> None:
        self.states = states
        self.node = ""
        self.shares_states = True
        self.tls = None
        self.store = None

    def log_of(self, target: Target) -> str:
        return "no log: simulated"

    def alive(self) -> bool:
        return True

    def presence(self, client_id: str) -> None:
        return None


class Client(Subscriptions):
    """A client of the cluster, with the methods of TransferQueueClient: they block in virtual time.

    For what happens at once with others, `start` begins one of `operations`, and `call` runs the cluster until it
    has ended, with time standing still.
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self.name = name
        self.state = ClientState(_Address(cluster.states.folder), name, lambda path: Held(cluster.held, path))
        self.operations = Operations(self.state)
        self.state.session.clock = lambda: cluster.clock.now
        self.state.renewals.on_change = self._await_renewal
        self._renews: float | None = None
        self._paused = False
        self._connections: dict[Target, int] = {}
        self._readers: dict[int, FrameReader] = {}
        self._tasks: dict[int, Task[Any]] = {}
        self._frames: dict[int, tuple[Target, bytes]] = {}

    @property
    def _operations(self) -> Operations:
        return self.operations

    def _run(self, operation: Operation[T]) -> T:
        task = self.start(operation)
        self._cluster.wait(lambda: task.done)
        return task.result()

    async def _run_async(self, operation: Operation[T]) -> T:
        return self._run(operation)

    def start(self, operation: Generator[Call, AnyReply, T]) -> Task[T]:
        """Begins an operation of `operations`."""
        task: Task[T] = Task(self, operation)
        task.resume(None)
        return task

    def call(self, operation: Generator[Call, AnyReply, T]) -> T:
        """What the operation returns; runs the cluster meanwhile. It must not have to wait for time to pass."""
        task = self.start(operation)
        self._cluster.run(lambda: task.done)
        return task.result()

    def pause_renewals(self, paused: bool = True) -> None:
        """Renews no leases from now on, as a stopped process."""
        self._paused = paused
        self._await_renewal()

    def _await_renewal(self) -> None:
        """Has the client renew its leases in time: what a thread does elsewhere."""
        due = self.state.renewals.next()
        if due is None or self._paused or (self._renews is not None and self._renews <= due):
            return
        self._renews = due
        self._cluster.later(due - self._cluster.clock.now, lambda: self._renew(due))

    def _renew(self, due: float) -> None:
        if self._renews != due:
            return  # there was one to be renewed before it
        self._renews = None
        if not self._paused and not self.state.session.closed:
            self.start(self.state.renewals.renew())
            self._await_renewal()

    def disconnect(self) -> None:
        """Loses all connections, with what is on its way. Requests without an answer wait for `reconnect`."""
        for target, connection in list(self._connections.items()):
            self._cluster._cut(self.name, target, connection)
        self._connections.clear()
        self._readers.clear()

    def reconnect(self) -> None:
        """Loses all connections and sends every request without an answer again, under its number."""
        self.disconnect()
        for target, frame in list(self._frames.values()):
            self._send(target, frame)

    def hold(self) -> None:
        """Lets replies on the connections of now be slow: they wait for `release`."""
        for connection in self._connections.values():
            self._cluster.network.hold(connection, "down")

    def release(self) -> None:
        """Replies arrive again."""
        for connection in self._connections.values():
            self._cluster.network.release(connection, "down")

    def close(self) -> None:
        """Ends like `TransferQueueClient.close`: hands back what it holds, then lets go of its locks."""
        self._run(self.state.leave())
        self.state.close()
        self.disconnect()

    def die(self) -> None:
        """Ends like a killed process: connections break, the kernel lets go of its locks."""
        self._paused = True
        self._tasks.clear()
        self._frames.clear()
        if self.state._space is not None:
            self.state.space.release()
        self.disconnect()

    def next_deadline(self) -> float | None:
        """When `tick` is due; None where this client waits for no time to pass."""
        return None

    def tick(self) -> None:
        """Does what is due."""

    def _lost(self, target: Target, connection: int) -> None:
        """A connection was severed. Requests without an answer wait for `reconnect`."""
        self._readers.pop(connection, None)
        if self._connections.get(target) == connection:
            del self._connections[target]

    def _ask(self, task: Task[Any], call: Call) -> None:
        if call.work is not None:
            call.work()
            task.resume(Done())
            return
        if call.together:
            self._ask_together(task, call.together)
            return
        sequence, frame = self.state.session.begin(call.request)
        task.call, task.sequence = call, sequence
        call.sequence = sequence
        self._tasks[sequence] = task
        self._frames[sequence] = (call.target, frame)
        self._send(call.target, frame)

    def _ask_together(self, task: Task[Any], calls: Sequence[Call]) -> None:
        """Makes these at once, and goes on when all of them have ended."""
        left = list(calls)

        def made(call: Call) -> Operation[None]:
            try:
                call.outcome = yield call
            except TransferQueueError as error:
                call.outcome = error
            left.remove(call)
            if not left:
                task.resume(Done())

        for call in calls:
            self.start(made(call))

    def _send(self, target: Target, frame: bytes) -> None:
        connection = self._connections.get(target)
        if connection is None:
            connection = self._connections[target] = self._cluster._connect(self, target)
            self._readers[connection] = FrameReader()
        self._cluster.network.send(connection, "up", frame)

    def _received(self, connection: int, frame: bytes) -> None:
        for body, _ in self._readers[connection].feed(frame):
            answer = self.state.session.answer(body)
            task = self._tasks.pop(answer.sequence, None)
            if task is not None:
                del self._frames[answer.sequence]
                self.state.session.finish(answer.sequence)
                task.resume(answer.body)
