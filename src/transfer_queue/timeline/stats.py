"""The figures of `TransferQueueClient.stats`: the account of time as a flat dict, with names that stay the same."""

from __future__ import annotations

import re

from transfer_queue.messages.descriptors import DISK, MEMORY, MIRROR, STORE
from transfer_queue.messages.system import SystemStatus
from transfer_queue.timeline.account import Account, TaskAccount, make_account
from transfer_queue.timeline.event_table import EventTable
from transfer_queue.timeline.events import EventKind
from transfer_queue.timeline.recording import Recording

WINDOW = 60.0  # seconds of the first figures
MAX_TASKS = 16
MAX_CHARACTERS = 64  # the length of a task in a name
PREFIX = "tq"
TIERS = (MEMORY, DISK, MIRROR, STORE)

_OTHER_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]")


class TaskLabels:
    """The names of tasks in the names of figures. A task keeps its label, and only the first tasks get one.

    Example:
        >>> labels = TaskLabels()
        >>> labels.of("reward model"), labels.of("reward/model"), labels.of("train")
        ('reward_model', 'reward_model_2', 'train')
    """

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}

    def of(self, task: str) -> str | None:
        """Return the label of a task; None for clients without a task, and if there are too many tasks."""
        label = self._labels.get(task)
        if label is None and task and len(self._labels) < MAX_TASKS:
            label = self._labels[task] = self._unused(_OTHER_CHARACTERS.sub("_", task[:MAX_CHARACTERS]))
        return label

    def _unused(self, base: str) -> str:
        used = {*self._labels.values(), *TIERS}
        label, number = base, 1
        while label in used:
            number += 1
            label = f"{base}_{number}"
        return label


def make_stats(recording: Recording, status: SystemStatus, since: float | None, labels: TaskLabels) -> dict[str, float]:
    """Return the figures of the time from `since` until the last event that was read.

    Args:
        recording: The events.
        status: The progress of the partitions of the same time.
        since: When the time begins, in Unix seconds; None for the last minute. What the recording does not have any
            more is left out.
        labels: The names of tasks.
    """
    start = _first_moment(recording, since)
    seconds = max(recording.now - start, 0.0)
    table = EventTable(recording)
    puts = table.of(EventKind.PUT)
    reads = table.of(EventKind.READ)
    put_bytes, read_bytes = (float(each.column("bytes")[each.first_after(start) :].sum()) for each in (puts, reads))
    account = make_account(table, status, start, recording.now)
    stats = {
        f"{PREFIX}/seconds": seconds,
        **_system_figures(status),
        f"{PREFIX}/put_bytes_rate": put_bytes / max(seconds, 1e-9),
        f"{PREFIX}/read_bytes_rate": read_bytes / max(seconds, 1e-9),
        f"{PREFIX}/tasks": float(sum(bool(name) for name in account.tasks)),
    }
    for task in account.tasks.values():
        label = labels.of(task.name)
        if label is not None:
            figures = _task_figures(account, task)
            stats |= {f"{PREFIX}/{label}/{name}": float(value) for name, value in figures.items()}
    return stats


def _first_moment(recording: Recording, since: float | None) -> float:
    """Return the first moment that is measured: earlier times are not known, or not requested."""
    start = max(recording.now - WINDOW if since is None else since, recording.now - recording.seconds)
    if since is None and recording.from_boot:
        start = max(start, recording.start)
    if len(recording.events) >= recording.limit:
        start = max(start, recording.start)
    return start


def _system_figures(status: SystemStatus) -> dict[str, float]:
    tasks = [task for partition in status.partitions for task in partition.tasks]
    figures = {
        "partitions": len(status.partitions),
        "rows": sum(each.rows for each in status.partitions),
        "bytes": sum(each.nbytes for each in status.partitions),
        "waiting_claims": sum(each.waiting for each in tasks),
        "waiting_puts": sum(each.waiting_puts for each in status.partitions),
        "longest_wait": max((each.longest_wait for each in tasks), default=0.0),
    }
    for tier in TIERS:
        units = [each for each in status.units if each.tier == tier]
        if units:
            figures[f"{tier}/held_bytes"] = sum(each.leased for each in units)
        if units and all(each.capacity for each in units):
            figures[f"{tier}/capacity_bytes"] = sum(each.capacity for each in units)
    return {f"{PREFIX}/{name}": float(value) for name, value in figures.items()}


def _task_figures(account: Account, task: TaskAccount) -> dict[str, float]:
    figures: dict[str, float] = {
        "workers": task.alive,
        "workers_gone": task.lost,
        "wait_share": task.waits,
        "held_share": task.held,
        "rate": task.claim_rate if task.takes else task.put_rate,
    }
    if task.takes:
        figures |= {"work_share": task.works, "queue_rows": task.queue_rows}
    if task.puts:
        figures["put_rate"] = task.put_rate
    ages, staleness = account.ages.get(task.name), account.staleness.get(task.name)
    if ages is not None:
        figures |= {"time_in_queue_p50": ages.median, "time_in_queue_max": ages.largest}
    if staleness is not None:
        figures |= {"staleness_mean": staleness.mean, "staleness_max": staleness.largest}
    return figures
