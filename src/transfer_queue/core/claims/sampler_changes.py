"""Replaces samplers: that of a task when a dataset names one, and that of the system."""

from __future__ import annotations

from transfer_queue.core.claims.claim_handler import SamplerCalls
from transfer_queue.core.claims.plan import Plans
from transfer_queue.core.context import Context
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.events.registry import Caller, Decision, handles
from transfer_queue.core.samplers.calls import AnySampler, Ask, name_of, watched_tags
from transfer_queue.core.samplers.remote_calls import hosted_runner
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.errors import InvalidArgumentError, TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.system import RegisterSampler
from transfer_queue.sampler.factory import describe_spec, sampler_of, spec_of


@handles(RegisterSampler)
def handle_register_sampler(context: Context, caller: Caller, request: RegisterSampler) -> list[Effect]:
    """Use a built-in sampler for a task. Batches that were dealt stay; claims that wait are decided again."""
    task, sampler = request.task, sampler_of(request.sampler, request.arguments)
    spec = spec_of(sampler)
    assert spec is not None
    known = _own_sampler(context, task)
    if known is not None and known[1] != spec:
        raise InvalidArgumentError(
            f"task {task!r} has the sampler {known[0]}, but {describe_spec(*spec)} is requested for it now. All "
            f"datasets of a task need the same sampler: pass the same one to all of them, or to one of them only, or "
            f"give this dataset another task_name"
        )
    if known is not None:
        return context.commit(caller, Decision([], Done))
    effects = context.commit(caller, Decision([r.SamplerRegistered(task, *spec)], Done))
    context.state.watched = list(dict.fromkeys([*context.state.watched, *watched_tags(sampler)]))
    for waiting in list(context.state.waiting.by_waiter.values()):
        if isinstance(waiting.request, Claim) and waiting.request.task == task:
            effects += _recheck_claim(context, waiting)
            context.changes.changes_of(waiting.request.partition).tasks |= {task}
    return effects


def _own_sampler(context: Context, task: str) -> tuple[str, tuple[str, str] | None] | None:
    """Return the sampler that the configuration or a dataset has set for exactly this task; None if there is none.

    It is described, with its specification, which is None for a user's sampler. The specification of a registered one
    is made again, because it may be from a release in which the sampler had other arguments.
    """
    configured, registered = context.samplers.of_tasks.get(task), context.state.samplers.get(task)
    if configured is None and registered is None:
        return None
    sampler = configured if configured is not None else context.samplers.of_task(task)
    where = "of another dataset" if configured is None else "controller.task_samplers"
    spec = spec_of(sampler)
    return f"{name_of(sampler) if spec is None else describe_spec(*spec)} ({where})", spec


def use_sampler(context: Context, sampler: AnySampler) -> list[Effect]:
    """Replace the system's sampler. Batches that are dealt stay; claims that wait are checked and decided again."""
    former = hosted_runner(context.samplers.default)
    context.samplers.replace_default(sampler)
    context.services[Plans].forget_all()
    effects = [] if former is None else context.services[SamplerCalls].replace(former)
    context.state.watched = watched_tags(*context.samplers.all)
    context.services.start_needed()
    for waiting in list(context.state.waiting.by_waiter.values()):
        if isinstance(waiting.request, Claim):
            effects += _recheck_claim(context, waiting)
    for name in {**context.state.partitions, **context.state.waiting.claims}:  # claims may wait for new partitions
        context.changes.changes_of(name).everything = True
    return effects


def _recheck_claim(context: Context, waiting: ParkedRequest) -> list[Effect]:
    """Refuse a parked claim that the new sampler can never meet."""
    claim = waiting.claim
    try:
        plan = context.services[Plans].of(context.state.partitions.get(claim.partition), claim)
        plan.check(claim, context.samplers.strict)
    except Ask:
        pass  # the sampler checks it when it is its turn for a call
    except TransferQueueError as error:
        return context.refuse(waiting, error)
    return []
