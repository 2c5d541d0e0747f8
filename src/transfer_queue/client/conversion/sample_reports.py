"""Joins the pages of a report about a sample, and those of a search for stuck samples. Imports no torch."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from transfer_queue.errors import UncarriableValueError
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
from transfer_queue.wire.blocks.row_addressing import SERVER_REPLY
from transfer_queue.wire.objects.object_values import decode_tag_value

MAX_HISTORY = 32
"""Events of a report."""
SEPARATORS = "_-/:.#|@ "
"""Characters at which the part of a key ends that the samples of a prompt share."""


class ReportPages:
    """The pages of the report about one sample.

    Args:
        partition: The partition.
        row: The global index, or None.
        key: The key, or None.
    """

    def __init__(self, partition: str, row: int | None, key: str | None) -> None:
        self._first = DescribeSample(partition, row, key)
        self._report: SampleReport | None = None
        self._history: list[SampleEvent] = []

    @property
    def request(self) -> DescribeSample | None:
        """The request for the next page; None if there is none."""
        report = self._report
        if report is None:
            return self._first
        row = report.index if report.index >= 0 else None
        if report.next_field is not None:
            return DescribeSample(report.partition, row, field=report.next_field)
        if report.before is not None and len(self._history) < MAX_HISTORY:
            return DescribeSample(report.partition, row, before=report.before)
        return None

    @property
    def explain(self) -> Explain:
        """The request for the explanation, when all pages are there. A cleared sample is named by its index."""
        report, first = self._report, self._first
        if report is not None and report.state == samples.CLEARED and report.index >= 0:
            return Explain(first.partition, report.index)
        return Explain(first.partition, first.row, first.key)

    def add(self, page: SampleReport) -> None:
        """Add the reply to `request`."""
        report = self._report
        if report is None:
            self._report, self._history = page, list(page.history)
        elif report.next_field is not None:
            self._report = msgspec.structs.replace(
                report, fields=report.fields + page.fields, missing=report.missing + page.missing,
                lost=report.lost + page.lost, next_field=page.next_field,
            )  # fmt: skip
        else:
            self._history = [*page.history, *self._history]
            self._report = msgspec.structs.replace(report, before=page.before, complete=page.complete)

    def report(self, explanation: str, allow_pickle: bool) -> SampleReport:
        """Return the complete report. Tags that need pickle are replaced by a text unless it is allowed."""
        assert self._report is not None
        report = self._report
        events = _with_replaced(self._history)
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


class StuckPages:
    """The pages of the search for stuck samples, and the reports about the oldest of them.

    Args:
        partition: The partition to search; None for all.
        older_than: The seconds for which a sample has not changed.
        limit: The number of samples that are described.
    """

    def __init__(self, partition: str | None, older_than: float, limit: int) -> None:
        self._limit = limit
        self._older_than = older_than
        self._most = max(1, min(limit, 1024))
        self.request: FindStuck | None = FindStuck(
            older_than, None if partition is None else [partition], most=self._most
        )
        """The request for the next page; None if there is none."""
        self._oldest: list[tuple[float, str, int]] = []
        self._counts: Counter[str] = Counter()
        self._now = 0.0

    def add(self, page: StuckPage) -> None:
        """Add the reply to `request`."""
        self._now = page.now
        self._counts[page.partition] += page.count
        times = np.nan_to_num(np.frombuffer(page.times, "<f8"), nan=-math.inf).tolist()
        rows = np.frombuffer(page.rows, "<i8").tolist()
        entries = ((time, page.partition, row) for time, row in zip(times, rows))
        self._oldest = heapq.nsmallest(self._limit, [*self._oldest, *entries])
        self.request = None
        if page.left:
            self.request = FindStuck(self._older_than, page.left, page.made, page.start, most=self._most)

    @property
    def oldest(self) -> list[ReportPages]:
        """The reports that `describe` needs, one for each of the oldest samples."""
        return [ReportPages(partition, row, None) for _, partition, row in self._oldest]

    def describe(self, reports: Sequence[SampleReport]) -> StuckReport:
        """Return the result.

        Args:
            reports: The reports about `oldest`, in the same order.
        """
        stuck = [
            _stuck_sample(report, None if math.isinf(time) else time)
            for (time, _, _), report in zip(self._oldest, reports)
            if report.state in (samples.LIVE, samples.RESERVED)  # otherwise it was cleared in the meantime
        ]
        partitions = {name: count for name, count in self._counts.items() if count}
        return StuckReport(self._now, self._older_than, sum(partitions.values()), partitions, grouped_by_prompt(stuck))


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
    named = []
    for each in stuck:
        prefix = prefix_of(each.key)
        if not each.prompt and prefix and shared[each.partition, prefix] > 1:
            each = msgspec.structs.replace(each, prompt=prefix)
        named.append(each)
    order: dict[tuple[str, str], list[StuckSample]] = {}
    for each in named:
        order.setdefault((each.partition, each.prompt), []).append(each)
    return [each for some in order.values() for each in some]


def prefix_of(key: str | None) -> str:
    """Return the part of a key before its last separator; "" if it has none."""
    if key is None:
        return ""
    at = max(key.rfind(separator) for separator in SEPARATORS)
    return key[:at] if at > 0 else ""
