"""Finds the slowest stage: from a task that waits to the task that puts the missing field, until one does not wait."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from transfer_queue.messages.system import SystemStatus
from transfer_queue.timeline.account import Account, TaskAccount
from transfer_queue.timeline.event_table import EventTable, order_by_flow
from transfer_queue.timeline.events import EventKind
from transfer_queue.timeline.spans import SpanState

NOTICED = 0.15  # a last task that waits less is not slowed down
WAITS_AS_WELL = 0.1  # a task that waits or is held for less counts as one that works
WAITS_LESS = 0.25  # so does a task whose share of waiting is less than this part of that of the task behind it
BUSY = 0.9  # a task with a growing queue is the slowest if it works for more
SINGLE = 0.6  # one task is the slowest if at least this part of the waiting leads to it
LEADS = 0.15  # in a cycle of tasks, the share of working of the slowest is larger than that of the next by this
SLOW_RANK = 2.0  # a rank is slow if it takes this many times as long as the others
GROWS = 0.1  # a queue grows if this share of the rows that arrive stays in it
HOPS = 16
MAX_WALKS = 1000


@dataclass(frozen=True)
class Hop:
    """One step of the walk: a task that waits for a field, or is held."""

    task: str
    """The task that waits or is held."""
    share: float
    """The share of the time for which it does."""
    field: str
    """The field that it waits for; "" if it is not known, or if the task is held."""
    producer: str | None
    """The task that puts the field; None if no task puts it."""
    held: str = ""
    """What holds the task: "policy", "capacity" or "demand"; "" if it waits for a field."""


@dataclass(frozen=True)
class Walk:
    """One way from a task that waits to a task that does not."""

    weight: float
    """The part of the waiting that leads this way; the weights of all ways add up to 1."""
    hops: tuple[Hop, ...]
    """The steps."""
    stage: str | None
    """The task at the end; None if the way does not end in a single task."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that takes much longer than the others of its task."""

    worker: int
    """Its position in `TaskWorkers`."""
    factor: float
    """How many times as long it takes for a row."""


@dataclass(frozen=True)
class Bottleneck:
    """Where the waiting leads."""

    stage: str | None
    """The slowest stage; None if it is not a single task."""
    walks: tuple[Walk, ...]
    """The ways to it, or all ways if no single task is slowest; heaviest first. Empty if only the queue shows it."""
    slow_rank: SlowRank | None = None
    """The rank of the stage that is much slower than the others."""


def find_bottleneck(account: Account, noticed: float = NOTICED) -> Bottleneck | None:
    """Return the slowest stage, or None if nothing slows the last tasks down.

    Args:
        account: The account of time.
        noticed: Less waiting of the last tasks than this share is none.
    """
    tasks = account.tasks
    ends = [tasks[name] for name in find_last_tasks(account.table) if name in tasks and tasks[name].alive]
    waiting = [each for each in ends if each.waits >= noticed]
    if waiting:
        start = max(waiting, key=lambda each: each.waits * each.alive)
        return _conclude(account, _Walker(account).follow(start.name))
    held = [each for each in tasks.values() if each.alive and each.held >= noticed]
    if held:
        start = max(held, key=lambda each: each.held * each.alive)
        return _conclude(account, _Walker(account).follow(start.name))
    ended = [each for each in tasks.values() if each.lost and not each.alive and each.takes]
    ended = [each for each in ended if each.arrival_rate > 0 or each.queue_rows > 0]
    if ended:
        stage = max(ended, key=lambda each: (each.queue_rows, each.arrival_rate))
        return Bottleneck(stage.name, ())
    growing = [each for each in tasks.values() if _falls_behind(account, each)]
    if growing:
        stage = max(growing, key=lambda each: each.queue_growth / each.arrival_rate)
        return Bottleneck(stage.name, (), find_slow_rank(account, stage.name))
    return None


def find_last_tasks(table: EventTable) -> list[str]:
    """Return the tasks with claims whose puts no other task takes, unless what it puts comes back to them."""
    names = list(table.takes)
    gives = np.zeros((len(names), len(names)), bool)
    for row, name in enumerate(names):
        puts = set(table.puts.get(name, ()))
        gives[row] = [not puts.isdisjoint(table.takes[other]) for other in names]
    for via in range(len(names)):
        gives |= gives[:, via : via + 1] & gives[via]
    return [name for row, name in enumerate(names) if not (gives[row] & ~gives[:, row]).any()]


