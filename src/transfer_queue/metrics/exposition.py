"""Writes a system's metrics in the text format of Prometheus, version 0.0.4, also under names of other dashboards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from transfer_queue.messages.reports.progress import TaskProgress, Timing
from transfer_queue.messages.reports.unit_reports import Measured
from transfer_queue.metrics.families import FAMILIES
from transfer_queue.metrics.samples import (
    Family,
    LabelValues,
    Sample,
    Snapshot,
    Source,
    Value,
    counter,
    gauge,
    histogram,
    named_tasks,
    per_partition,
    series,
)
from transfer_queue.metrics.timing import LOOP_BOUNDS, quantile

# ---------------------------------------------------------------- metrics of existing dashboards
# Their names, labels and types of requests are those of the dashboards. Where this system works differently, the
# meaning is the nearest one that it can measure, and the help says what that is.


CONTROLLER_TYPES = {
    "Claim": "GET_META", "ShowRows": "GET_META", "Reserve": "GET_META", "Publish": "NOTIFY_DATA_UPDATE",
    "ClearRows": "CLEAR_META", "ClearKeys": "CLEAR_META", "ClearPartition": "CLEAR_META",
}  # fmt: skip
"""Type of a request to the controller -> its `op_type`. Other requests have their own names."""
UNIT_TYPES = {
    "Lease": "PUT_DATA", "WriteBytes": "PUT_DATA", "Keep": "GET_DATA", "ReadPieces": "GET_DATA", "Free": "CLEAR_DATA",
}  # fmt: skip
"""Type of a request to a storage unit -> its `op_type`."""
UNIT = ("storage_unit_id",)


# ---------------------------------------------------------------- the controller


def _of_controller(value: Callable[[Snapshot], float]) -> Source:
    return Source((), lambda snapshot: [((), value(snapshot))])


def _requests_of_controller(snapshot: Snapshot) -> dict[str, Timing]:
    return _by_op_type(snapshot.server.requests, CONTROLLER_TYPES)


def _by_op_type(requests: list[Timing], types: dict[str, str]) -> dict[str, Timing]:
    """Return op_type -> its requests together; types that did not occur have none."""
    timings = {op_type: Timing(op_type, [0] * (len(LOOP_BOUNDS) + 1), 0.0) for op_type in types.values()}
    for request in requests:
        op_type = types.get(request.name, request.name)
        before = timings.get(op_type)
        if before is None:
            timings[op_type] = request
        else:
            counts = [one + other for one, other in zip(before.counts, request.counts, strict=True)]
            timings[op_type] = Timing(op_type, counts, before.seconds + request.seconds)
    return timings


def _request_samples(snapshot: Snapshot) -> Iterator[Sample]:
    yield ("NOTIFY_DATA_UPDATE",), snapshot.counters.get("published_rows", 0)
    yield ("GET_META",), snapshot.counters.get("dealt_rows", 0)
    yield ("CLEAR_META",), snapshot.series.get("cleared_rows", {}).get((), 0)


def _progress(done: Callable[[Snapshot, str, TaskProgress, str], float]) -> Source:
    """Return the share of the samples of a partition of which something is true, by partition and task."""
    return Source(
        ("partition_id", "task_name"),
        lambda snapshot: (
            ((partition.name, name), min(1.0, done(snapshot, partition.name, task, name) / max(partition.rows, 1)))
            for partition, task, name in named_tasks(snapshot)
        ),
    )


def _produced(snapshot: Snapshot, partition: str, task: TaskProgress, name: str) -> float:
    return task.consumed + task.claimed + snapshot.series.get("ready_rows", {}).get((partition, name), 0)


# ---------------------------------------------------------------- the storage units


def _values_of_units(snapshot: Snapshot) -> Iterator[tuple[str, int, float]]:
    """Yield each unit with its name, number and live values."""
    values = snapshot.series.get("unit_values", {})
    for info in snapshot.infos:
        yield str(info.unit), info.unit, values.get((str(info.unit),), 0)


def _active_keys(snapshot: Snapshot) -> Iterator[Sample]:
    for name, _, count in _values_of_units(snapshot):
        yield (name,), count


def _capacity(snapshot: Snapshot) -> Iterator[Sample]:
    capacities = {info.unit: info.capacity for info in snapshot.infos}
    for name, unit, count in _values_of_units(snapshot):
        answer, live = snapshot.units.get(unit), snapshot.live.get(unit, 0)
        capacity = capacities[unit] if answer is None else answer.storage.space.capacity
        if live and capacity:
            yield (name,), float(int(capacity / live * count))


def _answers(snapshot: Snapshot) -> Iterator[tuple[str, Measured]]:
    return ((str(unit), answer) for unit, answer in snapshot.units.items() if answer is not None)


def _utilization(snapshot: Snapshot) -> Iterator[Sample]:
    for unit, answer in _answers(snapshot):
        if answer.storage.space.capacity:
            yield (unit,), answer.storage.space.leased / answer.storage.space.capacity


def _per_unit_request(value: Callable[[Timing], float]) -> Source:
    return Source(
        ("op_type", *UNIT),
        lambda snapshot: (
            ((op_type, unit), value(timing))
            for unit, answer in _answers(snapshot)
            for op_type, timing in _by_op_type(answer.server.requests, UNIT_TYPES).items()
        ),
    )


COMPATIBLE: dict[str, Family] = {
    "tq_controller_uptime_seconds": gauge(
        "Time since the start of the controller's process.",
        _of_controller(lambda snapshot: max(0.0, snapshot.time - snapshot.server.started)),
    ),
    "tq_controller_memory_rss_bytes": gauge(
        "Resident memory of the controller.", _of_controller(lambda snapshot: snapshot.server.resident)
    ),
    "tq_partitions_total": gauge("Partitions that exist.", _of_controller(lambda snapshot: snapshot.count)),
    "tq_global_index_allocated_total": gauge("Global indexes that were allocated so far.", series("global_indexes")),
    "tq_global_index_reusable_total": gauge(
        "Always 0: this system never reuses a global index.", _of_controller(lambda snapshot: 0)
    ),
    "tq_controller_request_total": counter(
        "Requests that the controller has handled, by the type of the dashboards or their own name.",
        Source(
            ("op_type",),
            lambda snapshot: (
                ((op_type,), sum(timing.counts)) for op_type, timing in _requests_of_controller(snapshot).items()
            ),
        ),
    ),
    "tq_controller_request_duration_seconds": histogram(
        "Time of a request in the loop of the controller, without its wait for samples or space.",
        Source(
            ("op_type",),
            lambda snapshot: (((op_type,), timing) for op_type, timing in _requests_of_controller(snapshot).items()),
        ),
        LOOP_BOUNDS,
    ),
    "tq_controller_request_samples_total": counter(
        "Samples that were put (NOTIFY_DATA_UPDATE), dealt (GET_META) and removed (CLEAR_META).",
        Source(("op_type",), _request_samples),
    ),
    "tq_partition_samples_total": gauge(
        "Samples of a partition.", Source(("partition_id",), per_partition(lambda partition: partition.rows))
    ),
    "tq_partition_production_progress": gauge(
        "The share of the samples of a partition that have the fields of the task's last fetch, or that it received.",
        _progress(_produced),
        combine=max,
    ),
    "tq_partition_consumption_progress": gauge(
        "The share of the samples of a partition that a task has consumed.",
        _progress(lambda snapshot, partition, task, name: task.consumed),
        combine=max,
    ),
    "tq_storage_utilization_ratio": gauge(
        "The share of the capacity of a storage unit that is leased to writers.", Source(UNIT, _utilization)
    ),
    "tq_storage_active_keys_total": gauge(
        "Values in a storage unit: one for each field of a sample.", Source(UNIT, _active_keys)
    ),
    "tq_storage_capacity_total": gauge(
        "About how many values of the current mean size fit into a storage unit. An empty unit has no such series.",
        Source(UNIT, _capacity),
    ),
    "tq_storage_memory_rss_bytes": gauge(
        "Resident memory of a storage unit, including the used part of its arena.",
        Source(UNIT, lambda snapshot: (((unit,), answer.server.resident) for unit, answer in _answers(snapshot))),
    ),
    "tq_storage_request_ops": counter(
        "Requests that a storage unit has handled. Processes of its node read and write without one.",
        _per_unit_request(lambda timing: sum(timing.counts)),
    ),
    "tq_storage_request_latency_p50": gauge(
        "The median time of a request in the loop of a storage unit since its start.",
        _per_unit_request(lambda timing: quantile(LOOP_BOUNDS, timing.counts, 0.5)),
    ),
    "tq_storage_request_latency_p99": gauge(
        "The 99th percentile of this time.",
        _per_unit_request(lambda timing: quantile(LOOP_BOUNDS, timing.counts, 0.99)),
    ),
}
"""Name of a metric -> its declaration."""

# ---------------------------------------------------------------- the text

LINES = 200
"""The number of lines of a piece."""


def exposition(snapshot: Snapshot, compatible_names: bool = False) -> Iterator[str]:
    """Yield the text in pieces, between which a thread can let other threads run.

    Args:
        snapshot: The system.
        compatible_names: Whether to add the metrics of COMPATIBLE. Default: False.
    """
    lines: list[str] = []
    for name, family in {**FAMILIES, **(COMPATIBLE if compatible_names else {})}.items():
        rendered = _lines(name, family, snapshot)
        first = next(rendered, None)
        if first is None:
            continue
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}", first]
        for line in rendered:
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
