"""Handlers of the requests of consumers about dealt rows, leases and group demand."""

from __future__ import annotations

from typing import Any

from transfer_queue.core.activity import Activity
from transfer_queue.core.claims import row_leases
from transfer_queue.core.claims.row_leases import Leases
from transfer_queue.core.context import Context
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.events.registry import Caller, Decision, ParkDecision, handles
from transfer_queue.core.locks import Locks, release_unseen
from transfer_queue.core.state import unneeded_rows
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import require_partition, unknown_partition_warning
from transfer_queue.core.tables.rows import indexes_in
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.errors import InvalidArgumentError, TransferQueueError
from transfer_queue.messages import claims
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.partitions import SetGroupDemand, TakeGroupDemand


@handles(claims.ResetConsumption)
def handle_reset_consumption(context: Context, caller: Caller, request: claims.ResetConsumption) -> Decision:
    """Reset the consumption of a task (None: of every task)."""
    warning = unknown_partition_warning(context.state.partitions, request.partition, "reset_consumption has no effect")
    records: list[r.AnyRecord] = []
    if warning is None:
        records.append(r.ConsumptionForgotten(request.partition, request.task))
    return Decision(records, lambda: Done(True, warning))


@handles(claims.Finish)
def handle_finish(context: Context, caller: Caller, request: claims.Finish) -> Decision:
    """Finish rows that the holder has fetched for a task."""
    partition = context.state.partitions.get(request.partition)
    if partition is None:
        return Decision([], Done)

    def reply() -> AnyReply:
        activity = context.services[Activity]
        for consumer in list(activity.busy.get(request.holder, ())):
            is_of_task = consumer[:2] == (partition.name, request.task)
            if is_of_task and not len(partition.holds.rows_of(request.task, request.holder, consumer[2])):
                activity.end_work(request.holder, consumer)  # it has not fetched again
        return Done()

    return Decision(unneeded_rows.finish_rows(partition, request.task, request.holder, indexes_in(request.rows)), reply)


@handles(claims.Ack)
def handle_ack(context: Context, caller: Caller, request: claims.Ack) -> Decision:
    """Acknowledge rows of a lease. The reply says whether the lease had any of them."""
    records = _decide_ack(context, caller, request)
    return Decision(records, lambda: Done(bool(records)))


def _decide_ack(context: Context, caller: Caller, request: claims.Ack) -> list[r.AnyRecord]:
    records = row_leases.decide_ack(context.state, request)
    for record in records:
        assert isinstance(record, r.LeaseAcked)
        context.services[TimelineRecorder].note_ack(caller.client, record.partition, record.task, record.rows)
    return records


@handles(claims.AckMany)
def handle_ack_many(context: Context, caller: Caller, request: claims.AckMany) -> Decision:
    """Acknowledge rows of several leases, each as the ones before have left the state."""
    outcomes: list[Any] = []
    context.log.actor = caller.client
    for ack in request.acks:
        try:
            records = _decide_ack(context, caller, ack)
        except TransferQueueError as error:
            outcomes.append([type(error).__name__, str(error)])
            continue
        for record in records:
            context.log.apply(record)
        outcomes.append(bool(records))
    context.log.actor = ""
    return Decision([], lambda: Done(outcomes))


@handles(claims.Nack)
def handle_nack(context: Context, caller: Caller, request: claims.Nack) -> Decision:
    """Return rows of a lease. The reply says whether the lease had any of them."""
    records = row_leases.decide_nack(context.state, request, context.config.max_deliveries)
    return Decision(records, lambda: Done(bool(records)))


@handles(claims.ReportBatches)
def handle_report_batches(context: Context, caller: Caller, request: claims.ReportBatches) -> list[Effect]:
    """Note which batches were handed over or are returned, and cancel claims. A notice gets no reply.

    Some batches may have been reported before.
    """
    partitions, apply = context.state.partitions, context.log.apply
    for name, token in request.handed_over:
        partition = partitions.get(name)
        if partition is not None and token in partition.unseen_batches.by_token:
            apply(r.HandedOver(name, token))
    for name, token in request.finished:
        batch = partitions[name].unseen_batches.by_token.get(token) if name in partitions else None
        if batch is not None:
            apply(r.HandedOver(name, token))
            for record in unneeded_rows.finish_rows(partitions[name], batch.task, batch.client, batch.indexes):
                apply(record)
    for name, token in request.returned:
        for ended in row_leases.return_batch(context.state, name, token):
            apply(ended)
    if request.left:
        for ended in row_leases.settle_unseen(context.state, context.config.handed_over, caller.client, "left"):
            apply(ended)
    effects: list[Effect] = []
    for sequence in request.withdrawn:
        effects += _withdraw(context, caller, sequence)
    if caller.envelope.sequence:
        effects.append(Send(caller.peer, caller.envelope.sequence, Done()))
    return effects


