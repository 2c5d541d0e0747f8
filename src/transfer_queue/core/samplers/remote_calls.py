"""Calls users' samplers that run in processes of their own, each one call at a time, in the order of the claims.

A claim that needs an answer waits like any other claim that cannot be met. When the answer arrives, the claim is
decided again with all its answers so far, and the result of the sampler is checked against the current state. None of
this is part of the state: after a restart the client sends the claim again.

The states of users' samplers are saved and loaded here, too, one sampler after the other, as steps of a job.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np

from transfer_queue.core.context import Context, CoreService
from transfer_queue.core.events.effects import AskSampler, Effect
from transfer_queue.core.events.registry import BegunWork, GivenUpError
from transfer_queue.core.samplers.calls import Answers, AnySampler, Ask, HostedRunner, PartitionView, UserSampler
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.wait_queues import ParkedRequest, RequestKey
from transfer_queue.core.tables.ready_sets import ReadySet
from transfer_queue.errors import SamplerError, TransferQueueError
from transfer_queue.sampler.calls.call_messages import Question, SamplerCall, SamplerRequest, Shown, ViewReply
from transfer_queue.sampler.calls.sampler_calls import PAGE
from transfer_queue.sampler.ready_views import RankKey

MAX_GROUPS = 1 << 16  # groups in the reply to one question
NOTHING_SHOWN = Shown()

Done = Callable[[Any], list[Effect]]


class PendingCall:
    """A call that was sent to the sampler, or is about to be sent."""

    def __init__(self, waiter: RequestKey | None, fresh: bool = False, done: Done | None = None) -> None:
        self.waiter = waiter
        """The claim that is decided with the answer; None if `done` gets it."""
        self.fresh = fresh
        """Whether this is the first decision of the claim."""
        self.done = done
        """Receives the answer, or the exception, of a call that no claim needs."""
        self.again = False
        """Whether the claim must be decided again because the state has changed during the call."""
        self.void = False
        """Whether the state was replaced during the call. The answer is then ignored, and the claim asks again."""
        self.answers = Answers()
        """The answers of `runner`."""
        self.runner: HostedRunner | None = None
        """Represents the sampler that was called last; None before the first call."""
        self.ask: Ask | None = None
        self.began = 0.0


class SamplerAsks(CoreService, ABC):
    """The calls of all users' samplers that wait or were sent."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._queues: dict[HostedRunner, CallQueue] = {}
        self.numbers = itertools.count(1)
        """The numbers of the calls."""

    @classmethod
    def must_start(cls, context: Context) -> bool:
        """See `CoreService.must_start`."""
        return any(hosted_runner(sampler) is not None for sampler in context.samplers.of_users.values())

    @abstractmethod
    def decide_again(self, waiting: ParkedRequest, pending: PendingCall) -> list[Effect]:
        """Decide a parked claim with the answers so far."""

    def is_working(self) -> bool:
        """See `CoreService.is_working`."""
        return any(self._queues.values())

    def queue_of(self, runner: HostedRunner) -> CallQueue:
        """Return the calls of one sampler."""
        queue = self._queues.get(runner)
        if queue is None:
            queue = self._queues[runner] = CallQueue(self, runner)
        return queue

    def is_pending(self, waiter: RequestKey) -> bool:
        """Return whether a claim waits for its answer or for its turn. It is decided again after that."""
        return any(queue.is_pending(waiter) for queue in self._queues.values())

    def when_settled(self) -> list[Effect]:
        """Start the next calls of all samplers that are not in a call."""
        for sampler in self.context.samplers.of_users.values():
            if isinstance(sampler.runner, HostedRunner) and sampler.runner.orders:
                self.queue_of(sampler.runner)
        return [effect for queue in list(self._queues.values()) for effect in queue.start_next()]

    def void(self) -> None:
        """The state was replaced: do not decide the current claims with answers about the old state."""
        for queue in self._queues.values():
            queue.void()

    def queue_in_call(self, number: int) -> CallQueue | None:
        """Return the calls of the sampler in this call; None if the sampler was replaced."""
        return next((queue for queue in self._queues.values() if queue.is_in_call(number)), None)


