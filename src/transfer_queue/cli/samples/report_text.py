"""Formats the report about one sample, with the beginnings of its values, as text for a terminal."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from transfer_queue.cli.shell.terminal import Styles, clock_text, columns_text, cut, duration_text, table_lines
from transfer_queue.display import (
    count_text,
    listed_names,
    printable_name,
    short_name,
    short_repr,
    short_text,
    size_text,
    worker_text,
)
from transfer_queue.messages.reports import samples
from transfer_queue.messages.reports.progress_text import tier_name
from transfer_queue.messages.reports.samples import SampleEvent, SampleField, SampleGroup, SampleReport, SampleTask

if TYPE_CHECKING:
    from transfer_queue.client import TransferQueueClient
    from transfer_queue.node.system.launcher import RunningSystem
    from transfer_queue.token_text import TokenText


MAX_BYTES = 64 << 20
"""The largest value that is read, in bytes."""
FIRST = 8
"""Numbers of a tensor that are shown."""
MIN_TEXT = 2
"""Characters that a tensor must have to be shown as text."""
LONGEST_TEXT = 4096
"""Characters of a text that are kept."""


class ShownValue(msgspec.Struct, frozen=True):
    """The beginning of a value."""

    text: str | None = None
    """The text that the value contains; None if it does not contain text."""
    first: list[Any] = []
    """The first numbers of a tensor."""
    more: int = 0
    """The number of its other numbers."""
    other: str = ""
    """The beginning of the `repr` of an object."""
    decoded: str | None = None
    """The text whose token ids a tensor contains; None if it does not contain token ids, or without a tokenizer."""
    error: str = ""
    """Why the value is not shown."""


def read_values(system: RunningSystem, report: SampleReport, tokens: TokenText | None = None) -> dict[str, ShownValue]:
    """Return the beginnings of the values of a live sample, by field. `tokens` decodes token ids."""
    from transfer_queue.client import TransferQueueClient

    client = TransferQueueClient(system)
    try:
        fields = [field for field in report.fields if field.kind != "nested"]
        return {field.name: _read(client, report, field, tokens) for field in fields}
    finally:
        client.close()


def _read(
    client: TransferQueueClient, report: SampleReport, field: SampleField, tokens: TokenText | None
) -> ShownValue:
    if field.nbytes is not None and field.nbytes > MAX_BYTES:
        return ShownValue(error="too large to be shown")
    try:
        return shown(client._read_value(report.partition, report.index, field.name), tokens)
    except Exception as error:  # a user's class may raise anything when it is unpickled
        return ShownValue(error=f"{type(error).__name__}: {error}")


def shown(value: Any, tokens: TokenText | None = None) -> ShownValue:
    """Return the beginning of a value. `tokens` decodes token ids."""
    import torch

    if isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1) if not value.is_sparse else value.coalesce().values().reshape(-1)
        numbers = flat[:FIRST].tolist()
        decoded = None if tokens is None else tokens.decode(value)
        may_be_text = decoded is None and value.ndim == 1 and str(value.dtype).startswith(("torch.uint8", "torch.int"))
        text = text_of_numbers(flat[:LONGEST_TEXT].tolist()) if may_be_text else None
        return ShownValue(text, numbers, max(0, flat.numel() - len(numbers)), decoded=decoded)
    if isinstance(value, str):
        return ShownValue(value[:LONGEST_TEXT])
    if isinstance(value, (bytes, bytearray)):
        return ShownValue(text_of_numbers(list(value[:LONGEST_TEXT])), other=short_repr(bytes(value[:LONGEST_TEXT])))
    return ShownValue(other=f"{type(value).__name__}: {short_repr(value, 200)}")


def text_of_numbers(numbers: Sequence[int]) -> str | None:
    """Return the text whose UTF-8 bytes these numbers are, without padding of zeros at its end; None if they are not.

    Token ids are hardly ever text by accident, because most of them are above 255.
    """
    kept = list(itertools.dropwhile(lambda number: number == 0, reversed(numbers)))[::-1]
    if len(kept) < MIN_TEXT or not all(0 <= number < 256 for number in kept):
        return None
    try:
        text = bytes(kept).decode()
    except UnicodeDecodeError as error:
        if error.start < len(kept) - 4 or error.start < MIN_TEXT:  # not a character that the limit has cut
            return None
        text = bytes(kept[: error.start]).decode()
    printable = all(character.isprintable() or character in "\n\r\t" for character in text)
    return text if printable else None


COLORS = {
    samples.LIVE: "green", samples.RESERVED: "yellow", samples.CLEARED: "red", samples.UNKNOWN: "red",
    samples.CONSUMED: "green", samples.CLAIMED: "cyan", samples.READY: "yellow", samples.WAITING: "red",
    samples.SKIPPED: "red", samples.PUT: "green", samples.REPLACED: "yellow", samples.TAGGED: "green",
    samples.CLAIM: "cyan", samples.ACK: "cyan", samples.RETURNED: "red", samples.CLEAR: "red",
    samples.PARTITION_CLEAR: "red",
}  # fmt: skip
STATES = {
    samples.LIVE: "live", samples.RESERVED: "reserved, nothing was put into it yet",
    samples.CLEARED: "cleared", samples.UNKNOWN: "does not exist",
}  # fmt: skip
FIELD_HEADINGS = ("field", "type", "size", "stored", "put by", "ago")
TASK_HEADINGS = ("task", "state", "details")
EVENT_HEADINGS = ("time", "ago", "event", "by", "fields")
SHOWN_MEMBERS = 16
"""Members of a group that are named."""


class ReportText:
    """The text about one sample.

    Args:
        report: The report.
        values: The beginnings of its values, by field; empty if they were not read.
        width: The number of columns.
        style: Adds colors.
    """

    def __init__(self, report: SampleReport, values: Mapping[str, ShownValue], width: int, style: Styles) -> None:
        self._report = report
        self._values = values
        self._width = width
        self._style = style

    def lines(self) -> Iterator[str]:
        """Iterate over the lines."""
        report = self._report
        yield from self._heading()
        if report.fields or report.missing:
            yield ""
            yield from self._fields()
        if report.tasks:
            yield ""
            yield from self._tasks()
        yield ""
        yield from self._history()
        if report.explanation:
            yield ""
            for line in report.explanation.splitlines():
                yield from textwrap.wrap(printable_name(line), self._width, break_on_hyphens=False)

    def _heading(self) -> Iterator[str]:
        report, style = self._report, self._style
        name = f"sample {short_repr(report.key)}" if report.key is not None else f"sample {report.index}"
        index = f", index {report.index}" if report.key is not None and report.index >= 0 else ""
        yield (
            f"{style(name, 'bold')} of partition {style(short_name(report.partition), 'bold')}{index}: "
            f"{style(STATES[report.state], COLORS[report.state])}{self._end()}"
        )
        rows = []
        if report.group is not None:
            rows.append(("group", self._group(report.group)))
        if report.tags:
            tags = [f"{short_name(tag)} {short_repr(value)}" for tag, value in report.tags.items()]
            rows.append(("tags", ", ".join(tags)))
        for name, text in rows:
            yield from textwrap.wrap(
                text, self._width, initial_indent=f"  {name:<6} ", subsequent_indent=" " * 9, break_on_hyphens=False
            )

    def _end(self) -> str:
        """Return when and by whom the sample was cleared; "" if it was not, or this is not known."""
        report = self._report
        clear = next((event for event in report.history if event.kind in samples.CLEARS), None)
        if clear is None:
            return ""
        how = ""
        if clear.kind == samples.PARTITION_CLEAR:
            how = ", at the latest with its partition" if report.history[0] is clear else " with its partition"
        return f"{how} at {clock_text(clear.time, report.now)} by {who(clear)}"

    def _group(self, group: SampleGroup) -> str:
        size = f" of {group.size}" if group.size is not None else ""
        name = f"{short_name(group.key)}: " if group.key is not None else "by order of reservation: "
        exist = "sample exists" if group.count == 1 and group.size is None else "samples exist"
        text = f"{name}{group.count}{size} {exist}"
        text += f", {group.cleared} cleared" if group.cleared else ""
        shown = group.members[:SHOWN_MEMBERS]
        names = [
            (short_name(each.key, 32) if each.key is not None else str(each.index))
            + (" (this one)" if each.index == self._report.index else "")
            + (f" lacks {count_text(each.lacks, 'field')}" if each.lacks else "")
            for each in shown
        ]
        left = group.count - len(shown)
        return f"{text}: {', '.join(names)}" + (f", and {left} more" if left > 0 else "")

    # ------------------------------------------------------------ fields

    def _fields(self) -> Iterator[str]:
        report, style = self._report, self._style
        nbytes = sum(field.nbytes or 0 for field in report.fields)
        yield style(f"{count_text(len(report.fields), 'field')}, {size_text(nbytes)}", "bold")
        rows = [FIELD_HEADINGS, *(self._field(field) for field in report.fields)]
        headings, *lines = columns_text(rows, right=frozenset({2}))
        if lines:
            yield style(cut(headings, self._width), "dim")
        for field, line in zip(report.fields, lines):
            yield cut(line, self._width)
            value = self._values.get(field.name)
            if value is not None:
                yield style(cut(f"      {value_text(value)}", self._width), "dim")
                if value.decoded is not None:
                    yield style(cut(f"      text: {value.decoded!r}", self._width), "dim")
        if report.missing:
            missing = f"missing: {listed_names(report.missing, most=32, characters=60)}"
            lost = f"; lost with their storage unit: {listed_names(report.lost)}" if report.lost else ""
            for line in textwrap.wrap(
                missing + lost, self._width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            ):
                yield style(line, "yellow")

    def _field(self, field: SampleField) -> tuple[str, ...]:
        is_wide = self._width > 100
        age = "" if field.time is None else duration_text(self._report.now - field.time, 2 if is_wide else 1)
        copy = f"+{field.copy_unit}" if field.copy_unit >= 0 else ""
        return (
            short_name(field.name, 40 if is_wide else 18),
            type_text(field, 40 if is_wide else 20),
            "?" if field.nbytes is None else size_text(field.nbytes),
            f"unit {field.unit}{copy} {tier_name(field.tier)}" if is_wide else f"u{field.unit}{copy} {field.tier}",
            who(field, 60 if is_wide else 26) if field.client or field.task else "",
            age,
        )

    # ------------------------------------------------------------ tasks and history

    def _tasks(self) -> Iterator[str]:
        yield self._style(count_text(len(self._report.tasks), "task"), "bold")
        rows = [(short_name(task.name, 24), task.state, self._task(task)) for task in self._report.tasks]
        headings, *tables = table_lines(TASK_HEADINGS, rows, self._width, self._style)
        yield from headings
        for task, (first, *more) in zip(self._report.tasks, tables):
            yield self._colored(cut(first, self._width), task.state)
            yield from more

    def _task(self, task: SampleTask) -> str:
        if task.state == samples.WAITING:
            return f"lacks {listed_names(task.lacks)}"
        if task.state == samples.SKIPPED:
            return printable_name(task.reason)
        parts = []
        if task.state in (samples.CONSUMED, samples.CLAIMED):
            if task.client or task.rank >= 0:
                parts.append(f"by {who(task, task='')}")
            if task.time is not None:
                parts.append(f"{duration_text(self._report.now - task.time)} ago")
        if task.state == samples.CLAIMED:
            parts.append("under a lease" if task.leased else "not under a lease now")
        if task.batch_index >= 0:
            parts.append(f"batch {task.batch_index}")
        if task.deliveries:
            deliveries = "delivery" if task.deliveries == 1 else "deliveries"
            parts.append(f"{task.deliveries} {deliveries} not acknowledged")
        return ", ".join(parts)

    def _history(self) -> Iterator[str]:
        report = self._report
        kept = "" if report.complete else "; older events are not kept"
        if not report.history:
            yield self._style(f"history: {'no events' if report.complete else 'not kept'}", "bold")
            return
        yield self._style(cut(f"history, the newest last{kept}", self._width), "bold")
        rows = [EVENT_HEADINGS, *(self._event(event) for event in report.history)]
        headings, *lines = columns_text(rows, right=frozenset({1}))
        yield self._style(cut(headings, self._width), "dim")
        for event, line in zip(report.history, lines):
            yield self._colored(cut(line, self._width), event.kind)

    def _event(self, event: SampleEvent) -> tuple[str, ...]:
        is_wide = self._width > 100
        others = f" (with {count_text(event.rows - 1, 'other sample')})" if event.rows > 1 and is_wide else ""
        return (
            clock_text(event.time, self._report.now),
            duration_text(self._report.now - event.time, 2 if is_wide else 1),
            event.kind,
            who(event, 60 if is_wide else 26),
            (listed_names(event.fields) if event.fields else "") + others,
        )

    def _colored(self, line: str, word: str) -> str:
        before, separator, after = line.partition(f" {word}")
        return f"{before} {self._style(word, COLORS[word])}{after}" if separator else line


def who(done: SampleEvent | SampleField | SampleTask, most: int = 60, task: str | None = None) -> str:
    """Return who did something, as `worker_text`. task: the task to name instead of that of the client."""
    name = done.name if isinstance(done, SampleTask) else done.task
    return worker_text(name if task is None else task, done.rank, done.pid, done.host, done.client, most)


def type_text(field: SampleField, width: int) -> str:
    """Return the type of a value, as `float32[3, 4]`."""
    if field.kind != "tensor":
        return "a nested TensorDict" if field.kind == "nested" else "object"
    shape = "?" if field.shape is None else ", ".join(map(str, field.shape))
    return short_text(f"{field.dtype}[{shape}]", width)


def value_text(value: ShownValue) -> str:
    """Return the beginning of a value as one line."""
    if value.error:
        return f"not shown: {printable_name(' '.join(value.error.split()))}"
    if value.text is not None:
        return repr(value.text)
    if value.other:
        return value.other
    numbers = ", ".join(map(_number, value.first))
    return f"{numbers}, … {value.more:,} more" if value.more else numbers or "(empty)"


def _number(number: Any) -> str:
    return f"{number:.5g}" if isinstance(number, float) else str(number)


def lines_of(report: SampleReport, values: Mapping[str, ShownValue], width: int, style: Styles) -> Sequence[str]:
    """Return the text about a sample."""
    return list(ReportText(report, values, width, style).lines())
