"""Handlers of what clients do with rows that they were dealt, and of what tasks ask for."""

from __future__ import annotations

from transfer_queue.core.claims import consumer_state, lease_decisions
from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.control.unknown_names import unknown_partition
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.events.registry import Caller, Decision, ParkDecision, handles
from transfer_queue.core.state import unneeded_rows
from transfer_queue.core.tables.row_table import indexes_in
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.claims import Ack, Cancel, Finish, Nack, RankGone, Renew, ResetConsumption
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.partitions import SetGroupDemand, TakeGroupDemand


@handles(ResetConsumption)
def reset(core: ControllerContext, caller: Caller, request: ResetConsumption) -> Decision:
    """A task (None: every one) begins anew."""
    warning = unknown_partition(core.state.partitions, request.partition, "reset_consumption has no effect")
    records: list[r.AnyRecord] = []
    if warning is None:
        records.append(r.ConsumptionForgotten(request.partition, request.task))
    return Decision(records, lambda: Done(True, warning))


@handles(Finish)
def finish_rows(core: ControllerContext, caller: Caller, request: Finish) -> Decision:
    """A task is through with them."""
    partition = core.state.partitions.get(request.partition)
    if partition is None:
        return Decision([], Done)

    def reply() -> AnyReply:
        for consumer in consumer_state.idle(partition, request.task, request.holder, core.movers.busy):
            core.movers.back(request.holder, consumer)
        return Done()

    return Decision(unneeded_rows.finished(partition, request.task, request.holder, indexes_in(request.rows)), reply)


@handles(Ack)
def ack(core: ControllerContext, caller: Caller, request: Ack) -> Decision:
    """Whether it counts."""
    records = lease_decisions.ack(core.state, request)
    return Decision(records, lambda: Done(bool(records)))


@handles(Nack)
def nack(core: ControllerContext, caller: Caller, request: Nack) -> Decision:
    """Whether the lease had any of it."""
    records = lease_decisions.nack(core.state, request, core.max_deliveries)
    return Decision(records, lambda: Done(bool(records)))


@handles(RankGone)
def rank_gone(core: ControllerContext, caller: Caller, request: RankGone) -> Decision:
    """How many rows are ready again."""
    records, count = lease_decisions.rank_gone(core.state, request, core.max_deliveries)
    return Decision(records, lambda: Done(count))


@handles(SetGroupDemand)
def want(core: ControllerContext, caller: Caller, request: SetGroupDemand) -> Decision:
    """A task says how many groups it wants."""
    return Decision(consumer_state.want(core.state, request), Done)


@handles(TakeGroupDemand)
def wanted(core: ControllerContext, caller: Caller, request: TakeGroupDemand) -> Decision | ParkDecision:
    """How many a producer is to make."""
    partition = core.state.partitions.get(request.partition)
    size = core.group_size_of(request.partition) or 1
    if request.wait is not None and request.wait > 0 and not consumer_state.missing(partition, request.task, size):
        return ParkDecision(request, request.wait)
    count, records = consumer_state.taken(partition, caller.client, request, size)
    return Decision(records, lambda: Done(count))


@handles(Renew, reads=True)
def renew(core: ControllerContext, caller: Caller, request: Renew) -> Done:
    """Of each lease, whether it is still in force; it then has all its time again."""
    return Done([core.deadlines.renew(name, token, core.now) for name, token in request.leases])


@handles(Cancel)
def cancel(core: ControllerContext, caller: Caller, request: Cancel) -> list[Effect]:
    """Whether the request was waiting. It gets its one reply, too, although its client does not wait for it."""
    waiter = (caller.client, request.sequence)
    there = waiter in core.state.waiting.by_waiter
    effects: list[Effect] = []
    if there:
        known = core.peers.get(waiter, caller.peer)
        core.unpark(waiter)
        effects.append(Send(known, request.sequence, Failure("WaitTimeoutError", "cancelled by its client")))
    for record in lease_decisions.return_unseen(core.state, *waiter):
        core.apply(record)
    return [*effects, Send(caller.peer, caller.envelope.sequence, Done(there))]
