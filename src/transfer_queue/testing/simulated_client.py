"""A client of the simulated cluster: the production's operations, its session, space and codec, over virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from transfer_queue.client.attachment import Attachment
from transfer_queue.client.key_lock import LockMethods
from transfer_queue.client.operations.operations import Operations
from transfer_queue.client.subscriptions import Subscriptions
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import ReportBatches
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.net.calls import (
    CONTROLLER,
    NOT_MADE,
    Call,
    Join,
    JoinKey,
    Operation,
    Pause,
    Request,
    Together,
    Work,
)
from transfer_queue.net.drivers.join_queues import JoinQueue
from transfer_queue.net.framing import FrameReader
from transfer_queue.net.session import RetryPolicy, Session, Target, raise_failure
from transfer_queue.node.controller.state_files import StateFiles
from transfer_queue.storage.stores.base import StoreAddress
from transfer_queue.testing.network import Network, VirtualClock
from transfer_queue.testing.simulated_locks import HeldSlots, SimulatedSlotLock

T = TypeVar("T")


class Task(Generic[T]):
    """An operation that a simulated client has started.

    Args:
        client: The client.
        operation: The operation.

    Example:
        >>> from pathlib import Path
        >>> from transfer_queue.testing import Cluster
        >>> with Cluster(Path.cwd()) as cluster:
        ...     simulated = cluster.client("trainer")
        ...     task = simulated.start(simulated.operations.get_partition_list())
        ...     cluster.run()
        ...     task.result()
        []
    """

    def __init__(self, client: Client, operation: Generator[Call, AnyReply, T]) -> None:
        self._client = client
        self._operation = operation
        self.done = False
        """True when the operation has ended."""
        self.call: Request | None = None
        """The request whose reply the operation waits for, or was sent last; None if it has ended."""
        self.sequence = 0
        """The number of that call."""
        self._value: T | None = None
        self.error: BaseException | None = None
        """The exception that the operation raised; None if it raised none."""

    def result(self) -> T:
        """Return what the operation returned, or raise what it raised.

        Returns:
            The result.
        """
        assert self.done, "the operation has not ended; run the cluster first"
        if self.error is not None:
            raise self.error
        return cast(T, self._value)

    def resume(self, reply: AnyReply | Exception | None) -> None:
        """Continue the operation with the reply to its call.

        Args:
            reply: The reply, or the exception that its work has raised; None to begin.
        """
        try:
            if reply is None:
                call = next(self._operation)
            elif isinstance(reply, Exception):
                call = self._operation.throw(reply)
            else:
                try:
                    value = raise_failure(reply)
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


def outcome_of(work: Callable[[], object]) -> AnyReply | Exception:
    """Do the work of a call, and return what continues its operation."""
    try:
        work()
    except Exception as error:
        return error
    return Done()


class _JoiningTask:
    """A task that waits for its flight."""

    def __init__(self, task: Task[Any], call: Join) -> None:
        self.task = task
        self.call = call

    @property
    def left(self) -> bool:
        return self.task.done


class _Address:
    """The address of the simulated system."""

    new = True
    controller = "controller"
    key = b"simulated"

    def __init__(self, states: Path) -> None:
        self.states = states
        self.node = ""
        self.shares_states = True
        self.tls = None
        self.stores: dict[str, StoreAddress] = {}

    def log_of(self, target: Target) -> str:
        return "no log: simulated"

    def is_alive(self) -> bool:
        return True

    def will_return(self) -> bool:
        return True

    def start_liveness(self, client_id: str) -> None:
        return None

    def follow_controller(self, session: Session) -> None:
        return None


class SimulatedSystem(Protocol):
    """The system that a simulated client uses: `cluster.Cluster`."""

    clock: VirtualClock
    network: Network
    held: HeldSlots
    states: StateFiles

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Deliver messages until a condition is met, or until no message is on its way."""

    def wait(self, until: Callable[[], bool]) -> None:
        """Deliver messages and let virtual time pass until a condition is met."""

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Call a function after some virtual time."""

    def _connect(self, client: Client, target: Target) -> int:
        """Connect a client to a server, and return the connection."""

    def _cut(self, name: str, target: Target, connection: int) -> None:
        """Break the connection of a client."""


class Client(Subscriptions, LockMethods):
    """A client of a simulated cluster, with the methods of TransferQueueClient. They block in virtual time.

    To run several operations at once, start each of `operations` with `start`; `call` runs the cluster until one has
    ended, while the time stands still.

    Args:
        cluster: The cluster.
        name: The id of the client.

    Example:
        >>> from pathlib import Path
        >>> from transfer_queue.testing import Cluster
        >>> with Cluster(Path.cwd()) as cluster:
        ...     simulated = cluster.client("trainer")
        ...     meta = simulated.kv_put("a", "train_0", {"reward": torch.tensor(1.0)})
        ...     simulated.kv_batch_get(["a"], "train_0")["reward"].tolist()
        [1.0]
    """

    def __init__(self, cluster: SimulatedSystem, name: str) -> None:
        self._cluster = cluster
        self.name = name
        """The id of the client."""
        self.state = Attachment(
            _Address(cluster.states.folder), name, lambda path: SimulatedSlotLock(cluster.held, path)
        )
        """The session, arenas and settings of the client."""
        self.operations = Operations(self.state)
        """The operations, for `start` and `call`."""
        self.state.session.clock = lambda: cluster.clock.now
        self.state.renewals.on_change = self._await_renewal
        self._renews: float | None = None
        self._paused = False
        self._joins: dict[JoinKey, JoinQueue[_JoiningTask]] = {}
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
        """Start an operation.

        Args:
            operation: One of `operations`.

        Returns:
            The running operation.
        """
        task: Task[T] = Task(self, operation)
        task.resume(None)
        return task

    def call(self, operation: Generator[Call, AnyReply, T]) -> T:
        """Run the cluster until an operation, which must not wait for time to pass, returns its result.

        Args:
            operation: One of `operations`.

        Returns:
            The result.
        """
        task = self.start(operation)
        self._cluster.run(lambda: task.done)
        return task.result()

    def pause_renewals(self, paused: bool = True) -> None:
        """Stop renewing leases, as a stopped process does.

        Args:
            paused: False to continue. Default: True.
        """
        self._paused = paused
        self._await_renewal()

    def _await_renewal(self) -> None:
        """Schedule the next renewal of leases, which a thread does in production."""
        due = self.state.renewals.next_deadline()
        if due is None or self._paused or (self._renews is not None and self._renews <= due):
            return
        self._renews = due
        self._cluster.later(due - self._cluster.clock.now, lambda: self._renew(due))

    def _renew(self, due: float) -> None:
        if self._renews != due:
            return  # another lease was added, which is due earlier
        self._renews = None
        if not self._paused and not self.state.session.closed:
            self.start(self.state.renewals.renew())
            self._await_renewal()

    def disconnect(self) -> None:
        """Lose all connections, with what is on its way. Requests without a reply wait for `reconnect`."""
        for target, connection in list(self._connections.items()):
            self._cluster._cut(self.name, target, connection)
        self._connections.clear()
        self._readers.clear()

    def reconnect(self) -> None:
        """Lose all connections, and send every request without a reply again, under its number."""
        self.disconnect()
        for target, frame in list(self._frames.values()):
            self._send(target, frame)

    def hold(self) -> None:
        """Let replies on the present connections wait for `release`."""
        for connection in self._connections.values():
            self._cluster.network.hold(connection, "down")

    def release(self) -> None:
        """Let replies arrive again."""
        for connection in self._connections.values():
            self._cluster.network.release(connection, "down")

    def close(self) -> None:
        """End as `TransferQueueClient.close` does: release what the client holds, then its locks."""
        self._run(self.state.leave())
        self.state.close()
        self.forget_joins()
        self.disconnect()

    def die(self) -> None:
        """End as a killed process does: connections break, and the kernel releases its locks."""
        self._paused = True
        self._tasks.clear()
        self.forget_joins()
        self._frames.clear()
        self.state.space.release()
        self.disconnect()

    def next_deadline(self) -> float | None:
        """Return when `tick` is due; None if this client does not wait for time to pass.

        Returns:
            The virtual time in seconds, or None.
        """
        return None

    def tick(self) -> None:
        """Do what is due."""

    def _on_connection_lost(self, target: Target, connection: int) -> None:
        """Handle a severed connection. Requests without a reply wait for `reconnect`."""
        self._readers.pop(connection, None)
        if self._connections.get(target) == connection:
            del self._connections[target]

    def _ask_to_join(self, task: Task[Any], call: Join) -> None:
        """Let the operation go alone, or wait until the flight that is under way has ended."""
        queue = self._joins.get(call.key)
        if queue is None:
            queue = self._joins[call.key] = JoinQueue(call.key)
            queue.flights = 1
            call.ended = partial(self._end_flight, queue)
            task.resume(NOT_MADE)
            return
        queue.waiting.append(_JoiningTask(task, call))

    def forget_joins(self) -> None:
        """Begin no further flight: this client has ended, and its operations are collected as garbage at some time."""
        self._joins.clear()

    def _end_flight(self, queue: JoinQueue[_JoiningTask]) -> None:
        if self._joins.get(queue.key) is not queue:
            return  # see `forget_joins`
        queue.flights -= 1
        taken = queue.take(1)
        if taken:
            self.start(self._fly(queue, taken))
        elif queue.idle:
            self._joins.pop(queue.key, None)

    def _fly(self, queue: JoinQueue[_JoiningTask], waiters: list[_JoiningTask]) -> Operation[None]:
        yield from queue.key[0].run([waiter.call for waiter in waiters])
        for waiter in waiters:
            outcome = waiter.call.outcome
            assert outcome is not None, "a joiner has not set the outcome of an operation"
            waiter.task.resume(outcome)
        self._end_flight(queue)

    def _ask(self, task: Task[Any], call: Call) -> None:
        if isinstance(call, Request):
            self._ask_server(task, call)
        elif isinstance(call, Join):
            self._ask_to_join(task, call)
        elif isinstance(call, Work):
            self._work(task, call.function)
        elif isinstance(call, Pause):
            assert call.seconds is not None, "no thread of a simulated client can end a pause"
            self._plan(call.seconds, lambda: task.resume(Done()))
        elif isinstance(call, Together):
            self._ask_together(task, call.calls)
        else:
            self._notify(call.report)
            task.resume(Done())

    def _plan(self, seconds: float, action: Callable[[], object]) -> None:
        self._cluster.later(seconds, action)

    def _work(self, task: Task[Any], function: Callable[[], object]) -> None:
        task.resume(outcome_of(function))

    def _notify(self, report: ReportBatches) -> None:
        self.state.session.notices.add(report)
        self._send(CONTROLLER, self.state.session.notices.frame())

    def _ask_server(self, task: Task[Any], call: Request) -> None:
        sequence, frame = self.state.session.begin_request(call.body, 0, call.target, call.within)
        task.call, task.sequence = call, sequence
        call.sequence = sequence
        self._tasks[sequence] = task
        self._frames[sequence] = (call.target, frame)
        self._send(call.target, frame)
        self._report_later(sequence, RetryPolicy(self.state.session, call))

    def _report_later(self, sequence: int, attempts: RetryPolicy) -> None:
        """Let the wait of a call be reported when it is due."""
        if attempts.report_at == math.inf:
            return

        def report() -> None:
            if sequence in self._tasks:
                self.start(attempts.begin_report())
                self._report_later(sequence, attempts)

        self._cluster.later(attempts.report_at - self._cluster.clock.now, report)

    def _ask_together(self, task: Task[Any], calls: Sequence[Request | Work | Pause]) -> None:
        """Make several calls at once, and continue when all of them have ended."""
        left = list(calls)

        def made(call: Request | Work | Pause) -> Operation[None]:
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

    def _on_frame(self, connection: int, frame: bytes) -> None:
        for body, _ in self._readers[connection].feed(frame):
            answer = self.state.session.decode_reply(body)
            task = self._tasks.pop(answer.sequence, None)
            if task is not None:
                del self._frames[answer.sequence]
                self.state.session.finish(answer.sequence)
                task.resume(answer.body)
