"""What every handler of a request is given: the state, and the services that keep what is not part of the state."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from transfer_queue.core.claims.background_deals import BackgroundDeals
from transfer_queue.core.claims.index_builder import IndexBuilder
from transfer_queue.core.claims.lease_deadlines import LeaseDeadlines, LockDeadlines
from transfer_queue.core.claims.plan import Plans
from transfer_queue.core.control.absent_holders import AbsentHolders
from transfer_queue.core.control.activity import ActivityTracker
from transfer_queue.core.control.change_log import ChangeLog
from transfer_queue.core.control.connections import Connections
from transfer_queue.core.control.measures import ControllerMeasures
from transfer_queue.core.control.parked_requests import ParkedRequests
from transfer_queue.core.control.pending_checkpoints import PendingCheckpoints
from transfer_queue.core.control.record_log import RecordLog
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.events.registry import Caller, Decision
from transfer_queue.core.samplers import claim_samplers
from transfer_queue.core.samplers.claim_samplers import SamplerRegistry
from transfer_queue.core.samplers.remote_calls import SamplerAsks
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.core.timeline.abandoned_samples import AbandonedSamples
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.core.units.migration_planner import MigrationPlanner
from transfer_queue.core.units.mirror_writer import MirrorWriter
from transfer_queue.core.units.store_servers import StoreServers
from transfer_queue.core.units.unit_drains import UnitDrains
from transfer_queue.errors import FieldTypeError, TransferQueueError
from transfer_queue.messages.base import Failure
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.puts import Publish


@dataclass(slots=True)
class ControllerContext:
    """What the handlers of requests work with. `Controller` builds it."""

    state: State
    """The state. Only `log.apply` changes it."""
    log: RecordLog
    samplers: SamplerRegistry
    plans: Plans
    """What is resolved once for claims that differ only in their rank."""
    sampler_calls: SamplerAsks
    """The calls of a user's sampler that runs in a process of its own."""
    measures: ControllerMeasures
    connections: Connections
    parked: ParkedRequests
    timeline: TimelineRecorder
    abandoned: AbandonedSamples
    changes: ChangeLog
    activity: ActivityTracker
    """Which clients may still make space or rows, for the deadlock detector."""
    lease_deadlines: LeaseDeadlines
    lock_deadlines: LockDeadlines
    absent_holders: AbsentHolders
    background_deals: BackgroundDeals
    index_builder: IndexBuilder
    migrations: MigrationPlanner
    mirror: MirrorWriter
    unit_drains: UnitDrains
    stores: StoreServers
    checkpoints: PendingCheckpoints

    config: str
    """JSON text that clients get when they attach."""
    timer: Callable[[], float]
    """Returns seconds, to measure what a user's sampler costs. The core has no clock of its own."""
    boot: str
    """Differs from that of any other controller, and so tells apart block numbers that are equal."""
    handed_over: Callable[[], Collection[int]]
    """Returns the tokens of batches that processes of this node have handed over and noted."""
    max_deliveries: int
    """The limit of the partitions that do not set one. See `PartitionOptions`."""
    journal_error: str = field(default="")
    """Why mutations are blocked, for status; "" if they are not. The server sets it."""

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
        self.timeline.actor = caller.client
        for record in decision.records:
            self.log.apply(record)
        self.timeline.actor = ""
        return self.reply(caller, decision.reply())

    def reply(self, caller: Caller, reply: AnyReply) -> list[Effect]:
        """Reply to a request that was applied, and keep the reply until the client has it.

        A put is answered later if the mirror is too far behind.
        """
        envelope = caller.envelope
        self.log.apply(r.ReplySent(caller.client, envelope.sequence, envelope.acknowledged, reply, envelope.finished))
        send = Send(caller.peer, envelope.sequence, reply)
        if self.mirror.lag is not None and isinstance(envelope.body, Publish):
            newest = self.state.next_block - 1
            if not self.mirror.is_covered(newest, self.now):
                self.mirror.hold(caller.client, send, newest)
                return []
        return [send]

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
