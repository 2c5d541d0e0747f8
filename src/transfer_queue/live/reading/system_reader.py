"""Reads one system for the page, as a client that reads and writes no samples."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence

from msgspec.structs import replace

from transfer_queue.client.control_client import ENDED_ERRORS, ControlClient
from transfer_queue.errors import TransferQueueError, WaitTimeoutError
from transfer_queue.live.reading.partition_counter import GroupCounts, PartitionCounter
from transfer_queue.live.view.flow_parts import active_partitions, last_task
from transfer_queue.live.view.observation import Explained, Observation
from transfer_queue.messages.base import Done
from transfer_queue.messages.queries import Explain
from transfer_queue.messages.reports.overview import MeasureServers, ProgressReply, ReadProgress, ServersReply
from transfer_queue.messages.reports.progress import PartitionProgress
from transfer_queue.messages.system import SystemStatus
from transfer_queue.timeline.account import Account
from transfer_queue.timeline.event_table import EventTable
from transfer_queue.timeline.recording import Recording

ANSWER_SECONDS = 1.5  # a controller that does not reply within this time is being restarted, or is overloaded
SERVERS_SECONDS = 5.0  # the units have one second of it
SLOW_SECONDS = 2.0  # between two reads of the parts that the page shows every two seconds
NAMED = 24  # partitions whose progress is read each time
PAGE = 24  # others, which are read in turn
JUDGED = 64  # partitions whose queues the account of time considers
EXPLAINED = 2  # waits that are explained
EXPLAIN_SECONDS = 4.0  # between two explanations of the same wait
COSTLY_SECONDS = 0.02  # an explanation that takes longer is asked for less often
RARELY = 30.0
COUNTED_ROWS = 1 << 17  # groups of larger partitions are not counted
SAMPLE = re.compile(r"\bsample (\d+)\b")


class SystemReader:
    """Reads one system repeatedly. It is used by one thread.

    Args:
        client: The client of the system.
        logs: The folder of the logs.
    """

    def __init__(self, client: ControlClient, logs: str = "") -> None:
        self._client = client
        self._logs = logs
        self.recording = Recording()
        """What happened."""
        self.own_clients = 1
        """The connected clients that belong to this process."""
        self._partitions: dict[str, tuple[int, PartitionProgress]] = {}
        self.active: list[str] = []
        """The partitions that are claimed or put into, the most recent first."""
        self._newest: list[str] = []
        self._last = ""
        self._after = 0
        self._servers: tuple[float, ServersReply] | None = None
        self._servers_before: tuple[float, ServersReply] | None = None
        self._explained: dict[tuple[str, str, tuple[str, ...]], Explained] = {}
        self._explain_due: dict[tuple[str, str, tuple[str, ...]], float] = {}
        self.groups: dict[str, GroupCounts] = {}
        """See `Observation`."""
        self._counters: dict[str, PartitionCounter] = {}
        self._slow_due = 0.0

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def read(self) -> Observation:
        """Read what has happened since the last time.

        Raises:
            WaitTimeoutError: The controller does not reply.
            ConnectionLostError: The system has ended.
            AttachError: The system has ended.
            AuthenticationError: The system has ended, and another one has its address.
        """
        self._client.read_timeline(self.recording, timeout=ANSWER_SECONDS)
        request = ReadProgress([*self.active, *self._newest][:NAMED], page=PAGE, after=self._after)
        reply = self._client.request(request, ProgressReply, ANSWER_SECONDS)
        self._learn(reply, set(request.partitions))
        now = time.monotonic()
        if now >= self._slow_due:
            self._slow_due = now + SLOW_SECONDS
            self._measure_servers(now)
        partitions = {name: progress for name, (_, progress) in self._partitions.items()}
        servers, before = self._servers, self._servers_before
        return Observation(
            self.recording,
            self._judged(reply.status),
            partitions,
            self._newest,
            self.active,
            reply.count,
            reply.rows,
            reply.nbytes,
            None if servers is None else servers[1],
            None if before is None else before[1],
            0.0 if servers is None or before is None else servers[0] - before[0],
            self._explained,
            self.groups,
            self._logs,
            self.own_clients,
        )

    def look_closer(self, table: EventTable, account: Account) -> None:
        """Read what the next view needs in addition: which partitions are active, why claims wait, the groups."""
        self._last = last_task(account)
        self.active = active_partitions(account)
        self._explain(account)
        takes = {task: list(fields) for task, fields in table.takes.items() if task}
        for name in self.active[:3]:
            partition = self._partitions.get(name)
            if partition is None or not self._last or partition[1].rows > COUNTED_ROWS:
                self.groups.pop(name, None)
                continue
            counter = self._counters.setdefault(name, PartitionCounter(self._client, name))
            groups = counter.count_groups(takes, self._last)
            if groups is None:
                self.groups.pop(name, None)
            else:
                self.groups[name] = groups
        self._counters = {name: counter for name, counter in self._counters.items() if name in self.active[:3]}

    def _learn(self, reply: ProgressReply, requested: set[str]) -> None:
        """Keep the progress of the partitions, and forget those that do not exist any more."""
        for number, progress in zip(reply.numbers, reply.status.partitions):
            self._partitions.pop(progress.name, None)
            self._partitions[progress.name] = number, progress
        reported = {progress.name for progress in reply.status.partitions}
        last = reply.next or math.inf
        removed = [
            name
            for name, (number, _) in self._partitions.items()
            if name not in reported and (name in requested or self._after < number <= last)
        ]
        for name in removed:
            del self._partitions[name]
        self._after, self._newest = reply.next, reply.newest
        self._partitions = dict(sorted(self._partitions.items(), key=lambda each: each[1][0]))

    def _judged(self, status: SystemStatus) -> SystemStatus:
        """Return the status with those partitions in which something may queue."""
        active = set(self.active)
        chosen = [progress for name, (_, progress) in self._partitions.items() if name in active]
        unfinished = unfinished_partitions([progress for _, progress in self._partitions.values()])
        others = [progress for progress in unfinished if progress.name not in active]
        chosen += others[-(JUDGED - len(chosen)) :]
        return replace(status, partitions=chosen)

    def _measure_servers(self, now: float) -> None:
        try:
            measured = self._client.request(MeasureServers(), ServersReply, SERVERS_SECONDS)
        except WaitTimeoutError:
            self._servers = None
            return
        self._servers_before = self._servers
        self._servers = now, measured

    def _explain(self, account: Account) -> None:
        """Ask why the claims wait that cost most."""
        recording, now = self.recording, time.monotonic()
        cost: dict[tuple[str, str, tuple[str, ...]], tuple[float, int]] = {}
        for wait in recording.open:
            if wait.lane > 0 and not wait.holds and not wait.ahead and recording.now - wait.since > 0.2:
                task = recording.lanes[wait.lane].task
                key = task, wait.partition, tuple(wait.fields)
                share = account.tasks[task].waits if task in account.tasks else 0.0
                cost[key] = cost.get(key, (0.0, 0))[0] + share, wait.rows
        chosen = sorted(cost, key=lambda key: -cost[key][0])[:EXPLAINED]
        self._explained = {key: text for key, text in self._explained.items() if key in cost}
        self._explain_due = {key: due for key, due in self._explain_due.items() if key in cost}
        for key in chosen:
            if now < self._explain_due.get(key, 0.0):
                continue
            task, partition, fields = key
            began = time.monotonic()
            request = Explain(partition, task=task, fields=list(fields), count=cost[key][1])
            try:
                text = str(self._client.request(request, Done, ANSWER_SECONDS).value)
            except ENDED_ERRORS:
                raise
            except TransferQueueError as error:
                text = str(error)
            took = time.monotonic() - began
            self._explain_due[key] = now + (RARELY if took > COSTLY_SECONDS else EXPLAIN_SECONDS)
            named = SAMPLE.search(text)
            self._explained[key] = Explained(text[:2000], int(named[1]) if named else None)


def unfinished_partitions(partitions: Sequence[PartitionProgress]) -> list[PartitionProgress]:
    """Return the partitions in which a task of their pipeline has not consumed all rows, even if it has not come yet.

    Tasks are of one pipeline if they have claimed from the same partition, or if a third task has done so with both.
    """
    pipeline: dict[str, set[str]] = {}
    for each in partitions:
        tasks = {task.name for task in each.tasks}
        joined = tasks.union(*(pipeline[task] for task in tasks if task in pipeline))
        for task in joined:
            pipeline[task] = joined
    return [
        each for each in partitions if each.rows and each.tasks and _consumed_by(each) < pipeline[each.tasks[0].name]
    ]


def _consumed_by(partition: PartitionProgress) -> set[str]:
    return {task.name for task in partition.tasks if task.consumed >= partition.rows}
