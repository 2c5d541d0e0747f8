"""Looks at the requests that wait, after every event: meets those that can be met now, and ends those that cannot.

`claims.wake` selects the claims that are worth another look. Equal claims are decided together.
"""

from __future__ import annotations

from collections.abc import Iterator

from transfer_queue.core import locks
from transfer_queue.core.claims import claim_handler
from transfer_queue.core.claims.plan import Plans
from transfer_queue.core.claims.wake import Wake
from transfer_queue.core.context import Context, CoreService
from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.events.registry import HANDLERS, Decision
from transfer_queue.core.puts import limits
from transfer_queue.core.queries import partition_view
from transfer_queue.core.record_log import ChangeSet
from transfer_queue.core.reports.expiries import expiry_reply
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.base import Failure
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.puts import Publish, Reserve
from transfer_queue.messages.queries import Watch


class Wakeups(CoreService):
    """Meets and ends the requests that wait."""

    runs_always = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._part = context.config.part
        self._on_changed = context.services.with_hook["on_partition_changed"]
        self._when_settled = context.services.with_hook["when_settled"]
        self._on_unneeded = context.services.with_hook["on_extents_unneeded"]
        self._after_event = context.services.with_hook["after_event"]
        self.left: Iterator[list[Effect]] | None = None
        """What `settle` has left to `settle_further`, which must be done before the next event; None: nothing."""

    def settle(self) -> list[Effect]:
        """Meet what can be met after an event, until nothing more can be met. Then give free extents back.

        If these are many requests, returns the effects of the first ones. `settle_further` meets the others.
        """
        if self.context.state.waiting.by_waiter:
            self.left = self._parts()
            return self.settle_further(self._part)
        context, changes = self.context, self.context.changes.by_partition
        effects: list[Effect] = []
        while True:
            while changes:
                partition = context.state.partitions.get(changes.popitem()[0])
                if partition is not None:
                    for service in self._on_changed:
                        service.on_partition_changed(partition)
                    partition.gained.clear()
            for service in self._when_settled:
                effects += service.when_settled()
            if not changes:
                break
        if context.state.blocks.unreported or self._after_event or context.emitted:
            effects += self._end()
        return effects

    def settle_further(self, part: int | None) -> list[Effect]:
        """Continue what `settle` has left, until there are at least `part` effects. None: until the end."""
        effects: list[Effect] = []
        for some in self.left or ():
            effects += some
            if part is not None and len(effects) >= part:
                return effects
        self.left = None
        return effects

    def _parts(self) -> Iterator[list[Effect]]:
        """Do what `settle` does, and iterate over the effects of each step."""
        context = self.context
        state, changes = context.state, context.changes.by_partition
        while True:
            while changes:
                name, change = changes.popitem()
                yield from self._meet(name, state.partitions.get(name), change)
            for service in self._when_settled:
                yield service.when_settled()
            if not changes:
                break
        yield self._end()

    def _end(self) -> list[Effect]:
        """Return the effects of what is done after all requests that can be met."""
        effects: list[Effect] = []
        if self.context.state.blocks.unreported:
            for service in self._on_unneeded:
                effects += service.on_extents_unneeded()
        for service in self._after_event:
            effects += service.after_event()
        emitted, self.context.emitted = self.context.emitted, []
        return effects + emitted

    def retry(self, waiting: ParkedRequest) -> list[Effect]:
        """Look again at a request that waits."""
        if isinstance(waiting.request, Watch):
            return self._retry_watch(waiting)
        if isinstance(waiting.request, Claim):
            return claim_handler.retry_claims(self.context, [waiting])
        return self._retry_decision(waiting)

    def next_due(self) -> float | None:
        """See `CoreService.next_due`."""
        return self.context.state.waiting.next_deadline()

    def on_due(self) -> list[Effect]:
        """End the waits whose deadline has come."""
        effects: list[Effect] = []
        now = self.context.now
        for waiting in self.context.state.waiting.expired(now):
            peer = self.context.parked.peers.get(waiting.waiter)
            reply = expiry_reply(self.context, waiting)
            self.context.measures.counters["failures"] += isinstance(reply, Failure)
            if self.context.journal_error and isinstance(reply, Failure):
                reply = Failure(reply.kind, f"{reply.message}\nMeanwhile {self.context.journal_error}.")
            self.context.parked.unpark(waiting, met=False)
            if peer is not None:
                effects.append(self.context.answer(waiting.waiter, peer, reply))
        return effects

    def on_connection_ended(self, client: str, peer: int) -> None:
        """See `CoreService.on_connection_ended`. What waits on it is cancelled before anything can meet it."""
        self.context.parked.cancel(client, peer)

    def _meet(self, name: str, partition: Partition | None, change: ChangeSet) -> Iterator[list[Effect]]:
        """Meet the requests that wait for what has changed in a partition; None if the partition has ended.

        Iterates over the effects of requests that are met together.
        """
        context, waiting_for = self.context, self.context.state.waiting
        peers = context.parked.peers
        for waiter, reply in partition_view.watch_replies(context.state, name, peers):
            yield [self._reply(waiting_for.by_waiter[waiter], reply)]
        for waiting in locks.grantable(context.state, name, peers) if change.locks else ():
            yield self._retry_decision(waiting)
        gained: set[str] = set()
        if partition is not None:
            for service in self._on_changed:
                service.on_partition_changed(partition)
            gained, partition.gained = partition.gained, set()
        for waiting in list(waiting_for.work.get(name, {}).values()):
            yield self._retry_decision(waiting)
        for task, queue in list(waiting_for.claim_queues(name).items()):
            first = next(iter(queue.claims.values()), None)
            if partition and first and claim_handler.needs_indexes(context, partition, first.claim):
                continue  # all claims of the task are looked at when the index is built
            wake = Wake(context.services[Plans], partition, task, queue, peers)
            for some in wake.claims_to_retry(change, task in gained):
                yield claim_handler.retry_claims(context, some)
        if waiting_for.space and (change.everything or change.space or limits.admits_rows(partition)):
            for waiting in list(waiting_for.space.values()):
                assert isinstance(waiting.request, (Publish, Reserve))
                if not limits.certainly_waits(context.state, waiting.request):
                    yield self.retry(waiting)

    def _reply(self, waiting: ParkedRequest, reply: AnyReply) -> Send:
        """End the wait of a request that has a connection, with this reply."""
        peer = self.context.parked.peers[waiting.waiter]
        self.context.parked.unpark(waiting)
        return Send(peer, waiting.sequence, reply)

    def _retry_watch(self, waiting: ParkedRequest) -> list[Effect]:
        """Look again at a watch whose client came back after a restart."""
        state = self.context.state
        reply = partition_view.watch_reply(state, waiting.watch)
        if reply is None:
            partition_view.mark_seen(state, waiting.watch.partition)
            return []
        return [self._reply(waiting, reply)]

    def _retry_decision(self, waiting: ParkedRequest) -> list[Effect]:
        """Look again at a request that waits for space, for groups that a task wants, or until all rows are done."""
        context = self.context
        caller = context.parked.caller_of(waiting)
        if caller is None:
            return []
        try:
            context.state.check_epoch(waiting.request)
            decision = HANDLERS[type(waiting.request)](context, caller, waiting.request)
            if not isinstance(decision, Decision):
                return []  # the request still cannot be met
            context.parked.unpark(waiting)
            context.log.arrived = waiting.since
            return context.commit(caller, decision)
        except TransferQueueError as error:
            return context.refuse(waiting, error)
        finally:
            context.log.arrived = None
