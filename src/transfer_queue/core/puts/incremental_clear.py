"""Clears of many rows, and the end of big partitions, in steps between which others are served.

A step is a request like the one that was sent, for some of its rows; the last is answered. Whoever dies in between
leaves a state in which some rows are cleared, and its request, which was not answered, clears the others.
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

STEP = CHUNK // 2  # rows; half a millisecond, or a few where they have keys and tags

Clear = Union[ClearRows, ClearKeys, ClearPartition]


class ClearJob:
    """A request that is being carried out. done: of the rows or keys that it names.

    partition: the one that was meant; another one of its name is left alone.
    """

    def __init__(self, caller: Caller, partition: Partition) -> None:
        self.caller = caller
        self.partition = partition
        self.done = 0


class IncrementalClears:
    """jobs: those under way, each has a step in turn."""

    def __init__(self) -> None:
        self.jobs: deque[ClearJob] = deque()

    def begin(self, state: State, caller: Caller) -> bool:
        """Takes a request on where it is a long one; the same again is answered on the newest connection."""
        body = caller.envelope.body
        if not isinstance(body, (ClearRows, ClearKeys, ClearPartition)):
            return False
        for job in self.jobs:
            if job.caller.waiter == caller.waiter:
                job.caller = job.caller.on_newest(caller.peer)
                return True
        partition = state.partitions.get(body.partition)
        if partition is None or _length(partition, body) <= STEP:
            return False
        if isinstance(body, ClearRows) and len(body.rows) % 8:
            return False  # what is no column is refused before any row is cleared
        self.jobs.append(ClearJob(caller, partition))
        return True

    def step(self, core: ControllerContext) -> list[Effect]:
        """One step of the job whose turn it is."""
        if not self.jobs:
            return []
        job = self.jobs.popleft()
        body: Any = job.caller.envelope.body
        decision, last = Decision([], Done), True
        try:
            if core.state.partitions.get(body.partition) is job.partition:
                check_epoch(core.state, body)
                part, last = _part(job, body)
                decided = handler(type(part))(core, job.caller, part)
                assert isinstance(decided, Decision)
                decision = decided
        except TransferQueueError as error:
            return [core.failure(job.caller.peer, job.caller.envelope.sequence, error)]
        if last and job.caller.client in core.connections:
            return core.commit(job.caller, decision)
        for record in decision.records:
            core.apply(record)
        if not last:
            self.jobs.append(job)
        return []


def _length(partition: Partition, body: Clear) -> int:
    if isinstance(body, ClearRows):
        return len(body.rows) // 8
    return len(body.keys) if isinstance(body, ClearKeys) else partition.rows.count


def _part(job: ClearJob, body: Clear) -> tuple[Clear, bool]:
    """What is asked for in the next step, and whether it is the last."""
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
