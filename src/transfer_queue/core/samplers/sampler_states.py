"""Saves and loads the states of users' samplers, one sampler after the other, as steps of a job."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

from transfer_queue.core.events.effects import Effect
from transfer_queue.core.events.registry import GivenUpError, Work
from transfer_queue.core.samplers.remote_calls import SamplerAsks, hosted_runner
from transfer_queue.core.samplers.user_sampler import UserSampler
from transfer_queue.errors import SamplerError, TransferQueueError
from transfer_queue.sampler.calls.call_messages import SamplerCall, SamplerRequest


def save_states(calls: SamplerAsks, samplers: Mapping[str, UserSampler]) -> Generator[Work, Any, dict[str, bytes]]:
    """Return the states of these samplers by pattern, as msgpack. A sampler in a process of its own answers later.

    Raises:
        TransferQueueError: A sampler has not returned its state.
    """
    found: dict[str, bytes] = {}
    for pattern, sampler in samplers.items():
        found[pattern] = yield from _call(calls, sampler, "save_checkpoint", None)
    return found


def load_states(
    calls: SamplerAsks, samplers: Mapping[str, UserSampler], states: Mapping[str, bytes]
) -> Generator[Work, Any, None]:
    """Replace the states of these samplers.

    Raises:
        TransferQueueError: A sampler refuses its state.
    """
    for pattern, sampler in samplers.items():
        yield from _call(calls, sampler, "load_checkpoint", states[pattern])


def _call(calls: SamplerAsks, sampler: UserSampler, kind: str, state: bytes | None) -> Generator[Work, Any, Any]:
    """Make a call that belongs to no claim. Returns its result."""
    call, runner = SamplerCall(kind, SamplerRequest("", "", 0, {}), state=state), hosted_runner(sampler)
    if runner is None:
        return sampler.runner.run(call, None, None)
    hosted = runner

    def begin(number: int, resume: Callable[[Any], list[Effect]]) -> list[Effect]:
        calls.queue_call(hosted, call, resume)
        return []

    try:
        return (yield Work(begin))
    except (TransferQueueError, GivenUpError):
        raise
    except Exception as error:
        raise SamplerError(f"a call failed: {error!r}") from error
