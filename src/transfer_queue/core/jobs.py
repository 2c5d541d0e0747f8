"""Work that takes several turns of the controller, so that it serves other requests in between.

A job is a generator. A handler that returns one begins it; the value that the generator returns is the reply, and an
error of the tree is one, too. A job of no request returns effects. What it yields says when it goes on:

    None                in another turn; each turn does one step of one job
    `Until(time)`       after each event, and at this time at the latest
    `BegunWork(begin)`  when the outcome of what `begin` begins arrives: it is the value of the `yield`, or raised there

The first step is done at once. A request that is sent again while its job is under way is answered on the newest
connection. `Ends` says when a job is given up: a job that has changed nothing ends with its connection or client; one
that has written a record goes on. A job that waits for an outcome ends when this arrives, with a `GivenUpError`, so
that it can remove what was made for it. If the client has come back before and asks again, the job goes on.

Nothing here is part of the state. After a restart the client sends the request again, which begins the job again.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from transfer_queue.core.context import Context, CoreService
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.events.registry import Caller, Decision, Ends, GivenUpError, Steps, Until
from transfer_queue.errors import TransferQueueError

_AT_ONCE = Until(-math.inf)


@dataclass(eq=False)
class _Job:
    key: Hashable
    steps: Steps
    ends: Ends
    caller: Caller | None
    until: Until = _AT_ONCE
    is_given_up: bool = False


class Jobs(CoreService):
    """The jobs that are under way."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._by_key: dict[Hashable, _Job] = {}
        """What a job is for -> the job. A job of a request has its client and sequence as key."""
        self._ready: deque[_Job] = deque()
        """The jobs that go on in another turn; the first one does the next step."""
        self._resting: list[_Job] = []
        """The jobs that go on after each event."""
        self._working: dict[int, _Job] = {}
        """Number -> the job that waits for its outcome."""
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._by_key

    def begin(self, steps: Steps, key: Hashable, ends: Ends = Ends.NEVER, caller: Caller | None = None) -> list[Effect]:
        """Begin a job with its first step. caller: gets the reply."""
        job = self._by_key[key] = _Job(key, steps, ends, caller)
        return self._step(job)

    def attach(self, caller: Caller) -> bool:
        """Answer a request that is sent again on its newest connection. Returns whether it has a job."""
        job = self._by_key.get(caller.waiter)
        if job is None or job.caller is None:
            return False
        newest = max(job.caller.peer, caller.peer)  # the numbers of connections ascend
        job.caller, job.is_given_up = Caller(caller.client, newest, job.caller.envelope), False
        return True

    def describe(self, key: Hashable) -> str:
        """Return what a job waits for; "" if it does not wait, or there is none."""
        job = self._by_key.get(key)
        return "" if job is None else job.until.text

    def next_due(self) -> float | None:
        """See `CoreService.next_due`."""
        return self.context.now if self._ready else min((job.until.time for job in self._resting), default=None)

    def on_due(self) -> list[Effect]:
        """Do one step of the next job."""
        return self._step(self._ready.popleft()) if self._ready else []

    def after_event(self) -> list[Effect]:
        """Do one step of each job that goes on after each event."""
        resting, self._resting = self._resting, []
        return [effect for job in resting for effect in self._step(job)]

    def resume(self, number: int, outcome: Any) -> list[Effect]:
        """Go on with the job that has waited for this outcome, which is raised there if it is an exception."""
        job = self._working.pop(number)
        if job.is_given_up:
            return self._step(job, error=GivenUpError(outcome))
        if isinstance(outcome, BaseException):
            return self._step(job, error=outcome)
        return self._step(job, outcome)

    def is_working(self) -> bool:
        """See `CoreService.is_working`. A job that rests waits for others."""
        return bool(self._ready)

    def on_connection_ended(self, client: str, peer: int) -> None:
        """See `CoreService.on_connection_ended`."""
        for job in list(self._by_key.values()):
            caller = job.caller
            if caller is None or job.ends is not Ends.WITH_CONNECTION:
                continue
            if (caller.client, caller.peer) == (client, peer):
                self._give_up(job)

    def on_client_left(self, client: str, announced: bool) -> list[Effect]:
        """See `CoreService.on_client_left`."""
        for job in list(self._by_key.values()):
            if job.caller is not None and job.ends is Ends.WITH_CLIENT and job.caller.client == client:
                self._give_up(job)
        return []

    def _give_up(self, job: _Job) -> None:
        job.is_given_up = True
        for waiting in (self._resting, self._ready):
            if job in waiting:
                waiting.remove(job)
                del self._by_key[job.key]

    def _step(self, job: _Job, outcome: Any = None, error: BaseException | None = None) -> list[Effect]:
        log, caller = self.context.log, job.caller
        log.actor = "" if caller is None else caller.client
        try:
            yielded = job.steps.send(outcome) if error is None else job.steps.throw(error)
        except StopIteration as end:
            del self._by_key[job.key]
            if caller is None:
                return end.value or []
            return [] if job.is_given_up else self._answer(caller, end.value)
        except GivenUpError:
            del self._by_key[job.key]
            return []
        except TransferQueueError as refusal:
            del self._by_key[job.key]
            if caller is None or job.is_given_up:
                return []
            return self._answer(caller, self.context.failure(refusal))
        finally:
            log.actor = ""
        if yielded is None:
            self._ready.append(job)
        elif isinstance(yielded, Until):
            job.until = yielded
            self._resting.append(job)
        else:
            number = next(self._numbers)
            self._working[number] = job
            return yielded.begin(number, lambda outcome: self.resume(number, outcome))
        return []

    def _answer(self, caller: Caller, reply: Any) -> list[Effect]:
        """Reply to a request. The records of a decision are applied even if its client is gone."""
        if not isinstance(reply, Decision):
            return [self.context.answer(caller.waiter, caller.peer, reply)]
        if caller.client in self.context.connections.peers:
            return self.context.commit(caller, reply)
        self.context.log.apply_all(reply.records)
        return []
