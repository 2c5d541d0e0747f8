"""Handlers of the requests about locks of keys."""

from __future__ import annotations

from itertools import islice

from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.events.registry import Caller, Decision, ParkDecision, handles
from transfer_queue.core.locks import lock_decisions
from transfer_queue.errors import WaitTimeoutError
from transfer_queue.messages import locks
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyReply

PAGE = 256
"""Locks and waiting requests in one page of a list."""


@handles(locks.TakeLock)
def handle_take_lock(context: ControllerContext, caller: Caller, request: locks.TakeLock) -> Decision | ParkDecision:
    """Lock keys, or park the request while one of them is locked or an earlier request waits for one of them."""
    lock_decisions.check_request(request)
    state = context.state
    if lock_decisions.must_wait(state, request, caller.waiter, context.parked.peers):
        if request.wait is not None and request.wait > 0:
            return ParkDecision(request, request.wait)
        words = lock_decisions.describe_wait(state, caller.waiter, request, 0.0, context.now)
        raise WaitTimeoutError(f"Timeout: {words}. {lock_decisions.WAIT_ADVICE}")
    granted = lock_decisions.grant(state, caller.client, request, context.now)

    def reply() -> AnyReply:
        context.lock_deadlines.begin(request.partition, state.locks.by_token[granted.token], context.now)
        context.absent_holders.note_holder(caller.client)
        return locks.LockReply(granted.token)

    return Decision([granted], reply)


@handles(locks.ReleaseLock)
def handle_release_lock(context: ControllerContext, caller: Caller, request: locks.ReleaseLock) -> Decision:
    """Release a lock. The reply says whether the client held it."""
    records = lock_decisions.release(context.state, caller.client, request.token)
    return Decision(records, lambda: Done(bool(records)))


@handles(locks.ListLocks, reads=True)
def handle_list_locks(context: ControllerContext, caller: Caller, request: locks.ListLocks) -> locks.LocksReply:
    """Reply with a page of the locks and of the requests that wait for one."""
    found = lock_decisions.entries(context.state, context.now, request.partitions)
    page = list(islice(found, request.start, request.start + PAGE))
    more = next(found, None) is not None
    return locks.LocksReply(page, request.start + len(page) if more else None)
