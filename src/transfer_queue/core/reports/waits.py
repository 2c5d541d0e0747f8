"""Describes to a client what a request of it waits for, while it waits."""

from __future__ import annotations

from transfer_queue.core import locks
from transfer_queue.core.claims.plan import Plans
from transfer_queue.core.context import Context
from transfer_queue.core.events.registry import Caller, handles
from transfer_queue.core.jobs import Jobs
from transfer_queue.core.puts import limits
from transfer_queue.core.reports.explain import describe_waiting
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State, suggestion
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.display import count_text
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.locks import TakeLock
from transfer_queue.messages.partitions import TakeGroupDemand
from transfer_queue.messages.puts import Publish, Reserve
from transfer_queue.messages.queries import ExplainWait, Watch


@handles(ExplainWait, reads=True)
def handle_explain_wait(context: Context, caller: Caller, request: ExplainWait) -> Done:
    """Reply what a request of the same client waits for; "" if it does not wait."""
    waiter = caller.client, request.sequence
    waiting = context.state.waiting.by_waiter.get(waiter)
    if waiting is not None:
        return Done(_describe_wait(context, waiting))
    jobs = context.services.get(Jobs)
    return Done("" if jobs is None else jobs.describe(waiter))


def _describe_wait(context: Context, waiting: ParkedRequest) -> str:
    state, request = context.state, waiting.request
    partition = state.partitions.get(request.partition)
    if isinstance(request, Claim):
        return describe_waiting(state, request, context.services[Plans].of(partition, request).group_size)
    if isinstance(request, TakeLock):
        waited = context.now - waiting.since
        text = locks.describe_wait(state, waiting.waiter, request, waited, context.now)
        return f"{text[0].upper()}{text[1:]}."
    if isinstance(request, (Publish, Reserve)):
        return _describe_put(state, request)
    if isinstance(request, Watch):
        return _describe_watch(state, partition, request)
    if isinstance(request, TakeGroupDemand):
        size = context.group_size_of(request.partition, request.task) or 1
        return _describe_demand(state, partition, request, size)
    undone = 0 if partition is None else partition.undone
    were, are = ("was", "is") if undone == 1 else ("were", "are")
    return (
        f"A join (await_done) of partition {request.partition!r} waits: {count_text(undone, 'sample')} {were} put and "
        f"{are} not reported as done (report_done, or task_done of a queue)."
    )


def _describe_put(state: State, request: Publish | Reserve) -> str:
    what = "put" if isinstance(request, Publish) else "reservation"
    reason = limits.describe_limits(state, request.partition, request.count)
    return (
        f"A {what} of {count_text(request.count, 'sample')} into partition {request.partition!r} waits because "
        f"{reason or 'it is the turn of earlier puts.'}"
    )


def _describe_watch(state: State, partition: Partition | None, watch: Watch) -> str:
    since = "" if watch.since is None else f" after version {watch.since}"
    tags = f" of samples with the tags {sorted(watch.where)}" if watch.where else ""
    text = f"A call of wait_for_change waits for changes{tags}{since} in partition {watch.partition!r}; "
    if partition is None:
        return f"{text}the partition does not exist yet ({suggestion(watch.partition, state.partitions)})."
    return f"{text}it has {count_text(partition.row_count, 'sample')} and is at version {partition.version}."


def _describe_demand(state: State, partition: Partition | None, request: TakeGroupDemand, size: int) -> str:
    task = request.task
    text = f"A producer (wanted) waits until task {task!r} misses groups in partition {request.partition!r}; "
    if partition is None:
        return f"{text}the partition does not exist yet ({suggestion(request.partition, state.partitions)})."
    wanted = partition.wants.groups.get(task)
    if wanted is None:
        return f"{text}no group demand of this task is set (want)."
    promised = -(-partition.wants.promised_rows(task) // (partition.groups.size or size))
    return (
        f"{text}its group demand is {wanted}, and as many groups exist that it has not consumed or are promised by "
        f"producers ({promised} are promised){_staleness_limit(partition)}."
    )


def _staleness_limit(partition: Partition) -> str:
    window = partition.window
    if window.limit is None or window.counted < window.limit:
        return ""
    return f", or the partition accepts no more at policy version {partition.policy_version}"
