"""The measurements of one scrape, and functions from it to the samples of a metric, which `metrics.families` names.

A sample is a value and the values of the family's labels, in their order; None if the sample does not have the label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from transfer_queue.messages.descriptors import UnitInfo
from transfer_queue.messages.reports.progress import FieldProgress, PartitionProgress, SamplerCost, TaskProgress, Timing
from transfer_queue.messages.reports.unit_reports import Measured, ServerMeasures, UnitMeasures
from transfer_queue.metrics.timing import OTHER


@dataclass(frozen=True)
class JournalMeasures:
    """Measurements of the journal."""

    size: int
    """The length of all files in bytes."""
    records: int
    """The number of records since the last snapshot."""
    nbytes: int
    """The length of these records in bytes."""
    age: float
    """The time in seconds since the last snapshot."""
    commits: Timing
    """The time of commits."""
    last_commit: float
    """The time of the last commit in seconds."""
    failures: int
    """The number of failed commits."""
    trouble: bool
    """Whether the journal cannot be written now."""
    snapshot_failing: bool
    """Whether the last snapshot could not be written."""


@dataclass(frozen=True)
class Snapshot:
    """The system at one moment, or within some milliseconds, because a large state is read in steps."""

    server: ServerMeasures
    """The measurements of the controller's process."""
    counters: Mapping[str, float]
    """`ControllerMeasures.counters`."""
    count: int
    """The number of all partitions."""
    partitions: list[PartitionProgress]
    """The partitions that are reported by name, and if there are more, one with the sums of all others."""
    samplers: list[SamplerCost]
    """The cost of each user's sampler."""
    infos: list[UnitInfo]
    """All storage units."""
    units: Mapping[int, Measured | None]
    """Unit -> its measurements; None if it did not reply."""
    live: Mapping[int, int]
    """Unit -> bytes of its blocks that are needed."""
    series: Mapping[str, Mapping[tuple[str, ...], float]]
    """Name -> label values -> value, for `samples.series`."""
    journal: JournalMeasures | None
    """The measurements of the journal; None if the system has no journal."""
    timings: Mapping[str, list[Timing]] = field(default_factory=dict)
    """Name -> histograms of tasks, for `samples.per_task_timing`."""
    time: float = 0.0
    """The time of the scrape, in seconds since the epoch."""


MOST_OF_A_PARTITION = 50
"""Fields, tasks and reasons to drop of one partition that have their own samples. The others share one."""

LabelValues = tuple[str | None, ...]
Value = float | Timing
"""A number, or a histogram."""
Sample = tuple[LabelValues, Value]
Samples = Callable[[Snapshot], Iterable[Sample]]
T = TypeVar("T")


# ---------------------------------------------------------------- values with a name


def counter_of_controller(name: str) -> Samples:
    """Return `ControllerMeasures.counters[name]`, without labels; 0 if nothing was counted yet."""
    return lambda snapshot: [((), snapshot.counters.get(name, 0))]


def counter_of_units(name: str) -> Samples:
    """Return `StorageUnit.counters[name]` of each unit, by unit and tier; 0 if nothing was counted yet."""
    return per_unit(lambda unit: unit.counters.get(name, 0))


def series(name: str) -> Samples:
    """Return `StateMeasures.series[name]`, or a series of another part of the controller, by its keys, the labels."""
    return lambda snapshot: snapshot.series.get(name, {}).items()


def per_task_timing(name: str) -> Samples:
    """Return `TaskMeasures.timings[name]`, by task; clients without a task have no such label."""
    return lambda snapshot: (((timing.task or None,), timing) for timing in snapshot.timings.get(name, ()))


def named_series(name: str) -> Samples:
    """Return `series(name)`, in which a label value of "" leaves the label out."""
    return lambda snapshot: (
        (tuple(value or None for value in labels), number) for labels, number in snapshot.series.get(name, {}).items()
    )


# ---------------------------------------------------------------- values of the parts of a snapshot


def per_server(value: Callable[[ServerMeasures], float]) -> Samples:
    """Return a number of each server, by server and unit."""
    return lambda snapshot: ((labels, value(server)) for labels, server in _servers(snapshot))


def per_server_and_name(values: Callable[[ServerMeasures], Mapping[str, float]]) -> Samples:
    """Return several numbers of each server, by server, unit and the key of the number."""
    return lambda snapshot: (
        ((*labels, name), value) for labels, server in _servers(snapshot) for name, value in values(server).items()
    )


def per_request_type(value: Callable[[Timing], Value]) -> Samples:
    """Return a value of each type of request, by server, unit and type."""
    return lambda snapshot: (
        ((*labels, timing.name), value(timing)) for labels, server in _servers(snapshot) for timing in server.requests
    )


def per_wait(value: Callable[[Timing], Value]) -> Samples:
    """Return a value of each type of request that waited, by server, unit, type and, if it has one, task."""
    return lambda snapshot: (
        ((*labels, timing.name, timing.task or None), value(timing))
        for labels, server in _servers(snapshot)
        for timing in server.waits
    )


def servers_up(snapshot: Snapshot) -> Iterator[Sample]:
    """Return 1 for each server that replied, else 0, by server and unit."""
    yield ("controller", None), 1
    for number, answer in snapshot.units.items():
        yield ("unit", str(number)), int(answer is not None)


