"""Reads the pages of a report about a sample, and those of a search for stuck samples. Imports no torch."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from transfer_queue.errors import UncarriableValueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.queries import Explain
from transfer_queue.messages.reports import samples
from transfer_queue.messages.reports.samples import (
    DescribeSample,
    FindStuck,
    SampleEvent,
    SampleField,
    SampleReport,
    SampleTask,
    StuckPage,
    StuckReport,
    StuckSample,
)
from transfer_queue.net.calls import AskController, Operation
from transfer_queue.wire.blocks.row_addressing import SERVER_REPLY
from transfer_queue.wire.objects.object_values import decode_tag_value

MAX_HISTORY = 32
"""Events of a report."""
SEPARATORS = "_-/:.#|@ "
"""Characters at which the part of a key ends that the samples of a prompt share."""


def describe_sample(
    ask: AskController, sample: DescribeSample, allow_pickle: bool, timeout: float | None
) -> Operation[SampleReport]:
    """Return the complete report about one sample.

    Args:
        ask: Makes the requests.
        sample: The request for the first page.
        allow_pickle: Whether tags that need pickle are decoded. Otherwise a text takes their place.
        timeout: Seconds for each of the requests.
    """
    report = yield from _read_pages(ask, sample, timeout)
    explain = Explain(sample.partition, sample.row, sample.key)
    if report.state == samples.CLEARED and report.index >= 0:  # a cleared sample is named by its index
        explain = Explain(sample.partition, report.index)
    explanation = str((yield from ask(explain, Done, timeout)).value)
    return _complete(report, explanation, allow_pickle)


def _read_pages(ask: AskController, sample: DescribeSample, timeout: float | None) -> Operation[SampleReport]:
    """Return the first page of a report with the fields and the history of the others."""
    report = yield from ask(sample, SampleReport, timeout)
    row = report.index if report.index >= 0 else None
    while report.next_field is not None:
        page = yield from ask(DescribeSample(report.partition, row, field=report.next_field), SampleReport, timeout)
        report = msgspec.structs.replace(
            report, fields=report.fields + page.fields, missing=report.missing + page.missing,
            lost=report.lost + page.lost, next_field=page.next_field,
        )  # fmt: skip
    while report.before is not None and len(report.history) < MAX_HISTORY:
        page = yield from ask(DescribeSample(report.partition, row, before=report.before), SampleReport, timeout)
        history = [*page.history, *report.history]
        report = msgspec.structs.replace(report, history=history, before=page.before, complete=page.complete)
    return report


def _complete(report: SampleReport, explanation: str, allow_pickle: bool) -> SampleReport:
    """Return a report of all pages with what follows from its history."""
    events = _with_replaced(report.history)
    cut = len(events) > MAX_HISTORY or report.before is not None
    cleared = bool(events) and events[-1].kind in samples.CLEARS and report.state == samples.UNKNOWN
    return msgspec.structs.replace(
        report,
        state=samples.CLEARED if cleared else report.state,
        tags={name: _tag_value(value, allow_pickle) for name, value in report.tags.items()},
        fields=[_with_writer(field, events) for field in report.fields],
        tasks=[_with_claim(task, events) for task in report.tasks],
        history=events[-MAX_HISTORY:],
        complete=report.complete and not cut,
        explanation=explanation,
        before=None,
        next_field=None,
    )


@SERVER_REPLY
def _tag_value(value: Any, allow_pickle: bool) -> Any:
    try:
        return decode_tag_value(value, allow_pickle=allow_pickle)
    except UncarriableValueError:
        return "(needs pickle, which security.allow_pickle forbids)"


def _with_replaced(events: Iterable[SampleEvent]) -> list[SampleEvent]:
    """Return the events up to the clear. A put of fields that an earlier event has put is one that replaced them."""
    known: set[str] = set()
    marked = []
    for event in events:
        if event.kind == samples.PUT:
            again = not known.isdisjoint(event.fields)
            known.update(event.fields)
            event = msgspec.structs.replace(event, kind=samples.REPLACED) if again else event
        marked.append(event)
        if event.kind in samples.CLEARS:
            break  # the end of the partition is about all its rows, cleared ones included
    return marked


def _with_writer(field: SampleField, events: Sequence[SampleEvent]) -> SampleField:
    """Return a field with the client that put its value, if the history has it."""
    puts = [event for event in reversed(events) if event.kind in (samples.PUT, samples.REPLACED)]
    put = next((event for event in puts if event.block == field.block), None)
    if put is None:  # the value is in another block of its put, or was moved into a new block
        put = next((event for event in puts if field.name in event.fields), None)
    if put is None:
        return field
    return msgspec.structs.replace(
        field, client=put.client, task=put.task, rank=put.rank, time=put.time, host=put.host, pid=put.pid
    )


def _with_claim(task: SampleTask, events: Sequence[SampleEvent]) -> SampleTask:
    """Return a task with its last claim, if the history has it."""
    if task.state not in (samples.CONSUMED, samples.CLAIMED):
        return task
    own_claims = [event for event in reversed(events) if event.kind == samples.CLAIM and event.task == task.name]
    claims = [event for event in own_claims if not task.client or event.client == task.client]
    if not claims:
        return task
    last = claims[0]
    rank = task.rank if task.rank >= 0 else last.rank
    return msgspec.structs.replace(
        task, client=task.client or last.client, rank=rank, time=last.time, host=last.host, pid=last.pid
    )


def find_stuck(
    ask: AskController, partition: str | None, older_than: float, limit: int, timeout: float | None
) -> Operation[StuckReport]:
    """Return the stuck samples.

    Args:
        ask: Makes the requests.
        partition: The partition to search; None for all.
        older_than: The seconds for which a sample has not changed.
        limit: The number of samples that are described, the oldest ones.
        timeout: Seconds for each of the requests.
    """
    most = max(1, min(limit, 1024))
    oldest: list[tuple[float, str, int]] = []
    counts: Counter[str] = Counter()
    request: FindStuck | None = FindStuck(older_than, None if partition is None else [partition], most=most)
    while request is not None:
        page = yield from ask(request, StuckPage, timeout)
        counts[page.partition] += page.count
        times = np.nan_to_num(np.frombuffer(page.times, "<f8"), nan=-math.inf).tolist()
        rows = np.frombuffer(page.rows, "<i8").tolist()
        entries = ((time, page.partition, row) for time, row in zip(times, rows))
        oldest = heapq.nsmallest(limit, [*oldest, *entries])
        request = FindStuck(older_than, page.left, page.made, page.start, most=most) if page.left else None
    stuck = []
    for time, name, row in oldest:
        report = _complete((yield from _read_pages(ask, DescribeSample(name, row), timeout)), "", False)
        if report.state in (samples.LIVE, samples.RESERVED):  # otherwise it was cleared in the meantime
            stuck.append(_stuck_sample(report, None if math.isinf(time) else time))
    partitions = {name: count for name, count in counts.items() if count}
    return StuckReport(page.now, older_than, sum(partitions.values()), partitions, grouped_by_prompt(stuck))


def _stuck_sample(report: SampleReport, time: float | None) -> StuckSample:
    changes = [event for event in report.history if event.kind in (samples.PUT, samples.REPLACED, samples.TAGGED)]
    newest = max(report.fields, key=lambda field: field.block, default=None)
    writer: SampleEvent | SampleField | None = changes[-1] if changes else newest
    client, task, rank, host, pid = "", "", -1, "", 0
    if writer is not None:
        client, task, rank, host, pid = writer.client, writer.task, writer.rank, writer.host, writer.pid
    group = report.group.key if report.group is not None else None
    open_tasks = [task for task in report.tasks if task.state not in (samples.CONSUMED, samples.SKIPPED)]
    consumed = [task for task in report.tasks if task.state == samples.CONSUMED]
    return StuckSample(
        report.partition, report.index, report.key, group or "", time, client, task, rank, report.missing, open_tasks,
        host, pid, consumed,
    )  # fmt: skip


def grouped_by_prompt(stuck: Sequence[StuckSample]) -> list[StuckSample]:
    """Return samples with their prompts: those of a prompt together, in the order of the oldest of each.

    The prompt of a sample without a group is the part of its key, up to a separator, that another sample has, too.
    """
    shared = Counter((each.partition, prefix_of(each.key)) for each in stuck if not each.prompt)
    order: dict[tuple[str, str], list[StuckSample]] = {}
    for each in stuck:
        prefix = prefix_of(each.key)
        if not each.prompt and prefix and shared[each.partition, prefix] > 1:
            each = msgspec.structs.replace(each, prompt=prefix)
        order.setdefault((each.partition, each.prompt), []).append(each)
    return [each for some in order.values() for each in some]


def prefix_of(key: str | None) -> str:
    """Return the part of a key before its last separator; "" if it has none."""
    if key is None:
        return ""
    at = max(key.rfind(separator) for separator in SEPARATORS)
    return key[:at] if at > 0 else ""
