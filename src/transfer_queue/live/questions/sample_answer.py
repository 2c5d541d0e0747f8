"""Makes the answer about one sample out of the report of the controller."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transfer_queue.display import short_repr, worker_text
from transfer_queue.live import answers
from transfer_queue.messages.reports.samples import (
    ACK,
    CLAIM,
    CLEAR,
    PARTITION_CLEAR,
    PUT,
    REPLACED,
    RETURNED,
    TAGGED,
    SampleEvent,
    SampleField,
    SampleReport,
    SampleTask,
)

LONGEST_TAG = 2000
MAX_FIELDS = 200
HIDDEN = "values are hidden: start `tq live` with --values, or set live.values"


@dataclass(frozen=True)
class ValueHead:
    """The beginning of a value."""

    head: str | None = None
    """The first values as text."""
    text: str | None = None
    """The beginning of the text that the value is."""
    decoded: str | None = None
    """The beginning of the text whose token ids the value contains."""
    note: str = ""
    """Why the value is not shown; "" if it is."""


def answer_of(report: SampleReport, task: str, heads: Mapping[str, ValueHead] | None) -> answers.SampleAnswer:
    """Return the answer about a sample.

    Args:
        report: What the controller knows.
        task: The task at the end, for the command that explains the sample.
        heads: The beginnings of the values; None if the page may not show values.
    """
    fields = [_field(field, heads) for field in report.fields[:MAX_FIELDS]]
    fields += [
        answers.SampleFieldView(name, False, "", None, None, None, "", "", None, name in report.lost)
        for name in report.missing[:MAX_FIELDS]
    ]
    tags = [
        answers.SampleTagView(str(name), None if heads is None else _text(value)) for name, value in report.tags.items()
    ]
    command = f"tq explain {shlex.quote(report.partition)} --index {report.index}" + (
        f" --task {shlex.quote(task)}" if task else ""
    )
    tasks = [
        answers.SampleTaskView(
            each.name,
            each.state,
            each.lacks,
            _who("", each),
            each.reason,
        )
        for each in report.tasks
    ]
    samples = [] if report.group is None else [member.index for member in report.group.members]
    return answers.SampleAnswer(
        report.partition, report.index, report.key, round(report.now, 2), report.explanation, command, fields, tags,
        _group(report), [_event(event) for event in report.history],
        "" if report.complete else "older events are not kept", report.state, tasks, samples,
    )  # fmt: skip


def _field(field: SampleField, heads: Mapping[str, ValueHead] | None) -> answers.SampleFieldView:
    head = ValueHead(note=HIDDEN) if heads is None else heads.get(field.name, ValueHead())
    return answers.SampleFieldView(
        field.name, True, field.dtype if field.kind == "tensor" else field.kind, field.shape, field.nbytes,
        field.unit if field.unit >= 0 else None, field.tier, _who(field.task, field),
        None if field.time is None else round(field.time, 2), False, head.head, head.text, head.decoded, head.note,
    )  # fmt: skip


def _group(report: SampleReport) -> answers.SampleGroupView | None:
    group = report.group
    if group is None:
        return None
    places = [at for at, member in enumerate(group.members) if member.index == report.index]
    return answers.SampleGroupView(group.key or "", group.size or 0, places[0] if places else -1)


def _event(event: SampleEvent) -> answers.SampleEventView:
    named = ", ".join(event.fields[:16])
    kind_text = {
        PUT: f"put {named}", REPLACED: f"put again: {named}", TAGGED: "changed its tags", CLAIM: "claimed",
        ACK: "acknowledged", RETURNED: "returned without an acknowledgement", CLEAR: "cleared",
        PARTITION_CLEAR: "cleared the partition",
    }.get(event.kind, event.kind)  # fmt: skip
    return answers.SampleEventView(round(event.time, 2), kind_text, _who(event.task, event))


def _who(task: str, did: SampleField | SampleEvent | SampleTask) -> str:
    known = task or did.client or did.rank >= 0
    return worker_text(task, did.rank, did.pid, did.host, did.client) if known else ""


def _text(value: Any) -> str:
    return value[:LONGEST_TAG] if isinstance(value, str) else short_repr(value, LONGEST_TAG)
