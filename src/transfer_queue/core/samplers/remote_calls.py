"""Calls a user's sampler that runs in a process of its own, one call at a time, in the order in which claims need them.

A claim that needs an answer waits like any other claim that cannot be met. When the answer arrives, the claim is
decided again with all its answers so far, and the result of the sampler is checked against the current state. None of
this is part of the state: after a restart the client sends the claim again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from transfer_queue.core.events.effects import AskSampler, Effect
from transfer_queue.core.ready.ready_sets import ReadySet
from transfer_queue.core.samplers.claim_samplers import SamplerRegistry
from transfer_queue.core.samplers.user_sampler import Answers, AnySampler, Ask, HostedRunner, UserSampler
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import ParkedRequest, RequestKey
from transfer_queue.errors import SamplerError, TransferQueueError
from transfer_queue.sampler.calls.call_messages import Question, SamplerCall, SamplerRequest, Shown, ViewReply
from transfer_queue.sampler.calls.remote_partition import PAGE
from transfer_queue.sampler.ready_views import RankKey

MOST_GROUPS = 1 << 16  # groups in the reply to one question
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
        self.ask: Ask | None = None
        self.began = 0.0


DecideAgain = Callable[[ParkedRequest, PendingCall], list[Effect]]
"""Decides a parked claim with the answers so far."""


class CallContext(Protocol):
    """The part of the controller that the calls use."""

    state: State
    samplers: SamplerRegistry

    @property
    def timer(self) -> Callable[[], float]:
        """Returns seconds."""

    def refuse(self, waiting: ParkedRequest, error: TransferQueueError) -> list[Effect]:
        """Refuse a request that waits."""


class SamplerAsks:
    """The calls of the system's sampler that wait or were sent. True while there are any."""

    def __init__(self, sampler: AnySampler, decide_again: DecideAgain) -> None:
        self._decide_again = decide_again
        self.runner = _runner_of(sampler)
        """Has the answers of the sampler; None if it does not run in a process of its own."""
        self._begun = 0  # calls so far, including those of former samplers
        self._active: PendingCall | None = None
        self._claims: dict[RequestKey, bool] = {}  # claims that wait for their turn -> whether they are fresh
        self._orders: deque[tuple[SamplerCall, Done]] = deque()

    def __len__(self) -> int:
        return len(self._claims) + len(self._orders) + (self._active is not None)

    def __bool__(self) -> bool:
        return len(self) > 0

    # ------------------------------------------------------------ which calls are needed

    def request_call(self, context: CallContext, waiter: RequestKey, ask: Ask, fresh: bool = False) -> list[Effect]:
        """Start this call, which a parked claim needs for its decision, or queue the claim."""
        if self._active is not None or self._claims:
            self._claims.setdefault(waiter, fresh)
            return []
        return self._begin(context, PendingCall(waiter, fresh), ask)

    def is_pending(self, waiter: RequestKey) -> bool:
        """Return whether a claim waits for its answer or for its turn. It is decided again after that."""
        if self._active is not None and self._active.waiter == waiter:
            self._active.again = True
            return True
        return waiter in self._claims

    def queue_call(self, call: SamplerCall, done: Done) -> None:
        """Queue a call that no claim needs. done: called with the answer, or the exception; see `start_next`."""
        self._orders.append((call, done))

    def start_next(self, context: CallContext) -> list[Effect]:
        """Start the next call, unless the sampler is still in a call."""
        effects: list[Effect] = []
        if self.runner is not None and self.runner.orders:
            calls, self.runner.orders = self.runner.orders, []
            self._orders.extend((call, lambda outcome: []) for call in calls)
        while self._active is None and (self._orders or self._claims):
            if self._orders:
                call, done = self._orders.popleft()
                effects += self._begin(context, PendingCall(None, done=done), Ask(call, None, None))
                break
            waiter = next(iter(self._claims))
            fresh = self._claims.pop(waiter)
            waiting = context.state.waiting.by_waiter.get(waiter)
            if waiting is not None:
                effects += self._decide_again(waiting, PendingCall(waiter, fresh))
        return effects

    def replace(self, sampler: AnySampler) -> list[Effect]:
        """Replace the sampler. Claims that wait for an answer of the old one are decided with the new one.

        Calls of the old sampler that no claim needs have failed.
        """
        error = SamplerError("the system's sampler was replaced meanwhile")
        active, self._active, self.runner = self._active, None, _runner_of(sampler)
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

    def _begin(self, context: CallContext, pending: PendingCall, ask: Ask) -> list[Effect]:
        self._begun += 1
        self._active, pending.ask, pending.began = pending, ask, context.timer()
        shown = NOTHING_SHOWN
        if ask.partition is not None and ask.ready is not None:
            shown = self._shown_rows(pending, ask.partition, ask.ready)
        return [AskSampler(self._begun, ask.call, shown)]

    def start_further(self, context: CallContext, pending: PendingCall, ask: Ask) -> list[Effect]:
        """Start one more call, which the claim of a pending call needs."""
        if self._active is not None:
            assert pending.waiter is not None
            self._claims.setdefault(pending.waiter, pending.fresh)
            return []
        return self._begin(context, pending, ask)

    def on_answer(self, context: CallContext, number: int, outcome: Any) -> list[Effect]:
        """Handle the end of a call. outcome: its result, or an exception."""
        pending = self._active
        if pending is None or number != self._begun:
            return []  # the call of a sampler that was replaced
        self._active = None
        assert pending.ask is not None
        context.samplers.note(context.timer() - pending.began)
        if pending.done is not None:
            effects = pending.done(outcome)
        else:
            effects = self._decide(context, pending, pending.ask, outcome)
        if pending.again and pending.waiter in context.state.waiting.by_waiter and self._active is not pending:
            self._claims = {pending.waiter: pending.fresh, **self._claims}  # first, as it arrived before the others
        return effects

    def _decide(self, context: CallContext, pending: PendingCall, ask: Ask, outcome: Any) -> list[Effect]:
        assert pending.waiter is not None
        waiting = context.state.waiting.by_waiter.get(pending.waiter)
        if waiting is None:
            return []
        if isinstance(outcome, BaseException):
            error = outcome if isinstance(outcome, TransferQueueError) else SamplerError(f"a call failed: {outcome!r}")
            return context.refuse(waiting, error)
        if outcome is None or pending.void:
            pending.answers, pending.void = Answers(), False  # the rows that the sampler read have changed
        else:
            pending.answers.by_key[ask.key] = outcome
        return self._decide_again(waiting, pending)

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

    def answer_read(self, context: CallContext, number: int, question: Question) -> ViewReply:
        """Reply to what the sampler reads during a call; an empty reply if the claim or the partition is gone."""
        pending = self._active
        ask = None if pending is None else pending.ask
        if pending is None or ask is None or number != self._begun or ask.partition is None or ask.ready is None:
            return ViewReply()
        partition, ready = ask.partition, ask.ready
        if context.state.partitions.get(partition.name) is not partition:
            return ViewReply()
        ready = partition.ready_set(ready.task, ready.fields)
        if question.kind == "rows":
            return self._page(pending, partition, ready, max(0, question.after))
        if question.kind == "tags":
            rows = np.frombuffer(question.rows, "<i8")
            positions = partition.rows.positions_of(rows)
            live = positions[positions >= 0]
            tags = partition.tags_of(live)
            names = rows[positions >= 0].tolist()
            return ViewReply(tags=dict(zip(names, tags if tags is not None else [{} for _ in names], strict=True)))
        offered = partition.sampler_view(ready)
        if question.kind == "groups":
            groups = offered.first_groups(max(1, question.size), min(max(1, question.count), MOST_GROUPS))
            return self._offer(pending, groups.reshape(-1))
        if question.kind == "orphans":
            return ViewReply(np.array(offered.orphans(max(1, question.size)), "i8").tobytes())
        assert question.key is not None
        spoiled = offered.spoiled(RankKey(*question.key), question.bound, max(1, question.size))
        return ViewReply(np.array(spoiled, "i8").tobytes())


def _runner_of(sampler: AnySampler) -> HostedRunner | None:
    runner = sampler.runner if isinstance(sampler, UserSampler) else None
    return runner if isinstance(runner, HostedRunner) else None


def plain_call(kind: str, state: bytes | None = None) -> SamplerCall:
    """Return a call that belongs to no claim."""
    return SamplerCall(kind, SamplerRequest("", "", 0, {}), state=state)
