"""Locks of keys: the handlers of their requests, and the ends of their leases."""

from __future__ import annotations

from itertools import islice

from transfer_queue.core.absent_clients import AbsentHolders
from transfer_queue.core.context import Context, CoreService
from transfer_queue.core.deadlines import Deadlines
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.events.registry import Caller, Decision, ParkDecision, handles
from transfer_queue.core.locks import lock_decisions
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.errors import WaitTimeoutError
from transfer_queue.messages import locks
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyReply

PAGE = 256
"""Locks and waiting requests in one page of a list."""


class Locks(CoreService):
    """The deadlines of the locks."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.deadlines = Deadlines(
            [(lock.partition, lock) for lock in context.state.locks.by_token.values()],
            lambda name, token: context.state.locks.by_token.get(token),
            context.now,
        )

    @classmethod
    def must_start(cls, context: Context) -> bool:
        """See `CoreService.must_start`."""
        return bool(context.state.locks.by_token or context.state.waiting.locks)

    def next_due(self) -> float | None:
        """See `CoreService.next_due`."""
        return self.deadlines.next_deadline()

    def on_due(self) -> list[Effect]:
        """End the locks whose time is over."""
        for _, lock in self.deadlines.expired(self.context.now):
            self.context.log.apply(lock_decisions.expire(lock))
        return []

    def on_wait_ended(self, waiting: ParkedRequest, met: bool) -> None:
        """See `CoreService.on_wait_ended`. The requests behind one for a lock do not wait for it any more."""
        if isinstance(waiting.request, locks.TakeLock):
            self.context.changes.changes_of(waiting.request.partition).locks = True


@handles(locks.TakeLock)
def handle_take_lock(context: Context, caller: Caller, request: locks.TakeLock) -> Decision | ParkDecision:
    """Lock keys, or park the request while one of them is locked or an earlier request waits for one of them."""
    lock_decisions.check_request(request)
    state, service = context.state, context.services[Locks]
    if lock_decisions.must_wait(state, request, caller.waiter, context.parked.peers):
        if request.wait is not None and request.wait > 0:
            return ParkDecision(request, request.wait)
        words = lock_decisions.describe_wait(state, caller.waiter, request, 0.0, context.now)
        raise WaitTimeoutError(f"Timeout: {words}. {lock_decisions.WAIT_ADVICE}")
    granted = lock_decisions.grant(state, caller.client, request, context.now)

    def reply() -> AnyReply:
        service.deadlines.begin(request.partition, state.locks.by_token[granted.token], context.now)
        context.services[AbsentHolders].note_holder(caller.client)
        return locks.LockReply(granted.token)

    return Decision([granted], reply)


@handles(locks.ReleaseLock)
def handle_release_lock(context: Context, caller: Caller, request: locks.ReleaseLock) -> Decision:
    """Release a lock. The reply says whether the client held it."""
    records = lock_decisions.release(context.state, caller.client, request.token)
    return Decision(records, lambda: Done(bool(records)))


@handles(locks.ListLocks, reads=True)
def handle_list_locks(context: Context, caller: Caller, request: locks.ListLocks) -> locks.LocksReply:
    """Reply with a page of the locks and of the requests that wait for one."""
    found = lock_decisions.entries(context.state, context.now, request.partitions)
    page = list(islice(found, request.start, request.start + PAGE))
    more = next(found, None) is not None
    return locks.LocksReply(page, request.start + len(page) if more else None)
