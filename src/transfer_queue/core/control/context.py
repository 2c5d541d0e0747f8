"""What every handler of a request is given: the state, the records of the event under way, and who takes part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from transfer_queue.core.claims.background_deals import BackgroundDeals
from transfer_queue.core.claims.index_builder import IndexBuilder
from transfer_queue.core.claims.lease_deadlines import LeaseDeadlines
from transfer_queue.core.control.activity import Movers
from transfer_queue.core.control.change_set import ChangeSet
from transfer_queue.core.control.connections import ReconnectGrace, known
from transfer_queue.core.control.pending_checkpoints import Checkpoints
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.events.registry import Caller, Decision
from transfer_queue.core.samplers import claim_samplers
from transfer_queue.core.samplers.claim_samplers import SamplerRegistry
from transfer_queue.core.samplers.remote_calls import SamplerAsks
from transfer_queue.core.samplers.user_sampler import AnySampler, Values, watched_tags
from transfer_queue.core.state.apply import apply_record
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import ParkedRequest, RequestKey
from transfer_queue.core.units.migration_planner import MigrationPlanner
from transfer_queue.core.units.tiering_policy import Watermarks
from transfer_queue.errors import FieldTypeError, TransferQueueError
from transfer_queue.messages.base import Failure, name_of
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.partitions import TakeGroupDemand
from transfer_queue.messages.puts import Publish, Reserve
from transfer_queue.messages.queries import Watch
from transfer_queue.metrics.timing import Load, Waits

# records after which nobody who waits for rows has a better chance
_NO_NEWS = frozenset({r.RowsHeld, r.HoldInherited, r.AgesRecorded, r.RowsLeased})


class ControllerContext:
    """What the handlers of requests work with.

    config: JSON text that attaching clients get. capacity: most rows at a time. restored: the state of a controller
    before this one, and now: the time at which this one begins. Clients that it knows have a grace to come back; lives:
    see `returning`.

    records: what was applied since the last `take_records`. counters: for status and metrics. of_connections: the
    counters of the server around the controller.
    peers: the connection on which each waiting request will be answered. connections: peers of each client.
    timer: seconds that pass, to measure what a user's sampler costs; the core has no clock of its own.
    boot: unlike that of any other controller; it tells block numbers apart. checkpoints: saves and loads under way.
    max_deliveries: see `PartitionOptions`, of partitions that do not set it. deadlines: when leases end.
    trouble: why mutations are blocked, for status, set by the server; "" if they are not.
    replicas: units in which each block shall lie. marks: when blocks are moved to disk. drains: who waits until a unit
    is empty: peer, unit and deadline.
    changed: what happened to each partition since its waiting requests were last looked at.
    values: decodes a value of a message to the value that was put, for a user's sampler in this process.
    waits: since the controller began, for metrics. load: of the loop, which the server measures.
    """

    asks: SamplerAsks

    def __init__(
        self,
        sampler: AnySampler,
        config: str,
        capacity: int | None,
        timer: Callable[[], float],
        restored: State | None,
        now: float,
        lives: Callable[[str], bool],
        boot: str,
        max_deliveries: int,
        replicas: int,
        marks: Watermarks,
        values: Values,
        strict: bool,
    ) -> None:
        self.state = State(capacity) if restored is None else restored
        self.deadlines = LeaseDeadlines(self.state)
        self.max_deliveries = max_deliveries
        self.state.watched = watched_tags(sampler)
        self.values = values
        self.samplers = SamplerRegistry(sampler, values, strict)
        self.config = config
        self.timer = timer
        self.boot = boot
        self.checkpoints = Checkpoints()
        self.records: list[r.AnyRecord] = []
        self.counters = defaultdict[str, float](float, requests=0, failures=0, dealt_rows=0, published_rows=0)
        self.of_connections: Mapping[str, float] = {}
        self.load = Load()
        self.waits = Waits()
        self.peers: dict[RequestKey, int] = {}
        self.returning = ReconnectGrace(known(self.state), now, lives)
        self.connections: dict[str, set[int]] = {client: set() for client in self.returning.clients}
        self.departed: dict[str, None] = {}
        self.unit_peers: dict[int, int] = {}
        self.movers = Movers()
        self.movers.restored(self.returning.clients, self.state.partitions)
        self.moves = MigrationPlanner(self, replicas, marks)
        self.drains: dict[RequestKey, tuple[int, int, float]] = {}  # peer, unit and deadline of each who waits
        self.works = BackgroundDeals()
        self.making = IndexBuilder()
        self.warned: set[str] = set()  # partitions of whose groups somebody was warned
        self.trouble = ""
        self.changed: dict[str, ChangeSet] = {}
        self.now = 0.0  # of the event under way
        self._observers: dict[type, list[Callable[[Any], None]]] = {}
        self._observe()

    # ------------------------------------------------------------ records

    def apply(self, record: r.AnyRecord) -> None:
        """Apply one record, and pass it to those who observe records of its type."""
        apply_record(self.state, record)
        self.records.append(record)
        for note in self._observers.get(type(record), ()):
            note(record)

    def observe(self, kinds: Iterable[type], note: Callable[[Any], None]) -> None:
        """Call `note` with each record of these types from now on, after it was applied."""
        for kind in kinds:
            self._observers.setdefault(kind, []).append(note)

    def _observe(self) -> None:
        of_partitions = {kind for kind in get_args(r.AnyRecord) if "partition" in kind.__struct_fields__}
        self.observe(of_partitions - _NO_NEWS - {r.RowsFinished}, self._note)
        self.observe([r.RowsFinished], lambda record: self._note(record) if record.freed else None)
        self.observe([r.StateLoaded], lambda record: self.moves.forget())
        self.observe([r.UnitLost, r.ExtentsLost], self._note_loss)
        self.observe([r.ConsumptionForgotten], lambda record: self.works.forget(record.partition, record.task))
        self.observe([r.PartitionDropped], self._note_drop)

    def _note(self, record: Any) -> None:
        change = self.changed.get(record.partition)
        if change is None:
            change = self.changed[record.partition] = ChangeSet()
        change.note(record, self.state.partitions.get(record.partition))

    def _note_loss(self, record: r.AnyRecord) -> None:
        for partition in self.state.partitions.values():
            if self.state.losses in partition.losses.events:
                self.changed.setdefault(partition.name, ChangeSet())

    def _note_drop(self, record: r.PartitionDropped) -> None:
        self.movers.dropped(record.partition)
        self.warned.discard(record.partition)

    # ------------------------------------------------------------ replies and waiting requests

    @property
    def group_size(self) -> int:
        """Samples in a group where a partition does not say it."""
        return claim_samplers.group_size(self.samplers.default) or 1

    def group_size_of(self, name: str) -> int | None:
        """Samples in a group that the system's sampler deals of this partition; None if it deals single samples."""
        partition = self.state.partitions.get(name)
        return claim_samplers.group_size(self.samplers.for_partition(self.samplers.default, partition))

    def take_records(self) -> list[r.AnyRecord]:
        """The records applied since the last call, for the journal."""
        taken, self.records = self.records, []
        return taken

    def commit(self, caller: Caller, decision: Decision) -> list[Effect]:
        """Apply what a request does, and answer it. The reply is kept until the client has it."""
        for record in decision.records:
            self.apply(record)
        reply, envelope = decision.reply(), caller.envelope
        replied = r.ReplySent(caller.client, envelope.sequence, envelope.acknowledged, reply, envelope.finished)
        apply_record(self.state, replied)
        self.records.append(replied)
        return [Send(caller.peer, envelope.sequence, reply)]

    def failure(self, peer: int, sequence: int, error: TransferQueueError) -> Send:
        """The answer to a request that is refused."""
        self.counters["failures"] += 1
        tensors = error.tensors if isinstance(error, FieldTypeError) else {}
        return Send(peer, sequence, Failure(type(error).__name__, str(error), tensors))

    def park(self, caller: Caller, request: Claim | Publish | Reserve | TakeGroupDemand | Watch, wait: float) -> None:
        """A request waits from now on, for at most `wait` seconds. CapacityError if too many of its client do."""
        sequence, now = caller.envelope.sequence, self.now
        self.state.waiting.check_room(caller.client, request)
        self.apply(r.RequestParked(caller.client, sequence, now, now + wait, request))
        self.peers[caller.client, sequence] = caller.peer

    def unpark(self, waiter: RequestKey) -> None:
        """A request waits no more."""
        waiting = self.state.waiting.by_waiter[waiter]
        kind, task = name_of(type(waiting.request)), getattr(waiting.request, "task", "")
        self.waits.note(kind, task, self.now - waiting.since)
        self.apply(r.Unparked(*waiter))
        self.peers.pop(waiter, None)

    def failed(self, waiting: ParkedRequest, error: TransferQueueError) -> list[Effect]:
        """A request that waits cannot be met any more."""
        peer = self.peers.get(waiting.waiter)
        self.unpark(waiting.waiter)
        return [] if peer is None else [self.failure(peer, waiting.sequence, error)]
