"""Handlers of the requests of consumers about dealt rows, leases and group demand."""

from __future__ import annotations

from typing import Any

from transfer_queue.core.claims import consumer_state, lease_decisions
from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.events.registry import Caller, Decision, ParkDecision, handles
from transfer_queue.core.locks import lock_decisions
from transfer_queue.core.state import unneeded_rows
from transfer_queue.core.state.state import State
from transfer_queue.core.state.unknown_partitions import unknown_partition_warning
from transfer_queue.core.tables.row_table import indexes_in
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages import claims
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.partitions import SetGroupDemand, TakeGroupDemand


@handles(claims.ResetConsumption)
def handle_reset_consumption(context: ControllerContext, caller: Caller, request: claims.ResetConsumption) -> Decision:
    """Reset the consumption of a task (None: of every task)."""
    warning = unknown_partition_warning(context.state.partitions, request.partition, "reset_consumption has no effect")
    records: list[r.AnyRecord] = []
    if warning is None:
        records.append(r.ConsumptionForgotten(request.partition, request.task))
    return Decision(records, lambda: Done(True, warning))


@handles(claims.Finish)
def handle_finish(context: ControllerContext, caller: Caller, request: claims.Finish) -> Decision:
    """Finish rows that the holder has fetched for a task."""
    partition = context.state.partitions.get(request.partition)
    if partition is None:
        return Decision([], Done)

    def reply() -> AnyReply:
        for consumer in consumer_state.idle_consumers(partition, request.task, request.holder, context.activity.busy):
            context.activity.end_work(request.holder, consumer)
        return Done()

    return Decision(unneeded_rows.finish_rows(partition, request.task, request.holder, indexes_in(request.rows)), reply)


@handles(claims.Ack)
def handle_ack(context: ControllerContext, caller: Caller, request: claims.Ack) -> Decision:
    """Acknowledge rows of a lease. The reply says whether the lease had any of them."""
    records = _decide_ack(context, caller, request)
    return Decision(records, lambda: Done(bool(records)))


def _decide_ack(context: ControllerContext, caller: Caller, request: claims.Ack) -> list[r.AnyRecord]:
    records = lease_decisions.decide_ack(context.state, request)
    for record in records:
        assert isinstance(record, r.LeaseAcked)
        context.timeline.note_ack(caller.client, record.partition, record.task, record.rows)
    return records


@handles(claims.AckMany)
def handle_ack_many(context: ControllerContext, caller: Caller, request: claims.AckMany) -> Decision:
    """Acknowledge rows of several leases, each as the ones before have left the state."""
    outcomes: list[Any] = []
    context.timeline.actor = caller.client
    for ack in request.acks:
        try:
            records = _decide_ack(context, caller, ack)
        except TransferQueueError as error:
            outcomes.append([type(error).__name__, str(error)])
            continue
        for record in records:
            context.log.apply(record)
        outcomes.append(bool(records))
    context.timeline.actor = ""
    return Decision([], lambda: Done(outcomes))


@handles(claims.Nack)
def handle_nack(context: ControllerContext, caller: Caller, request: claims.Nack) -> Decision:
    """Return rows of a lease. The reply says whether the lease had any of them."""
    records = lease_decisions.decide_nack(context.state, request, context.max_deliveries)
    return Decision(records, lambda: Done(bool(records)))


@handles(claims.ReportBatches)
def handle_report_batches(context: ControllerContext, caller: Caller, request: claims.ReportBatches) -> list[Effect]:
    """Note which batches were handed over or are returned, and cancel claims. A notice gets no reply."""
    for batches, end in (
        (request.handed_over, lease_decisions.hand_over),
        (request.finished, lease_decisions.hand_over_finished),
        (request.returned, lease_decisions.take_back),
    ):
        for name, token in batches:
            unseen = lease_decisions.find_unseen(context.state, name, token)
            if unseen is not None:  # otherwise it was reported before, or is under a lease
                for record in end(*unseen):
                    context.log.apply(record)
    for name, token in request.returned:
        for record in lease_decisions.return_lease(context.state, name, token):
            context.log.apply(record)
    for record in lease_decisions.take_back_all(context.state, caller.client, "left") if request.left else ():
        context.log.apply(record)
    effects = [effect for sequence in request.withdrawn for effect in _withdraw(context, caller, sequence)]
    sequence = caller.envelope.sequence
    return [*effects, Send(caller.peer, sequence, Done())] if sequence else effects