def find_dead_stages(account: Account, status: SystemStatus | None) -> list[str]:
    """Return the stages whose workers are all gone although others need their work, in the order of the flow.

    A stage is needed if a task with workers takes a field that no such task puts, or if it is at the end of the
    pipeline and no other task there has workers. A stage that has put nothing yet may be the one that puts a field for
    which a task waits and that no task has put.
    """
    tasks, table = account.tasks, account.table
    dead = [each.name for each in tasks.values() if each.lost and not each.alive]
    alive = [each for each in tasks.values() if each.alive]
    if not dead or not alive:
        return []
    last = find_last_tasks(table)
    ends = {name for name in last if name in dead} if not any(each.name in last for each in alive) else set()
    wanted = {field for each in alive for field in each.takes} - {field for each in alive for field in each.puts}
    unknown = any(field and maker is None for each in alive for field, maker in account.missing.get(each.name, ()))
    needed = [
        name for name in dead
        if (name in ends or wanted & set(tasks[name].puts) or (unknown and tasks[name].takes and not tasks[name].puts))
        and _has_work(tasks[name], status)
    ]  # fmt: skip
    return order_by_flow(table, needed)


def _has_work(task: TaskAccount, status: SystemStatus | None) -> bool:
    """Return whether samples may come for a task, or lack a field that it puts. True if the status is not known."""
    for partition in [] if status is None else status.partitions:
        produced = [each.produced for each in partition.fields if each.name in task.puts]
        taken = [each.consumed + each.claimed for each in partition.tasks if each.name == task.name]
        if (produced or taken) and (not partition.sealed or min(produced + taken) < partition.rows):
            return True
    return status is None


def find_slow_rank(account: Account, task: str) -> SlowRank | None:
    """Return the rank of a task that takes more than twice as long for a row as the median of the others."""
    workers = account.tasks[task].workers
    rows, seconds = rows_and_seconds(account, task)
    has_worked = seconds > 0
    if np.count_nonzero(has_worked) < 2 or rows.sum() <= 0:
        return None
    workers, rows, seconds = workers[has_worked], rows[has_worked], seconds[has_worked]
    claim = _rows_of_a_claim(account, task)
    # A count of complete claims is on average half a claim too small for the seconds.
    cost = seconds / np.maximum(rows + claim / 2, claim)
    worst = int(np.argmax(cost))
    others = float(np.median(np.delete(cost, worst)))
    certain = seconds[worst] / (rows[worst] + claim)
    long = seconds[worst] > 0.5 * seconds.max()
    if others > 0 and cost[worst] >= SLOW_RANK * others and certain >= 0.75 * SLOW_RANK * others and long:
        return SlowRank(int(workers[worst]), float(cost[worst]) / others)
    return None


def rows_and_seconds(account: Account, task: str) -> tuple[np.ndarray, np.ndarray]:
    """Return for each worker of a task the rows that it claimed, or put if it claims none, and its seconds of work."""
    workers, seconds = account.tasks[task].workers, account.spans.seconds
    works, kind = seconds[workers, SpanState.WORKS], EventKind.CLAIM
    if not account.tasks[task].takes:
        works, kind = works + seconds[workers, SpanState.IDLE], EventKind.PUT
    return account.rows_of(kind)[workers], works


def _rows_of_a_claim(account: Account, task: str) -> float:
    kind = EventKind.CLAIM if account.tasks[task].takes else EventKind.PUT
    return account.usual_rows(kind, task)


def _falls_behind(account: Account, task: TaskAccount) -> bool:
    """Return whether a task works all the time and its queue grows by more than what one round moves."""
    if not task.alive or not task.takes or task.works < BUSY:
        return False
    grown = task.queue_growth * account.spans.line.length
    in_hand = max(task.alive * _rows_of_a_claim(account, task.name), _rows_of_a_burst(account, task))
    return task.queue_growth > GROWS * task.arrival_rate and grown > in_hand


def _rows_of_a_burst(account: Account, task: TaskAccount) -> float:
    """Return how many rows arrive together if all ranks of a producer put at the same time."""
    names = {name for each in task.takes for name in account.producers_of(each) if name in account.tasks}
    makers = [account.tasks[name] for name in names]
    return max((each.alive * account.usual_rows(EventKind.PUT, each.name) for each in makers), default=0.0)


def _last_share(hops: tuple[Hop, ...]) -> float:
    return hops[-1].share if hops and not hops[-1].held else 0.0


def _conclude(account: Account, walks: list[Walk]) -> Bottleneck:
    weights: dict[str | None, float] = defaultdict(float)
    for walk in walks:
        weights[walk.stage] += walk.weight
    walks.sort(key=lambda walk: -walk.weight)
    stage = max(weights, key=lambda name: weights[name], default=None)
    if stage is None or weights[stage] < SINGLE:
        return Bottleneck(None, tuple(walks))
    return Bottleneck(stage, tuple(walk for walk in walks if walk.stage == stage), find_slow_rank(account, stage))


