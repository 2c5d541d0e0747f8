"""The parts of a view about tasks: verdict, rates, step, flow, the life of a sample, and who waits."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np

from transfer_queue.live import payload
from transfer_queue.live.view.lane_book import reason_of_waiting, task_order
from transfer_queue.live.view.observation import Explained, Observation
from transfer_queue.messages.reports.timeline import Verdict
from transfer_queue.timeline.account import Account, TaskAccount
from transfer_queue.timeline.bottleneck import find_last_tasks
from transfer_queue.timeline.event_table import EventTable, sum_by
from transfer_queue.timeline.events import EventKind
from transfer_queue.timeline.spans import SpanState

MAX_TASKS = 16
MAX_FIELDS = 50
MAX_LETTERS = 64  # ranks of a task whose states are shown one by one
MAX_WAITS = 5
MAX_RANKS = 16  # the number of ranks that a wait names
RECENT = 10.0  # seconds in which a partition was claimed or put into
MAX_RECENT = 1 << 16  # events of this time
POINT = 2.0  # seconds of a point of the rates
OTHER = "other"

LETTERS = {
    SpanState.UNKNOWN: "x", SpanState.IDLE: "i", SpanState.WORKS: "W", SpanState.HELD: "h", SpanState.WAITS: "w",
    SpanState.GONE: "x",
}  # fmt: skip
HELD_REASONS = {
    "policy": "Its puts wait until the policy version advances (set_policy_version).",
    "capacity": "Its puts wait for free space.",
    "demand": "It waits until more groups are wanted (client.want).",
}
END_OF_HEADLINE = re.compile(": "), re.compile(r"; (?![^(]*\))")  # the second one is for a stopped system
STATE_OF = {"W": "works", "w": "waits", "h": "held", "i": "idle", "x": "gone"}


def last_task(account: Account) -> str:
    """Return the task at the end of the pipeline; of several, the one that claims most. "" if no task claims."""
    names = [name for name in find_last_tasks(account.table) if name in account.tasks and name]
    return max(names, key=lambda name: (account.tasks[name].claim_rate, account.tasks[name].alive), default="")


def verdict_part(verdict: Verdict, last: str) -> payload.VerdictView:
    """Return the verdict in two parts."""
    # "Stopped: nothing was dealt for 80 s; `train` waits ..."; otherwise "`reward` is the slowest stage: `train` ..."
    headline, detail = (*END_OF_HEADLINE[verdict.state == "stopped"].split(verdict.text, 1), "")[:2]
    if verdict.stage is not None and ": " in verdict.stage:
        headline, detail = verdict.text, ""
    return payload.VerdictView(
        verdict.state, verdict.text, headline, detail, verdict.stage, verdict.field, last,
        verdict.queue_rows, _time(verdict.since), verdict.cause, verdict.advice,
    )  # fmt: skip


def rate_points(account: Account, task: str, watched: str) -> list[payload.RatePoint]:
    """Return the rate of a task, and the queue of another one, by two seconds.

    The queue is computed backwards from what it is now, by what was put and claimed since.
    """
    table, recording = account.table, account.table.recording
    end = math.floor(recording.now / POINT) * POINT
    count = int(min(end - recording.start, payload.HISTORY_SECONDS) // POINT)
    if count <= 0:
        return []
    start = end - count * POINT
    claims, tasks = table.rows_over_time(EventKind.CLAIM, start, POINT, count), table.workers.tasks
    dealt, claimed = (claims[tasks.index(name)] if name in tasks else np.zeros(count) for name in (task, watched))
    queue = np.zeros(count)
    if watched in account.tasks:
        names = account.tasks[watched].takes
        arrived = [_rows_with_field(table, name, start, count) for name in names]
        least = min(arrived, key=lambda rows: float(rows.sum()), default=np.zeros(count))
        steps = (least - claimed)[::-1]
        now = account.tasks[watched].queue_rows
        queue = np.maximum(now - np.concatenate([[0.0], np.cumsum(steps)[:-1]]), 0.0)[::-1]
    times = start + POINT * np.arange(1, count + 1)
    rows = zip(times.tolist(), (dealt / POINT).tolist(), queue.tolist())
    return [payload.RatePoint(when, round(rate, 2), round(depth)) for when, rate, depth in rows]


def _rows_with_field(table: EventTable, name: str, start: float, count: int) -> np.ndarray:
    puts = table.of(EventKind.PUT)
    place = ((puts.time - start) / POINT).astype(np.int64)
    with_field = np.array([name in fields for fields in table.recording.fields], bool)[puts.fields]
    kept = with_field & (puts.time >= start) & (place < count)
    return np.bincount(place[kept], puts.rows[kept], minlength=count).astype(np.float64)


def step_part(seen: Observation, account: Account, task: str) -> payload.StepView | None:
    """Return how far the task at the end is with the partition that it claims."""
    name = claimed_partition(account, task)
    partition = seen.partitions.get(name)
    if partition is None:
        return None
    progress = next((each for each in partition.tasks if each.name == task), None)
    dealt = 0 if progress is None else progress.consumed_ever + progress.claimed
    produced = max((each.produced_ever for each in partition.fields), default=0)
    rows = max(produced, partition.rows, dealt) + partition.reserved
    rate = account.tasks[task].claim_rate if task in account.tasks else 0.0
    eta = round((rows - dealt) / rate, 1) if rate > 0 and partition.sealed else None
    return payload.StepView(name, dealt, rows, partition.sealed, eta)


def claimed_partition(account: Account, task: str) -> str:
    """Return the partition that a task claims now, or claimed last; "" if it has claimed none."""
    recording, claims = account.table.recording, account.table.of(EventKind.CLAIM)
    for wait in reversed(recording.open):
        if not wait.holds and wait.lane > 0 and recording.lanes[wait.lane].task == task:
            return wait.partition
    tasks = account.table.workers.tasks
    positions = np.flatnonzero(claims.task == (tasks.index(task) if task in tasks else -2))
    return recording.partitions[int(claims.partition[positions[-1]])] if len(positions) else ""


def active_partitions(account: Account) -> list[str]:
    """Return the partitions in which something happens.

    First the one that the last task claims, then that of the task before it, and so on to the producers; then the next
    one of each of them.
    """
    table, recording = account.table, account.table.recording
    weights: dict[int, Counter[str]] = defaultdict(Counter)
    for wait in recording.open:
        if wait.lane > 0:
            worker = int(table.workers.of_lane[wait.lane])
            weights[int(table.task_of_worker[worker])][wait.partition] += len(recording.events) + 1
    for kind in (EventKind.CLAIM, EventKind.PUT):
        events = table.of(kind)
        first = max(events.first_after(recording.now - RECENT), len(events) - MAX_RECENT)
        for numbers, count in sum_by(np.ones(len(events) - first), events.task[first:], events.partition[first:]):
            weights[numbers[0]][recording.partitions[numbers[1]]] += int(count)
    order = [table.workers.tasks.index(name) for name in reversed(task_order(account))]
    ranked = [[name for name, _ in weights[task].most_common(16) if name] for task in order if task in weights]
    active = dict.fromkeys(names[at] for at in range(16) for names in ranked if at < len(names))
    return list(active)[:16]


# ------------------------------------------------------------ tasks, queues, fields


def task_parts(account: Account) -> list[payload.TaskView]:
    """Return the tasks in the order of the flow."""
    order = [name for name in task_order(account) if name in account.tasks]
    order = [name for name in order if name or account.tasks[name].put_rate > 0]
    if len(order) > MAX_TASKS:
        weight = {name: account.tasks[name].alive + account.tasks[name].claim_rate for name in order}
        kept = set(sorted(order, key=lambda name: -weight[name])[: MAX_TASKS - 1])
        rest = [name for name in order if name not in kept]
        return [*(_task_part(account, name) for name in order if name in kept), _other_tasks(account, rest)]
    return [_task_part(account, name) for name in order]


def _task_part(account: Account, name: str) -> payload.TaskView:
    task = account.tasks[name]
    only_puts = bool(task.puts) and not task.takes
    letters = _letters(account, task, only_puts)
    text = "".join(letters[worker] for worker in letters)
    few = len(letters) <= MAX_LETTERS
    works = task.busy if only_puts else task.works
    return payload.TaskView(
        name, task.alive + task.lost, task.alive, task.lost,
        list(task.takes), list(task.puts), _rate(task.put_rate if only_puts else task.claim_rate), _rate(task.put_rate),
        _share(works), _share(task.waits), _share(task.held), _share(0.0 if only_puts else task.idle),
        {state: text.count(letter) for letter, state in STATE_OF.items()}, text if few else "",
    )  # fmt: skip


def _letters(account: Account, task: TaskAccount, only_puts: bool) -> dict[int, str]:
    """Return the state of each worker now, ordered by rank, of those that are connected or gone."""
    spans, workers = account.spans, account.table.workers
    states = np.append(spans.state, SpanState.UNKNOWN)[spans.newest]
    connected = account.table.connected if account.table.recording.connected else states != SpanState.GONE
    order = sorted(task.workers.tolist(), key=lambda each: (int(workers.rank[each]) < 0, int(workers.rank[each])))
    letters = {}
    for worker in order:
        state = SpanState(int(states[worker]))
        if worker in task.lost_workers:
            letters[worker] = "x"
        elif connected[worker]:
            idle = state in (SpanState.IDLE, SpanState.UNKNOWN)
            letters[worker] = ("W" if only_puts else "i") if idle else LETTERS[state]
    return letters


def _other_tasks(account: Account, names: list[str]) -> payload.TaskView:
    """Return the sum of several tasks."""
    parts = [account.tasks[name] for name in names]
    alive = max(sum(each.alive for each in parts), 1)

    def mean(values: Iterable[float]) -> float:
        return _share(sum(value * each.alive for value, each in zip(values, parts)) / alive)

    return payload.TaskView(
        OTHER, sum(each.alive + each.lost for each in parts), sum(each.alive for each in parts),
        sum(each.lost for each in parts),
        sorted({field for each in parts for field in each.takes})[:MAX_FIELDS],
        sorted({field for each in parts for field in each.puts})[:MAX_FIELDS],
        _rate(sum(each.claim_rate for each in parts)), _rate(sum(each.put_rate for each in parts)),
        mean(each.busy for each in parts), mean(each.waits for each in parts), mean(each.held for each in parts),
        0.0, {}, "", len(names),
    )  # fmt: skip


def queue_parts(account: Account, names: Iterable[str]) -> list[payload.QueueView]:
    """Return what queues before each of these tasks."""
    queues = []
    for name in names:
        task = account.tasks.get(name)
        if task is None or not task.takes:
            continue
        age = account.ages.get(name)
        queues.append(
            payload.QueueView(
                name, task.queue_rows, None if age is None else round(age.median, 2),
                None if age is None else round(age.largest, 2),
            )
        )  # fmt: skip
    return queues


def field_parts(account: Account, names: Iterable[str]) -> list[payload.FieldView]:
    """Return the fields in the order of the flow."""
    names = list(names)
    known = dict.fromkeys(field for name in names for field in account.tasks[name].puts)
    known.update(dict.fromkeys(field for name in names for field in account.tasks[name].takes))
    fields = list(known)
    views = []
    for field in fields[: MAX_FIELDS if len(fields) <= MAX_FIELDS else MAX_FIELDS - 1]:
        producers = account.producers_of(field)
        views.append(
            payload.FieldView(
                field, sorted(producers, key=lambda task: (-producers[task], task))[:MAX_TASKS],
                [name for name in names if field in account.tasks[name].takes],
                _rate(sum(producers.values())),
            )
        )  # fmt: skip
    if len(fields) > MAX_FIELDS:
        rest = set(fields[MAX_FIELDS - 1 :])
        rate = sum(flow.rows for flow in account.flows if flow.field in rest)
        views.append(payload.FieldView(OTHER, [], [], _rate(rate)))
    return views


def life_parts(account: Account, last: str) -> list[payload.LifePart]:
    """Return the way of a sample backwards from the last task, over the field that comes last to each task."""
    parts: list[payload.LifePart] = []
    task, seen = last, set[str]()
    while task in account.tasks and account.tasks[task].takes and task not in seen and len(parts) < 16:
        seen.add(task)
        stage, age = account.tasks[task], account.ages.get(task)
        if age is None:
            break
        parts = [
            payload.LifePart("queue", task, round(age.median, 2)),
            payload.LifePart("work", task, round(stage.step * stage.works, 2)),
            *parts,
        ]
        makers = {
            maker: account.ages[maker].median
            for field in stage.takes
            for maker in account.producers_of(field)
            if maker in account.ages and account.tasks[maker].takes
        }
        task = max(makers, key=lambda each: makers[each], default="")
    return parts


# ------------------------------------------------------------ waits


def wait_parts(seen: Observation, account: Account) -> list[payload.WaitView]:
    """Return who waits and for what, the most expensive first: the number of ranks times the share of their time."""
    recording, workers = account.table.recording, account.table.workers
    groups: dict[tuple[str, bool, tuple[str, ...]], list[int]] = defaultdict(list)
    for at, wait in enumerate(recording.open):
        if wait.lane > 0 and not wait.ahead:
            groups[recording.lanes[wait.lane].task, wait.holds, tuple(wait.fields)].append(at)
    waits: list[tuple[float, payload.WaitView]] = []
    for (task, holds, fields), places in groups.items():
        partition = Counter(recording.open[at].partition for at in places).most_common(1)[0][0]
        stage = account.tasks.get(task)
        ranks = dict.fromkeys(int(workers.of_lane[recording.open[at].lane]) for at in places)
        share = 0.0 if stage is None else stage.held if holds else stage.waits
        field, producer = ("", None) if holds else _missing_of(account, task, fields)
        explained = seen.explained.get((task, partition, fields), Explained())
        since = min(recording.open[at].since for at in places)
        text = HELD_REASONS[account.hold_causes.get(task, "capacity")] if holds else explained.text
        view = payload.WaitView(
            task, "held" if holds else "wait", _labels(account, ranks),
            len(ranks), len(ranks) if stage is None else max(stage.alive + stage.lost, len(ranks)),
            max(recording.open[at].rows for at in places), list(fields[:MAX_FIELDS]), field, producer or "", partition,
            round(since, 1), _share(share), text, explained.sample,
        )  # fmt: skip
        # Waits of some milliseconds are a part of normal work, so that what has waited longer comes first.
        waits.append((len(ranks) * max(share, 0.01) + (recording.now - since) / 1e3, view))
    waits += [(len(stage.workers) * 1.0, _gone_part(account, stage)) for stage in account.tasks.values() if stage.lost]
    return [view for _, view in sorted(waits, key=lambda each: -each[0])[:MAX_WAITS]]


def _missing_of(account: Account, task: str, fields: tuple[str, ...]) -> tuple[str, str | None]:
    field, producer = reason_of_waiting(account, task)
    return (field, producer) if field in fields else ("", None)


def _gone_part(account: Account, task: TaskAccount) -> payload.WaitView:
    processes = account.table.workers.describe_processes(task.lost_workers.tolist())
    text = f"Their connections ended without a close: {processes}."
    total = task.alive + task.lost
    return payload.WaitView(
        task.name, "gone", _labels(account, task.lost_workers.tolist()), task.lost, total, 0, [], "", "", "",
        round(task.lost_since if task.lost_since is not None else account.table.recording.start, 1),
        _share(task.lost / max(total, 1)), text,
    )  # fmt: skip


def _labels(account: Account, workers: Iterable[int]) -> list[str]:
    known = account.table.workers
    return [known.lanes[worker].label for worker in sorted(workers, key=known.rank.__getitem__)[:MAX_RANKS]]


# ------------------------------------------------------------ policy


def age_parts(account: Account, last: str, version: int) -> list[payload.AgeView]:
    """Return by how many versions the claimed rows were old, by the version at the time of the claims."""
    table = account.table
    claims, policies = table.of(EventKind.CLAIM), table.of(EventKind.POLICY)
    if last not in table.workers.tasks:
        return []
    stale = claims.column("staleness")
    chosen = (claims.task == table.workers.tasks.index(last)) & (stale >= 0)
    if not chosen.any():
        return []
    versions = np.append(policies.rows[0] - 1 if len(policies) else version, policies.rows).astype(np.int64)
    steps = versions[np.searchsorted(policies.time, claims.time[chosen], side="right")]
    old, rows = np.minimum(stale[chosen], 7), claims.rows[chosen]
    ages = []
    for step in np.unique(steps)[-8:].tolist():
        counts = np.bincount(old[steps == step], rows[steps == step])
        ages.append(payload.AgeView(int(step), counts.astype(int).tolist()))
    return ages


def policy_since(account: Account) -> float | None:
    """Return when the policy version was set last."""
    policies = account.table.of(EventKind.POLICY)
    return round(float(policies.time[-1]), 2) if len(policies) else None


def _time(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _rate(value: float) -> float:
    return round(value, 2)


def _share(value: float) -> float:
    return round(min(max(value, 0.0), 1.0), 3)
