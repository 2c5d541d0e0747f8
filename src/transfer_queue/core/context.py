"""What a feature of the controller keeps outside of the state, and when the controller calls it.

A feature stands in modules of its own: handlers of its requests, records with their appliers, decisions, and a
`CoreService` if something has to be kept. One line of `core.services` registers it. The controller does not name
features: it calls the hooks of the services that run, as far as a service defines them. So a feature that nobody has
used costs nothing.

`Context` is what handlers and services work with: the state, the log of records, the connections, and the services that
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.events.records import Record
from transfer_queue.core.events.registry import Caller, Decision
from transfer_queue.core.record_log import ChangeLog, ControllerMeasures, ParkedRequests, RecordLog
from transfer_queue.core.samplers import claim_samplers
from transfer_queue.core.samplers.claim_samplers import SamplerRegistry
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import ReplyCache, State
from transfer_queue.core.state.wait_queues import ParkedRequest, RequestKey
from transfer_queue.errors import FieldTypeError, TransferQueueError
from transfer_queue.messages.base import Failure
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.puts import PublishReply

ServiceT = TypeVar("ServiceT", bound="CoreService")
MethodT = TypeVar("MethodT", bound=Callable[..., Any])

MAX_DEPARTED = 1024
"""Clients without a connection whose replies are kept."""


def observes(*kinds: type) -> Callable[[MethodT], MethodT]:
    """Call the decorated method of a running service with each record of these types, after it was applied.

    The method of a request type is called with the client and the request, before it is handled. Requests that change
    nothing (`registry.READS`) are not observed.
    """

    def mark(method: MethodT) -> MethodT:
        method.observed = kinds  # type: ignore[attr-defined]
        return method

    return mark


class CoreService:
    """What one feature keeps outside of the state.

    A service starts when it is used for the first time (`context.services[Kind]`), or earlier by `must_start` and
    `begins_with`. It must derive everything from the state, because it has not seen the records before its start.

    The public methods below are the hooks. A service defines those that it needs, and no other hook of it is called.
    Most return the effects of what they do.
    """

    observed: ClassVar[list[tuple[type, str]]] = []
    """Types of records and requests, each with a method that observes it."""

    runs_always: ClassVar[bool] = False
    """Whether the service starts with the controller, whatever the configuration and the state are."""

    begins_with: ClassVar[tuple[type, ...]] = ()
    """The service starts when a record of one of these types was applied."""

    def __init_subclass__(cls) -> None:
        """Collect the methods that observe something."""
        super().__init_subclass__()
        methods = [(name, method.observed) for name, method in vars(cls).items() if hasattr(method, "observed")]
        cls.observed = [*cls.observed, *((kind, name) for name, kinds in methods for kind in kinds)]

    def __init__(self, context: Context) -> None:
        self.context = context

    @classmethod
    def must_start(cls, context: Context) -> bool:
        """Return whether it must run now: it is always used, or the configuration or the state needs it.

        Asked at the start of the controller, and when another state was loaded.
        """
        return cls.runs_always

    # ------------------------------------------------------------ times

    def next_due(self) -> float | None:
        """Return the time of the next `on_due`; None if there is none. Asked after each event that changes something.

        A time that has passed means: as soon as possible.
        """
        raise NotImplementedError

    def on_due(self) -> list[Effect]:
        """Do what is due."""
        raise NotImplementedError

    def when_settled(self) -> list[Effect]:
        """Begin what has waited until all requests that can be met were met. It may lead to further ones."""
        raise NotImplementedError

    def after_event(self) -> list[Effect]:
        """Do what follows from an event, after all requests that it can meet were met."""
        raise NotImplementedError

    # ------------------------------------------------------------ clients and units

    def on_connected(self, client: str) -> None:
        """Note that a client has opened a connection, its first one or a further one."""

    def on_connection_ended(self, client: str, peer: int) -> None:
        """Forget a connection. What waits on it will not be answered."""

    def on_client_left(self, client: str, announced: bool) -> list[Effect]:
        """Note that the last connection of a client has ended. announced: the client has said that it closes."""
        raise NotImplementedError

    def on_client_removed(self, client: str) -> None:
        """Forget a client: its last connection has ended, or it has not reconnected in time after a restart."""

    def on_unit_removed(self, unit: int) -> None:
        """Forget the connection of a storage unit, and what it has reported on it."""

    # ------------------------------------------------------------ requests

    def on_partition_changed(self, partition: Partition) -> None:
        """Note that something happened to a partition, before the requests that wait for it are looked at."""

    def on_wait_ended(self, waiting: ParkedRequest, met: bool) -> None:
        """Note that a request does not wait any more. met: whether it got what it waited for."""

    def holds_reply(self, client: str, send: Send, again: bool) -> bool:
        """Return whether this service holds a reply to a put. again: the client has sent the request again."""
        raise NotImplementedError

    def on_extents_unneeded(self) -> list[Effect]:
        """Act after an event because extents of units are not needed any more."""
        raise NotImplementedError

    def is_working(self) -> bool:
        """Return whether it may still make space or rows by itself, so that no put or claim waits for ever."""
        raise NotImplementedError


_NO_HOOKS = ("observed", "runs_always", "begins_with", "must_start")
_HOOKS = [name for name in vars(CoreService) if not name.startswith("_") and name not in _NO_HOOKS]


class Services(dict[type[Any], Any]):
    """The services that run. `services[Kind]` starts one that does not run yet."""

    def __init__(self, context: Context, features: Iterable[type[CoreService]]) -> None:
        super().__init__()
        self._context = context
        self._features = list(features)
        self.with_hook: dict[str, list[Any]] = {name: [] for name in _HOOKS}
        """Name of a hook -> the running services that define it, in the order of `core.services`."""
        self.requests: dict[type, list[Callable[[str, Any], None]]] = {}
        """Type of a request -> the methods that observe it."""
        for kind in self._features:
            context.log.observe(kind.begins_with, self._starter(kind))

    if TYPE_CHECKING:

        def __getitem__(self, kind: type[ServiceT]) -> ServiceT:
            """Return a service, which starts if it does not run."""

        def get(self, kind: type[ServiceT]) -> ServiceT | None:  # type: ignore[override]
            """Return a service if it runs."""

    def __missing__(self, kind: type[ServiceT]) -> ServiceT:
        service = self[kind] = kind(self._context)
        for name, running in self.with_hook.items():
            if getattr(kind, name) is not getattr(CoreService, name):
                running.append(service)
                running.sort(key=lambda each: self._features.index(type(each)))
        for observed, name in kind.observed:
            if issubclass(observed, Record):
                self._context.log.observe([observed], getattr(service, name))
            else:
                self.requests.setdefault(observed, []).append(getattr(service, name))
        return service

    def _starter(self, kind: type[CoreService]) -> Callable[[Any], Any]:
        return lambda record: self[kind]

    def start_needed(self) -> None:
        """Start the services that must run now."""
        for kind in self._features:
            if kind not in self and kind.must_start(self._context):
                self[kind]

    def due(self, now: float) -> Iterator[Any]:
        """Iterate over the services that have something to do at this time."""
        for service in self.with_hook["next_due"]:
            when = service.next_due()
            if when is not None and when <= now:
                yield service


def known_clients(state: State) -> list[str]:
    """Return the clients that a state names: in kept replies, as holders of rows, and in promises of groups."""
    clients = dict.fromkeys(state.clients)
    for partition in state.partitions.values():
        clients |= dict.fromkeys(client for _, client, _ in partition.holds.by_holder)
        clients |= dict.fromkeys(client for _, client in partition.wants.promised)
    return list(clients)


class Connections:
    """Which connections each client and each storage unit has."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.restored = known_clients(state)
        """The clients of the controller before this one."""
        self.peers: dict[str, set[int]] = {client: set() for client in self.restored}
        """Client -> its connections. A client that is awaited has none, and is in here."""
        self.units: dict[int, int] = {}
        """Storage unit -> its connection."""
        self.leaving: set[str] = set()
        """The clients that have announced that they close, and that still have connections."""
        self.departed: dict[str, None] = {}
        """The clients without a connection whose replies are kept, the first to leave first."""
        self.unrecorded: dict[str, ReplyCache] = {}
        """Client -> its replies that no record has: refusals, and those to requests that have changed nothing.

        A copy of such a request may still arrive on another connection of its client. It must not be carried out when
        the client was told that it was refused. When all connections have ended, no copy is left.
        """

    def note_opened(self, client: str, peer: int) -> None:
        """Note a connection of a client."""
        self.peers.setdefault(client, set()).add(peer)
        self.departed.pop(client, None)

    def note_closed(self, client: str, peer: int) -> bool:
        """Note the end of a connection. Returns whether it was the last one of its client."""
        peers = self.peers.get(client)
        if peers is None:
            return False
        peers.discard(peer)
        if not peers:
            self.unrecorded.pop(client, None)
        return not peers

    def note_answer(self, waiter: RequestKey, reply: AnyReply) -> None:
        """Keep a reply that no record has, unless its client is gone or has given the request up."""
        client, sequence = waiter
        if client in self.peers:
            kept = self.unrecorded.setdefault(client, ReplyCache())
            if not kept.is_finished(sequence):
                kept.replies[sequence] = reply

    def depart(self, client: str) -> list[str]:
        """Note that a client is gone. Returns the clients whose replies are not kept any longer."""
        if client not in self._state.clients:
            return []
        self.departed[client] = None
        forgotten = list(self.departed)[: max(0, len(self.departed) - MAX_DEPARTED)]
        for oldest in forgotten:
            del self.departed[oldest]
        return forgotten


