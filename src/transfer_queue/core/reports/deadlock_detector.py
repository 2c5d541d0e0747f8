"""Ends a deadlock, in which puts wait for space, claims wait for samples, and no client is left that could help."""

from __future__ import annotations

from collections.abc import Collection

from transfer_queue.core.activity import Activity
from transfer_queue.core.context import Context, CoreService
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, SendToUnit
from transfer_queue.core.reports.explain import nearest_rows
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.display import count_text
from transfer_queue.errors import DeadlockError
from transfer_queue.messages.puts import Publish, Reserve
from transfer_queue.messages.reports.unit_reports import RefuseWriters, SpaceShortReport

SHOWN = 3  # requests of each kind in the message


class DeadlockDetector(CoreService):
    """Looks after each event whether the claims that wait and the puts that wait wait for each other."""

    begins_with = (r.RequestParked,)

    @classmethod
    def must_start(cls, context: Context) -> bool:
        """See `CoreService.must_start`."""
        return bool(context.state.waiting.by_waiter)

    def after_event(self) -> list[Effect]:
        """Fail all requests that wait for space with a DeadlockError, if nothing can ever meet them."""
        context, activity = self.context, self.context.services[Activity]
        if not context.state.waiting.claims or not activity.is_deadlocked():
            return []
        if any(service.is_working() for service in context.services.with_hook["is_working"]):
            return []  # the controller itself may still meet them
        message = describe_deadlock(context.state, activity.short.values())
        effects: list[Effect] = []
        for waiting in list(context.state.waiting.space.values()):
            effects += context.refuse(waiting, DeadlockError(message))
        effects += [SendToUnit(unit, RefuseWriters(message)) for unit, short in activity.short.items() if short.writers]
        return effects


def describe_deadlock(state: State, short: Collection[SpaceShortReport]) -> str:
    """Return the message of a DeadlockError: which puts wait for space, and which claims wait for samples."""
    puts = [_describe_waiting_put(state, waiting) for waiting in list(state.waiting.space.values())]
    puts += [
        f"{state.describe_client(writer)} waits for bytes of storage unit {unit.unit}"
        for unit in short for writer in unit.writers
    ]  # fmt: skip
    claims = [
        _describe_waiting_claim(state, waiting)
        for tasks in state.waiting.claims.values()
        for queue in tasks.values()
        for waiting in queue.claims.values()
    ]
    return (
        f"deadlock: every put waits for space, every claim waits for samples, and no client is left that could clear "
        f"samples. Puts: {_shortened_list(puts)}. Claims: {_shortened_list(claims)}. Raise the capacity, lower "
        f"batch_size, clear samples when they are consumed (create_partition(free_when=...)), or put fields of "
        f"samples that exist."
    )


def _shortened_list(descriptions: list[str]) -> str:
    more = f"; and {len(descriptions) - SHOWN} more" if len(descriptions) > SHOWN else ""
    return "; ".join(descriptions[:SHOWN]) + more


def _describe_waiting_put(state: State, waiting: ParkedRequest) -> str:
    request = waiting.request
    assert isinstance(request, (Publish, Reserve))
    rows, client = count_text(request.count, "sample"), state.describe_client(waiting.client)
    return f"{client} waits for space for {rows} in partition {request.partition!r}"


def _describe_waiting_claim(state: State, waiting: ParkedRequest) -> str:
    claim = waiting.claim
    partition = state.partitions.get(claim.partition)
    rows = count_text(claim.count, "sample")
    begin = f"task {claim.task!r} waits for {rows} with {claim.fields} in partition {claim.partition!r}"
    if partition is None:
        return begin + ", which does not exist"
    ready = partition.ready_set(claim.task, tuple(claim.fields)).total
    near = nearest_rows(state, partition, claim.task, claim.fields).rstrip(".")
    return f"{begin}, where {ready:,} {'is' if ready == 1 else 'are'} ready ({near})"
