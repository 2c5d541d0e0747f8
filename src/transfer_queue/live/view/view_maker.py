"""Makes the parts of a view out of one read of a system, and remembers how long the last steps of the training took."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from transfer_queue.display import worker_text
from transfer_queue.errors import ConnectionLostError
from transfer_queue.live import payload
from transfer_queue.live.answers import LanesAnswer
from transfer_queue.live.reading.system_reader import SLOW_SECONDS, SystemReader
from transfer_queue.live.view import flow_parts, store_parts
from transfer_queue.live.view.lane_book import LaneBook
from transfer_queue.live.view.observation import Observation
from transfer_queue.live.view.opened_bands import OpenedBands
from transfer_queue.timeline.account import Account, make_account
from transfer_queue.timeline.events import EventKind
from transfer_queue.timeline.recording import Recording
from transfer_queue.timeline.verdict import judge_with_account

MAX_WAITING = 8
MAX_STEPS = 32
UNITS = "unit-"  # the names with which storage units connect to the controller begin with it

Parts = dict[str, object]
"""Name of an attribute of `LiveView` -> its value."""


class StepTimes:
    """Remembers when steps began, because a step may be longer than the time that a recording keeps.

    A step is the time from one policy version to the next, or from one partition to the next.
    """

    def __init__(self) -> None:
        self._versions: dict[int, float] = {}
        self._partitions: dict[str, float] = {}
        self._task: str | None = None

    def update(self, account: Account, last: str) -> payload.StepsView:
        """Return the last steps.

        Args:
            account: What has happened.
            last: The task at the end of the pipeline. A step without policy versions is the time between its first
                claims of two partitions.
        """
        policies = account.table.of(EventKind.POLICY)
        for version, began in zip(policies.rows.tolist(), policies.time.tolist()):
            if version > max(self._versions, default=-1):
                self._versions[int(version)] = began
        if last != self._task:
            self._task, self._partitions = last, {}
        self._note_partitions(account, last)
        by_version = bool(self._versions)
        begun = {f"v{version}": at for version, at in self._versions.items()} if by_version else self._partitions
        for known in (self._versions, self._partitions):
            while len(known) > MAX_STEPS + 1:
                del known[next(iter(known))]  # type: ignore[arg-type]
        # A version names the step that it ends; a partition names the step that its first claim begins.
        steps = [
            payload.StepTime(name if by_version else before, round(end, 2), round(end - start, 2))
            for (before, start), (name, end) in pairwise(begun.items())
            if not math.isnan(start)
        ]
        since = next(reversed(begun.values()), math.nan)
        return payload.StepsView(
            "version" if by_version else "partition", last, steps[-MAX_STEPS:],
            None if math.isnan(since) else round(since, 2),
        )  # fmt: skip

    def _note_partitions(self, account: Account, task: str) -> None:
        table, claims = account.table, account.table.of(EventKind.CLAIM)
        if task not in table.workers.tasks:
            return
        positions = np.flatnonzero(claims.task == table.workers.tasks.index(task))
        numbers, first = np.unique(claims.partition[positions], return_index=True)
        for number, at in sorted(zip(numbers.tolist(), first.tolist()), key=lambda each: each[1]):
            name, began = table.recording.partitions[number], float(claims.time[positions[at]])
            if not self._partitions:
                self._partitions[name] = math.nan  # it may have been claimed before the recording begins
            elif name not in self._partitions and not began <= next(reversed(self._partitions.values())):
                self._partitions[name] = began


class ViewMaker:
    """Makes the views of one system, one after the other.

    What a viewer needs in addition to the first view depends on what was sent before, so the maker keeps the rates and
    the lanes of the timeline.
    """

    def __init__(self, reader: SystemReader, describe: payload.SystemInfo) -> None:
        self._reader = reader
        self._system = describe
        self._book: LaneBook | None = None
        self._opened: OpenedBands | None = None
        self._account: Account | None = None
        self._steps = StepTimes()
        self._rates: dict[float, payload.RatePoint] = {}
        self._watched = ("", "")
        self._slow_due = 0.0
        self._slow: Parts = {}
        self.takes: Mapping[str, list[str]] = {}
        """Task -> the fields that its claims name."""
        self.last = ""
        """The task at the end of the pipeline."""
        self.renewed = True
        """Whether the last view cannot be reached by a `delta`."""

    def make(self) -> tuple[float, Parts]:
        """Read the system. Returns the time, and the parts of a `delta` before equal ones are left out.

        Raises what `SystemReader.read` raises.
        """
        seen = self._reader.read()
        recording = seen.recording
        verdict, judged = judge_with_account(recording, seen.status)
        table = judged.table
        # The verdict may be about a longer time than the one whose rates and shares are shown.
        start = max(recording.now - payload.WINDOW_SECONDS, recording.start)
        account = make_account(table, seen.status, start, recording.now)
        self._account = account
        self._reader.look_closer(table, account)
        seen.active, seen.groups = self._reader.active, self._reader.groups
        last = self.last = flow_parts.last_task(account)
        self.takes = {task: list(fields) for task, fields in table.takes.items() if task}
        tasks = flow_parts.task_parts(account)
        names = [task.name for task in tasks if not task.joined]
        parts: Parts = {
            "system": self._system,
            "verdict": flow_parts.verdict_part(verdict, last),
            "rates": self._new_rates(account, last, verdict.stage or last),
            "step": flow_parts.step_part(seen, account, last),
            "steps": self._steps.update(account, last),
            "tasks": tasks,
            "queues": flow_parts.queue_parts(account, names),
            "fields": flow_parts.field_parts(account, names),
            "life": flow_parts.life_parts(account, last),
            "timeline": self._update_book(account),
        }
        now = time.monotonic()
        if now >= self._slow_due:
            self._slow_due = now + SLOW_SECONDS * 0.9
            self._slow = self._make_slow(seen, account, last)
        parts |= self._slow
        parts["clients"] = _clients(seen, empty=_is_empty(seen))
        parts["state"] = payload.SystemState(
            "empty" if _is_empty(seen) else "live", self._system.started, _next_step(seen) if _is_empty(seen) else ""
        )
        return round(recording.now, 3), parts

    def full_parts(self) -> Parts:
        """Return the parts that a `full` has instead of those of the last `make`."""
        if self._account is None or self._book is None:
            return {}
        return {"timeline": self._book.timeline(self._account), "rates": list(self._rates.values())}

    def lanes(self, task: str, first: int, count: int, after: str) -> LanesAnswer | None:
        """Return ranks of a band as of the last `make`; see `OpenedBands.answer`. None if there is no such band.

        Raises:
            ConnectionLostError: Nothing was read of the system yet.
        """
        if self._account is None or self._book is None or self._opened is None:
            raise ConnectionLostError("the page has not reached the system yet; try again")
        joined = self._book.joined.get(task)
        return None if joined is None else self._opened.answer(joined, self._account, task, first, count, after)

    def _update_book(self, account: Account) -> payload.Timeline:
        if self._book is None:
            self._book = LaneBook(account.table.recording.start)
            self._opened = OpenedBands(account.table.recording.start)
        timeline = self._book.update(account)
        self.renewed = self._book.renewed
        return timeline

    def _new_rates(self, account: Account, last: str, watched: str) -> list[payload.RatePoint]:
        """Return the points that are new. If another task is watched, these are all."""
        points = flow_parts.rate_points(account, last, watched)
        if (last, watched) != self._watched:
            self._watched = (last, watched)
            self._rates = {}
        known = max(self._rates, default=0.0)
        fresh = [point for point in points if point.t > known]
        self._rates.update((point.t, point) for point in fresh)
        oldest = account.table.recording.now - payload.HISTORY_SECONDS
        self._rates = {t: point for t, point in self._rates.items() if t >= oldest}
        return fresh

    def _make_slow(self, seen: Observation, account: Account, last: str) -> Parts:
        """Return the parts that are made every two seconds."""
        waits = flow_parts.wait_parts(seen, account)
        policy = store_parts.policy_part(seen, flow_parts.policy_since(account))
        version = 0 if policy is None else policy.version
        return {
            "waits": waits,
            "policy": policy,
            "ages": flow_parts.age_parts(account, last, version) if policy is not None else [],
            "groups": store_parts.group_parts(seen, last),
            "partitions": store_parts.partitions_part(seen, waits),
            "memory": store_parts.memory_part(seen),
            "servers": store_parts.servers_part(seen),
        }


def _is_empty(seen: Observation) -> bool:
    """Whether nothing was put yet."""
    return not seen.rows and not seen.status.counters.get("published_rows") and not len(seen.recording.events)


def _clients(seen: Observation, *, empty: bool) -> payload.ClientsView:
    waiting: dict[str, str] = {}
    recording: Recording = seen.recording
    for wait in recording.open if empty else ():
        if wait.lane > 0:
            lane = recording.lanes[wait.lane]
            what = "a put" if wait.holds else f"partition {wait.partition!r}"
            who = worker_text(lane.task, lane.rank, lane.pid, lane.host, lane.client)
            text = f"{who}: for {what}, since {recording.now - wait.since:.0f} s"
            waiting.setdefault(f"{lane.client} {wait.partition}", text)
    clients = sum(not client.startswith(UNITS) for client in recording.connected)
    return payload.ClientsView(max(clients - seen.own_clients, 0), list(waiting.values())[:MAX_WAITING])


def _next_step(seen: Observation) -> str:
    units = len(seen.status.units)
    up = 0 if seen.servers is None else sum(1 for unit in seen.servers.units if unit.server is not None)
    answering = f"the controller and {up} of {units} storage units answer" if seen.servers is not None else "it answers"
    return (
        f"Nothing was put yet; {answering}. If a rollout should have put by now, run `tq doctor` and check TQ_SYSTEM."
    )