def _withdraw(context: Context, caller: Caller, sequence: int) -> list[Effect]:
    """Cancel a claim, also one that arrives later, from a connection that was abandoned."""
    *effects, _ = handle_cancel(context, caller, claims.Cancel(sequence))  # the last one is the reply of a `Cancel`
    kept = context.state.clients.get(caller.client)
    if sequence and (kept is None or not kept.is_finished(sequence)):
        context.log.apply(r.ReplySent(caller.client, sequence, 0, Done(), [(sequence, sequence)]))
    return effects


@handles(claims.RankGone)
def handle_rank_gone(context: Context, caller: Caller, request: claims.RankGone) -> Decision:
    """Make the unacknowledged rows of a rank ready again. The reply has their number."""
    records, count = row_leases.decide_rank_gone(context.state, request, context.config.max_deliveries)
    return Decision(records, lambda: Done(count))


@handles(claims.Renew, reads=True)
def handle_renew(context: Context, caller: Caller, request: claims.Renew) -> Done:
    """Restart the time of leases and locks. The reply says for each of them whether it is still in force.

    So is a batch that was not handed over: as long as its client exists, its time does not end.
    """
    leases, locks, now = context.services[Leases], context.services[Locks].deadlines, context.now
    return Done(
        [
            leases.renew(name, token)
            or locks.renew(name, token, now)
            or row_leases.find_unseen(context.state, name, token) is not None
            for name, token in request.leases
        ]
    )


@handles(claims.Cancel)
def handle_cancel(context: Context, caller: Caller, request: claims.Cancel) -> list[Effect]:
    """Cancel a waiting request, or undo what it did. The reply says whether nothing of it is left.

    The cancelled request gets its one reply, too, although its client does not wait for it. If it arrives later, on a
    connection that was given up, it is refused.
    """
    waiter = (caller.client, request.sequence)
    state, envelope = context.state, caller.envelope
    effects: list[Effect] = []
    waiting = state.waiting.by_waiter.get(waiter)
    undone = waiting is not None
    if waiting is not None:
        known = context.parked.peers.get(waiter, caller.peer)
        context.parked.unpark(waiting, met=False)
        effects.append(Send(known, request.sequence, Failure("WaitTimeoutError", "the client cancelled this request")))
    for decide in (row_leases.return_unseen, release_unseen, unneeded_rows.withdraw_unseen):
        for record in decide(state, *waiter):
            context.log.apply(record)
            undone = True
    kept = state.clients.get(caller.client)
    finished = list(envelope.finished)
    if undone or kept is None or request.sequence not in kept.replies:
        finished.append((request.sequence, request.sequence))
    reply = Done(undone)
    context.log.apply(r.ReplySent(caller.client, envelope.sequence, envelope.acknowledged, reply, finished))
    return [*effects, Send(caller.peer, envelope.sequence, reply)]


# ------------------------------------------------------------ groups that tasks want, and that producers promise


@handles(SetGroupDemand)
def handle_set_group_demand(context: Context, caller: Caller, request: SetGroupDemand) -> Decision:
    """Set how many groups a task wants."""
    if request.groups < 0:
        raise InvalidArgumentError(f"groups must not be negative, got {request.groups}")
    partition = require_partition(context.state.partitions, request.partition)
    same = partition.wants.groups.get(request.task, 0) == request.groups
    return Decision([] if same else [r.GroupsWanted(request.partition, request.task, request.groups)], Done)


@handles(TakeGroupDemand)
def handle_take_group_demand(context: Context, caller: Caller, request: TakeGroupDemand) -> Decision | ParkDecision:
    """Reply with the number of groups that a producer is to make, or park the request."""
    partition = context.state.partitions.get(request.partition)
    size = context.group_size_of(request.partition, request.task) or 1
    count = missing_groups(partition, request.task, size)
    if request.wait is not None and request.wait > 0 and not count:
        return ParkDecision(request, request.wait)
    if request.most is None or not count or partition is None:
        return Decision([], lambda: Done(count))
    if request.most < 1:
        raise InvalidArgumentError(f"most must be positive or None, got {request.most}")
    promised = min(count, request.most)
    rows = min(promised * (partition.groups.size or size), r.LARGEST)
    return Decision([r.GroupsTaken(request.partition, request.task, caller.client, rows)], lambda: Done(promised))


def missing_groups(partition: Partition | None, task: str, size: int) -> int:
    """Return how many groups the task wants in addition to those that exist undealt or that producers have promised.

    They are not more than the limit of staleness admits now.

    size: samples of a group, used if the partition was created without a group_size.
    """
    if partition is None or task not in partition.wants.groups:
        return 0
    size = partition.groups.size or size
    consumed = partition.tasks.get(task, 0) + partition.claimed.get(task, 0)
    if partition.groups.explicit:
        existing = len(partition.groups.declared) - partition.groups.broken - consumed // size
    else:
        existing = -(-(partition.row_count - consumed) // size)
    promised = -(-partition.wants.promised_rows(task) // size)
    missing = partition.wants.groups[task] - max(0, existing) - promised
    if partition.window.limit is not None:
        space = partition.window.limit - partition.window.counted - sum(partition.wants.promised.values())
        missing = min(missing, space // size)
    return max(0, missing)