class Context:
    """What handlers and services work with: the state, the log, the connections, and the services that run."""

    def __init__(self, config: CoreConfig, state: State, now: float, features: Iterable[type[CoreService]]) -> None:
        self.config = config
        self.client_config = config.client_config
        """JSON text that clients get when they attach."""
        self.state = state
        """The state. Only `log.apply` changes it."""
        self.log = RecordLog(state)
        self.log.now = now
        self.measures = ControllerMeasures()
        self.connections = Connections(state)
        self.changes = ChangeLog(self.log)
        self.parked = ParkedRequests(self.log, self.measures)
        self.samplers = SamplerRegistry(config, lambda: state.samplers)
        self.journal_error = ""
        """Why mutations are blocked, for status; "" if they are not. The server sets it."""
        self.emitted: list[Effect] = []
        """Effects that `Wakeups.settle` returns with those of the event."""
        self.services = Services(self, features)
        """The services that run; `services[Kind]` starts one."""
        self.changes.on_changed = self.services.with_hook["on_partition_changed"]
        self.parked.on_ended = self.services.with_hook["on_wait_ended"]
        self._holding = self.services.with_hook["holds_reply"]

    def emit(self, *effects: Effect) -> None:
        """Add effects to those of the current event."""
        self.emitted += effects

    @property
    def now(self) -> float:
        """The time of the current event, on the controller's clock."""
        return self.log.now

    def group_size_of(self, name: str, task: str | None) -> int | None:
        """Return the samples in a group that the sampler of a task deals of a partition; None if it deals no groups.

        task: None for the system's sampler.
        """
        partition = self.state.partitions.get(name)
        return claim_samplers.group_size(self.samplers.choose(task or "", {}, partition))

    def commit(self, caller: Caller, decision: Decision) -> list[Effect]:
        """Apply what a request does, reply to it, and keep the reply until the client has it.

        A service may hold the reply to a put.
        """
        log, envelope = self.log, caller.envelope
        log.actor = caller.client
        for record in decision.records:
            log.apply(record)
        log.actor = ""
        reply = decision.reply()
        log.apply(r.ReplySent(caller.client, envelope.sequence, envelope.acknowledged, reply, envelope.finished))
        send = Send(caller.peer, envelope.sequence, reply)
        return [] if self._holding and self.is_held(caller.client, send) else [send]

    def is_held(self, client: str, send: Send, again: bool = False) -> bool:
        """Return whether a service holds this reply, if it is one to a put. again: the request was sent again."""
        is_put = isinstance(send.reply, PublishReply)
        return is_put and any(service.holds_reply(client, send, again) for service in self._holding)

    def forget_client(self, client: str) -> None:
        """End what depends on a client that is gone."""
        self.connections.peers.pop(client, None)
        for service in self.services.with_hook["on_client_removed"]:
            service.on_client_removed(client)

    def answer(self, waiter: RequestKey, peer: int, reply: AnyReply) -> Send:
        """Reply to a request that no record tells of, and keep the reply until the client has it.

        The request may arrive again on a connection that the client has abandoned. If it was carried out then, it would
        have an effect although its client was told that it has none.
        """
        self.connections.note_answer(waiter, reply)
        return Send(peer, waiter[1], reply)

    def failure(self, error: TransferQueueError) -> Failure:
        """Return the reply to a request that is refused."""
        self.measures.counters["failures"] += 1
        kind, text = type(error).__name__, str(error)
        if isinstance(error, FieldTypeError):
            return Failure(kind, text, error.tensors, error.field)
        return Failure(kind, text)

    def refuse(self, waiting: ParkedRequest, error: TransferQueueError) -> list[Effect]:
        """End the wait of a request that cannot be met any more, and send the error to its client."""
        peer = self.parked.peers.get(waiting.waiter)
        self.parked.unpark(waiting, met=False)
        return [] if peer is None else [self.answer(waiting.waiter, peer, self.failure(error))]
