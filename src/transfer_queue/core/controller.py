"""The controller: events in, effects out.

    handle(client, peer, envelope, now)   a request arrived on connection `peer` of `client`
    closed(client, peer, now)             that connection ended
    tick(now)                             a deadline may have come (see next_deadline)
    worked(number, outcome, now)          an effect `Work` was carried out

Each decides on records (puts.py, claims.py), applies them (state.py), and gives effects for the server. Every
request gets exactly one reply. Replies to what changed something are kept in the state until the client says
that it has them, so the same request on a new connection gets the same answer. What waits is answered by the
event that completes it, in order of arrival per (partition, task).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from transfer_queue.core import checkpoint_handler, wakeups
from transfer_queue.core.claims import claim_handler, consumer_state, lease_decisions
from transfer_queue.core.claims.background_deals import Works
from transfer_queue.core.claims.index_builder import Making
from transfer_queue.core.claims.lease_deadlines import Deadlines
from transfer_queue.core.claims.wakeup_filter import Change
from transfer_queue.core.control.connections import Returning, known
from transfer_queue.core.control.epochs import check_epoch
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, Release, Send, TellUnit
from transfer_queue.core.puts import clear_decisions, put_decisions, retention
from transfer_queue.core.puts.incremental_clear import Clearing
from transfer_queue.core.puts.put_handlers import MUTATIONS, Decide
from transfer_queue.core.puts.wide_puts import WidePuts, with_whole_schema
from transfer_queue.core.queries import change_answers
from transfer_queue.core.queries.batch_metadata import QUERIES, status
from transfer_queue.core.reports import deadlock_detector
from transfer_queue.core.reports.explain import explain, timeout_words, waiting_words
from transfer_queue.core.reports.state_metrics import LeaseCounts
from transfer_queue.core.samplers import claim_samplers
from transfer_queue.core.samplers.claim_samplers import Samplers
from transfer_queue.core.samplers.remote_calls import SamplerAsks
from transfer_queue.core.samplers.user_sampler import AnySampler, Values, copied, watched_tags
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import Waiter, Waiting
from transfer_queue.core.units import unit_drain
from transfer_queue.core.units.migration_planner import Moves
from transfer_queue.core.units.tiering_policy import DEFAULTS, Watermarks
from transfer_queue.errors import CapacityError, FieldTypeError, ProtocolError, SamplerError, TransferQueueError
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.checkpoints import LoadState
from transfer_queue.messages.claims import Cancel, Claim, Renew
from transfer_queue.messages.envelopes import AnyReply, Envelope
from transfer_queue.messages.partitions import Wanted
from transfer_queue.messages.puts import Publish, Reserve
from transfer_queue.messages.queries import Explain, Watch
from transfer_queue.messages.system import Drain, Status, SystemStatus, Topology, TopologyReply
from transfer_queue.messages.unit_reports import SpaceShort
from transfer_queue.metrics.timing import Load, Waits
from transfer_queue.sampler.remote_partition import Question, ViewReply

MAX_DELIVERIES = 16  # of a row without an ack, where neither its partition nor the system says another number
MAX_DEPARTED = 1024  # clients without a connection whose replies are kept
# records after which nobody who waits for rows has a better chance
_NO_NEWS = frozenset({r.Handed, r.Inherited, r.Aged, r.Leased, r.Replied, r.Answered, r.Unparked})


class Controller:
    """The core of the system. config: JSON text that attaching clients get. capacity: most rows at a time.

    restored: the state of a controller before this one, and now: the time at which this one begins. Clients that it
    knows have a grace to come back; lives: see `returning`.

    records: what was applied since the last `take_records`. counters: for status and metrics, with those that the
    server around it counts of its connections.
    peers: the connection on which each waiting request will be answered. connections: peers of each client.
    timer: seconds that pass, to say what a user's sampler costs; the core has no clock of its own.
    boot: unlike that of any other controller; block numbers are told apart by it. checkpoints: under way.
    max_deliveries: see `PartitionOptions`, of partitions that do not say it. deadlines: when leases end.
    trouble: why what changes anything waits, for status, told by the server; "" where it does not.
    replicas: units that each block shall lie in. marks: when blocks are moved to disk (`offload.Watermarks`). drains:
    who waits until a unit is empty.
    changed: what happened to each partition since `settle`.
    values: decodes a value of a message to the value that was put, for a user's sampler in this process.
    waits, lease_counts: since the controller began, for metrics. load: of the loop, which the server measures.
    """

    def __init__(
        self,
        sampler: AnySampler,
        config: str = "{}",
        capacity: int | None = None,
        timer: Callable[[], float] = lambda: 0.0,
        restored: State | None = None,
        now: float = 0.0,
        lives: Callable[[str], bool] = lambda client: False,
        boot: str = "",
        max_deliveries: int = MAX_DELIVERIES,
        replicas: int = 1,
        marks: Watermarks = DEFAULTS,
        values: Values = copied,
        strict: bool = False,
    ) -> None:
        self.state = State(capacity) if restored is None else restored
        self.deadlines = Deadlines(self.state)
        self.max_deliveries = max_deliveries
        self.state.watched = watched_tags(sampler)
        self.values = values
        self.samplers = Samplers(sampler, values, strict)
        self.config = config
        self.timer = timer
        self.boot = boot
        self.checkpoints = checkpoint_handler.Checkpoints()
        self.records: list[r.AnyRecord] = []
        self.counters = defaultdict[str, float](float, requests=0, failures=0, dealt_rows=0, published_rows=0)
        self.of_connections: Mapping[str, float] = {}
        self.load = Load()
        self.waits = Waits()
        self.lease_counts = LeaseCounts()
        self.peers: dict[Waiter, int] = {}
        self.returning = Returning(known(self.state), now, lives)
        self.connections: dict[str, set[int]] = {client: set() for client in self.returning.clients}
        self.departed: dict[str, None] = {}
        self.unit_peers: dict[int, int] = {}
        self.movers = deadlock_detector.Movers()
        self.movers.restored(self.returning.clients, self.state.partitions)
        self.moves = Moves(self, replicas, marks)
        self.drains: dict[Waiter, tuple[int, int, float]] = {}  # peer, unit and deadline of each who waits
        self.works = Works()
        self.asks = SamplerAsks(self.samplers.default)
        self.clearing = Clearing()
        self.wide_puts = WidePuts()
        self.making = Making()
        self.warned: set[str] = set()  # partitions of whose groups somebody was warned
        self.trouble = ""
        self.changed: dict[str, Change] = {}
        self._now = 0.0  # of the event under way

    # ------------------------------------------------------------ events

    def opened(self, client: str, peer: int) -> None:
        """A client has a (further) connection."""
        self.connections.setdefault(client, set()).add(peer)
        self.departed.pop(client, None)

    def handle(self, client: str, peer: int, envelope: Envelope, now: float) -> list[Effect]:
        """A request arrived."""
        self._now = now
        self.counters["requests"] += 1
        sequence = envelope.sequence
        kept = self.state.clients.get(client)
        if kept is not None and sequence in kept.replies:
            return [Send(peer, sequence, kept.replies[sequence])]
        waiting = self.state.waiting.by_waiter.get((client, sequence))
        if waiting is not None:
            return self._attach(waiting, peer)
        if kept is not None and kept.over(sequence):
            return [self.failure(peer, sequence, ProtocolError(f"request {sequence} was acknowledged before"))]
        try:
            return self.answer(client, peer, envelope)
        except TransferQueueError as error:
            return [self.failure(peer, sequence, error), *self.settle()]

    def closed(self, client: str, peer: int, now: float) -> list[Effect]:
        """A connection ended: what waited on it is cancelled, before anything can meet it."""
        self._now = now
        for waiter in [w for w, p in self.peers.items() if p == peer and w[0] == client]:
            self.unpark(waiter)
        for waiter in [w for w, (p, _, _) in self.drains.items() if p == peer and w[0] == client]:
            del self.drains[waiter]
        self.wide_puts.closed(peer)
        for unit in [u for u, p in self.unit_peers.items() if p == peer]:
            del self.unit_peers[unit]
            self.movers.short.pop(unit, None)
            self.moves.gone(unit)
        peers = self.connections.get(client)
        if peers is not None:
            peers.discard(peer)
            if not peers:
                left = self.checkpoints.left(client)
                self._gone(client)
                return [*left, *self.settle()]
        return self.settle()

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, None where nobody waits."""
        times = [self.state.waiting.next_deadline(), self.returning.due(), self.deadlines.next(), self.moves.due()]
        if self.state.aging or self.drains:
            times += [retention.due(partition) for partition in self.state.aging.values()]
            times += [deadline for _, _, deadline in self.drains.values()]
        if self.clearing.jobs or self.making or self.wide_puts.jobs:
            times.append(self._now)
        return min([time for time in times if time is not None], default=None)

    def tick(self, now: float) -> list[Effect]:
        """Ends waits and leases whose deadline has come, drops rows too old, gives up clients that did not return."""
        self._now = now
        effects: list[Effect] = []
        for client in self.returning.gone(now, self.connections):
            self._gone(client)
        for leased, lease in self.deadlines.due(now):
            for record in lease_decisions.end(leased, lease, lease.rows, "expired", self.max_deliveries):
                self.apply(record)
        for partition in list(self.state.aging.values()):
            self.retain(partition)
        for waiting in self.state.waiting.expired(now):
            waiter = (waiting.client, waiting.sequence)
            peer = self.peers.get(waiter)
            reply = self._expiry(waiting, now)
            self.unpark(waiter)
            if peer is not None:
                effects.append(Send(peer, waiting.sequence, reply))
        effects += self.clearing.step(self)
        effects += self.wide_puts.step(self)
        self.making.step(self)
        records, orders = self.moves.step(now)
        for record in records:
            self.apply(record)
        effects += [TellUnit(unit, order) for unit, order in orders]
        return [*effects, *self.settle()]

    def worked(self, number: int, outcome: Any, now: float) -> list[Effect]:
        """Work has ended. outcome: what it gave, or the exception that it raised.

        Who began the deal gets it where it still can be made, else its claim is decided anew, like all others that
        wait for the same task.
        """
        self._now = now
        job = self.works.end(number)
        effects: list[Effect] = []
        waiting = self.state.waiting.by_waiter.get(job.waiter)
        if waiting is not None and isinstance(outcome, BaseException):
            error = outcome if isinstance(outcome, TransferQueueError) else SamplerError(f"a deal failed: {outcome!r}")
            effects += self.failed(waiting, error)
        elif waiting is not None:
            effects += claim_handler.retry(self, waiting, job.made(outcome))
        self.changed.setdefault(job.partition.name, Change()).tasks.add(job.task)
        return [*effects, *self.settle()]

    def sampler_answered(self, number: int, outcome: Any, now: float) -> list[Effect]:
        """An effect `AskSampler` was carried out. outcome: see there."""
        self._now = now
        return [*self.asks.answered(self, number, outcome), *self.settle()]

    def sampler_reads(self, number: int, question: Question) -> ViewReply:
        """Reply to what a user's sampler reads during a call."""
        return self.asks.question(self, number, question)

    def state_written(self, name: str, trouble: str | None, now: float) -> list[Effect]:
        """An effect `WriteState` was carried out, or failed: why, in words."""
        self._now = now
        return [*checkpoint_handler.written(self, name, trouble), *self.settle()]

    def state_read(
        self, client: str, sequence: int, read: checkpoint_handler.SavedState | Exception, now: float
    ) -> list[Effect]:
        """An effect `ReadState` was carried out. read: what the file holds (`checkpoints.built`), or an exception."""
        self._now = now
        return [*checkpoint_handler.read(self, client, sequence, read), *self.settle()]

    def load_state(
        self, client: str, peer: int, sequence: int, record: r.StateLoaded, found: checkpoint_handler.SavedState
    ) -> list[Effect]:
        """Replace the state of this controller by a saved one, and reply to the client."""
        before = list(self.state.partitions.values())
        asked = Envelope(sequence, 0, LoadState(""))
        self.state.prepared = (record, found.tree, found.state)
        try:
            effects = self.commit(client, peer, asked, [record], lambda: self._taken_over(before))
        finally:
            self.state.prepared = None
        return [*effects, Release(before)]

    def use_sampler(self, sampler: AnySampler) -> list[Effect]:
        """Replace the sampler. Dealt batches do not change; claims that wait are checked and decided again."""
        self.samplers = Samplers(sampler, self.values, self.samplers.strict)
        effects = self.asks.replace(self.samplers.default)
        self.state.watched = watched_tags(sampler)
        for waiting in list(self.state.waiting.by_waiter.values()):
            if isinstance(waiting.request, Claim):
                effects += claim_handler.check_again(self, waiting)
        for name in {**self.state.partitions, **self.state.waiting.claims}:  # also of partitions not there
            self.changed.setdefault(name, Change()).everything = True
        return [*effects, *self.settle()]

    def status(self, now: float) -> SystemStatus:
        """Progress of every partition, and the counters."""
        around = {f"connections_{name}": value for name, value in self.of_connections.items()}
        costs = list(self.samplers.costs.values())
        found = status(self.state, {**self.counters, **around}, now, self.group_size, costs, self.trouble)
        return msgspec.structs.replace(found, requests=self.load.timings(), longest=self.load.longest.of_all(now))

    def take_records(self) -> list[r.AnyRecord]:
        """The records applied since the last call, for the journal."""
        taken, self.records = self.records, []
        return taken

    # ------------------------------------------------------------ one request

    def answer(self, client: str, peer: int, envelope: Envelope) -> list[Effect]:
        """Return the effects of a request. Raises an error of the tree if it is refused."""
        now = self._now
        body: Any = envelope.body
        sequence = envelope.sequence
        check_epoch(self.state, body)
        query = QUERIES.get(type(body))
        if query is not None:
            return [Send(peer, sequence, query(self.state, body))]
        decide = MUTATIONS.get(type(body))
        if decide is not None:
            return self._change(client, peer, envelope, decide, now)
        if isinstance(body, Claim):
            return claim_handler.ask(self, client, peer, envelope, body, now)
        if isinstance(body, Watch):
            return self._watch(client, peer, sequence, body, now)
        if isinstance(body, Topology):
            return [Send(peer, sequence, TopologyReply(list(self.state.units.values()), self.config))]
        if isinstance(body, Status):
            return [Send(peer, sequence, self.status(now))]
        if isinstance(body, Explain):
            return [Send(peer, sequence, Done(self._explain(body)))]
        if isinstance(body, Renew):
            held = [self.deadlines.renew(name, token, now) for name, token in body.leases]
            return [Send(peer, sequence, Done(held))]
        if isinstance(body, Cancel):
            return self._cancel(client, peer, sequence, body.sequence)
        if isinstance(body, Drain):
            return unit_drain.ask(self, client, peer, envelope, body, now)
        if isinstance(body, SpaceShort):
            return self._space_short(peer, sequence, body)
        if isinstance(body, checkpoint_handler.REQUESTS):
            return [*checkpoint_handler.ask(self, client, peer, sequence, body), *self.settle()]
        raise ProtocolError(f"{type(body).__name__} is no request to a controller")

    def _change(self, client: str, peer: int, envelope: Envelope, decide: Decide, now: float) -> list[Effect]:
        sequence, body = envelope.sequence, envelope.body
        if isinstance(body, Wanted) and body.wait is not None and body.wait > 0 and not self.missing(body):
            self.park(client, peer, sequence, body, now, body.wait)
            return self.settle()
        self.movers.acted(client, body)
        if self.clearing.begin(self.state, client, peer, envelope):
            return []
        if self.wide_puts.begin(self.state, client, peer, envelope):
            return []
        try:
            records, reply = decide(self, client, peer, body)
        except CapacityError:
            if not isinstance(body, (Publish, Reserve)) or body.wait is None or body.wait <= 0:
                raise
            self.park(client, peer, sequence, with_whole_schema(self.state, body), now, body.wait)
            return self.settle()
        return [*self.commit(client, peer, envelope, records, reply), *self.settle()]

    def commit(
        self, client: str, peer: int, envelope: Envelope, records: list[r.AnyRecord], reply: Callable[[], AnyReply]
    ) -> list[Effect]:
        """Applies what a request does, and answers it; the answer is kept until its client has it."""
        for record in records:
            self.apply(record)
        answer = reply()
        replied = r.Replied(client, envelope.sequence, envelope.acknowledged, answer, envelope.finished)
        self.state.apply(replied)
        self.records.append(replied)
        return [Send(peer, envelope.sequence, answer)]

    def finish(self, partition: Partition, task: str, client: str, rows: np.ndarray) -> None:
        """A client is through with rows that it held."""
        for record in clear_decisions.finished(partition, task, client, rows):
            self.apply(record)

    def _space_short(self, peer: int, sequence: int, short: SpaceShort) -> list[Effect]:
        if self.unit_peers.get(short.unit) != peer:
            raise ProtocolError("only the unit itself may say who waits for its space")
        self.movers.short[short.unit] = short
        self.moves.waits(short.unit, bool(short.writers))
        return [Send(peer, sequence, Done()), *self.settle()]

    def _watch(self, client: str, peer: int, sequence: int, watch: Watch, now: float) -> list[Effect]:
        self.movers.acted(client, watch)
        reply = change_answers.answer(self.state, watch)
        if reply is None and watch.wait is not None and watch.wait > 0:
            self.park(client, peer, sequence, watch, now, watch.wait)
            change_answers.looked(self.state, watch.partition)
            return []
        return [Send(peer, sequence, reply or change_answers.nothing(self.state, watch))]

    # ------------------------------------------------------------ waiting

    def park(
        self,
        client: str,
        peer: int,
        sequence: int,
        body: Claim | Publish | Reserve | Wanted | Watch,
        now: float,
        wait: float,
    ) -> None:
        """A request waits from now on. CapacityError where too many of its client do."""
        self.state.waiting.check_room(client, body)
        self.apply(r.Parked(client, sequence, now, now + wait, body))
        self.peers[client, sequence] = peer

    def unpark(self, waiter: Waiter) -> None:
        """A request waits no more."""
        waiting = self.state.waiting.by_waiter[waiter]
        kind, task = type(waiting.request).__name__, getattr(waiting.request, "task", "")
        self.waits.note(kind, task, self._now - waiting.since)
        self.apply(r.Unparked(*waiter))
        self.peers.pop(waiter, None)

    def _attach(self, waiting: Waiting, peer: int) -> list[Effect]:
        """A parked request came again: it is answered on the newest connection (peers are numbered ascending)."""
        known = self.peers.get(waiting.waiter)
        self.peers[waiting.waiter] = peer if known is None else max(peer, known)
        if known is None:  # parked before a replay, and not looked at since
            return [*wakeups.retry(self, waiting), *self.settle()]
        return []

    def _cancel(self, client: str, peer: int, sequence: int, cancelled: int) -> list[Effect]:
        """The cancelled request gets its one reply too, though nobody waits for it."""
        waiter = (client, cancelled)
        there = waiter in self.state.waiting.by_waiter
        effects: list[Effect] = []
        if there:
            known = self.peers.get(waiter, peer)
            self.unpark(waiter)
            effects.append(Send(known, cancelled, Failure("WaitTimeoutError", "cancelled by its client")))
        for record in lease_decisions.unseen(self.state, client, cancelled):
            self.apply(record)
            effects += self.settle()
        return [*effects, Send(peer, sequence, Done(there))]

    def _expiry(self, waiting: Waiting, now: float) -> AnyReply:
        request = waiting.request
        if isinstance(request, Watch):
            return change_answers.nothing(self.state, request)
        self.counters["failures"] += 1
        if isinstance(request, Claim):
            if request.probe or request.quiet:
                return claim_handler.nothing(self, request, ended=False)
            dealt = claim_samplers.group_size(self.samplers.of(request, self.state.partitions.get(request.partition)))
            waited = request.waited + now - waiting.since
            return Failure("WaitTimeoutError", timeout_words(self.state, request, waited, dealt))
        if isinstance(request, Wanted):
            return Done(0)
        try:
            put_decisions.check_room(self.state, request.partition, request.count)
        except CapacityError as error:
            return Failure(type(error).__name__, f"{error} It waited {now - waiting.since:.3g} s.")
        return Failure("CapacityError", f"no capacity came free within {now - waiting.since:.3g} s")

    def _explain(self, request: Explain) -> str:
        if request.count is None or request.task is None or not request.fields:
            return explain(self.state, request, self.group_size_of(request.partition))
        claim = Claim(request.partition, request.task, request.fields, request.count, request.sampling)
        sampler = self.samplers.of(claim, self.state.partitions.get(request.partition))
        return waiting_words(self.state, claim, claim_samplers.group_size(sampler))

    def settle(self) -> list[Effect]:
        """Meets what can be met after a change, until nothing more can; then hands back free extents."""
        return wakeups.settle(self)

    def failed(self, waiting: Waiting, error: TransferQueueError) -> list[Effect]:
        """A request that waits cannot be met any more."""
        peer = self.peers.get(waiting.waiter)
        self.unpark(waiting.waiter)
        return [] if peer is None else [self.failure(peer, waiting.sequence, error)]

    # ------------------------------------------------------------ the rest

    @property
    def now(self) -> float:
        """When the event under way happened, on the server's clock."""
        return self._now

    def _taken_over(self, before: list[Partition]) -> AnyReply:
        """A loaded state is in place, where these partitions were: what the controller knew of them is no more."""
        self.works.void()
        self.asks.void()
        self.warned.clear()
        for name in {*(partition.name for partition in before), *self.state.partitions}:
            self.changed.setdefault(name, Change()).everything = True
        for partition in list(self.state.partitions.values()):
            for record in clear_decisions.never_taken(partition):
                self.apply(record)
            if partition.sealed:
                for record in clear_decisions.never_put(partition, ()):
                    self.apply(record)
        return Done(self.state.epoch)

    @property
    def group_size(self) -> int:
        """Samples in a group where a partition does not say it."""
        return claim_samplers.group_size(self.samplers.default) or 1

    def group_size_of(self, name: str) -> int | None:
        """Samples in a group that the system's sampler deals of this partition; None if it deals single samples."""
        partition = self.state.partitions.get(name)
        return claim_samplers.group_size(self.samplers.for_partition(self.samplers.default, partition))

    def missing(self, request: Wanted) -> int:
        """How many groups its task wants beyond those that are there or on their way."""
        size = self.group_size_of(request.partition) or 1
        return consumer_state.missing(self.state.partitions.get(request.partition), request.task, size)

    def retain(self, partition: Partition) -> None:
        """Drops what is beyond the partition's retention, one after the other as each changes what is there."""
        if retention.keeps_all(partition):
            return
        for record in retention.mark(partition, self._now):
            self.apply(record)
        for drop in retention.drops(partition, self._now):
            self.apply(drop)

    def apply(self, record: r.AnyRecord) -> None:
        """Takes one record in, and notes who may have waited for it."""
        self.state.apply(record)
        self.records.append(record)
        if type(record) in LeaseCounts.RECORDS:
            self.lease_counts.note(record)
        if type(record) in _NO_NEWS or (isinstance(record, r.Finished) and not record.freed):
            return
        name: str | None = getattr(record, "partition", None)
        if name is not None:
            change = self.changed.get(name)
            if change is None:
                change = self.changed[name] = Change()
            change.note(record, self.state.partitions.get(name))
        if isinstance(record, r.StateLoaded):
            self.moves.forget()
        elif isinstance(record, (r.UnitLost, r.ExtentsLost)):
            for partition in self.state.partitions.values():
                if self.state.losses in partition.losses.events:
                    self.changed.setdefault(partition.name, Change())
        elif isinstance(record, r.ConsumptionForgotten):
            self.works.forget(record.partition, record.task)
        elif isinstance(record, r.PartitionDropped):
            self.movers.dropped(record.partition)
            self.warned.discard(record.partition)

    def _gone(self, client: str) -> None:
        """A client has no connection any more."""
        self.connections.pop(client, None)
        self._release(client)
        self._depart(client)

    def _release(self, client: str) -> None:
        """A client is gone: it holds nothing, has promised nothing, and will not put what it has reserved."""
        self.movers.left(client)
        for partition in list(self.state.partitions.values()):
            for task, rows in partition.holds.of_client(client):
                self.finish(partition, task, client, rows)
            for task in [task for task, name in partition.wants.promised if name == client]:
                self.apply(r.GroupsTaken(partition.name, task, client, 0))
            if partition.sealed and client in partition.owners:
                for record in clear_decisions.never_put(partition, self.connections):
                    self.apply(record)

    def _depart(self, client: str) -> None:
        if client not in self.state.clients:
            return
        self.departed[client] = None
        while len(self.departed) > MAX_DEPARTED:
            oldest = next(iter(self.departed))
            del self.departed[oldest]
            self.apply(r.ClientForgotten(oldest))

    def failure(self, peer: int, sequence: int, error: TransferQueueError) -> Send:
        """The answer to a request that is refused."""
        self.counters["failures"] += 1
        tensors = error.tensors if isinstance(error, FieldTypeError) else {}
        return Send(peer, sequence, Failure(type(error).__name__, str(error), tensors))