class _Walker:
    """Follows the waiting of one task along every way."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.walks: list[Walk] = []

    def follow(self, task: str) -> list[Walk]:
        """Return the ways from a task to the ones that do not wait."""
        self._step(task, 1.0, ())
        return self.walks

    def _step(self, name: str, weight: float, hops: tuple[Hop, ...]) -> None:
        task = self.account.tasks.get(name)
        if name in (hop.task for hop in hops):
            self._end(weight, hops, self._leader(hops[[hop.task for hop in hops].index(name) :]))
        elif task is None or self._ends_here(task, hops):
            self._end(weight, hops, name)
        elif task.waits >= max(WAITS_AS_WELL, _last_share(hops) * WAITS_LESS) and task.waits >= task.held:
            self._to_producers(task, weight, hops)
        elif task.held >= WAITS_AS_WELL:
            self._downstream(task, weight, hops)
        else:
            self._end(weight, hops, name)

    def _ends_here(self, task: TaskAccount, hops: tuple[Hop, ...]) -> bool:
        if not task.alive or len(hops) > HOPS or len(self.walks) > MAX_WALKS:
            return True
        return bool(hops) and self._is_one_slow_rank(hops[-1].task, task.name)

    def _end(self, weight: float, hops: tuple[Hop, ...], stage: str | None) -> None:
        self.walks.append(Walk(weight, hops, stage))

    def _to_producers(self, task: TaskAccount, weight: float, hops: tuple[Hop, ...]) -> None:
        missing = self.account.missing.get(task.name, {})
        known = {key: seconds for key, seconds in missing.items() if key[0]}
        total = sum(known.values())
        for (field, producer), seconds in known.items():
            if seconds < 0.05 * total:
                continue
            hop = Hop(task.name, task.waits, field, producer)
            if producer is None:
                self._end(weight * seconds / total, (*hops, hop), None)
            else:
                self._step(producer, weight * seconds / total, (*hops, hop))
        if not total > 0:
            self._end(weight, (*hops, Hop(task.name, task.waits, "", None)), None)

    def _downstream(self, task: TaskAccount, weight: float, hops: tuple[Hop, ...]) -> None:
        """Go from a task that is held to the one that has to take rows, or to set the policy version."""
        why = self.account.hold_causes.get(task.name, "capacity")
        hop = Hop(task.name, task.held, "", None, held=why)
        tasks = self.account.tasks
        after = self._after(task.name)
        if why == "policy":
            after = [name for name in self.account.policy_tasks if name in tasks] or after
        if not after:
            self._end(weight, (*hops, hop), None)
            return
        best = min((tasks[name] for name in after), key=lambda each: (each.alive > 0, each.waits + each.held))
        if best.alive and max(best.waits, best.held) >= WAITS_AS_WELL and best.name not in [h.task for h in hops]:
            self._end(weight, (*hops, hop), self._leader((*hops, hop, Hop(best.name, best.waits, "", None))))
        else:
            self._step(best.name, weight, (*hops, hop))

    def _after(self, name: str) -> list[str]:
        """Return the tasks with claims that take, directly or not, what a task puts."""
        later: list[str] = []
        reached = set(self.account.tasks[name].puts)
        for _ in self.account.tasks:
            for task in self.account.tasks.values():
                if task.name != name and task.name not in later and reached & set(task.takes):
                    later.append(task.name)
                    reached |= set(task.puts)
        return later

    def _leader(self, circle: tuple[Hop, ...]) -> str | None:
        """Return the task that works for most of the time among those that wait for each other, if one does."""
        tasks = [self.account.tasks[hop.task] for hop in circle]
        tasks.sort(key=lambda task: -task.busy)
        second = tasks[1].busy if len(tasks) > 1 else 0.0
        return tasks[0].name if tasks[0].busy >= SINGLE and tasks[0].busy >= second + LEADS else None

    def _is_one_slow_rank(self, waiting: str, name: str) -> bool:
        """Return whether one slow rank of a task ends most of the waiting for it, while its other ranks wait."""
        ended = self.account.ended_by.get(waiting, {})
        slow = find_slow_rank(self.account, name)
        workers = self.account.tasks[name].workers.tolist()
        total = sum(ended.get(worker, 0.0) for worker in workers)
        return slow is not None and len(workers) > 2 and ended.get(slow.worker, 0.0) > 0.5 * total
