"""The verdict: one sentence about what slows a training, and the numbers in it."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from transfer_queue.display import count_text, time_of_day
from transfer_queue.messages.reports.progress import describe_abandoned
from transfer_queue.messages.reports.timeline import Verdict
from transfer_queue.messages.system import SystemStatus
from transfer_queue.timeline.account import Account, TaskAccount, make_account
from transfer_queue.timeline.bottleneck import (
    NOTICED,
    Bottleneck,
    Hop,
    find_bottleneck,
    find_dead_stages,
    find_last_tasks,
    rows_and_seconds,
)
from transfer_queue.timeline.event_table import EventTable
from transfer_queue.timeline.events import AHEAD, TIMED_OUT, EventKind
from transfer_queue.timeline.recording import Recording

WINDOW = 60.0  # the shortest window that is judged, in seconds, if the recording has as much
STEPS = 4  # the window has this many steps of the task with the longest steps
WARM_UP = 20.0  # at least this many seconds after the first rows of the last tasks are not judged
WARM_UP_STEPS = 2  # the same in steps of the task with the longest steps
STOPPED_AFTER = 60.0  # seconds without a dealt row, at least, until a system counts as stopped
STOPPED_STEPS = 3  # the same in steps of the slowest task
CLAIMS_AGAIN = 1.0  # seconds in which a client whose claim got nothing claims again
SCATTER = 0.05  # the scatter of rates: a number of ranks that exceeds an integer by less is that integer
MAX_HOPS = 4  # the number of steps that a text describes
MAX_STAGES = 2  # the number of stages of which a text says that workers are gone
BINS = 60  # in which a change of a rate is searched
CHANGE = 0.25  # the least change, as a part of the previous rate
CERTAINTY = 3.0  # a change is larger than the scatter of the means by this factor
SHORTEST = 3  # bins on each side of a change
HOLDS = {"policy": "policy version", "capacity": "capacity", "demand": "group demand"}
REASONS = {
    "policy": "the policy version has to advance",
    "capacity": "the capacity is used up",
    "demand": "no more groups are wanted",
}
STARTING, FLOWING, SLOW, STOPPED, IDLE = "starting", "flowing", "slow", "stopped", "idle"


def judge(recording: Recording, status: SystemStatus | None = None, seconds: float | None = None) -> Verdict:
    """Return the verdict of a recording at its end.

    Args:
        recording: The events. A recording of 60 s or four steps of the slowest task is enough.
        status: The progress of the partitions of the same time, for the queues; None if it is not known.
        seconds: How many seconds before the end are judged. Default: 60, or four steps of the slowest task if these
            are longer.
    """
    return judge_with_account(recording, status, seconds)[0]


def judge_with_account(
    recording: Recording, status: SystemStatus | None = None, seconds: float | None = None
) -> tuple[Verdict, Account]:
    """Return the verdict, and the account of time of the window that it is about. The arguments are those of `judge`.

    The verdict also names the samples that are held for ranks that have never asked, and those that processes had
    claimed when they were gone, because no event shows them.
    """
    verdict, account = _judge_events(recording, status, seconds)
    verdict = _with_gone(verdict, account)
    partitions = [] if status is None else status.partitions
    held = "; ".join(task.held_text for each in partitions for task in each.tasks if task.held)
    abandoned = [
        describe_abandoned(each.name, task.name, task.abandoned)
        for each in partitions for task in each.tasks if task.abandoned
    ]  # fmt: skip
    for reason in filter(None, (held, *abandoned)):
        text = f"{verdict.text} {reason[0].upper()}{reason[1:]}."
        verdict = msgspec.structs.replace(verdict, text=text, cause=verdict.cause or reason)
    return verdict, account


def _judge_events(recording: Recording, status: SystemStatus | None, seconds: float | None) -> tuple[Verdict, Account]:
    table = EventTable(recording)
    quiet = max(STOPPED_AFTER, STOPPED_STEPS * max((median for median, _ in table.steps.values()), default=0.0))
    dealt, happened = _last_times(table)
    longest = max((long for _, long in table.steps.values()), default=0.0)
    seconds = max(WINDOW, STEPS * longest) if seconds is None else seconds
    begun = _first_dealt(table)
    warm_up = max(WARM_UP, WARM_UP_STEPS * longest)
    warms_up = recording.from_boot and begun is not None and recording.now - begun < warm_up
    start = max(recording.now - seconds, recording.start)
    if recording.from_boot and begun is not None and not warms_up:
        start = max(start, begun)
    account = make_account(table, status, start, recording.now)
    dead = find_dead_stages(account, status)
    if dead:
        return _all_gone(account, dead), account
    claims_open = any(not each.holds for each in recording.open) or _has_just_timed_out(table)
    if not claims_open and (happened is None or recording.now - happened >= quiet or _all_ended(table)):
        return _idle(recording, happened), account
    if claims_open and recording.now - (recording.start if dealt is None else dealt) >= quiet:
        account = make_account(table, status, (recording.start if dealt is None else dealt) + 1e-3, recording.now)
        return _stopped(account, dealt), account
    starts = recording.from_boot and begun is None and recording.now - recording.start < STOPPED_AFTER
    bottleneck = find_bottleneck(account)
    if starts or warms_up:
        return _starting(account, bottleneck), account
    if bottleneck is None:
        return Verdict(f"Flowing: {_describe_flow(account)}.", FLOWING), account
    return _describe(account, bottleneck, SLOW), account


def _last_times(table: EventTable) -> tuple[float | None, float | None]:
    """Return when rows were dealt last, and when anything happened last."""
    claims, events = table.of(EventKind.CLAIM), table.recording.events
    dealt = claims.time[claims.rows > 0]
    return float(dealt[-1]) if len(dealt) else None, float(events["time"][-1]) if len(events) else None


def _has_just_timed_out(table: EventTable) -> bool:
    """Return whether a claim has just ended without rows, so that its client is about to claim again."""
    waits = table.of(EventKind.WAIT)
    timeouts = waits.time[(waits.flags & TIMED_OUT != 0) & (waits.flags & AHEAD == 0)]
    return len(timeouts) > 0 and table.recording.now - float(timeouts[-1]) <= CLAIMS_AGAIN


def _first_dealt(table: EventTable) -> float | None:
    """Return when each of the last tasks got its first rows; None if no task has got rows."""
    claims, tasks = table.of(EventKind.CLAIM), table.workers.tasks
    numbers = [tasks.index(name) for name in find_last_tasks(table) if name in tasks]
    firsts = [np.flatnonzero(claims.task == number)[:1] for number in numbers]
    return max((float(claims.time[at[0]]) for at in firsts if len(at)), default=None)


def _all_ended(table: EventTable) -> bool:
    """Return whether the last event of every lane is the end of its partition, or of its connection."""
    matters = np.flatnonzero(~np.isin(table.kind, (EventKind.ACK, EventKind.READ)))
    last = np.full(len(table.recording.lanes), -1, np.int64)
    last[table.lanes[matters]] = matters
    return bool(np.isin(table.kind[last[last >= 0]], (EventKind.END, EventKind.GONE)).all())


def _idle(recording: Recording, happened: float | None) -> Verdict:
    if happened is None:
        span = _duration(recording.seconds)
        return Verdict(f"Idle: no claim is open, and nothing was recorded in the last {span}.", IDLE)
    ago = _duration(recording.now - happened)
    return Verdict(f"Idle: no claim is open, and the last event was {ago} ago.", IDLE, since=happened)


def _starting(account: Account, bottleneck: Bottleneck | None) -> Verdict:
    """Return what was seen so far of a system that has not run long enough to say which stage is slow."""
    hops = bottleneck.walks[0].hops if bottleneck is not None and bottleneck.walks else ()
    if bottleneck is None or not hops or not hops[-1].field:
        return Verdict(f"Starting: so far {_describe_flow(account)}.", STARTING)
    hop = hops[-1]
    text = f"Starting: so far {'; '.join(_ways(bottleneck))}."
    if hop.producer is None:
        text = f"Starting: {_task(hop.task)} waits for `{hop.field}`, which no task has put yet."
    return Verdict(text, STARTING, field=hop.field, wait_share=hops[0].share)


def _describe_flow(account: Account) -> str:
    last = [account.tasks[name] for name in find_last_tasks(account.table) if name in account.tasks]
    takers = [each for each in last if each.claim_rate > 0]
    if takers:
        rates = " and ".join(f"{_task(each.name)} takes {_rate(each.claim_rate)}" for each in takers[:2])
        return f"{rates} samples each second"
    rate = max((each.put_rate for each in account.tasks.values()), default=0.0)
    if rate <= 0:
        return "no sample is put"
    return f"{_rate(rate)} samples are put each second"


def _all_gone(account: Account, names: list[str]) -> Verdict:
    """Return the verdict about stages whose workers are all gone."""
    stage, bottleneck, cause = account.tasks[names[0]], find_bottleneck(account), _gone_of(account, names)
    bottleneck = bottleneck if bottleneck is not None and bottleneck.stage == stage.name else Bottleneck(stage.name, ())
    hops = bottleneck.walks[0].hops if bottleneck.walks else ()
    return Verdict(
        _sentence("Stopped", [cause, *_ways(bottleneck), _queue_text(stage)]), STOPPED, stage.name,
        hops[-1].field if hops and hops[-1].producer == stage.name else None, hops[0].share if hops else 0.0,
        stage.queue_rows, stage.queue_growth, stage.lost_since, cause,
    )  # fmt: skip


def _gone_of(account: Account, names: list[str]) -> str:
    """Return a clause about the workers that are gone of the first of these stages."""
    return " and ".join(_describe_gone(account, account.tasks[name]) for name in names[:MAX_STAGES])


def _with_gone(verdict: Verdict, account: Account) -> Verdict:
    """Return a verdict that also names the workers that are gone of other stages than the one that it is about.

    If nothing is slow, these are the ones that the recording has seen, because the others are not missed.
    """
    seen = account.table.recording.start if verdict.state in (FLOWING, IDLE) else -math.inf
    ended = [(each.lost_since, each) for each in account.tasks.values() if each.name and each.lost_since is not None]
    names = [
        each.name for since, each in ended if since >= seen and _describe_gone(account, each) not in verdict.cause
    ]  # fmt: skip
    if not names:
        return verdict
    reason = _gone_of(account, names)
    return msgspec.structs.replace(verdict, text=f"{verdict.text[:-1]}; {reason}.", cause=verdict.cause or reason)


def _stopped(account: Account, dealt: float | None) -> Verdict:
    """Return the verdict about the time since the last rows were dealt."""
    recording = account.table.recording
    since = recording.start if dealt is None else dealt
    bottleneck = find_bottleneck(account) or find_bottleneck(account, NOTICED / 10) or Bottleneck(None, ())
    verdict = _describe(account, bottleneck, STOPPED)
    text = f"Stopped: nothing was dealt for {_duration(recording.now - since)}"
    text += f"; {verdict.text}" if verdict.text else "."
    return msgspec.structs.replace(verdict, text=text, since=dealt)


def _describe(account: Account, slowest: Bottleneck, state: str) -> Verdict:
    """Return the verdict about a bottleneck."""
    stage = account.tasks.get(slowest.stage) if slowest.stage is not None else None
    hops = slowest.walks[0].hops if slowest.walks else ()
    share = hops[0].share if hops else 0.0
    cause = _cause(account, slowest, stage)
    # What holds a task is a part of its clause already.
    clauses = [*_ways(slowest), "" if stage is None else _queue_text(stage), "" if _is_held(slowest, stage) else cause]
    if stage is None:
        field = next((hop.field for hop in reversed(hops) if hop.field), None)
        no_producer = bool(hops) and hops[-1].producer is None and not hops[-1].held
        subject = "" if state == STOPPED or no_producer or not hops else "no single task is the slowest"
        return Verdict(_sentence(subject, clauses), state, slowest.stage, field, share, cause=cause)
    subject = "" if state == STOPPED else f"{_task(stage.name)} is the slowest stage"
    field = hops[-1].field if hops and hops[-1].producer == stage.name else None
    return Verdict(
        _sentence(subject, clauses), state, stage.name, field, share, stage.queue_rows, stage.queue_growth,
        _since(account, stage), cause, _advice(account, slowest, stage),
    )  # fmt: skip


def _sentence(subject: str, clauses: list[str]) -> str:
    if subject.startswith(("no single", "a client without")):  # the names of tasks keep their case
        subject = subject[0].upper() + subject[1:]
    joined = "; ".join(clause for clause in clauses if clause)
    text = f"{subject}: {joined}" if subject and joined else subject or joined
    return f"{text}." if text else ""


def _ways(bottleneck: Bottleneck) -> list[str]:
    """Return a clause for each step of the heaviest walk, and of the next one if it ends at another task."""
    clauses: dict[str, None] = {}
    walks = bottleneck.walks[:1]
    if bottleneck.stage is None:
        walks += tuple(walk for walk in bottleneck.walks[1:] if walk.stage != bottleneck.walks[0].stage)[:1]
    for walk in walks:
        part = walk.weight if len(walks) > 1 and len(walk.hops) == 1 else 1.0
        for hop in walk.hops[:MAX_HOPS]:
            clauses[_describe_hop(hop, part)] = None
    return list(clauses)


def _describe_hop(hop: Hop, part: float) -> str:
    share = f"{100 * hop.share * part:.0f} % of the time"
    if hop.held:
        return f"{_task(hop.task)} is held {share} by the {HOLDS[hop.held]}"
    if not hop.field:
        return f"{_task(hop.task)} waits {share}"
    puts = "" if hop.producer is None else f", which {_task(hop.producer)} puts"
    return f"{_task(hop.task)} waits {share} for `{hop.field}`{puts}"


def _queue_text(stage: TaskAccount) -> str:
    if not stage.takes or stage.queue_rows <= 0:
        return ""
    text = f"{count_text(stage.queue_rows, 'sample')} {'queues' if stage.queue_rows == 1 else 'queue'} before it"
    growth = stage.queue_growth
    if abs(growth) > max(0.05 * max(stage.arrival_rate, stage.claim_rate), 0.1):
        text += f", {_rate(abs(growth))} {'more' if growth > 0 else 'fewer'} each second"
    return text


def _cause(account: Account, bottleneck: Bottleneck, stage: TaskAccount | None) -> str:
    """Return why the stage is slow, or why no single one is; "" if the timeline does not show it."""
    if stage is not None and stage.lost:
        return _describe_gone(account, stage)
    if stage is not None and stage.closed and not stage.alive:
        return f"every {_task(stage.name)} worker has closed"
    if stage is not None and bottleneck.slow_rank is not None:
        lane = account.table.workers.lanes[bottleneck.slow_rank.worker]
        factor = f"{bottleneck.slow_rank.factor:.1f} times as long as its other ranks"
        process = f" ({lane.process})" if lane.process else ""
        return f"{lane.name} of {_task(stage.name)} takes {factor}{process}"
    hop = _held_hop(bottleneck)
    if hop is not None:
        return f"{_task(hop.task)} is held because {REASONS[hop.held]}"
    if stage is None and bottleneck.walks and bottleneck.walks[0].hops:
        hop = bottleneck.walks[0].hops[-1]
        if hop.producer is None and hop.field:
            return f"no task has put `{hop.field}` since the timeline begins"
    return "" if stage is None else _describe_long_work(account, stage)


def _held_hop(bottleneck: Bottleneck) -> Hop | None:
    return next((hop for walk in bottleneck.walks for hop in walk.hops if hop.held), None)


def _is_held(bottleneck: Bottleneck, stage: TaskAccount | None) -> bool:
    """Return whether the cause is that a task is held."""
    return not (stage is not None and (stage.lost or bottleneck.slow_rank)) and _held_hop(bottleneck) is not None


def _describe_gone(account: Account, stage: TaskAccount) -> str:
    processes = account.table.workers.describe_processes(stage.lost_workers.tolist())
    since = f" since {time_of_day(stage.lost_since)}" if stage.lost_since is not None else ""
    kind = "clients without a task" if not stage.name else f"{stage.name} workers"
    if not stage.alive and stage.lost == 1:
        only = f"{stage.name} worker" if stage.name else "client without a task"
        return f"the only {only} is gone ({processes}){since}"
    if not stage.alive:
        return f"all {kind} are gone ({processes}){since}"
    are = "is" if stage.lost == 1 else "are"
    return f"{stage.lost:,} of {stage.alive + stage.lost:,} {kind} {are} gone ({processes}){since}"


def _describe_long_work(account: Account, stage: TaskAccount) -> str:
    """Return the reason that all ranks of a stage have worked on their last claim during the complete window."""
    if not stage.takes or not stage.alive or stage.claim_rate > 0 or stage.works < 0.999:
        return ""
    claims = account.table.of(EventKind.CLAIM)
    times = claims.time[np.isin(claims.worker, stage.workers)]
    since = f" since {time_of_day(float(times[-1]))}" if len(times) else ""
    if stage.alive == 1:
        return f"the only {_task(stage.name)} worker works on its last claim{since}"
    return f"all {stage.alive:,} {_task(stage.name)} workers work on their last claim{since}"


def _since(account: Account, stage: TaskAccount) -> float | None:
    """Return when the rate of a stage changed last by more than 25 %, or the number of its ranks."""
    recording, events = account.table.recording, account.table.of(EventKind.CLAIM if stage.takes else EventKind.PUT)
    is_of_stage = np.isin(events.worker, stage.workers)
    changed = last_rate_change(events.time[is_of_stage], events.rows[is_of_stage], recording.start, recording.now)
    return max((each for each in (changed, stage.lost_since) if each is not None), default=None)


def _advice(account: Account, bottleneck: Bottleneck, stage: TaskAccount) -> str:
    """Return how many ranks a stage needs for the rows that come, or that the waiting task could take."""
    rows, seconds = rows_and_seconds(account, stage.name)
    if rows.sum() <= 0 or seconds.sum() <= 0:
        return ""
    each = float(rows.sum() / seconds.sum())
    hop = bottleneck.walks[0].hops[0] if bottleneck.walks and bottleneck.walks[0].hops else None
    wanted, meaning = stage.arrival_rate, "samples come each second"
    if hop is not None and hop.share < 0.95:
        task = account.tasks[hop.task]
        could = (task.put_rate if hop.held else task.claim_rate) / (1 - hop.share)
        if could > wanted:
            verb = "put" if hop.held else "take"
            wanted, meaning = could, f"samples are what {_task(hop.task)} could {verb} each second"
    needed = math.ceil(wanted / each * (1 - SCATTER))
    if needed <= stage.alive:
        return ""
    return (
        f"{_task(stage.name)} needs {count_text(needed, 'rank')} and has {stage.alive:,}: "
        f"{_rate(wanted)} {meaning}, and one rank does {_rate(each)}."
    )


def _task(name: str) -> str:
    return name or "a client without a task"


def _rate(rows: float) -> str:
    return f"{rows:,.0f}" if rows >= 100 else f"{rows:,.1f}" if rows >= 0.1 or rows <= 0 else f"{rows:.2g}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def last_rate_change(times: np.ndarray, rows: np.ndarray, start: float, end: float) -> float | None:
    """Return when the rate changed last by more than 25 %.

    Args:
        times: When something happened, in order.
        rows: How many rows each time.
        start: When the recording begins.
        end: When it ends.

    Returns:
        The time of the change; None if the rate did not change, or if too little happened.
    """
    if not end > start or len(times) < 2 * SHORTEST:
        return None
    # Bins that hold less than a few events would scatter more than they show.
    bins = min(BINS, max(len(times) // 4, 2 * SHORTEST))
    rate, edges = np.histogram(times, bins, (start, end), weights=rows)
    changed_at, first = None, 0
    while True:
        at = _change(rate[first:])
        if at is None:
            return changed_at
        first += at
        changed_at = float(edges[first])


def _change(rate: np.ndarray) -> int | None:
    """Return the bin at which the two sides differ most, if they differ enough."""
    count = len(rate)
    if count < 2 * SHORTEST:
        return None
    before = np.arange(SHORTEST, count - SHORTEST + 1)
    sums, squares = np.cumsum(rate), np.cumsum(rate**2)
    left = sums[before - 1] / before
    right = (sums[-1] - sums[before - 1]) / (count - before)
    spread = squares[-1] - before * left**2 - (count - before) * right**2
    scatter = np.sqrt(np.maximum(spread, 0.0) / max(count - 2, 1) * (1 / before + 1 / (count - before)))
    score = np.abs(right - left) / np.maximum(scatter, 1e-9 * max(float(rate.max()), 1e-300))
    best = int(np.argmax(score))
    changed = abs(right[best] - left[best]) > CHANGE * max(left[best], 1e-300)
    return int(before[best]) if changed and score[best] > CERTAINTY else None
