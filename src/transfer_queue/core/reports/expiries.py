"""The replies to requests whose time to wait is over."""

from __future__ import annotations

from transfer_queue.core import locks
from transfer_queue.core.claims import answers
from transfer_queue.core.claims.plan import Plans
from transfer_queue.core.context import Context
from transfer_queue.core.puts import limits
from transfer_queue.core.queries import partition_view
from transfer_queue.core.reports.explain import timeout_words
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.core.timeline.abandoned_samples import AbandonedSamples
from transfer_queue.errors import CapacityError
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.locks import TakeLock
from transfer_queue.messages.partitions import AwaitDone, TakeGroupDemand
from transfer_queue.messages.queries import Watch


def expiry_reply(context: Context, waiting: ParkedRequest) -> AnyReply:
    """Return the reply to a request whose deadline has come."""
    request, now = waiting.request, context.now
    if isinstance(request, Watch):
        return partition_view.empty_watch_reply(context.state, request)
    if isinstance(request, Claim):
        if request.probe or request.quiet:
            return answers.empty_reply(context, request, ended=False)
        plan = context.services[Plans].of(context.state.partitions.get(request.partition), request)
        waited = request.waited + now - waiting.since
        abandoned = context.services[AbandonedSamples].find(request.partition)
        words = timeout_words(context.state, request, waited, plan.group_size, abandoned)
        return Failure("WaitTimeoutError", words)
    if isinstance(request, TakeGroupDemand):
        return Done(0)
    if isinstance(request, TakeLock):
        waited = now - waiting.since
        words = locks.describe_wait(context.state, waiting.waiter, request, waited, now)
        return Failure("WaitTimeoutError", f"Timeout: {words}. {locks.WAIT_ADVICE}")
    if isinstance(request, AwaitDone):
        return Done(False)
    try:
        limits.check_limits(context.state, request.partition, request.count)
    except CapacityError as error:
        refusal = limits.refused_put(error, request.wait, now - waiting.since)
        return Failure(type(refusal).__name__, str(refusal))
    return Failure("CapacityError", f"no capacity became free within {now - waiting.since:.3g} s")
