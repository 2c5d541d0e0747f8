"""`tq stuck`: print the samples that have not changed for some time and are not finished."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from transfer_queue.cli.options import Commands, find_system_that_replies, finish, seconds_type, whole_number_type
from transfer_queue.cli.shell.terminal import (
    Styles,
    duration_text,
    print_json,
    table_lines,
    width_of_output,
    wrap,
)
from transfer_queue.display import count_text, listed_names, ranges_text, short_name, worker_text
from transfer_queue.messages.reports.samples import CLAIMED, WAITING, StuckReport, StuckSample
from transfer_queue.names import did_you_mean

if TYPE_CHECKING:
    from transfer_queue.timeline.recording import Recording

SECONDS = 60.0  # default of --for
HISTORY = 1e6  # seconds of the timeline that are searched for the producers of fields
LIMIT = 256  # default of --limit
SOME = 3  # exit code if there are stuck samples; 1 says that the command failed
WIDE = 120  # a terminal with as many columns shows who changed the samples last
LONGEST_KEY = 24  # characters of a key that is shown beside the index
HEADINGS = ("samples", "count", "unchanged", "lacks", "last changed by", "why")
NO_PRODUCER: tuple[str, ...] = ()  # of a field that no sample has
UNKNOWN_PRODUCER = ("\0",)  # of a field that was put before the timeline begins
THEM = "\0"  # stands for "it" or "them" in a cause
OPEN = ("ready", "waiting")  # the states of a sample that a task has not claimed


def add(commands: Commands) -> None:
    """Add the command to the parser of `tq`."""
    command = commands.add_parser(
        "stuck", help="samples that have not changed for some time and are not finished",
        description="Prints the samples whose fields and tags have not changed for some time, and that a task has not "
        "consumed or that lack a field that other samples of their partition have: a table for each partition, with "
        "ranges of samples, the fields that they lack and the tasks that put these. Those that have been unchanged for "
        f"longest come first. The exit code is {SOME} if samples are stuck.",
    )  # fmt: skip
    command.add_argument(
        "--for", dest="seconds", default=SECONDS, metavar="SECONDS",
        type=seconds_type("a number of seconds from 0 to 1e9", lambda each: 0 <= each <= 1e9),
        help=f"how long a sample has not changed (default: {SECONDS:g})",
    )  # fmt: skip
    command.add_argument("--partition", help="only samples of this partition")
    command.add_argument(
        "--limit", type=whole_number_type("a whole number from 1 to 10000", 1, 10_000), default=LIMIT, metavar="N",
        help=f"how many samples to examine, those that have been unchanged for longest (default: {LIMIT})",
    )  # fmt: skip
    finish(command, run)


def run(options: argparse.Namespace) -> int:
    """Print the samples."""
    from transfer_queue.client.control_client import ControlClient
    from transfer_queue.timeline.recording import Recording

    recording = Recording(HISTORY)
    with ControlClient(find_system_that_replies(options.name)) as onlooker:
        if options.partition is not None:
            names = [partition.name for partition in onlooker.status().partitions]
            if options.partition not in names:
                nearest = did_you_mean(options.partition, names)
                hint = nearest or f"; the partitions are: {listed_names(names)}"
                print(f"tq: partition {options.partition!r} does not exist{hint}", file=sys.stderr)
                return 1
        report = onlooker.find_stuck(options.partition, options.seconds, options.limit)
        if report.total and not options.json:
            onlooker.read_timeline(recording)
    if options.json:
        print_json(report)
    else:
        print("\n".join(lines_of(report, width_of_output(), Styles(), KnownWorkers.of(recording))))
    return SOME if report.total else 0


@dataclass(frozen=True)
class KnownWorkers:
    """What the timeline says about the tasks and their processes."""

    producers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Field -> the tasks that put it."""
    departed: frozenset[str] = frozenset()
    """The clients that are gone."""

    @classmethod
    def of(cls, recording: Recording) -> KnownWorkers:
        """Return what a recording says."""
        from transfer_queue.timeline.event_table import EventTable

        return cls(EventTable(recording).producers, frozenset(recording.departed))


class _Cause(NamedTuple):
    """Why samples are stuck. Samples with the same cause are one line of the table."""

    lacks: tuple[str, ...]
    """The fields that they lack."""
    why: str
    """Return which tasks put these fields, or which tasks claim the samples, for people."""


