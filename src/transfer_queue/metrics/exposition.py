"""Writes a system's metrics in the text format of Prometheus, version 0.0.4."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from transfer_queue.messages.reports.progress import Timing
from transfer_queue.metrics.compatible import COMPATIBLE
from transfer_queue.metrics.declaration import Family
from transfer_queue.metrics.families import FAMILIES
from transfer_queue.metrics.samples import LabelValues, Value
from transfer_queue.metrics.snapshot import Snapshot

LINES = 200
"""The number of lines of a piece."""


def exposition(snapshot: Snapshot, compatible_names: bool = False) -> Iterator[str]:
    """Yield the text in pieces, between which a thread can let other threads run.

    Args:
        snapshot: The system.
        compatible_names: Whether to add the metrics of `metrics.compatible`. Default: False.
    """
    lines: list[str] = []
    for name, family in {**FAMILIES, **(COMPATIBLE if compatible_names else {})}.items():
        found = _lines(name, family, snapshot)
        first = next(found, None)
        if first is None:
            continue
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}", first]
        for line in found:
            lines.append(line)
            if len(lines) >= LINES:
                yield "\n".join(lines) + "\n"
                lines = []
    yield "\n".join(lines) + "\n"


def _lines(name: str, family: Family, snapshot: Snapshot) -> Iterator[str]:
    for values, value in _merged(family, snapshot).items():
        labels = [(label, text) for label, text in zip(family.labels, values, strict=True) if text is not None]
        if not isinstance(value, Timing):
            yield _line(name, labels, value)
            continue
        reached = list(accumulate(value.counts))
        for bound, count in zip((*map(repr, family.bounds), "+Inf"), reached, strict=True):
            yield _line(f"{name}_bucket", [*labels, ("le", bound)], count)
        yield _line(f"{name}_sum", labels, value.seconds)
        yield _line(f"{name}_count", labels, reached[-1])


def _merged(family: Family, snapshot: Snapshot) -> dict[LabelValues, Value]:
    """Return the samples by label values. Numbers with equal label values are combined into one."""
    merged: dict[LabelValues, Value] = {}
    for labels, value in family.sample(snapshot):
        before = merged.get(labels)
        if before is None or isinstance(before, Timing) or isinstance(value, Timing):
            merged[labels] = value
        else:
            merged[labels] = family.combine((before, value))
    return merged


def _line(name: str, labels: list[tuple[str, str]], value: float) -> str:
    inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
    return f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
