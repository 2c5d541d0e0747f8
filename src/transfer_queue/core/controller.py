"""The controller: events in, effects out.

    handle(client, peer, envelope, now)         a request arrived on connection `peer` of `client`
    on_disconnect(client, peer, now)            that connection ended
    tick(now)                                   a deadline may have come (see next_deadline)
    on_deal_computed(number, outcome, now)      an effect `ComputeDeal` was carried out
    settle_further()                            the effects so far were carried out, and the event has more of them

Each event is decided as records, which are applied (`core.transitions.apply`), and as effects for the server. Every
request gets exactly one reply. The reply to a mutation is kept in the state until the client says that it has the
reply, so the same request on a new connection gets the same reply. A request that waits is answered by the event that
completes it, in order of arrival per (partition, task).

An event that completes very many requests returns the effects of the first ones, so that their replies are sent while
the others are decided (`part`). `settle_further` returns the next ones. Any other event completes the rest first, so
that the records are the same as without parts, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from transfer_queue.core import checkpoint_handler
from transfer_queue.core.claims import claim_handler, consumption_handlers, lease_decisions
from transfer_queue.core.claims.background_deals import BackgroundDeals
from transfer_queue.core.claims.index_builder import IndexBuilder
from transfer_queue.core.claims.lease_deadlines import LeaseDeadlines, LockDeadlines
from transfer_queue.core.claims.plan import Plans
from transfer_queue.core.control.absent_holders import AbsentHolders
from transfer_queue.core.control.activity import ActivityTracker
from transfer_queue.core.control.change_log import ChangeLog
from transfer_queue.core.control.connections import Connections
from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.control.epochs import check_epoch
from transfer_queue.core.control.measures import ControllerMeasures, LeaseCounts
from transfer_queue.core.control.parked_requests import ParkedRequests
from transfer_queue.core.control.pending_checkpoints import PendingCheckpoints
from transfer_queue.core.control.record_log import RecordLog
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, Send, SendToUnit
from transfer_queue.core.events.registry import READS, Caller, Decision, ParkDecision, handler
from transfer_queue.core.locks import lock_decisions, lock_handlers
from transfer_queue.core.puts import equal_values, put_handlers, puts_together, retention
from transfer_queue.core.puts.incremental_clear import IncrementalClears
from transfer_queue.core.puts.wide_puts import WidePuts
from transfer_queue.core.queries import batch_metadata, change_answers, column_counts, partition_view, value_locations
from transfer_queue.core.queries.wide_lookups import WideLookups
from transfer_queue.core.reports import explain, sample_report, status, stuck_samples, wait_reasons
from transfer_queue.core.samplers.claim_samplers import NONE_OF_TASKS, SamplerRegistry
from transfer_queue.core.samplers.remote_calls import SamplerAsks, hosted_runner
from transfer_queue.core.samplers.user_sampler import AnySampler, Values, copy_containers, watched_tags
from transfer_queue.core.state.state import State
from transfer_queue.core.timeline import timeline_handlers
from transfer_queue.core.timeline.abandoned_samples import AbandonedSamples
from transfer_queue.core.timeline.event_ring import DEFAULT_CAPACITY
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.core.units import unit_handlers
from transfer_queue.core.units.migration_planner import MigrationPlanner
from transfer_queue.core.units.mirror_writer import MaxLag, MirrorWriter
from transfer_queue.core.units.store_servers import StoreServers
from transfer_queue.core.units.tiering_policy import DEFAULTS, Watermarks
from transfer_queue.core.units.unit_drains import UnitDrains
from transfer_queue.core.wakeups import Wakeups
from transfer_queue.errors import ProtocolError, SamplerError, TransferQueueError
from transfer_queue.messages.claims import Claim, ReportBatches
from transfer_queue.messages.envelopes import NOTICE, AnyRequest, RequestEnvelope
from transfer_queue.messages.puts import PublishReply
from transfer_queue.messages.queries import Lookup
from transfer_queue.messages.system import SystemStatus
from transfer_queue.sampler.calls.call_messages import Question, ViewReply

MAX_DELIVERIES = 16
"""Deliveries of a row without an acknowledgement, if neither its partition nor the system sets another limit."""

FREED = 1024
"""Objects that a step frees, which takes about half a millisecond."""

HANDLERS = (
    batch_metadata,
    change_answers,
    checkpoint_handler,
    claim_handler,
    column_counts,
    consumption_handlers,
    explain,
    lock_handlers,
    partition_view,
    put_handlers,
    equal_values,
    sample_report,
    status,
    stuck_samples,
    timeline_handlers,
    unit_handlers,
    value_locations,
    wait_reasons,
)
"""The modules that register handlers of requests."""


class Controller:
    """The core of the system: routes events to handlers, and looks after each event at the requests that wait."""

    def __init__(
        self,
        sampler: AnySampler,
        config: str = "{}",
        capacity: int | None = None,
        timer: Callable[[], float] = lambda: 0.0,
        restored: State | None = None,
        now: float = 0.0,
        lives: Callable[[str], bool] = lambda client: False,
        handed_over: Callable[[], Collection[int]] = frozenset,
        boot: str = "",
        max_deliveries: int = MAX_DELIVERIES,
        replicas: int = 1,
        marks: Watermarks = DEFAULTS,
        values: Values = copy_containers,
        strict: bool = False,
        timeline_events: int = DEFAULT_CAPACITY,
        max_lag: MaxLag | None = None,
        part: int | None = None,
        task_samplers: Mapping[str, AnySampler] = NONE_OF_TASKS,
        lease_key: bytes | None = None,
    ) -> None:
        """Begin with an empty state, or with that of a controller before this one.

        Args:
            sampler: The sampler of claims that name no other.
            config: JSON text that clients get when they attach.
            capacity: The most rows at a time; None for no limit.
            timer: Returns seconds, to measure what a user's sampler costs.
            restored: The state of the controller before this one. Its clients have a grace period to reconnect.
            now: The time on the controller's clock.
            lives: Returns whether the process of a client is known to be alive.
            handed_over: Returns the tokens of batches that processes of this node have handed over and noted.
            boot: An identifier that no other controller has.
            max_deliveries: The limit of the partitions that do not set one. See `PartitionOptions`.
            replicas: The number of units that store each block.
            marks: The fill levels at which blocks are moved to disk.
            values: Decodes a value of a message, for a user's sampler in this process.
            strict: Whether entries of a sampling_config that the sampler does not take are errors.
            timeline_events: The number of events of the timeline that are kept; 0: none are written.
            max_lag: How far a mirror may be behind acknowledged puts; None: the system has no mirror.
            part: The number of effects after which an event may return, before it has met all requests that can be met.
                The caller must call `settle_further` as long as `unfinished`. None: an event returns all effects.
            task_samplers: Task, or pattern of tasks -> its sampler in the configuration.
            lease_key: The key with which units prove their leases; None: proofs are not checked.
        """
        self.state = state = State(capacity) if restored is None else restored
        """The state of the system."""
        state.lease_key = lease_key
        samplers = SamplerRegistry(sampler, values, strict, task_samplers, lambda: state.samplers)
        state.watched = watched_tags(*samplers.all)
        log, measures = RecordLog(state), ControllerMeasures()
        log.now = now
        timeline = TimelineRecorder(log, state, timeline_events)
        changes = ChangeLog(log)
        migrations = MigrationPlanner(state, replicas, marks)
        self.context = ControllerContext(
            state=state,
            log=log,
            samplers=samplers,
            plans=Plans(samplers),
            sampler_calls=SamplerAsks(lambda *args: claim_handler.decide_parked(self.context, *args)),
            measures=measures,
            connections=Connections(state, now, lives),
            parked=ParkedRequests(log, measures, timeline, changes),
            timeline=timeline,
            abandoned=AbandonedSamples(timeline, state),
            changes=changes,
            activity=ActivityTracker(),
            lease_deadlines=LeaseDeadlines(state),
            lock_deadlines=LockDeadlines(state),
            absent_holders=AbsentHolders(state, lives, now),
            background_deals=BackgroundDeals(),
            index_builder=IndexBuilder(),
            migrations=migrations,
            mirror=MirrorWriter(state, migrations, max_lag, now),
            unit_drains=UnitDrains(state),
            stores=StoreServers(state),
            checkpoints=PendingCheckpoints(),
            config=config,
            timer=timer,
            boot=boot,
            handed_over=handed_over,
            max_deliveries=max_deliveries,
        )
        migrations.mirror_is_due = self.context.mirror.is_due
        migrations.has_mirror = max_lag is not None
        self.clears = IncrementalClears()
        self.wide_puts = WidePuts()
        self.wide_lookups = WideLookups()
        self._wakeups = Wakeups(self.context, self.clears, self.wide_puts, part)
        self._part = part
        self._due: float | None = None
        self._is_due_known = False
        """Whether `_due` is the next deadline. What an event changes may change it; requests of READS do not."""
        self.context.activity.restore(self.context.connections.grace.clients, state.partitions)
        self._observe_records()

    def _observe_records(self) -> None:
        log, context = self.context.log, self.context
        log.observe(LeaseCounts.RECORDS, context.measures.lease_counts.count_record)
        log.observe([r.StateLoaded], lambda record: context.migrations.forget())
        log.observe(
            [r.ConsumptionForgotten], lambda record: context.background_deals.mark_stale(record.partition, record.task)
        )
        log.observe([r.WriterFenced], lambda record: context.absent_holders.note_dead(record.writer))
        log.observe([r.PartitionDropped], lambda record: context.activity.forget_partition(record.partition))
        log.observe([r.PartitionDropped], lambda record: context.samplers.warned.discard(record.partition))
        log.observe([r.PartitionDropped], lambda record: context.plans.end(record.partition))
        log.observe([r.SamplerRegistered, r.StateLoaded, r.StateMerged], lambda record: context.plans.end())
        if context.mirror.lag is not None:
            log.observe([r.StateLoaded], lambda record: context.mirror.forget(log.now))
            log.observe([r.StateMerged, r.UnitLost, r.ExtentsLost], lambda record: self._on_lost_locations())
            new = [r.RowsPut, r.RowsPutTogether, r.Published, r.BlocksMoved]
            log.observe(new, lambda record: context.mirror.note_new_blocks(log.now))
            log.observe([r.BlocksMoved], context.mirror.note_moved)
        log.observe([r.RowsPut, r.RowsPutTogether, r.Published], context.stores.note_published)
        context.timeline.observe(log.observe)

    def _on_lost_locations(self) -> None:
        """Blocks may have lost their location in memory, or that in the mirror."""
        self.context.migrations.restores = True
        self.context.mirror.rescan(self.context.now)

    def take_records(self) -> list[r.AnyRecord]:
        """Return the records that were applied since the last call, for the journal."""
        return self.context.log.take()

    # ------------------------------------------------------------ events

    def on_connect(self, client: str, peer: int) -> None:
        """A client has opened a connection, its first one or a further one."""
        self.context.connections.note_opened(client, peer)
        self.context.timeline.gone.pop(client, None)

    @property
    def unfinished(self) -> bool:
        """Whether the last event has further effects, which `settle_further` returns."""
        return self._wakeups.left is not None

    def settle_further(self) -> list[Effect]:
        """Return the next effects of the last event."""
        return self._with_orders(self._wakeups.settle_further(self._part))

    def _finish_last(self) -> list[Effect]:
        """Return all further effects of the last event, before another one begins."""
        return self._with_orders(self._wakeups.settle_further(None)) if self.unfinished else []

    def handle(self, client: str, peer: int, envelope: RequestEnvelope, now: float) -> list[Effect]:
        """A request arrived."""
        if self._wakeups.left is not None:
            return self._finish_last() + self.handle(client, peer, envelope, now)
        context, state = self.context, self.state
        context.log.now = now
        sequence, request = envelope.sequence, envelope.body
        report = envelope.report
        if report is not None:
            if report.returned or report.withdrawn or report.left:
                effects = self.handle(client, peer, RequestEnvelope(NOTICE, 0, report), now)
                return effects + self.handle(client, peer, msgspec.structs.replace(envelope, report=None), now)
            consumption_handlers.hand_over(context, report)
        if sequence == NOTICE:
            return self._handle_notice(Caller(client, peer, envelope))
        context.measures.counters["requests"] += 1
        kept = state.clients.get(client)
        if kept is not None and sequence in kept.replies:
            send = Send(peer, sequence, kept.replies[sequence])
            held = isinstance(send.reply, PublishReply) and context.mirror.hold_again(client, send, now)
            self._is_due_known = False
            return [] if held else [send]
        waiting = state.waiting.by_waiter.get((client, sequence))
        if waiting is not None:
            return self._settle_after(self._wakeups.retry(waiting)) if context.parked.attach(waiting, peer) else []
        if kept is not None and kept.is_finished(sequence):
            return [context.failure(peer, sequence, ProtocolError(f"request {sequence} was acknowledged before"))]
        if envelope.reads:
            context.timeline.note_reads(client, envelope.reads)
        caller = Caller(client, peer, envelope)
        try:
            if type(request) in READS:
                check_epoch(state, request)
                if type(request) is Lookup and self.wide_lookups.begin(state, caller, request):
                    self._is_due_known = False
                    return []
                reply: Any = handler(type(request))(context, caller, request)
                effects = [Send(peer, sequence, reply)]
                return effects if report is None else self._settle_after(effects)
            effects = self.change(caller, request)
        except TransferQueueError as error:
            effects = [context.failure(peer, sequence, error)]
        return self._settle_after(effects)

    def _handle_notice(self, caller: Caller) -> list[Effect]:
        request = caller.envelope.body
        if type(request) is ReportBatches:
            return self._settle_after(self.change(caller, request))
        words = f"only a ReportBatches may have the sequence 0, which gets no reply, not a {type(request).__name__}"
        return [self.context.failure(caller.peer, NOTICE, ProtocolError(words))]

    def handle_puts(self, puts: Sequence[tuple[str, int, RequestEnvelope]], now: float) -> list[Effect]:
        """Puts of different clients arrived at the same time. Those of new samples are decided together if possible.

        Args:
            puts: (client, peer, envelope) of each, all with a `Publish`.
            now: The time on the controller's clock.
        """
        context, effects = self.context, self._finish_last()
        context.log.now = now
        for client, peer, envelope in puts:
            if envelope.report is not None:
                effects += self.handle(client, peer, RequestEnvelope(NOTICE, 0, envelope.report), now)
        for callers in puts_together.alike_puts([Caller(*put) for put in puts]):
            effects += self._finish_last()
            if len(callers) > 1 and not puts_together.has_fields(self.state, callers[0]):
                first = callers.pop(0)  # it makes the partition and its fields
                effects += self.handle(first.client, first.peer, first.envelope, now)
                effects += self._finish_last()
            record = puts_together.decide(self.state, callers) if len(callers) > 1 else None
            if record is not None:
                context.measures.counters["requests"] += len(callers)
                effects += self._settle_after(puts_together.carry_out(context, callers, record))
                continue
            for caller in callers:
                effects += self.handle(caller.client, caller.peer, caller.envelope, now)
        return effects

    def on_disconnect(self, client: str, peer: int, now: float) -> list[Effect]:
        """A connection ended. What waits on it is cancelled before anything can meet it."""
        before, context = self._finish_last(), self.context
        context.log.now = now
        context.parked.cancel(client, peer)
        context.unit_drains.cancel(client, peer)
        context.mirror.drop_connection(peer)
        self.wide_puts.drop_connection(peer)
        self.wide_lookups.drop_connection(peer)
        context.stores.note_closed(peer, now)
        for unit in context.connections.units_at(peer):
            unit_handlers.forget_unit(context, unit)
        effects: list[Effect] = []
        if context.connections.note_closed(client, peer):
            announced = context.connections.take_leaving(client)
            context.timeline.note_gone(client, announced)
            effects = context.checkpoints.forget_client(client)
            self._wakeups.release(client)
            if announced:
                self._end_holds(client, "left")
            context.absent_holders.note_disconnected(client, now)
        return before + self._settle_after(effects)

    def next_deadline(self) -> float | None:
        """Return when `tick` has something to do; None if there is no deadline. Determined once after a change."""
        if not self._is_due_known:
            self._due, self._is_due_known = self._earliest_deadline(), True
        return self._due

    def _earliest_deadline(self) -> float | None:
        context, state = self.context, self.context.state
        times = [
            state.waiting.next_deadline(),
            context.connections.grace.next_deadline(),
            context.lease_deadlines.next_deadline(),
            context.lock_deadlines.next_deadline(),
            context.absent_holders.next_deadline(),
            context.migrations.next_deadline(),
            context.unit_drains.next_deadline(),
        ]
        if context.mirror.lag is not None:
            times.append(context.mirror.next_deadline())
        if state.aging:
            times += [retention.next_expiry(partition) for partition in state.aging.values()]
        jobs = self.unfinished or self.clears.jobs or self.wide_puts.jobs or self.wide_lookups.jobs
        if jobs or context.index_builder or state.blocks.discarded:
            times.append(context.now)
        return min([time for time in times if time is not None], default=None)

    def tick(self, now: float) -> list[Effect]:
        """End what has reached its deadline (waits, leases, old rows, grace periods), and do a step of long jobs."""
        before, context = self._finish_last(), self.context
        context.log.now = now
        for client in context.connections.grace.expired_clients(now, context.connections.peers):
            self._wakeups.release(client)
        for name, lease in context.lease_deadlines.expired(now):
            leased = context.state.partitions[name]
            for record in lease_decisions.end_lease(leased, lease, lease.rows, "expired", context.max_deliveries):
                context.log.apply(record)
        for _, lock in context.lock_deadlines.expired(now):
            context.log.apply(lock_decisions.expire(lock))
        for client, is_dead in context.absent_holders.check(now, context.connections.peers):
            self._end_holds(client, "gone", locks=is_dead)
            for waiting in context.state.waiting.space.values():
                put_handlers.drop_abandoned(context, waiting.request.partition)
        for partition in list(context.state.aging.values()):
            retention.retain(context.log, partition)
        effects = self._wakeups.expire(now)
        effects += self.clears.step(context)
        effects += self.wide_puts.step(context, self.change, self._wakeups.retry)
        effects += self.wide_lookups.step(context)
        context.state.blocks.free_some(FREED)
        built = context.index_builder.step(context.state)
        if built is not None:
            context.changes.changes_of(built[0]).tasks |= {built[1]}
        records, orders = context.migrations.step(now)
        for record in records:
            context.log.apply(record)
        effects += [SendToUnit(unit, order) for unit, order in orders]
        effects += [SendToUnit(unit, order) for unit, order in context.mirror.step(now)]
        return before + self._settle_after(effects)

    def expire_waits(self, now: float) -> list[Effect]:
        """End the waits whose deadline has come, and nothing else: no record of this has to be written."""
        if self.unfinished:
            return []
        self.context.log.now, self._is_due_known = now, False
        return self._wakeups.expire(now)

    def on_deal_computed(self, number: int, outcome: Any, now: float) -> list[Effect]:
        """A long deal was computed.

        The claim that began it gets the deal if the deal is still possible. Otherwise the claim is decided again, like
        all others of its task that wait.

        Args:
            number: The number in `ComputeDeal`.
            outcome: The result of `ComputeDeal.run`, or the exception that it raised.
            now: The time on the controller's clock.
        """
        before, context = self._finish_last(), self.context
        context.log.now = now
        job = context.background_deals.end(number)
        effects: list[Effect] = []
        waiting = context.state.waiting.by_waiter.get(job.waiter)
        if waiting is not None and isinstance(outcome, BaseException):
            error = outcome if isinstance(outcome, TransferQueueError) else SamplerError(f"a deal failed: {outcome!r}")
            effects = context.refuse(waiting, error)
        elif waiting is not None:
            effects = claim_handler.retry_claims(context, [waiting], job.validate_shares(outcome))
        context.changes.changes_of(job.partition.name).tasks |= {job.task}
        return before + self._settle_after(effects)

    def on_sampler_answer(self, number: int, outcome: Any, now: float) -> list[Effect]:
        """The process of a user's sampler answered a call. outcome: see `AskSampler`."""
        before = self._finish_last()
        self.context.log.now = now
        return before + self._settle_after(self.context.sampler_calls.on_answer(self.context, number, outcome))

    def answer_sampler_read(self, number: int, question: Question) -> ViewReply:
        """Return the reply to what a user's sampler reads during a call."""
        return self.context.sampler_calls.answer_read(self.context, number, question)

    def on_state_written(self, name: str, trouble: str | None, now: float) -> list[Effect]:
        """The state was written to a file, or not. trouble: why not, in words; None if it was."""
        before = self._finish_last()
        self.context.log.now = now
        return before + self._settle_after(checkpoint_handler.finish_writing(self.context, name, trouble))

    def on_state_read(
        self, client: str, sequence: int, read: checkpoint_handler.SavedState | Exception, now: float
    ) -> list[Effect]:
        """The file of a saved state was read for a client. read: its content, or why it cannot be read."""
        before = self._finish_last()
        self.context.log.now = now
        return before + self._settle_after(checkpoint_handler.finish_reading(self.context, client, sequence, read))

    def use_sampler(self, sampler: AnySampler) -> list[Effect]:
        """Replace the sampler. Batches that are dealt stay; claims that wait are checked and decided again."""
        before, context = self._finish_last(), self.context
        former = hosted_runner(context.samplers.default)
        context.samplers.replace_default(sampler)
        context.plans.end()
        effects = context.sampler_calls.replace(former)
        context.state.watched = watched_tags(*context.samplers.all)
        for waiting in list(context.state.waiting.by_waiter.values()):
            if isinstance(waiting.request, Claim):
                effects += claim_handler.recheck_claim(context, waiting)
        for name in {**context.state.partitions, **context.state.waiting.claims}:  # claims may wait for new partitions
            context.changes.changes_of(name).everything = True
        return before + self._settle_after(effects)

    # ------------------------------------------------------------ requests

    def change(self, caller: Caller, request: AnyRequest) -> list[Effect]:
        """Return the effects of a request that may change the state.

        Raises:
            TransferQueueError: The request is refused.
        """
        context = self.context
        check_epoch(self.state, request)
        handle = handler(type(request))
        context.activity.note_request(caller.client, request)
        if self.clears.begin(self.state, caller) or self.wide_puts.begin(self.state, caller, context.now):
            return []
        result = handle(context, caller, request)
        if isinstance(result, Decision):
            return context.commit(caller, result)
        if isinstance(result, ParkDecision):
            context.parked.park(caller, result.request, result.seconds)
            return []
        if isinstance(result, list):
            return result
        return [Send(caller.peer, caller.envelope.sequence, result)]

    def status(self, now: float) -> SystemStatus:
        """Return the progress of every partition, and the counters."""
        return status.collect_status(self.context, now)

    def _end_holds(self, client: str, reason: str, *, locks: bool = True) -> None:
        """End what a client still holds: batches that it has not handed over, and its locks. reason: of the records."""
        released = lock_decisions.release_all(self.state, client) if locks else []
        settled = lease_decisions.settle_unseen(self.state, self.context.handed_over, client, reason)
        for record in [*settled, *released]:
            self.context.log.apply(record)

    def _settle_after(self, effects: list[Effect]) -> list[Effect]:
        """Return these effects of an event, and those of the requests that can be met after it."""
        return self._with_orders(effects + self._wakeups.settle())

    def _with_orders(self, effects: list[Effect]) -> list[Effect]:
        """Add what follows from the records so far: replies that were held for the mirror, and orders to stores."""
        context = self.context
        self._is_due_known = False
        if context.mirror.held:
            effects += context.mirror.release(context.now)
        if context.stores.orders:
            effects += context.stores.take_orders()
        return effects
