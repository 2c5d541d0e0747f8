"""Saves and loads the states of users' samplers, one sampler after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Union

from transfer_queue.core.events.effects import Effect
from transfer_queue.core.samplers.remote_calls import SamplerAsks, hosted_runner
from transfer_queue.core.samplers.user_sampler import UserSampler
from transfer_queue.errors import SamplerError, TransferQueueError
from transfer_queue.sampler.calls.call_messages import SamplerCall, SamplerRequest

SavedStates = Union[dict[str, bytes], TransferQueueError]
"""Pattern -> state of its sampler, as msgpack; or why a sampler has not returned its state."""


def save_states(
    calls: SamplerAsks, samplers: Mapping[str, UserSampler], done: Callable[[SavedStates], list[Effect]]
) -> list[Effect]:
    """Call `done` with the states of these samplers. A sampler in a process of its own answers later."""
    found: dict[str, bytes] = {}

    def save_next() -> list[Effect]:
        pattern = next((each for each in samplers if each not in found), None)
        if pattern is None:
            return done(found)

        def saved(outcome: Any) -> list[Effect]:
            if isinstance(outcome, BaseException):
                return done(_error_of(outcome))
            found[pattern] = outcome
            return save_next()

        return _call(calls, samplers[pattern], "save_checkpoint", None, saved)

    return save_next()


def load_states(
    calls: SamplerAsks,
    samplers: Mapping[str, UserSampler],
    states: Mapping[str, bytes],
    done: Callable[[TransferQueueError | None], list[Effect]],
) -> list[Effect]:
    """Replace the states of these samplers. Calls `done` with the error of the first one that refuses its state."""
    left = list(samplers)

    def load_next() -> list[Effect]:
        if not left:
            return done(None)
        pattern = left.pop(0)
        return _call(calls, samplers[pattern], "load_checkpoint", states[pattern], loaded)

    def loaded(outcome: Any) -> list[Effect]:
        return done(_error_of(outcome)) if isinstance(outcome, BaseException) else load_next()

    return load_next()


def _call(
    calls: SamplerAsks,
    sampler: UserSampler,
    kind: str,
    state: bytes | None,
    done: Callable[[Any], list[Effect]],
) -> list[Effect]:
    """Make a call that belongs to no claim. `done` gets its result, or the exception that it raises."""
    call, runner = SamplerCall(kind, SamplerRequest("", "", 0, {}), state=state), hosted_runner(sampler)
    if runner is not None:
        calls.queue_call(runner, call, done)
        return []
    outcome: Any
    try:
        outcome = sampler.runner.run(call, None, None)
    except TransferQueueError as error:
        outcome = error
    return done(outcome)


def _error_of(outcome: BaseException) -> TransferQueueError:
    """Return what a call of a sampler has raised, as an error of the tree."""
    return outcome if isinstance(outcome, TransferQueueError) else SamplerError(f"a call failed: {outcome!r}")
