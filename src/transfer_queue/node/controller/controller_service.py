"""The core behind the server loop: it carries out the core's effects and decides nothing."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Union

import msgspec

from transfer_queue.config.settings import SYSTEM, Settings
from transfer_queue.core.absent_clients import AbsentHolders
from transfer_queue.core.checkpoints import check_file_name
from transfer_queue.core.configuration import CoreConfig, MaxLag, Watermarks
from transfer_queue.core.controller import Controller
from transfer_queue.core.events.effects import (
    AskSampler,
    ComputeDeal,
    Effect,
    ForgetState,
    ReadState,
    Release,
    RemoveMirror,
    RemoveState,
    Send,
    SendToUnit,
    WriteState,
)
from transfer_queue.core.events.registry import READS as CONTROLLER_READS
from transfer_queue.core.samplers.calls import AnySampler, HostedRunner, UserSampler
from transfer_queue.core.state.restore import free_partitions
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.errors import TransferQueueError
from transfer_queue.journal.terms import Term
from transfer_queue.messages.base import Done, Failure, name_of
from transfer_queue.messages.checkpoints import FetchState, SendState
from transfer_queue.messages.envelopes import NOTICE, RequestEnvelope
from transfer_queue.messages.puts import Publish, Reserve
from transfer_queue.messages.reports import store_reports, unit_reports
from transfer_queue.messages.reports.overview import MeasureServers, ServersReply, ShowViews, ViewsReply
from transfer_queue.messages.system import UseSampler
from transfer_queue.net.handshake import Hello
from transfer_queue.net.server.server_loop import Outgoing, ServerLoop
from transfer_queue.node.controller.journal_service import Journaling
from transfer_queue.node.controller.sampler_host import SamplerHost
from transfer_queue.node.controller.sampler_loading import AnyMade, SamplerFiles
from transfer_queue.node.controller.state_files import StateFiles, StateWriter
from transfer_queue.node.hosting.service_base import BackgroundThread, EnvelopeService
from transfer_queue.storage.arena.remote_access import MAX_WRITTEN
from transfer_queue.system_folder.liveness import DepartedClients
from transfer_queue.wire.objects.object_values import decode_tag_value_copied

logger = logging.getLogger(__name__)

CallSoon = Callable[[Callable[[], Union[Iterable[Outgoing], None]]], None]
# requests that change nothing of the state
READS = CONTROLLER_READS | {
    unit_reports.Measured, MeasureServers, ShowViews,
    store_reports.ReportStoreServer, store_reports.AwaitFirstStoreServer,
}  # fmt: skip
MAX_WAITING = 4096  # requests of one connection that wait for space on the journal's disk
ASIDE_A_TURN = 16
LOOK_SECONDS = 0.1  # between two checks of a full disk
REPLY_SHARE = 0.9  # of the time in which a client needs a reply, so that the reply still reaches it
CHECK_SECONDS = 1.0  # between two checks of the term of an idle controller
FROM_UNITS = (
    unit_reports.RegisterUnit,
    unit_reports.WriterGone,
    unit_reports.SpaceShortReport,
    unit_reports.ExtentsFreedReport,
    unit_reports.BlocksMovedReport,
    unit_reports.ExtentsRecalledReport,
    unit_reports.ExtentsGone,
    unit_reports.Measured,
    store_reports.ReportStoreServer,
    store_reports.AwaitFirstStoreServer,
    store_reports.StoreChanged,
)
SERVED_HERE = frozenset((*FROM_UNITS, MeasureServers, ShowViews, UseSampler))
"""The requests that this module looks at; the core serves all others."""


NOT_OF_CORE = SERVED_HERE | {FetchState, SendState}
"""The requests that the core may not see, although it must see the reports that they carry."""


class _Arrived(NamedTuple):
    """A put that has arrived in this turn."""

    hello: Hello
    peer: int
    envelope: RequestEnvelope
    at: float


class _WaitingMutation:
    """A request that waits for space on the journal's disk. It is not carried out before.

    `patience`: see `Journaling`.
    """

    def __init__(self, hello: Hello, peer: int, envelope: RequestEnvelope, now: float, patience: float) -> None:
        self.hello = hello
        self.peer = peer
        self.envelope = envelope
        self._since = now
        wait: float | None = getattr(envelope.body, "wait", None)
        needed = patience + (wait or 0.0) if envelope.within is None else envelope.within
        self.until = now + (REPLY_SHARE * needed if wait is None else min(wait, REPLY_SHARE * needed))
        """When it is refused. Never for those that have no reply, or that a server of the system has sent."""
        if envelope.sequence == NOTICE or hello.role == "unit":
            self.until = math.inf

    def refusal(self, now: float, trouble: str) -> Failure:
        """Return the reply if there is still no space. `trouble`: see `Journaling`."""
        name = name_of(type(self.envelope.body))
        kind = "CapacityError" if isinstance(self.envelope.body, (Publish, Reserve)) else "WaitTimeoutError"
        return Failure(
            kind,
            f"Timeout: {name} waited {now - self._since:.3g} s and has changed nothing, because {trouble}.",
        )


class ControllerService(EnvelopeService):
    """A `net.server.server_connection.Service` that serves one controller."""

    name = "controller"

    def __init__(
        self,
        controller: Controller,
        states: StateFiles,
        journaling: Journaling | None = None,
        departed: DepartedClients | None = None,
        samplers: SamplerFiles | None = None,
        term: Term | None = None,
    ) -> None:
        """Make the service of a controller.

        Args:
            controller: The core.
            states: The files to which its state is saved, and from which it is loaded.
            journaling: The journal; None: records are not kept.
            departed: Gets the clients that have no connection any more.
            samplers: Where samplers are found that replace the system's.
            term: The term in which the controller may answer; None: no other controller may take its place.
        """
        super().__init__()
        self._samplers = samplers
        self._term = term
        self._next_check = 0.0
        """When the term is checked although nothing happens."""
        self.end: Callable[[], object] = lambda: None
        """Ends the server, without sending anything, after `commit` has found that a later term has begun."""
        self.serves_one: Callable[[], bool] = lambda: True
        """Returns whether at most one connection has sent something in this turn. If not, `serve_puts` is called."""
        self.on_measured: Callable[[int, unit_reports.Measured], None] = lambda peer, measured: None
        """Gets what a unit at this connection has measured."""
        self.measure_servers: Callable[[], ServersReply] | None = None
        """Measures all servers, in another thread than the loop's; None if this is not possible."""
        self.show_views: Callable[[], ViewsReply] | None = None
        """The same for the views of readers."""
        self._measuring = BackgroundThread()
        self._departed = departed
        self._controller = controller
        controller.context.measures.load = self.load
        controller.context.services[TimelineRecorder].wall = time.time() - time.monotonic()
        self._states = states
        self._journaling = journaling
        self._late = None if journaling is None else journaling.late
        self._worker = BackgroundThread()
        self._call_soon: CallSoon | None = None
        self._aside: deque[_WaitingMutation] = deque()
        """Requests that wait for space on the journal's disk."""
        self._puts: dict[str, _Arrived] = {}
        """Client -> its put that has arrived in this turn, and is served at the end of the turn."""
        self._look_again = 0.0
        """When the disk is checked again."""
        self._hosts: dict[str, SamplerHost] = {}
        """The processes of users' samplers, by the keys of `Settings.samplers`."""
        self._loop: ServerLoop | None = None

    def attach(self, call_soon: CallSoon) -> None:
        """Set how other threads reach the loop (`ServerLoop.call_soon`), before the first request."""
        self._call_soon = call_soon
        if self._journaling is not None:
            self._journaling.attach(StateWriter(call_soon))
            if self._journaling.late is not None:
                self._journaling.late.attach(call_soon)

    def use_hosts(self, samplers: Mapping[str, AnyMade], loop: ServerLoop) -> None:
        """Use these samplers from now on, by the keys of `Settings.samplers`. The loop watches their sockets."""
        self._loop = loop
        for pattern, sampler in samplers.items():
            self._replace(pattern, sampler)

    def _replace(self, pattern: str, sampler: AnyMade) -> None:
        former = self._hosts.pop(pattern, None)
        if former is not None:
            former.close()
            self._worker.begin(former.stop, lambda outcome: None)  # reaps the process
        if isinstance(sampler, SamplerHost):
            assert self._loop is not None
            self._hosts[pattern] = sampler
            answered = partial(self._on_sampler_answer, sampler)
            sampler.attach(self._loop, answered, self._controller.answer_sampler_read)

    def _on_sampler_answer(self, host: SamplerHost, number: int, outcome: Any) -> list[Outgoing]:
        self._controller.context.samplers.restarts[host.facts.name] = host.restarts
        return self._carry_out(self._controller.on_sampler_answer(number, outcome, time.monotonic()))

    def commit(self) -> bool:
        """Write the records of all changes so far. Returns whether the server may now send its replies.

        With a term, it may if the term is current *after* the records were written: see `journal.terms`.
        """
        if self._journaling is None:
            self._controller.take_records()
            return True
        committed = self._journaling.commit()
        if self._term is None or self._term.is_current():
            return committed
        logger.error(
            "a controller of a later term than %d has taken over the journal; this controller answers no request any "
            "more and ends",
            self._term.number,
        )
        self.end()
        return False

    def on_connect(self, peer: int, hello: Hello) -> None:
        """See `net.server.server_connection.Service.on_connect`."""
        super().on_connect(peer, hello)
        self._controller.on_connect(hello.client_id, peer)
        if self._departed is not None:
            self._sweep(self._departed)

    def _sweep(self, departed: DepartedClients) -> None:
        context = self._controller.context
        departed.sweep(context.connections.peers, context.services[AbsentHolders].awaited)

    def handle(
        self, hello: Hello, peer: int, envelope: RequestEnvelope, payload: memoryview | None, now: float
    ) -> Iterable[Outgoing] | None:
        """See `EnvelopeService.handle`. Puts of different clients are served together; all else in order of arrival."""
        body, must_wait = envelope.body, self._waits_for_space
        kind = type(body)
        if kind is Publish and not (must_wait or self.serves_one()):
            served = self.serve_puts() if hello.client_id in self._puts else None
            self._puts[hello.client_id] = _Arrived(hello, peer, envelope, now)
            return served
        before = self.serve_puts() if self._puts else []
        if envelope.report is not None and (must_wait or kind in NOT_OF_CORE):
            notice = RequestEnvelope(NOTICE, 0, envelope.report)
            envelope = msgspec.structs.replace(envelope, report=None)
            if must_wait:
                self._set_aside(hello, peer, notice)
            else:
                before = [*before, *self._serve(hello, peer, notice, now)]
        if isinstance(body, (FetchState, SendState)):
            return [*before, self._state_file(peer, envelope.sequence, body, payload)]
        if must_wait and kind not in READS:
            return [*before, *self._set_aside(hello, peer, envelope)]
        return before + self._serve(hello, peer, envelope, now)

    def serve_puts(self) -> list[Outgoing]:
        """Serve the puts of this turn, and continue an event that has more replies than those that were sent.

        The loop calls it when it has read from all connections, and after each time that it has sent replies.
        """
        if not self._puts:
            return self._continue_event() if self._controller.unfinished else []
        puts = list(self._puts.values())
        self._puts.clear()
        try:
            if len(puts) == 1:
                hello, peer, envelope, now = puts[0]
                effects = self._controller.handle(hello.client_id, peer, envelope, now)
            else:
                callers = [(put.hello.client_id, put.peer, put.envelope) for put in puts]
                effects = self._controller.handle_puts(callers, puts[-1].at)
            outgoing = self._carry_out(effects)
        except Exception as error:
            outgoing = [self.answer_error(put.hello, put.peer, put.envelope, error) for put in puts]
        ended = time.monotonic()
        for put in puts:
            self.load.record_request(Publish, put.at, ended)
        return outgoing

    def _continue_event(self) -> list[Outgoing]:
        """Return the next replies of an event of which some were sent; [] if there are none."""
        try:
            while self._controller.unfinished:
                outgoing = self._carry_out(self._controller.settle_further())
                if outgoing:
                    return outgoing
        except Exception:
            logger.exception("the controller failed while it answered requests that waited")
        return []

    def _state_file(
        self, peer: int, sequence: int, request: FetchState | SendState, payload: memoryview | None
    ) -> Outgoing:
        """Read or write a state file for a client on another node, which cannot access the folder of state files."""
        try:
            if isinstance(request, FetchState):
                left, data = self._states.piece(request.name, max(0, request.start), min(request.length, MAX_WRITTEN))
                return self.answer(peer, sequence, Done(left), [memoryview(data)] if data else ())
            if request.start < 0:
                self._states.remove(check_file_name(request.name))
            else:
                self._states.put(request.name, request.start, payload or b"")
            return self.answer(peer, sequence, Done(True))
        except TransferQueueError as error:
            return self.answer(peer, sequence, Failure(type(error).__name__, str(error)))
        except OSError as error:
            text = f"the controller cannot read or write a state file: {error}; free some space there, or try again"
            return self.answer(peer, sequence, Failure("CheckpointError", text))

    @property
    def _waits_for_space(self) -> bool:
        """Whether mutations cannot be written to the journal at the moment, so that they must wait."""
        return self._journaling is not None and (self._journaling.trouble is not None or bool(self._aside))

    def _set_aside(self, hello: Hello, peer: int, envelope: RequestEnvelope) -> Iterable[Outgoing]:
        assert self._journaling is not None
        if envelope.sequence and sum(waiting.peer == peer for waiting in self._aside) >= MAX_WAITING:
            message = f"{MAX_WAITING} requests of this connection are waiting already. {self._journaling.trouble}"
            return [self._refuse(hello, peer, envelope, Failure("CapacityError", message))]
        self._aside.append(_WaitingMutation(hello, peer, envelope, time.monotonic(), self._journaling.patience))
        return ()

    def _refuse_aside(self, now: float, trouble: str) -> Iterator[Outgoing]:
        """Refuse the requests that can wait no longer for space, while their clients still wait for the replies."""
        expired = [waiting for waiting in self._aside if waiting.until <= now]
        if expired:
            self._aside = deque(waiting for waiting in self._aside if waiting.until > now)
        for waiting in expired:
            yield self._refuse(waiting.hello, waiting.peer, waiting.envelope, waiting.refusal(now, trouble))

    def _refuse(self, hello: Hello, peer: int, envelope: RequestEnvelope, refusal: Failure) -> Outgoing:
        """Refuse a request of which the core did not know. If it arrives again, the core repeats the refusal."""
        send = self._controller.context.answer((hello.client_id, envelope.sequence), peer, refusal)
        return self.answer(send.peer, send.sequence, send.reply)

    def _serve_aside(self) -> Iterator[Outgoing]:
        """Serve some of the requests that waited for space, in order; other requests are served between the turns."""
        assert self._journaling is not None
        for _ in range(min(ASIDE_A_TURN, len(self._aside))):
            waiting = self._aside.popleft()
            yield from self._serve(waiting.hello, waiting.peer, waiting.envelope, time.monotonic())

    def _serve(self, hello: Hello, peer: int, envelope: RequestEnvelope, now: float) -> list[Outgoing]:
        effects = self._serve_here(hello, peer, envelope) if type(envelope.body) in SERVED_HERE else None
        if effects is not None:
            return effects
        return self._carry_out(self._controller.handle(hello.client_id, peer, envelope, now))

    def _serve_here(self, hello: Hello, peer: int, envelope: RequestEnvelope) -> list[Outgoing] | None:
        """Serve a request about units, servers or samplers; None if the core serves it."""
        body, sequence = envelope.body, envelope.sequence
        if hello.role != "unit" and isinstance(body, FROM_UNITS):
            failure = Failure("ProtocolError", f"only a server of the system may send {type(body).__name__}")
            return [self.answer(peer, sequence, failure)]
        if isinstance(body, (unit_reports.ExtentsFreedReport, unit_reports.BlocksMovedReport)) and body.failed:
            logger.error("storage unit %d could not carry out an order of the controller: %s", body.unit, body.failed)
        if isinstance(body, unit_reports.Measured):
            self.on_measured(peer, body)
            return [self.answer(peer, sequence, Done())]
        if isinstance(body, MeasureServers) and self.measure_servers is not None:
            self._measure(peer, sequence, self.measure_servers)
            return []
        if isinstance(body, ShowViews) and self.show_views is not None:
            self._measure(peer, sequence, self.show_views)
            return []
        if isinstance(body, UseSampler) and self._samplers is not None:
            self._use_sampler(peer, sequence, self._samplers, body.name)
            return []
        return None

    def on_disconnect(self, peer: int, now: float) -> Iterable[Outgoing]:
        """See `net.server.server_connection.Service.on_disconnect`."""
        served = self.serve_puts()  # they have arrived before the end of this connection
        hello = self._peers.pop(peer)
        self._aside = deque(waiting for waiting in self._aside if waiting.peer != peer)
        outgoing = [*served, *self._carry_out(self._controller.on_disconnect(hello.client_id, peer, now))]
        if self._departed is not None:
            if hello.client_id not in self._controller.context.connections.peers:
                self._departed.note_departed(hello.client_id)
            self._sweep(self._departed)
        return outgoing

    def next_deadline(self) -> float | None:
        """See `net.server.server_connection.Service.next_deadline`."""
        dues = [self._look_again if self._waits_for_space else self._controller.next_deadline()]
        dues += [host.next_deadline() for host in self._hosts.values()]
        if self._late is not None:
            dues.append(self._late.next_deadline())
        if self._term is not None:
            dues.append(self._next_check)
        return min((due for due in dues if due is not None), default=None)

    def on_deadline(self, now: float) -> Iterable[Outgoing]:
        """See `net.server.server_connection.Service.on_deadline`."""
        if self._late is not None:
            self._late.tick(now)
        self._next_check = now + CHECK_SECONDS  # the commit of this turn checks the term
        late = [outgoing for host in self._hosts.values() for outgoing in host.tick(now)]
        return [*late, *self._tick(now)]

    def _tick(self, now: float) -> Iterable[Outgoing]:
        if not self._waits_for_space:
            return self._carry_out(self._controller.tick(now))
        # tick is not called, so that no lease ends while its ack waits
        assert self._journaling is not None
        if self._journaling.reserve_space():
            self._look_again = now
            return list(self._serve_aside())
        self._look_again = now + LOOK_SECONDS
        refused = self._refuse_aside(now, self._journaling.trouble or "")
        return [*refused, *self._carry_out(self._controller.expire_waits(now))]

    def _run_aside(
        self, run: Callable[[], Any], done: Callable[[Any], Iterable[Outgoing]], thread: BackgroundThread | None = None
    ) -> None:
        """Call `run` in another thread, then `done` with its outcome in the loop, which sends what it returns."""
        call_soon = self._call_soon
        assert call_soon is not None
        (thread or self._worker).begin(run, lambda outcome: call_soon(lambda: done(outcome)))

    def _resume(self, number: int, outcome: Any) -> list[Outgoing]:
        """Go on with the job that waits for this outcome."""
        return self._carry_out(self._controller.on_outcome(number, outcome, time.monotonic()))

    def _write(self, write: WriteState) -> Iterable[Outgoing]:
        """Write the current state in a forked child, while the controller continues to serve."""
        assert self._call_soon is not None
        done = partial(self._resume, write.number)
        try:
            StateWriter(self._call_soon).begin(self._states.path(write.name), write.tree, done, sync=False)
        except OSError as error:
            return done(str(error))
        return ()

    def _measure(self, peer: int, sequence: int, measure_servers: Callable[[], ServersReply | ViewsReply]) -> None:
        """Measure all servers in another thread, because the units may take a second to answer."""

        def done(outcome: Any) -> list[Outgoing]:
            failed = isinstance(outcome, BaseException)
            reply = Failure("WaitTimeoutError", f"the servers cannot be measured: {outcome}") if failed else outcome
            return [self.answer(peer, sequence, reply)]

        self._run_aside(measure_servers, done, self._measuring)

    def _use_sampler(self, peer: int, sequence: int, samplers: SamplerFiles, name: str) -> None:
        """Load a user's sampler in the worker's thread, because its imports may take seconds."""

        def taken(outcome: Any) -> list[Outgoing]:
            if isinstance(outcome, BaseException):
                message = f"the sampler cannot be used: {type(outcome).__name__}: {outcome}"
                return [self.answer(peer, sequence, Failure("SamplerError", message))]
            self._replace(SYSTEM, outcome)
            met = self._carry_out(self._controller.use_sampler(core_sampler(outcome)))
            return [self.answer(peer, sequence, Done()), *met]

        self._run_aside(partial(samplers.load_sampler, name), taken)

    def _send_when_on_disk(self, order: Outgoing) -> Iterable[Outgoing]:
        """Send an order to a mirror, now or when the disk has the records because of which it is given."""
        if self._late is None:
            return (order,)
        self._late.send_later(order)
        return ()

    def _carry_out(self, effects: list[Effect]) -> list[Outgoing]:
        if len(effects) == 1 and type(effects[0]) is Send:  # the usual case
            return [self.answer(effects[0].peer, effects[0].sequence, effects[0].reply)]
        return list(self._outgoing(effects))

    def _outgoing(self, effects: list[Effect]) -> Iterator[Outgoing]:
        for effect in effects:
            if isinstance(effect, Send):
                yield self.answer(effect.peer, effect.sequence, effect.reply)
            elif isinstance(effect, ComputeDeal):
                self._run_aside(effect.run, partial(self._resume, effect.number))
            elif isinstance(effect, AskSampler):
                self._hosts[effect.sampler].ask(effect.number, effect.call, effect.shown)
            elif isinstance(effect, WriteState):
                yield from self._write(effect)
            elif isinstance(effect, ReadState):
                read = partial(self._states.read, effect.name, effect.watched)
                self._run_aside(read, partial(self._resume, effect.number))
            elif isinstance(effect, RemoveState):
                self._states.remove(effect.name)
            elif isinstance(effect, ForgetState):
                self._worker.begin(partial(self._states.forget, effect.file), lambda outcome: None)
            elif isinstance(effect, Release):
                self._worker.begin(partial(free_partitions, effect.partitions), lambda outcome: None)
            elif isinstance(effect, SendToUnit):
                unit = self._controller.context.connections.units.get(effect.unit)
                if unit is not None:
                    order = self.demand(unit, effect.request)
                    frees = isinstance(effect.request, unit_reports.ReleaseExtents)
                    is_late = frees and effect.unit in self._controller.state.mirrors
                    yield from self._send_when_on_disk(order) if is_late else (order,)
            elif isinstance(effect, RemoveMirror):
                yield from self._send_when_on_disk(self.demand(effect.peer, unit_reports.RemoveArena()))


def core_sampler(made: AnyMade, pattern: str = SYSTEM) -> AnySampler:
    """Return the sampler as the core uses it: a built-in sampler itself, a `UserSampler` for one in a process."""
    return UserSampler(HostedRunner(made.facts, pattern)) if isinstance(made, SamplerHost) else made


def core_config(settings: Settings, sampler: AnySampler, client_config: str, **environment: Any) -> CoreConfig:
    """Return the configuration of a controller.

    Args:
        settings: The settings of the system.
        sampler: The sampler of the system.
        client_config: JSON text that clients get when they attach.
        environment: Other fields of `CoreConfig`, which the process of the controller knows.
    """
    return CoreConfig(
        sampler,
        client_config=client_config,
        capacity=settings.total_storage_size,
        max_deliveries=settings.max_deliveries,
        replicas=settings.replicas,
        marks=Watermarks(settings.offload_high, settings.offload_low),
        max_lag=None if settings.max_lag is None else MaxLag(*settings.max_lag),
        strict=settings.strict,
        timeline_events=settings.timeline_events,
        values=partial(decode_tag_value_copied, allow_pickle=settings.allow_pickle),
        **environment,
    )
