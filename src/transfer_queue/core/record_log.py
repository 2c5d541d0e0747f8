"""The records of the current event, what they change for requests that wait, and on which connections these wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transfer_queue.core.events import records as r
from transfer_queue.core.events.records import AnyRecord, Parkable, Wakes
from transfer_queue.core.events.registry import APPLIERS, Caller
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import ParkedRequest, RequestKey, ShareKey
from transfer_queue.messages.base import name_of
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.metrics.timing import Load, Waits


class ControllerMeasures:
    """The counters and timings of the controller and of the server around it."""

    def __init__(self) -> None:
        self.counters = defaultdict[str, float](float, requests=0, failures=0, dealt_rows=0, published_rows=0)
        self.server_counters: Mapping[str, float] = {}
        """The counters of the server's connections. The server sets them."""
        self.load = Load()
        """What the server's loop has had to do. The server sets and measures it."""
        self.waits = Waits()
        """How long requests were parked."""


class RecordLog:
    """The state, and the records that have changed it during the current event."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.now = 0.0
        """The time of the current event, on the controller's clock."""
        self.arrived: float | None = None
        """When the request of the current event arrived, if that was before the event."""
        self.actor = ""
        """The client whose request the records of the current event carry out; "" for the controller itself."""
        self.records: list[AnyRecord] = []
        """The records since the last `take`."""
        self._observers: dict[type, list[Callable[[Any], None]]] = {}

    def apply(self, record: AnyRecord) -> None:
        """Apply one record, then pass it to the observers of its type."""
        kind = type(record)
        APPLIERS[kind](self.state, record)
        self.records.append(record)
        for note in self._observers.get(kind, ()):
            note(record)

    def apply_all(self, records: Iterable[AnyRecord]) -> None:
        """Apply records. Each one that is decided late, such as those of a generator, sees the ones before it."""
        for record in records:
            self.apply(record)

    def observe(self, kinds: Iterable[type], note: Callable[[Any], None]) -> None:
        """Call `note` with each record of these types from now on, after it is applied."""
        for kind in kinds:
            self._observers.setdefault(kind, []).append(note)

    def take(self) -> list[AnyRecord]:
        """Return the records since the last call, for the journal."""
        taken, self.records = self.records, []
        return taken


class ChangeSet:
    """What happened to one partition since its parked claims were last looked at.

    Beyond what is noted here, a claim can be met only if rows became ready for its task (`Partition.gained`).
    """

    everything = False
    """Whether any request may be met now, or have come to its end."""
    joined = False
    """Whether rows joined groups, so that some groups may be complete now."""
    space = False
    """Whether rows were removed, so that puts may find space."""
    locks = False
    """Whether requests for locks may be granted now."""
    tasks: frozenset[str] = frozenset()
    """The tasks of which any claim may be met now."""
    consumed: frozenset[str] = frozenset()
    """The tasks that have consumed all rows, which ends their finite claims."""

    def __init__(self) -> None:
        self.shares: dict[str, set[ShareKey]] = {}
        """Task -> the batches that were dealt."""

    def note(self, record: Any, partition: Partition | None) -> None:
        """Note a record. The partition has it applied, and is None if it has ended."""
        wakes = record.wakes
        if wakes is Wakes.ROWS:
            assert partition is not None
            self.joined |= record.groups is not None
            self.everything |= self.joined and partition.sealed  # groups that can never be complete may be left
        elif wakes is Wakes.SHARES:
            assert partition is not None
            self._note_deal(record, partition)
        elif wakes is Wakes.TASK:
            self.everything |= bool(getattr(record, "freed", b""))
            # a skipped row frees space for another one (`max_staleness`)
            self.space |= isinstance(record, r.PassedOver)
            self.tasks |= {record.task}
        elif wakes is Wakes.LOCKS:
            self.locks = True
        elif wakes is Wakes.SPACE and partition is not None and not partition.sealed:
            self.space = True
            self.consumed |= {task for task in partition.tasks if partition.is_wholly_consumed(task)}
        elif wakes is not Wakes.WORK:  # what meets those requests is looked at after every change
            self.everything = True

    def _note_deal(self, record: r.Dealt, partition: Partition) -> None:
        """Note a deal. It takes rows, so it only meets the claims for its shares, or ends those that wait for more."""
        if record.batch_index is not None:
            shares = self.shares.setdefault(record.task, set())
            shares |= {(share.dp_rank, record.batch_index) for share in record.shares}
        if partition.sealed:
            self.tasks |= {record.task}
        elif partition.is_wholly_consumed(record.task):
            self.consumed |= {record.task}