class CallQueue:
    """The calls of one sampler that wait or were sent."""

    def __init__(self, calls: SamplerAsks, runner: HostedRunner) -> None:
        self._calls = calls
        self._context = calls.context
        self._runner: HostedRunner | None = runner  # None: the sampler was replaced
        self._number = 0  # of the last call
        self._active: PendingCall | None = None
        self._claims: dict[RequestKey, bool] = {}  # claims that wait for their turn -> whether they are fresh
        self._orders: deque[tuple[SamplerCall, Done]] = deque()

    def __len__(self) -> int:
        return len(self._claims) + len(self._orders) + (self._active is not None)

    def is_in_call(self, number: int) -> bool:
        """Return whether the sampler is in this call."""
        return self._active is not None and self._number == number

    # ------------------------------------------------------------ which calls are needed

    def request_call(self, waiter: RequestKey, ask: Ask, fresh: bool = False) -> list[Effect]:
        """Start this call, which a parked claim needs for its decision, or queue the claim."""
        if self._active is not None or self._claims:
            self._claims.setdefault(waiter, fresh)
            return []
        return self._begin(PendingCall(waiter, fresh), ask)

    def is_pending(self, waiter: RequestKey) -> bool:
        """Return whether a claim waits for its answer or for its turn. It is decided again after that."""
        if self._active is not None and self._active.waiter == waiter:
            self._active.again = True
            return True
        return waiter in self._claims

    def queue_call(self, call: SamplerCall, done: Done) -> None:
        """Queue a call that no claim needs. done: called with the answer, or the exception; see `start_next`."""
        self._orders.append((call, done))

    def start_next(self) -> list[Effect]:
        """Start the next call, unless the sampler is still in a call."""
        effects: list[Effect] = []
        if self._runner is not None and self._runner.orders:
            calls, self._runner.orders = self._runner.orders, []
            self._orders.extend((call, lambda outcome: []) for call in calls)
        while self._active is None and (self._orders or self._claims):
            if self._orders:
                call, done = self._orders.popleft()
                assert self._runner is not None
                effects += self._begin(PendingCall(None, done=done), Ask(self._runner, call, None, None))
                break
            waiter = next(iter(self._claims))
            fresh = self._claims.pop(waiter)
            waiting = self._context.state.waiting.by_waiter.get(waiter)
            if waiting is not None:
                effects += self._calls.decide_again(waiting, PendingCall(waiter, fresh))
        return effects

    def end(self) -> list[Effect]:
        """The sampler was replaced. Claims that wait for its answer are decided with the new one.

        Calls that no claim needs have failed.
        """
        error = SamplerError("the system's sampler was replaced meanwhile")
        active, self._active, self._runner = self._active, None, None
        waits = [done for _, done in self._orders]
        if active is not None and active.done is not None:
            waits.append(active.done)
        if active is not None and active.waiter is not None:
            self._claims = {active.waiter: active.fresh, **self._claims}
        effects = [effect for done in waits for effect in done(error)]
        self._orders.clear()  # also the calls of the old sampler that `done` has just queued
        return effects

    def void(self) -> None:
        """The state was replaced: do not decide the current claim with an answer about the old state."""
        if self._active is not None:
            self._active.void = True

    # ------------------------------------------------------------ calls

    def _begin(self, pending: PendingCall, ask: Ask) -> list[Effect]:
        self._number = next(self._calls.numbers)
        self._active, pending.ask, pending.began = pending, ask, self._context.config.timer()
        pending.runner = ask.runner
        shown = NOTHING_SHOWN
        if ask.partition is not None and ask.ready is not None:
            shown = self._shown_rows(pending, ask.partition, ask.ready)
        return [AskSampler(self._number, ask.call, shown, ask.runner.pattern)]

    def start_further(self, pending: PendingCall, ask: Ask) -> list[Effect]:
        """Start one more call, which the claim of a pending call needs."""
        if pending.runner is not ask.runner:
            pending.answers = Answers()  # the claim has another sampler now
        if self._active is not None:
            assert pending.waiter is not None
            self._claims.setdefault(pending.waiter, pending.fresh)
            return []
        return self._begin(pending, ask)

    def on_answer(self, outcome: Any) -> list[Effect]:
        """Handle the end of the call. outcome: its result, or an exception."""
        pending, self._active = self._active, None
        assert pending is not None
        assert pending.ask is not None
        self._context.samplers.note(pending.ask.runner.facts.name, self._context.config.timer() - pending.began)
        if pending.done is not None:
            effects = pending.done(outcome)
        else:
            effects = self._decide(pending, pending.ask, outcome)
        if pending.again and pending.waiter in self._context.state.waiting.by_waiter and self._active is not pending:
            self._claims = {pending.waiter: pending.fresh, **self._claims}  # first, as it arrived before the others
        return effects

    def _decide(self, pending: PendingCall, ask: Ask, outcome: Any) -> list[Effect]:
        assert pending.waiter is not None
        waiting = self._context.state.waiting.by_waiter.get(pending.waiter)
        if waiting is None:
            return []
        if isinstance(outcome, BaseException):
            error = outcome if isinstance(outcome, TransferQueueError) else SamplerError(f"a call failed: {outcome!r}")
            return self._context.refuse(waiting, error)
        if outcome is None or pending.void:
            pending.answers, pending.void = Answers(), False  # the rows that the sampler read have changed
        else:
            pending.answers.by_key[ask.key] = outcome
        return self._calls.decide_again(waiting, pending)

    # ------------------------------------------------------------ what the sampler reads

    def _shown_rows(self, pending: PendingCall, partition: Partition, ready: ReadySet) -> Shown:
        reply = self._page(pending, partition, ready, 0)
        return Shown(
            partition.name, partition.groups.size, partition.policy_version, ready.total, reply.rows, reply.after
        )

    def _page(self, pending: PendingCall, partition: Partition, ready: ReadySet, after: int) -> ViewReply:
        positions, behind = ready.page(after, PAGE)
        return self._offer(pending, partition.rows.indexes_of(positions), behind)

    def _offer(self, pending: PendingCall, rows: np.ndarray, after: int = -1) -> ViewReply:
        pending.answers.offered.append(rows)
        return ViewReply(rows.tobytes(), after)

    def answer_read(self, question: Question) -> ViewReply:
        """Reply to what the sampler reads during the call; an empty reply if the claim or the partition is gone."""
        pending = self._active
        ask = None if pending is None else pending.ask
        if pending is None or ask is None or ask.partition is None or ask.ready is None:
            return ViewReply()
        partition, ready = ask.partition, ask.ready
        if self._context.state.partitions.get(partition.name) is not partition:
            return ViewReply()
        ready = partition.ready_set(ready.task, ready.fields)
        if question.kind == "rows":
            return self._page(pending, partition, ready, max(0, question.after))
        if question.kind == "tags":
            return ViewReply(tags=PartitionView(partition).get_custom_meta(np.frombuffer(question.rows, "<i8")))
        offered = partition.sampler_view(ready)
        if question.kind == "groups":
            groups = offered.first_groups(max(1, question.size), min(max(1, question.count), MAX_GROUPS))
            return self._offer(pending, groups.reshape(-1))
        if question.kind == "orphans":
            return ViewReply(np.array(offered.orphans(max(1, question.size)), "i8").tobytes())
        assert question.key is not None
        spoiled = offered.spoiled(RankKey(*question.key), question.bound, max(1, question.size))
        return ViewReply(np.array(spoiled, "i8").tobytes())


