"""Clears many rows or a large partition in steps, so that the controller serves other requests in between.

Each step handles a request like the original for some of its rows, and the last step sends the reply. If the controller
or the client dies in between, some rows are cleared, and the request, when it is sent again, clears the others.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Union

import msgspec

from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.control.epochs import check_epoch
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.events.registry import Caller, Decision, handler
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.row_table import CHUNK
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.messages.puts import ClearKeys, ClearRows

STEP = CHUNK // 2  # rows; they take half a millisecond, or a few milliseconds if they have keys and tags

Clear = Union[ClearRows, ClearKeys, ClearPartition]


class ClearJob:
    """A clear that is carried out in steps."""

    def __init__(self, caller: Caller, partition: Partition) -> None:
        self.caller = caller
        self.partition = partition
        """The partition at the first step. A newer one of the same name is not cleared."""
        self.done = 0
        """The number of rows or keys of the request that are done."""


class IncrementalClears:
    """The clears that are carried out in steps."""

    def __init__(self) -> None:
        self.jobs: deque[ClearJob] = deque()
        """The next one does a step and goes to the end."""

    def begin(self, state: State, caller: Caller) -> bool:
        """Start to carry out a request in steps if it is a long clear. Returns whether it is.

        A request that is sent again is answered on its newest connection.
        """
        body = caller.envelope.body
        if not isinstance(body, (ClearRows, ClearKeys, ClearPartition)):
            return False
        for job in self.jobs:
            if job.caller.waiter == caller.waiter:
                job.caller = job.caller.with_newest_peer(caller.peer)
                return True
        partition = state.partitions.get(body.partition)
        if partition is None or _length(partition, body) <= STEP:
            return False
        if isinstance(body, ClearRows) and len(body.rows) % 8:
            return False  # the handler refuses an invalid column before any row is cleared
        self.jobs.append(ClearJob(caller, partition))
        return True

    def step(self, context: ControllerContext) -> list[Effect]:
        """Do one step of the next clear."""
        if not self.jobs:
            return []
        job = self.jobs.popleft()
        body: Any = job.caller.envelope.body
        decision, last = Decision([], Done), True
        try:
            if context.state.partitions.get(body.partition) is job.partition:
                check_epoch(context.state, body)
                part, last = _part(job, body)
                decided = handler(type(part))(context, job.caller, part)
                assert isinstance(decided, Decision)
                decision = decided
        except TransferQueueError as error:
            return [context.failure(job.caller.peer, job.caller.envelope.sequence, error)]
        if last and job.caller.client in context.connections.peers:
            return context.commit(job.caller, decision)
        context.timeline.actor = job.caller.client
        for record in decision.records:
            context.log.apply(record)
        context.timeline.actor = ""
        if not last:
            self.jobs.append(job)
        return []


def _length(partition: Partition, body: Clear) -> int:
    if isinstance(body, ClearRows):
        return len(body.rows) // 8
    return len(body.keys) if isinstance(body, ClearKeys) else partition.rows.count


def _part(job: ClearJob, body: Clear) -> tuple[Clear, bool]:
    """Return the request of the next step, and whether it is the last one."""
    if isinstance(body, ClearPartition):
        if job.partition.rows.count <= STEP:
            return body, True
        chunk = next(iter(job.partition.rows.chunks.values()))
        rows = chunk.index[: chunk.size][chunk.alive[: chunk.size] == 1][:STEP]
        return ClearRows(body.partition, rows.astype("<i8").tobytes()), False
    start = job.done
    job.done += STEP
    last = job.done >= _length(job.partition, body)
    if isinstance(body, ClearRows):
        return msgspec.structs.replace(body, rows=body.rows[8 * start : 8 * job.done]), last
    return msgspec.structs.replace(body, keys=body.keys[start : job.done]), last