def _withdraw(context: ControllerContext, caller: Caller, sequence: int) -> list[Effect]:
    """Cancel a claim, also one that arrives later, from a connection that was abandoned."""
    *effects, _ = handle_cancel(context, caller, claims.Cancel(sequence))  # the last one is the reply of a `Cancel`
    kept = context.state.clients.get(caller.client)
    if sequence and (kept is None or not kept.is_finished(sequence)):
        context.log.apply(r.ReplySent(caller.client, sequence, 0, Done(), [(sequence, sequence)]))
    return effects


@handles(claims.RankGone)
def handle_rank_gone(context: ControllerContext, caller: Caller, request: claims.RankGone) -> Decision:
    """Make the unacknowledged rows of a rank ready again. The reply has their number."""
    records, count = lease_decisions.decide_rank_gone(context.state, request, context.max_deliveries)
    return Decision(records, lambda: Done(count))


@handles(SetGroupDemand)
def handle_set_group_demand(context: ControllerContext, caller: Caller, request: SetGroupDemand) -> Decision:
    """Set how many groups a task wants."""
    return Decision(consumer_state.decide_demand(context.state, request), Done)


@handles(TakeGroupDemand)
def handle_take_group_demand(
    context: ControllerContext, caller: Caller, request: TakeGroupDemand
) -> Decision | ParkDecision:
    """Reply with the number of groups that a producer is to make, or park the request."""
    partition = context.state.partitions.get(request.partition)
    size = context.group_size_of(request.partition) or 1
    if (
        request.wait is not None
        and request.wait > 0
        and not consumer_state.missing_groups(partition, request.task, size)
    ):
        return ParkDecision(request, request.wait)
    count, records = consumer_state.decide_production(partition, caller.client, request, size)
    return Decision(records, lambda: Done(count))


@handles(claims.Renew, reads=True)
def handle_renew(context: ControllerContext, caller: Caller, request: claims.Renew) -> Done:
    """Restart the time of leases and locks. The reply says for each of them whether it is still in force."""
    leases, locks, now = context.lease_deadlines, context.lock_deadlines, context.now
    return Done(
        [
            leases.renew(name, token, now) or locks.renew(name, token, now) or is_unseen(context.state, name, token)
            for name, token in request.leases
        ]
    )


def is_unseen(state: State, name: str, token: int) -> bool:
    """Return whether a batch was not handed over yet. As long as its client exists, its time does not end."""
    partition = state.partitions.get(name)
    return partition is not None and token in partition.unseen_batches.by_token


@handles(claims.Cancel)
def handle_cancel(context: ControllerContext, caller: Caller, request: claims.Cancel) -> list[Effect]:
    """Cancel a waiting request. The reply says whether it was waiting.

    The cancelled request gets its one reply, too, although its client does not wait for it.
    """
    waiter = (caller.client, request.sequence)
    there = waiter in context.state.waiting.by_waiter
    effects: list[Effect] = []
    if there:
        known = context.parked.peers.get(waiter, caller.peer)
        context.parked.unpark(waiter, met=False)
        effects.append(Send(known, request.sequence, Failure("WaitTimeoutError", "the client cancelled this request")))
    for decide in (lease_decisions.return_unseen, lock_decisions.release_unseen):
        for record in decide(context.state, *waiter):
            context.log.apply(record)
    return [*effects, Send(caller.peer, caller.envelope.sequence, Done(there))]
