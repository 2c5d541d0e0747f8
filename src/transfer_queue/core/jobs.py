"""Work that takes several turns of the controller, so that it serves other requests in between.

A job is a generator. A handler that returns one begins it; the value that the generator returns is the reply, and an
error of the tree is one, too. What it yields says when it goes on:

    None              in another turn; each turn does one step of one job
    `Until(time)`     after each event, and at this time at the latest

A request that is sent again while its job is under way is answered on the newest connection. `Ends` says when a job is
given up: a job that has changed nothing ends with its connection; one that has written a record goes on.

Nothing here is part of the state. After a restart the client sends the request again, which begins the job again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.events.registry import Caller, Decision, Ends, Steps, Until
from transfer_queue.core.service import Service
from transfer_queue.errors import TransferQueueError

_AT_ONCE = Until(-math.inf)


@dataclass(eq=False)
class _Job:
    key: Hashable
    steps: Steps
    ends: Ends
    caller: Caller | None
    until: Until = _AT_ONCE


class Jobs(Service):
    """The jobs that are under way."""

    def __init__(self, context: ControllerContext) -> None:
        super().__init__(context)
        self._ready: deque[_Job] = deque()
        """The jobs that go on in another turn; the first one does the next step."""
        self._by_key: dict[Hashable, _Job] = {}
        """What a job is for -> the job. A job of a request has its client and sequence as key."""
        self._resting: list[_Job] = []
        """The jobs that go on after each event."""

    def __contains__(self, key: Hashable) -> bool:
        return key in self._by_key

    def begin(self, steps: Steps, key: Hashable, ends: Ends = Ends.NEVER, caller: Caller | None = None) -> None:
        """Begin a job, whose first step is done in the next turn. caller: gets the reply."""
        job = self._by_key[key] = _Job(key, steps, ends, caller)
        self._ready.append(job)

    def attach(self, caller: Caller) -> bool:
        """Answer a request that is sent again on its newest connection. Returns whether it has a job."""
        job = self._by_key.get(caller.waiter)
        if job is None or job.caller is None:
            return False
        job.caller = job.caller.with_newest_peer(caller.peer)
        return True

    def describe(self, key: Hashable) -> str:
        """Return what a job waits for; "" if it does not wait, or there is none."""
        job = self._by_key.get(key)
        return "" if job is None else job.until.text

    def next_due(self) -> float | None:
        """See `Service.next_due`."""
        return self.context.now if self._ready else min((job.until.time for job in self._resting), default=None)

    def on_due(self) -> list[Effect]:
        """Do one step of the next job."""
        return self._step(self._ready.popleft()) if self._ready else []

    def after_event(self) -> list[Effect]:
        """Do one step of each job that goes on after each event."""
        resting, self._resting = self._resting, []
        return [effect for job in resting for effect in self._step(job)]

    def is_working(self) -> bool:
        """See `Service.is_working`. A job that rests waits for others."""
        return bool(self._ready)

    def on_connection_ended(self, client: str, peer: int) -> None:
        """See `Service.on_connection_ended`."""
        for job in list(self._by_key.values()):
            caller = job.caller
            if caller is None or job.ends is Ends.NEVER:
                continue
            if (caller.client, caller.peer) == (client, peer):
                self._forget(job)

    def _forget(self, job: _Job) -> None:
        del self._by_key[job.key]
        if job in self._resting:
            self._resting.remove(job)
        if job in self._ready:
            self._ready.remove(job)
        job.steps.close()

    def _step(self, job: _Job) -> list[Effect]:
        log, caller = self.context.log, job.caller
        log.actor = "" if caller is None else caller.client
        try:
            yielded = next(job.steps)
        except StopIteration as end:
            del self._by_key[job.key]
            return [] if caller is None else self._answer(caller, end.value)
        except TransferQueueError as error:
            del self._by_key[job.key]
            if caller is None:
                raise
            return [self.context.failure(caller.peer, caller.envelope.sequence, error)]
        finally:
            log.actor = ""
        if yielded is None:
            self._ready.append(job)
        else:
            job.until = yielded
            self._resting.append(job)
        return []

    def _answer(self, caller: Caller, reply: Any) -> list[Effect]:
        """Reply to a request. The records of a decision are applied even if its client is gone."""
        if not isinstance(reply, Decision):
            return [Send(caller.peer, caller.envelope.sequence, reply)]
        if caller.client in self.context.connections.peers:
            return self.context.commit(caller, reply)
        for record in reply.records:
            self.context.log.apply(record)
        return []
