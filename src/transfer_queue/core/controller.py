"""The controller: events in, effects out.

    handle(client, peer, envelope, now)   a request arrived on connection `peer` of `client`
    closed(client, peer, now)             that connection ended
    tick(now)                             a deadline may have come (see next_deadline)
    worked(number, outcome, now)          an effect `Work` was carried out

Each decides on records, applies them (`state.apply`), and returns effects for the server. Every
request gets exactly one reply. Replies to what changed something are kept in the state until the client says
that it has them, so the same request on a new connection gets the same answer. What waits is answered by the
event that completes it, in order of arrival per (partition, task).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transfer_queue.core import checkpoint_handler, wakeups
from transfer_queue.core.claims import claim_handler, consumption_handlers, lease_decisions
from transfer_queue.core.control.change_set import ChangeSet
from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.control.epochs import check_epoch
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, Send, SendToUnit
from transfer_queue.core.events.registry import READS, Caller, Decision, ParkDecision, handler
from transfer_queue.core.puts import put_decisions, put_handlers, retention
from transfer_queue.core.puts.incremental_clear import IncrementalClears
from transfer_queue.core.puts.wide_puts import WidePuts
from transfer_queue.core.queries import batch_metadata, change_answers, partition_view, value_locations
from transfer_queue.core.reports import explain, status
from transfer_queue.core.reports.explain import timeout_words
from transfer_queue.core.reports.state_metrics import LeaseCounts
from transfer_queue.core.samplers import claim_samplers
from transfer_queue.core.samplers.claim_samplers import SamplerRegistry
from transfer_queue.core.samplers.remote_calls import SamplerAsks
from transfer_queue.core.samplers.user_sampler import AnySampler, Values, copied, watched_tags
from transfer_queue.core.state import unneeded_rows as clear_decisions
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.core.units import unit_drain, unit_handlers
from transfer_queue.core.units.tiering_policy import DEFAULTS, Watermarks
from transfer_queue.errors import CapacityError, ProtocolError, SamplerError, TransferQueueError
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.envelopes import AnyReply, AnyRequest, RequestEnvelope
from transfer_queue.messages.partitions import TakeGroupDemand
from transfer_queue.messages.queries import Watch
from transfer_queue.messages.system import SystemStatus
from transfer_queue.sampler.calls.call_messages import Question, ViewReply

MAX_DELIVERIES = 16  # of a row without an ack, where neither its partition nor the system says another number
MAX_DEPARTED = 1024  # clients without a connection whose replies are kept

HANDLERS = (
    batch_metadata,
    change_answers,
    checkpoint_handler,
    claim_handler,
    consumption_handlers,
    explain,
    partition_view,
    put_handlers,
    status,
    unit_drain,
    unit_handlers,
    value_locations,
)
"""The modules that register handlers of requests."""


class Controller(ControllerContext):
    """The core of the system: see `ControllerContext` for the arguments and attributes.

    lease_counts: since the controller began, for metrics.
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
        super().__init__(
            sampler,
            config,
            capacity,
            timer,
            restored,
            now,
            lives,
            boot,
            max_deliveries,
            replicas,
            marks,
            values,
            strict,
        )
        self.asks = SamplerAsks(self.samplers.default, partial(claim_handler.look, self))
        self.lease_counts = LeaseCounts()
        self.observe(LeaseCounts.RECORDS, self.lease_counts.note)
        self.clearing = IncrementalClears()
        self.wide_puts = WidePuts()

    # ------------------------------------------------------------ events

    def opened(self, client: str, peer: int) -> None:
        """A client has a (further) connection."""
        self.connections.setdefault(client, set()).add(peer)
        self.departed.pop(client, None)

    def handle(self, client: str, peer: int, envelope: RequestEnvelope, now: float) -> list[Effect]:
        """A request arrived."""
        self.now = now
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
            return self.answer(Caller(client, peer, envelope), envelope.body)
        except TransferQueueError as error:
            return [self.failure(peer, sequence, error), *self.settle()]

    def closed(self, client: str, peer: int, now: float) -> list[Effect]:
        """A connection ended: what waited on it is cancelled, before anything can meet it."""
        self.now = now
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

    def status(self, now: float) -> SystemStatus:
        """Progress of every partition, and the counters."""
        return status.of_system(self, now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, None where nobody waits."""
        times = [self.state.waiting.next_deadline(), self.returning.due(), self.deadlines.next(), self.moves.due()]
        if self.state.aging or self.drains:
            times += [retention.next_expiry(partition) for partition in self.state.aging.values()]
            times += [deadline for _, _, deadline in self.drains.values()]
        if self.clearing.jobs or self.making or self.wide_puts.jobs:
            times.append(self.now)
        return min([time for time in times if time is not None], default=None)

    def tick(self, now: float) -> list[Effect]:
        """Ends waits and leases whose deadline has come, drops rows too old, gives up clients that did not return."""
        self.now = now
        effects: list[Effect] = []
        for client in self.returning.gone(now, self.connections):
            self._gone(client)
        for leased, lease in self.deadlines.due(now):
            for record in lease_decisions.end_lease(leased, lease, lease.rows, "expired", self.max_deliveries):
                self.apply(record)
        for partition in list(self.state.aging.values()):
            retention.retain(self, partition)
        for waiting in self.state.waiting.expired(now):
            waiter = (waiting.client, waiting.sequence)
            peer = self.peers.get(waiter)
            reply = self._expiry(waiting, now)
            self.unpark(waiter)
            if peer is not None:
                effects.append(Send(peer, waiting.sequence, reply))
        effects += self.clearing.step(self)
        effects += self.wide_puts.step(self, self.answer)
        made = self.making.step(self.state)
        if made is not None:
            self.changed.setdefault(made[0], ChangeSet()).tasks.add(made[1])
        records, orders = self.moves.step(now)
        for record in records:
            self.apply(record)
        effects += [SendToUnit(unit, order) for unit, order in orders]
        return [*effects, *self.settle()]

    def worked(self, number: int, outcome: Any, now: float) -> list[Effect]:
        """Work has ended. outcome: what it gave, or the exception that it raised.

        Who began the deal gets it where it still can be made, else its claim is decided anew, like all others that
        wait for the same task.
        """
        self.now = now
        job = self.works.end(number)
        effects: list[Effect] = []
        waiting = self.state.waiting.by_waiter.get(job.waiter)
        if waiting is not None and isinstance(outcome, BaseException):
            error = outcome if isinstance(outcome, TransferQueueError) else SamplerError(f"a deal failed: {outcome!r}")
            effects += self.failed(waiting, error)
        elif waiting is not None:
            effects += claim_handler.retry_claim(self, waiting, job.made(outcome))
        self.changed.setdefault(job.partition.name, ChangeSet()).tasks.add(job.task)
        return [*effects, *self.settle()]

    def sampler_answered(self, number: int, outcome: Any, now: float) -> list[Effect]:
        """An effect `AskSampler` was carried out. outcome: see there."""
        self.now = now
        return [*self.asks.answered(self, number, outcome), *self.settle()]

    def sampler_reads(self, number: int, question: Question) -> ViewReply:
        """Reply to what a user's sampler reads during a call."""
        return self.asks.question(self, number, question)

    def state_written(self, name: str, trouble: str | None, now: float) -> list[Effect]:
        """An effect `WriteState` was carried out, or failed: why, in words."""
        self.now = now
        return [*checkpoint_handler.written(self, name, trouble), *self.settle()]

    def state_read(
        self, client: str, sequence: int, read: checkpoint_handler.SavedState | Exception, now: float
    ) -> list[Effect]:
        """An effect `ReadState` was carried out. read: what the file holds (`checkpoints.built`), or an exception."""
        self.now = now
        return [*checkpoint_handler.read(self, client, sequence, read), *self.settle()]

    def use_sampler(self, sampler: AnySampler) -> list[Effect]:
        """Replace the sampler. Dealt batches do not change; claims that wait are checked and decided again."""
        self.samplers = SamplerRegistry(sampler, self.values, self.samplers.strict)
        effects = self.asks.replace(self.samplers.default)
        self.state.watched = watched_tags(sampler)
        for waiting in list(self.state.waiting.by_waiter.values()):
            if isinstance(waiting.request, Claim):
                effects += claim_handler.check_again(self, waiting)
        for name in {**self.state.partitions, **self.state.waiting.claims}:  # also of partitions not there
            self.changed.setdefault(name, ChangeSet()).everything = True
        return [*effects, *self.settle()]

    # ------------------------------------------------------------ one request

    def answer(self, caller: Caller, request: AnyRequest) -> list[Effect]:
        """Return the effects of a request. Raises an error of the tree if it is refused."""
        check_epoch(self.state, request)
        handle = handler(type(request))
        if type(request) not in READS:
            self.movers.acted(caller.client, request)
            if self.clearing.begin(self.state, caller) or self.wide_puts.begin(self.state, caller):
                return []
        result = handle(self, caller, request)
        if isinstance(result, Decision):
            return [*self.commit(caller, result), *self.settle()]
        if isinstance(result, ParkDecision):
            self.park(caller, result.request, result.seconds)
            return self.settle()
        if isinstance(result, list):
            return [*result, *self.settle()]
        return [Send(caller.peer, caller.envelope.sequence, result)]

    # ------------------------------------------------------------ waiting

    def _attach(self, waiting: ParkedRequest, peer: int) -> list[Effect]:
        """A parked request came again: it is answered on the newest connection (peers are numbered ascending)."""
        known = self.peers.get(waiting.waiter)
        self.peers[waiting.waiter] = peer if known is None else max(peer, known)
        if known is None:  # parked before a replay, and not looked at since
            return [*wakeups.retry(self, waiting), *self.settle()]
        return []

    def _expiry(self, waiting: ParkedRequest, now: float) -> AnyReply:
        request = waiting.request
        if isinstance(request, Watch):
            return change_answers.empty_watch_reply(self.state, request)
        self.counters["failures"] += 1
        if isinstance(request, Claim):
            if request.probe or request.quiet:
                return claim_handler.empty_reply(self, request, ended=False)
            dealt = claim_samplers.group_size(self.samplers.of(request, self.state.partitions.get(request.partition)))
            waited = request.waited + now - waiting.since
            return Failure("WaitTimeoutError", timeout_words(self.state, request, waited, dealt))
        if isinstance(request, TakeGroupDemand):
            return Done(0)
        try:
            put_decisions.check_room(self.state, request.partition, request.count)
        except CapacityError as error:
            return Failure(type(error).__name__, f"{error} It waited {now - waiting.since:.3g} s.")
        return Failure("CapacityError", f"no capacity came free within {now - waiting.since:.3g} s")

    def settle(self) -> list[Effect]:
        """Meets what can be met after a change, until nothing more can; then hands back free extents."""
        return wakeups.settle(self, bool(self.clearing.jobs))

    # ------------------------------------------------------------ the rest

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
                for record in clear_decisions.finished(partition, task, client, rows):
                    self.apply(record)
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