def hosted_runner(sampler: AnySampler) -> HostedRunner | None:
    """Return what represents a sampler in a process of its own; None for other samplers."""
    runner = sampler.runner if isinstance(sampler, UserSampler) else None
    return runner if isinstance(runner, HostedRunner) else None


def save_states(calls: SamplerAsks, samplers: Mapping[str, UserSampler]) -> Generator[BegunWork, Any, dict[str, bytes]]:
    """Return the states of these samplers by pattern, as msgpack. A sampler in a process of its own answers later.

    Raises:
        TransferQueueError: A sampler has not returned its state.
    """
    states: dict[str, bytes] = {}
    for pattern, sampler in samplers.items():
        states[pattern] = yield from _call(calls, sampler, "save_checkpoint", None)
    return states


def load_states(
    calls: SamplerAsks, samplers: Mapping[str, UserSampler], states: Mapping[str, bytes]
) -> Generator[BegunWork, Any, None]:
    """Replace the states of these samplers.

    Raises:
        TransferQueueError: A sampler refuses its state.
    """
    for pattern, sampler in samplers.items():
        yield from _call(calls, sampler, "load_checkpoint", states[pattern])


def _call(calls: SamplerAsks, sampler: UserSampler, kind: str, state: bytes | None) -> Generator[BegunWork, Any, Any]:
    """Make a call that belongs to no claim. Returns its result."""
    call, runner = SamplerCall(kind, SamplerRequest("", "", 0, {}), state=state), hosted_runner(sampler)
    if runner is None:
        return sampler.runner.run(call, None, None)
    hosted = runner

    def begin(number: int, resume: Callable[[Any], list[Effect]]) -> list[Effect]:
        calls.queue_of(hosted).queue_call(call, resume)
        return []

    try:
        return (yield BegunWork(begin))
    except (TransferQueueError, GivenUpError):
        raise
    except Exception as error:
        raise SamplerError(f"a call failed: {error!r}") from error