class ChangeLog:
    """The changes of all partitions, as far as something waits for them.

    It observes the records, which declare what they mean for requests that wait. A request that begins to wait has been
    decided with the present state, so changes before that are not noted.
    """

    def __init__(self, log: RecordLog) -> None:
        self._state = log.state
        self.on_changed: list[Any] = []
        """The services with the hook `on_partition_changed`."""
        self.by_partition: dict[str, ChangeSet] = {}
        """Partition -> its changes. A partition without changes is not in here."""
        kinds = {kind for kind in APPLIERS if "partition" in kind.__struct_fields__}
        log.observe([kind for kind in kinds if kind.wakes is not Wakes.NONE], self._note)
        log.observe([r.UnitLost, r.ExtentsLost], self._note_loss)
        log.observe([r.StateLoaded], self._note_load)

    def changes_of(self, partition: str) -> ChangeSet:
        """Return the changes of a partition, to be added to."""
        change = self.by_partition.get(partition)
        if change is None:
            change = self.by_partition[partition] = ChangeSet()
        return change

    def _note(self, record: Any) -> None:
        if not (self._state.waiting.by_waiter or self.on_changed):
            return
        if record.wakes is not Wakes.ALL_IF_FREED or record.freed:
            self.changes_of(record.partition).note(record, self._state.partitions.get(record.partition))

    def _note_load(self, record: r.AnyRecord) -> None:
        for name in self._state.waiting.locks:  # a load ends all locks
            self.changes_of(name).locks = True

    def _note_loss(self, record: r.AnyRecord) -> None:
        for partition in self._state.partitions.values():
            if self._state.losses in partition.losses.events:
                self.changes_of(partition.name)


class ParkedRequests:
    """The connections of the requests that wait. The requests themselves are part of the state (`State.waiting`)."""

    def __init__(self, log: RecordLog, measures: ControllerMeasures) -> None:
        self._log = log
        self._measures = measures
        self.on_ended: list[Any] = []
        """The services with the hook `on_wait_ended`."""
        self.peers: dict[RequestKey, int] = {}
        """The connection of each parked request. After a restart a request has none until its client sends it again."""

    def park(self, caller: Caller, request: Parkable, seconds: float) -> None:
        """Let a request wait for at most `seconds`.

        Raises:
            CapacityError: Too many requests of this client wait.
        """
        sequence, now = caller.envelope.sequence, self._log.now
        self._log.state.waiting.check_limits(caller.client, request)
        self._log.apply(r.RequestParked(caller.client, sequence, now, now + seconds, request))
        self.peers[caller.client, sequence] = caller.peer

    def attach(self, waiting: ParkedRequest, peer: int) -> bool:
        """A client has sent its parked request again: answer it on the newest connection.

        Peers are numbered in ascending order. Returns whether the request had no connection since a restart.
        """
        known = self.peers.get(waiting.waiter)
        self.peers[waiting.waiter] = peer if known is None else max(peer, known)
        return known is None

    def caller_of(self, waiting: ParkedRequest) -> Caller | None:
        """Return the caller of a request that waits, on its newest connection; None if it has none."""
        peer = self.peers.get(waiting.waiter)
        if peer is None:
            return None
        return Caller(waiting.client, peer, RequestEnvelope(waiting.sequence, 0, waiting.request))

    def unpark(self, *waits: ParkedRequest, met: bool = True) -> None:
        """End the waits of a request, or of claims of one task. met: whether they got what they waited for."""
        request, now = waits[0].request, self._log.now
        kind, task = name_of(type(request)), getattr(request, "task", "")
        self._measures.waits.record(kind, task, *(now - each.since for each in waits))
        for waiting in waits:
            for service in self.on_ended:
                service.on_wait_ended(waiting, met)
            self._log.apply(r.Unparked(waiting.client, waiting.sequence))
            self.peers.pop(waiting.waiter, None)

    def cancel(self, client: str, peer: int) -> None:
        """End the waits of the requests that a connection would have answered."""
        by_waiter = self._log.state.waiting.by_waiter
        for waiter in [waiter for waiter, known in self.peers.items() if known == peer and waiter[0] == client]:
            self.unpark(by_waiter[waiter], met=False)
