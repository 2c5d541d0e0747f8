"""After an event: who waits and can be met now is met, until nothing more can be; then free extents are handed back.

`claims.wakeup_filter` selects the requests to look at again. Equal ones are looked at together.
"""

from __future__ import annotations

from collections.abc import Iterator

from transfer_queue.core.claims import claim_batching, claim_handler
from transfer_queue.core.claims.wakeup_filter import all_claims, claims_to_retry
from transfer_queue.core.control.change_set import ChangeSet
from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.control.epochs import check_epoch
from transfer_queue.core.events.effects import Effect, FreeExtents, Send
from transfer_queue.core.events.registry import Caller, Decision, handler
from transfer_queue.core.puts import retention
from transfer_queue.core.queries import change_answers
from transfer_queue.core.reports import deadlock_detector
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import ParkedRequest, RequestKey
from transfer_queue.core.units import unit_drain
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.envelopes import AnyReply, RequestEnvelope
from transfer_queue.messages.queries import Watch


def settle(core: ControllerContext, clearing: bool) -> list[Effect]:
    """Meets what can be met after a change, until nothing more can; then hands back free extents.

    clearing: whether rows are being cleared in steps.
    """
    effects: list[Effect] = []
    while True:
        while core.changed:
            name, change = core.changed.popitem()
            partition = core.state.partitions.get(name)
            if core.state.waiting.by_waiter:
                effects += _meet(core, name, partition, change)
            elif partition is not None:
                retention.retain(core, partition)
                partition.gained.clear()
        effects += core.asks.next(core)
        if not core.changed:
            break
    if core.state.blocks.untold:
        for unit, extents in core.state.blocks.take_freed(core.unit_peers, core.checkpoints).items():
            core.movers.freed[unit] = core.movers.freed.get(unit, 0) + 1
            effects.append(FreeExtents(unit, extents))
    if core.drains:
        effects += unit_drain.drained(core)
    if core.state.waiting.claims:  # else nothing can be in the way of anything
        waits = core.works or core.asks or core.checkpoints.cuts or core.moves.active or clearing or core.making
        if not waits and core.movers.deadlocked(core.state, core.connections):
            effects += deadlock_detector.end_deadlock(core)
    return effects


def retry(core: ControllerContext, waiting: ParkedRequest) -> list[Effect]:
    """Looks again at one who waits, whatever for."""
    if isinstance(waiting.request, Watch):
        return _retry_watch(core, waiting)
    if isinstance(waiting.request, Claim):
        return claim_handler.retry_claim(core, waiting)
    return _retry_decision(core, waiting)


def _meet(core: ControllerContext, name: str, partition: Partition | None, change: ChangeSet) -> Iterator[Effect]:
    """Meets who waits for what has changed in a partition; None where it is no more."""
    for waiter, reply in change_answers.watch_replies(core.state, name, core.peers):
        yield _met(core, waiter, reply)
    gained: set[str] = set()
    if partition is not None:
        retention.retain(core, partition)
        gained, partition.gained = partition.gained, set()
        for waiting in list(core.state.waiting.work.get(name, {}).values()):
            yield from _retry_decision(core, waiting)
    for task, queue in list(core.state.waiting.of_partition(name).items()):
        first = next(iter(queue.claims.values()), None)
        if partition is not None and first is not None and core.making.waits(core.samplers, partition, first.claim):
            continue  # all of them are looked at once it is made
        if partition is None or change.everything or task in change.tasks:
            worth = all_claims(core.samplers, partition, queue, core.peers)
        else:
            shares = change.shares.get(task, ())
            consumed = task in change.consumed
            grown = change.joined or task in gained
            worth = claims_to_retry(core.samplers, partition, task, queue, grown, shares, consumed, core.peers)
        for some in worth:
            yield from retry(core, some[0]) if len(some) == 1 else claim_batching.meet_together(core, some)
    if change.everything or change.space:
        for waiting in list(core.state.waiting.space.values()):
            yield from retry(core, waiting)


def _met(core: ControllerContext, waiter: RequestKey, reply: AnyReply) -> Send:
    """Answers one who waits and has a connection."""
    peer = core.peers[waiter]
    core.unpark(waiter)
    return Send(peer, waiter[1], reply)


def _retry_watch(core: ControllerContext, waiting: ParkedRequest) -> list[Effect]:
    """Looks again at one who came back after a replay."""
    reply = change_answers.watch_reply(core.state, waiting.watch)
    if reply is None:
        change_answers.mark_seen(core.state, waiting.watch.partition)
        return []
    return [_met(core, waiting.waiter, reply)]


def _retry_decision(core: ControllerContext, waiting: ParkedRequest) -> list[Effect]:
    """Looks again at a request that waits for space, or for groups that are wanted."""
    peer = core.peers.get(waiting.waiter)
    if peer is None:
        return []
    caller = Caller(waiting.client, peer, RequestEnvelope(waiting.sequence, 0, waiting.request))
    try:
        check_epoch(core.state, waiting.request)
        decision = handler(type(waiting.request))(core, caller, waiting.request)
    except TransferQueueError as error:
        return core.failed(waiting, error)
    if not isinstance(decision, Decision):
        return []  # it waits on
    core.unpark(waiting.waiter)
    return core.commit(caller, decision)
