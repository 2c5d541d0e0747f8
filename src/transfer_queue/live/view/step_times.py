"""How long each step of the training took: from one policy version to the next, or from one partition to the next."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from transfer_queue.live.payload import StepsView, StepTime
from transfer_queue.timeline.account import Account
from transfer_queue.timeline.events import EventKind

MOST_STEPS = 32


class StepTimes:
    """Remembers when steps began, because a step may be longer than the time that a recording keeps."""

    def __init__(self) -> None:
        self._versions: dict[int, float] = {}
        self._partitions: dict[str, float] = {}
        self._task: str | None = None

    def update(self, account: Account, last: str) -> StepsView:
        """Return the last steps.

        Args:
            account: What has happened.
            last: The task at the end of the pipeline. A step without policy versions is the time between its first
                claims of two partitions.
        """
        policies = account.table.of(EventKind.POLICY)
        for version, time in zip(policies.rows.tolist(), policies.time.tolist()):
            if version > max(self._versions, default=-1):
                self._versions[int(version)] = time
        if last != self._task:
            self._task, self._partitions = last, {}
        self._note_partitions(account, last)
        by_version = bool(self._versions)
        begun = {f"v{version}": at for version, at in self._versions.items()} if by_version else self._partitions
        for known in (self._versions, self._partitions):
            while len(known) > MOST_STEPS + 1:
                del known[next(iter(known))]  # type: ignore[arg-type]
        # A version names the step that it ends; a partition names the step that its first claim begins.
        steps = [
            StepTime(name if by_version else before, round(end, 2), round(end - start, 2))
            for (before, start), (name, end) in pairwise(begun.items())
            if not math.isnan(start)
        ]
        since = next(reversed(begun.values()), math.nan)
        return StepsView(
            "version" if by_version else "partition", last, steps[-MOST_STEPS:],
            None if math.isnan(since) else round(since, 2),
        )  # fmt: skip

    def _note_partitions(self, account: Account, task: str) -> None:
        table, claims = account.table, account.table.of(EventKind.CLAIM)
        if task not in table.workers.tasks:
            return
        mine = np.flatnonzero(claims.task == table.workers.tasks.index(task))
        numbers, first = np.unique(claims.partition[mine], return_index=True)
        for number, at in sorted(zip(numbers.tolist(), first.tolist()), key=lambda each: each[1]):
            name, time = table.recording.partitions[number], float(claims.time[mine[at]])
            if not self._partitions:
                self._partitions[name] = math.nan  # it may have been claimed before the recording begins
            elif name not in self._partitions and not time <= next(reversed(self._partitions.values())):
                self._partitions[name] = time
