"""What every handler and service is given: the state, and what keeps what is not part of the state."""

from __future__ import annotations

from collections.abc import Iterable

from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.control.change_log import ChangeLog
from transfer_queue.core.control.connections import Connections
from transfer_queue.core.control.measures import ControllerMeasures
from transfer_queue.core.control.parked_requests import ParkedRequests
from transfer_queue.core.control.record_log import RecordLog
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.events.registry import Caller, Decision
from transfer_queue.core.samplers import claim_samplers
from transfer_queue.core.samplers.claim_samplers import SamplerRegistry
from transfer_queue.core.service import Service, Services
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.errors import FieldTypeError, TransferQueueError
from transfer_queue.messages.base import Failure
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.puts import PublishReply


class ControllerContext:
    """What handlers and services work with: the state, the log, the connections, and the services that run."""

    def __init__(self, config: CoreConfig, state: State, now: float, features: Iterable[type[Service]]) -> None:
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
        self.samplers = SamplerRegistry(
            config.sampler, config.values, config.strict, config.task_samplers, lambda: state.samplers
        )
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
        """Apply what a request does, and reply to it; see `reply`."""
        log = self.log
        log.actor = caller.client
        for record in decision.records:
            log.apply(record)
        log.actor = ""
        return self.reply(caller, decision.reply())

    def reply(self, caller: Caller, reply: AnyReply) -> list[Effect]:
        """Reply to a request that was applied, and keep the reply until the client has it.

        A service may hold the reply to a put.
        """
        envelope = caller.envelope
        self.log.apply(r.ReplySent(caller.client, envelope.sequence, envelope.acknowledged, reply, envelope.finished))
        send = Send(caller.peer, envelope.sequence, reply)
        return [] if self._holding and self.is_held(caller.client, send) else [send]

    def is_held(self, client: str, send: Send, again: bool = False) -> bool:
        """Return whether a service holds this reply back, if it is one to a put. again: the client asked again."""
        is_put = isinstance(send.reply, PublishReply)
        return is_put and any(service.holds_reply(client, send, again) for service in self._holding)

    def forget_client(self, client: str) -> None:
        """End what depends on a client that is gone."""
        self.connections.peers.pop(client, None)
        for service in self.services.with_hook["on_client_gone"]:
            service.on_client_gone(client)

    def failure(self, peer: int, sequence: int, error: TransferQueueError) -> Send:
        """Return the reply to a request that is refused."""
        self.measures.counters["failures"] += 1
        kind, text = type(error).__name__, str(error)
        if isinstance(error, FieldTypeError):
            return Send(peer, sequence, Failure(kind, text, error.tensors, error.field))
        return Send(peer, sequence, Failure(kind, text))

    def refuse(self, waiting: ParkedRequest, error: TransferQueueError) -> list[Effect]:
        """End the wait of a request that cannot be met any more, and send the error to its client."""
        peer = self.parked.peers.get(waiting.waiter)
        self.parked.unpark(waiting.waiter, met=False)
        return [] if peer is None else [self.failure(peer, waiting.sequence, error)]