def per_unit(value: Callable[[UnitMeasures], float]) -> Samples:
    """Return a number of each storage unit that replied, by unit and tier."""
    return lambda snapshot: ((labels, value(answer.storage)) for _, labels, answer in _units(snapshot))


def live_bytes(snapshot: Snapshot) -> Iterator[Sample]:
    """Return the bytes of needed blocks of each unit that replied, by unit and tier."""
    return ((labels, snapshot.live.get(number, 0)) for number, labels, _ in _units(snapshot))


def per_partition(value: Callable[[PartitionProgress], float]) -> Samples:
    """Return a number of each partition, by partition."""
    return lambda snapshot: (((partition.name,), value(partition)) for partition in snapshot.partitions)


def per_partition_and_name(values: Callable[[PartitionProgress], Mapping[str, float]]) -> Samples:
    """Return several numbers of each partition, by partition and the key of the number."""
    return lambda snapshot: (
        ((partition.name, name), value)
        for partition in snapshot.partitions
        for name, value in values(partition).items()
    )


def per_field(value: Callable[[FieldProgress], float]) -> Samples:
    """Return a number of each field of each partition, by partition and field."""
    return lambda snapshot: (
        ((partition.name, name), value(field))
        for partition in snapshot.partitions
        for field, name in _bounded((field.name for field in partition.fields), partition.fields)
    )


def per_task(value: Callable[[TaskProgress], float]) -> Samples:
    """Return a number of each task of each partition, by partition and task."""
    return lambda snapshot: (((partition.name, name), value(task)) for partition, task, name in named_tasks(snapshot))


def dropped_rows(snapshot: Snapshot) -> Iterator[Sample]:
    """Return the number of dropped rows, by partition and reason."""
    for partition in snapshot.partitions:
        for (_, rows), reason in _bounded(partition.dropped, partition.dropped.items()):
            yield (partition.name, reason), rows


def passed_over_rows(snapshot: Snapshot) -> Iterator[Sample]:
    """Return the number of rows that a task skips and will never be dealt, by partition, task and reason."""
    for partition, task, name in named_tasks(snapshot):
        for reason, rows in partition.passed.get(task.name, {}).items():
            yield (partition.name, name, reason), rows


def journal_value(value: Callable[[JournalMeasures], Value]) -> Samples:
    """Return a value of the journal, without labels; no sample if the system has no journal."""
    return lambda snapshot: [] if snapshot.journal is None else [((), value(snapshot.journal))]


def per_sampler(value: Callable[[SamplerCost], float]) -> Samples:
    """Return a number of each user's sampler, by sampler."""
    return lambda snapshot: (((cost.name,), value(cost)) for cost in snapshot.samplers)


def _servers(snapshot: Snapshot) -> Iterator[tuple[LabelValues, ServerMeasures]]:
    yield ("controller", None), snapshot.server
    for number, answer in snapshot.units.items():
        if answer is not None:
            yield ("unit", str(number)), answer.server


def _units(snapshot: Snapshot) -> Iterator[tuple[int, LabelValues, Measured]]:
    for number, answer in snapshot.units.items():
        if answer is not None:
            yield number, (str(number), answer.storage.space.tier), answer


def named_tasks(snapshot: Snapshot) -> Iterator[tuple[PartitionProgress, TaskProgress, str]]:
    """Yield each task of each partition, and the name under which it is reported."""
    for partition in snapshot.partitions:
        for task, name in _bounded((task.name for task in partition.tasks), partition.tasks):
            yield partition, task, name


def _bounded(names: Iterable[str], found: Iterable[T]) -> Iterator[tuple[T, str]]:
    """Yield each item, and the name under which it is reported."""
    for number, (name, each) in enumerate(zip(names, found)):
        yield each, name if number < MOST_OF_A_PARTITION else OTHER


SERVER = ("server", "unit")
"""server: "controller" or "unit"; unit: the number of a storage unit, absent for the controller."""

ARENA = ("unit", "tier")
"""tier: "memory", "disk" or "store" (an external one)."""


@dataclass(frozen=True)
class Family:
    """A metric: all samples of one name."""

    kind: str
    """The type as Prometheus names it: "counter", "gauge" or "histogram"."""
    help: str
    """The meaning, for the endpoint, the reference page and the dashboard."""
    labels: tuple[str, ...]
    """The names of the labels that its samples may have."""
    sample: Samples
    """Returns the samples of a snapshot."""
    combine: Callable[[tuple[float, float]], float] = sum
    """Combines the values of two samples with equal labels. Use max for a longest time."""
    bounds: tuple[float, ...] = ()
    """The upper bounds of the buckets of a histogram, in the unit of its name."""
    panel: str = ""
    """The title of the dashboard panel, which several metrics of a row can share. Default: a panel of its own."""
    legend: str = ""
    """The name of its lines in the panel, with labels as "{{label}}". Default: its labels."""
    queries: tuple[tuple[str, str], ...] = ()
    """The queries of the dashboard: PromQL, in which METRIC is this metric with its filter, and the name of the lines.

    Default: the rate of a counter, quantiles of a histogram, and the value of a gauge.
    """
    shown: bool = True
    """Whether the dashboard has the metric."""