def lines_of(report: StuckReport, width: int, style: Styles, workers: KnownWorkers | None = None) -> Iterator[str]:
    """Iterate over the lines of the text about stuck samples: for each partition a table with a line for each cause."""
    duration = f"for {duration_text(report.older_than)} or longer"
    if not report.total:
        yield f"no sample that is not finished has been unchanged {duration}"
        return
    where = ", ".join(f"{count:,} in {short_name(name)}" for name, count in list(report.partitions.items())[:4])
    left = len(report.partitions) - 4
    where += f", and {count_text(left, 'more partition')}" if left > 0 else ""
    be = "is" if report.total == 1 else "are"
    title = f"{count_text(report.total, 'sample')} {be} unchanged {duration} and not finished: {where}"
    yield from (style(line, "bold") for line in wrap(title, width))
    by_partition: dict[str, dict[_Cause, list[StuckSample]]] = {}
    for each in report.samples:
        cause = _cause_of(each, workers or KnownWorkers())
        by_partition.setdefault(each.partition, {}).setdefault(cause, []).append(each)
    for partition, causes in by_partition.items():
        yield ""
        yield style(short_name(partition), "cyan")
        rows = [_row(some, cause, report.now, width) for cause, some in causes.items()]
        for lines in table_lines(HEADINGS, rows, width, style, frozenset({1})):
            yield from lines
    left = report.total - len(report.samples)
    if left > 0:
        yield ""
        yield from wrap(f"{left:,} more {'is' if left == 1 else 'are'} not shown; --limit shows more", width)
    yield ""
    first = report.samples[0] if report.samples else None
    if first is not None:
        name = first.key if first.key is not None else str(first.index)
        yield style(f"one sample with its history: tq show {shlex.quote(first.partition)} {shlex.quote(name)}", "dim")


def _row(some: Sequence[StuckSample], cause: _Cause, now: float, width: int) -> tuple[str, ...]:
    is_wide = width >= WIDE
    samples = ranges_text((each.index for each in some), 4 if is_wide else 2)
    key = some[0].key
    if key is not None and len(some) == 1:
        samples = f"{samples} ({key})" if key.isprintable() and len(key) <= LONGEST_KEY else samples
    return (
        samples,
        f"{len(some):,}",
        _ages([each.time for each in some], now),
        listed_names(cause.lacks, 4 if is_wide else 2) if cause.lacks else "nothing",
        _writers(some) if is_wide else "",
        cause.why.replace(THEM, "it" if len(some) == 1 else "them"),
    )


def _writers(some: Sequence[StuckSample]) -> str:
    """Return who changed samples last: one process, or the number of them."""
    workers = {(each.task, each.rank, each.pid, each.host, each.client) for each in some if each.client or each.task}
    if len(workers) == 1:
        return worker_text(*next(iter(workers)), most=40)
    tasks = {worker[0] for worker in workers}
    name = f"{short_name(tasks.pop(), 24)} " if len(tasks) == 1 and "" not in tasks else ""
    return f"{len(workers):,} {name}{'ranks' if name else 'processes'}" if workers else ""


def _ages(times: Sequence[float | None], now: float) -> str:
    """Return for how long samples have not changed, the shortest and the longest time."""
    known = [now - time for time in times if time is not None]
    if len(known) < len(times):
        return "since start"  # of the controller
    least, most = (duration_text(seconds, units=1) for seconds in (min(known), max(known)))
    return most if least == most else f"{least} to {most}"


def _cause_of(sample: StuckSample, workers: KnownWorkers) -> _Cause:
    """Return why a sample is stuck."""
    wanted = [name for task in sample.tasks for name in task.lacks]
    lacks = tuple(dict.fromkeys([*wanted, *sample.missing]))
    producers = {task for name in lacks for task in workers.producers.get(name, ())}
    reasons = [*_describe_producers(sample, lacks, workers), *_describe_consumers(sample, producers)]
    return _Cause(lacks, "; ".join(reasons))


def _describe_producers(sample: StuckSample, lacks: Sequence[str], workers: KnownWorkers) -> Iterator[str]:
    """Iterate over clauses that name the tasks that put the fields that a sample lacks."""
    by_task: dict[tuple[str, ...], list[str]] = {}
    for name in lacks:
        # If other samples have the field, some task has put it.
        unknown = UNKNOWN_PRODUCER if name in sample.missing else NO_PRODUCER
        by_task.setdefault(tuple(workers.producers.get(name, unknown)), []).append(name)
    for tasks, names in by_task.items():
        some = listed_names(names, 4)
        if tasks in (NO_PRODUCER, UNKNOWN_PRODUCER):
            was_put = tasks == UNKNOWN_PRODUCER
            yield f"the timeline does not show which task puts {some}" if was_put else f"no task has put {some}"
            continue
        for task in tasks:
            state = next((each for each in [*sample.tasks, *sample.consumed] if each.name == task), None)
            label = short_name(task) if task else "a client without a task"
            if state is None or state.state in OPEN:
                also = "" if state is None else f", and has not claimed {THEM}"
                also = f", and waits for {listed_names(state.lacks, 4)}" if state is not None and state.lacks else also
                yield f"{'task ' if task else ''}{label} puts {some}{also}"
                continue
            holder = worker_text(task, state.rank, state.pid, state.host, state.client)
            addition = ", which is gone," if state.client in workers.departed else ""
            yield f"{holder}{addition} claimed {THEM} and has not put {some}"


def _describe_consumers(sample: StuckSample, producers: Collection[str]) -> Iterator[str]:
    """Iterate over clauses about the tasks that have not consumed a sample, lack no field of it, and put none of it."""
    others = [task for task in sample.tasks if task.name not in producers]
    for task in others:
        if task.state == CLAIMED:
            yield f"claimed by {worker_text(task.name, task.rank, task.pid, task.host, task.client)}, not acknowledged"
    ready = [task.name for task in others if task.state not in (CLAIMED, WAITING)]
    if ready:
        yield f"not claimed by {listed_names(ready, 4)}, although ready"
