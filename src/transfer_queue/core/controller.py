"""The controller: events in, effects out.

    handle(client, peer, envelope, now)         a request arrived on connection `peer` of `client`
    on_disconnect(client, peer, now)            that connection ended
    tick(now)                                   a deadline may have come (see next_deadline)
    on_outcome(number, outcome, now)            an effect with a number of a job was carried out
    settle_further()                            the effects so far were carried out, and the event has more of them

Each event is decided as records, which are applied (`core.appliers`), and as effects for the server. Every
request gets exactly one reply. The reply to a mutation is kept in the state until the client says that it has the
reply, so the same request on a new connection gets the same reply. A request that waits is answered by the event that
completes it, in order of arrival per (partition, task).

An event that completes very many requests returns the effects of the first ones, so that their replies are sent while
the others are decided (`part`). `settle_further` returns the next ones. Any other event completes the rest first, so
that the records are the same as without parts, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from transfer_queue.core.appliers import APPLIERS
from transfer_queue.core.claims.claim_handler import SamplerCalls, use_sampler
from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.context import Context
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.events.registry import HANDLERS, OF_AN_EPOCH, READS, Begin, Caller, Decision, ParkDecision
from transfer_queue.core.jobs import Jobs
from transfer_queue.core.puts import decide
from transfer_queue.core.samplers.calls import AnySampler, watched_tags
from transfer_queue.core.services import SERVICES
from transfer_queue.core.state.state import State
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.core.wakeups import Wakeups
from transfer_queue.errors import ProtocolError, TransferQueueError
from transfer_queue.messages.claims import ReportBatches
from transfer_queue.messages.envelopes import NOTICE, AnyRequest, RequestEnvelope
from transfer_queue.sampler.calls.call_messages import Question, ViewReply

RECORDS: tuple[type[r.Record], ...] = tuple(APPLIERS)
"""The types of the records of all features, which a journal contains."""


class Controller:
    """The core of the system: routes events to handlers, and looks after each event at the requests that wait."""

    def __init__(self, config: CoreConfig, restored: State | None = None, now: float = 0.0) -> None:
        """Begin with an empty state, or with that of a controller before this one.

        Args:
            config: The configuration.
            restored: The state of the controller before this one. Its clients have a grace period to reconnect.
            now: The time on the controller's clock.
        """
        self.state = state = State(config.capacity) if restored is None else restored
        """The state of the system."""
        state.lease_key = config.lease_key
        self.context = context = Context(config, state, now, SERVICES)
        state.watched = watched_tags(*context.samplers.all)
        context.log.observe([r.StateLoaded, r.StateMerged], lambda record: context.services.start_needed())
        context.services.start_needed()
        self.take_records = context.log.take
        """Returns the records that were applied since the last call, for the journal."""
        self._wakeups = context.services[Wakeups]
        self._hooks = context.services.with_hook
        self._observers = context.services.requests
        self._due: float | None = None
        self._is_due_known = False
        """Whether `_due` is the next deadline. What an event changes may change it; requests of READS do not."""

    # ------------------------------------------------------------ events

    def on_connect(self, client: str, peer: int) -> None:
        """A client has opened a connection, its first one or a further one."""
        self.context.connections.note_opened(client, peer)
        for service in self._hooks["on_connected"]:
            service.on_connected(client)

    @property
    def unfinished(self) -> bool:
        """Whether the last event has further effects, which `settle_further` returns."""
        return self._wakeups.left is not None

    def settle_further(self) -> list[Effect]:
        """Return the next effects of the last event."""
        self._is_due_known = False
        return self._wakeups.settle_further(self.context.config.part)

    def _finish_last(self) -> list[Effect]:
        """Return all further effects of the last event, before another one begins."""
        self._is_due_known = False
        return self._wakeups.settle_further(None) if self.unfinished else []

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
            HANDLERS[ReportBatches](context, Caller(client, peer, RequestEnvelope(NOTICE, 0, report)), report)
        caller = Caller(client, peer, envelope)
        if sequence == NOTICE:
            return self._handle_notice(caller)
        context.measures.counters["requests"] += 1
        kept = state.clients.get(client)
        if kept is not None and sequence in kept.replies:
            send = Send(peer, sequence, kept.replies[sequence])
            self._is_due_known = False
            return [] if context.is_held(client, send, again=True) else [send]
        waiting = state.waiting.by_waiter.get((client, sequence))
        if waiting is not None:
            return self._settle_after(self._wakeups.retry(waiting)) if context.parked.attach(waiting, peer) else []
        finished = kept is not None and kept.is_finished(sequence)
        unrecorded = context.connections.unrecorded.get(client)
        if unrecorded is not None:
            unrecorded.advance(envelope.acknowledged, envelope.finished)
            if sequence in unrecorded.replies and not finished:
                return self._settle_after([Send(peer, sequence, unrecorded.replies[sequence])])
            finished = finished or unrecorded.is_finished(sequence)
        if finished:
            refusal = context.failure(ProtocolError(f"request {sequence} was acknowledged before"))
            return [Send(peer, sequence, refusal)]
        if envelope.reads:
            context.services[TimelineRecorder].note_reads(client, envelope.reads)
        try:
            kind = type(request)
            if kind in OF_AN_EPOCH and request.epoch not in (None, state.epoch):  # type: ignore[attr-defined]
                state.check_epoch(request)
            if kind in READS:
                reply: Any = HANDLERS[kind](context, caller, request)
                effects = [Send(peer, sequence, reply)]
                return effects if report is None else self._settle_after(effects)
            effects = self.change(caller, request)
        except TransferQueueError as error:
            effects = [context.answer(caller.waiter, peer, context.failure(error))]
        self._is_due_known = False
        return effects + self._wakeups.settle()

    def _handle_notice(self, caller: Caller) -> list[Effect]:
        request = caller.envelope.body
        if type(request) is ReportBatches:
            return self._settle_after(self.change(caller, request))
        message = f"only a ReportBatches may have the sequence 0, which gets no reply, not a {type(request).__name__}"
        return [Send(caller.peer, NOTICE, self.context.failure(ProtocolError(message)))]

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
        for callers in decide.group_puts([Caller(*put) for put in puts]):
            effects += self._finish_last()
            if len(callers) > 1 and not decide.has_fields(self.state, callers[0]):
                first = callers.pop(0)  # it makes the partition and its fields
                effects += self.handle(first.client, first.peer, first.envelope, now)
                effects += self._finish_last()
            published = decide.publish_several(context, callers) if len(callers) > 1 else None
            if published is not None:
                effects += self._settle_after(published)
                continue
            for caller in callers:
                effects += self.handle(caller.client, caller.peer, caller.envelope, now)
        return effects

    def on_disconnect(self, client: str, peer: int, now: float) -> list[Effect]:
        """A connection ended. What waits on it is cancelled before anything can meet it."""
        before, context = self._finish_last(), self.context
        context.log.now = now
        for service in self._hooks["on_connection_ended"]:
            service.on_connection_ended(client, peer)
        effects: list[Effect] = []
        if context.connections.note_closed(client, peer):
            announced = client in context.connections.leaving
            context.connections.leaving.discard(client)
            context.forget_client(client)
            for service in self._hooks["on_client_left"]:
                effects += service.on_client_left(client, announced)
        return before + self._settle_after(effects)

    def next_deadline(self) -> float | None:
        """Return when `tick` has something to do; None if there is no deadline. Determined once after a change."""
        if not self._is_due_known:
            self._due, self._is_due_known = self._earliest_deadline(), True
        return self._due

    def _earliest_deadline(self) -> float | None:
        if self.unfinished:
            return self.context.now
        earliest: float | None = None
        for service in self._hooks["next_due"]:
            time = service.next_due()
            if time is not None and (earliest is None or time < earliest):
                earliest = time
        return earliest

    def tick(self, now: float) -> list[Effect]:
        """Do what is due: the ends of waits, leases and grace periods, and a step of a job."""
        effects, context = self._finish_last(), self.context
        context.log.now = now
        for service in context.services.due(now):
            effects += service.on_due()
        return self._settle_after(effects)

    def expire_waits(self, now: float) -> list[Effect]:
        """End the waits whose deadline has come, and nothing else: no record of this has to be written."""
        if self.unfinished:
            return []
        self.context.log.now, self._is_due_known = now, False
        return self._wakeups.on_due()

    def on_sampler_answer(self, number: int, outcome: Any, now: float) -> list[Effect]:
        """The process of a user's sampler answered a call. outcome: see `AskSampler`."""
        before = self._finish_last()
        self.context.log.now = now
        queue = self.context.services[SamplerCalls].queue_in_call(number)
        return before + self._settle_after([] if queue is None else queue.on_answer(outcome))

    def answer_sampler_read(self, number: int, question: Question) -> ViewReply:
        """Return the reply to what a user's sampler reads during a call; an empty one if the sampler was replaced."""
        queue = self.context.services[SamplerCalls].queue_in_call(number)
        return ViewReply() if queue is None else queue.answer_read(question)

    def on_outcome(self, number: int, outcome: Any, now: float) -> list[Effect]:
        """What a job waits for has happened. number: that of the effect; outcome: see the effect."""
        before, context = self._finish_last(), self.context
        context.log.now = now
        return before + self._settle_after(context.services[Jobs].resume(number, outcome))

    def use_sampler(self, sampler: AnySampler) -> list[Effect]:
        """Replace the sampler. Batches that are dealt stay; claims that wait are checked and decided again."""
        return self._finish_last() + self._settle_after(use_sampler(self.context, sampler))

    # ------------------------------------------------------------ requests

    def change(self, caller: Caller, request: AnyRequest) -> list[Effect]:
        """Return the effects of a request that may change the state.

        Raises:
            TransferQueueError: The request is refused.
        """
        context = self.context
        kind = type(request)
        handle = HANDLERS.get(kind)
        if handle is None:
            raise ProtocolError(f"{kind.__name__} is not a request to a controller")
        for observe in self._observers.get(kind, ()):
            observe(caller.client, request)
        jobs = context.services.get(Jobs)
        if jobs is not None and jobs.attach(caller):
            return []
        result = handle(context, caller, request)
        if isinstance(result, Decision):
            return context.commit(caller, result)
        if isinstance(result, ParkDecision):
            context.parked.park(caller, result.request, result.seconds)
            return []
        if isinstance(result, Begin):
            return context.services[Jobs].begin(result.steps, caller.waiter, result.ends, caller)
        if isinstance(result, list):
            return result
        return [context.answer(caller.waiter, caller.peer, result)]

    def _settle_after(self, effects: list[Effect]) -> list[Effect]:
        """Return these effects of an event, and those of the requests that can be met after it."""
        self._is_due_known = False
        return effects + self._wakeups.settle()
