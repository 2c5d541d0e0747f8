"""The measurements of one scrape, and functions from it to the samples of a metric, which `metrics.families` names.

A sample is a value and the values of the family's labels, in their order; None if the sample does not have the label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

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


MAX_OF_A_PARTITION = 50
"""Fields, tasks and reasons to drop of one partition that have their own samples. The others share one."""
SERVER = ("server", "unit")
"""server: "controller" or "unit"; unit: the number of a storage unit, absent for the controller."""
ARENA = ("unit", "tier")
"""tier: "memory", "disk" or "store" (an external one)."""

LabelValues = tuple[str | None, ...]
Value = float | Timing
"""A number, or a histogram."""
Sample = tuple[LabelValues, Value]
Samples = Callable[[Snapshot], Iterable[Sample]]
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """Where the samples of a metric come from."""

    labels: tuple[str, ...]
    """The names of the labels that its samples may have."""
    read: Samples
    """Returns the samples of a snapshot."""

    def __call__(self, snapshot: Snapshot) -> Iterable[Sample]:
        """Return the samples of a snapshot."""
        return self.read(snapshot)


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


def gauge(help: str, source: Source, panel: str = "", legend: str = "", **more: Any) -> Family:
    """Return a metric whose values go up and down. See `Family` for the arguments."""
    return Family("gauge", help, source.labels, source, panel=panel, legend=legend, **more)


def counter(help: str, source: Source, panel: str = "", legend: str = "", **more: Any) -> Family:
    """Return a metric that only grows, until its server restarts. See `Family` for the arguments."""
    return Family("counter", help, source.labels, source, panel=panel, legend=legend, **more)


def histogram(
    help: str, source: Source, bounds: tuple[float, ...], panel: str = "", legend: str = "", **more: Any
) -> Family:
    """Return a metric whose samples are a `Timing` with these bounds. See `Family` for the arguments."""
    return Family("histogram", help, source.labels, source, bounds=bounds, panel=panel, legend=legend, **more)


# ---------------------------------------------------------------- values with a name


def counter_of_controller(name: str) -> Source:
    """Return `ControllerMeasures.counters[name]`, without labels; 0 if nothing was counted yet."""
    return Source((), lambda snapshot: [((), snapshot.counters.get(name, 0))])


def counter_of_units(name: str) -> Source:
    """Return `StorageUnit.counters[name]` of each unit, by unit and tier; 0 if nothing was counted yet."""
    return per_unit(lambda unit: unit.counters.get(name, 0))


def series(name: str, *labels: str) -> Source:
    """Return `StateMeasures.series[name]`, or a series of another part of the controller, by its keys, the labels."""
    return Source(labels, lambda snapshot: snapshot.series.get(name, {}).items())


def per_task_timing(name: str) -> Source:
    """Return `TaskMeasures.timings[name]`, by task; clients without a task have no such label."""
    return Source(
        ("task",), lambda snapshot: (((timing.task or None,), timing) for timing in snapshot.timings.get(name, ()))
    )


def named_series(name: str, *labels: str) -> Source:
    """Return `series(name)`, in which a label value of "" leaves the label out."""
    return Source(
        labels,
        lambda snapshot: (
            (tuple(each or None for each in values), number) for values, number in series(name)(snapshot)
        ),
    )


# ---------------------------------------------------------------- values of the parts of a snapshot


def _each(
    labels: tuple[str, ...], parts: Callable[[Snapshot], Iterable[tuple[LabelValues, T]]]
) -> Callable[[Callable[[T], Value]], Source]:
    """Return a function that makes the source of one value of each part of a snapshot."""
    return lambda value: Source(labels, lambda snapshot: ((names, value(part)) for names, part in parts(snapshot)))


def _servers(snapshot: Snapshot) -> Iterator[tuple[LabelValues, ServerMeasures]]:
    yield ("controller", None), snapshot.server
    for number, answer in snapshot.units.items():
        if answer is not None:
            yield ("unit", str(number)), answer.server


def _units(snapshot: Snapshot) -> Iterator[tuple[LabelValues, tuple[int, UnitMeasures]]]:
    for number, answer in snapshot.units.items():
        if answer is not None:
            yield (str(number), answer.storage.space.tier), (number, answer.storage)


def _fields(snapshot: Snapshot) -> Iterator[tuple[LabelValues, FieldProgress]]:
    for partition in snapshot.partitions:
        for each, name in _bounded((each.name for each in partition.fields), partition.fields):
            yield (partition.name, name), each


def named_tasks(snapshot: Snapshot) -> Iterator[tuple[PartitionProgress, TaskProgress, str]]:
    """Yield each task of each partition, and the name under which it is reported."""
    for partition in snapshot.partitions:
        for task, name in _bounded((task.name for task in partition.tasks), partition.tasks):
            yield partition, task, name


def _bounded(names: Iterable[str], values: Iterable[T]) -> Iterator[tuple[T, str]]:
    """Yield each item, and the name under which it is reported."""
    for number, (name, each) in enumerate(zip(names, values)):
        yield each, name if number < MAX_OF_A_PARTITION else OTHER


per_server = _each(SERVER, _servers)
per_request_type = _each(
    (*SERVER, "type"),
    lambda snapshot: (
        ((*labels, timing.name), timing) for labels, server in _servers(snapshot) for timing in server.requests
    ),
)
per_wait = _each(
    (*SERVER, "type", "task"),
    lambda snapshot: (
        ((*labels, timing.name, timing.task or None), timing)
        for labels, server in _servers(snapshot)
        for timing in server.waits
    ),
)
"""A value of each type of request that waited, by server, unit, type and, if it has one, task."""
per_unit = _each(ARENA, lambda snapshot: ((labels, unit) for labels, (_, unit) in _units(snapshot)))
"""A value of each storage unit that replied, by unit and tier."""
per_partition = _each(("partition",), lambda snapshot: (((each.name,), each) for each in snapshot.partitions))
per_field = _each(("partition", "field"), _fields)
per_task = _each(
    ("partition", "task"), lambda snapshot: (((its.name, name), task) for its, task, name in named_tasks(snapshot))
)
journal_value = _each((), lambda snapshot: [] if snapshot.journal is None else [((), snapshot.journal)])
"""A value of the journal, without labels; no sample if the system has no journal."""
per_sampler = _each(("sampler",), lambda snapshot: (((cost.name,), cost) for cost in snapshot.samplers))
"""A value of each user's sampler."""


def per_server_and_name(name: str, values: Callable[[ServerMeasures], Mapping[str, float]]) -> Source:
    """Return several numbers of each server, by server, unit and the key of the number, which is the label `name`."""
    return Source(
        (*SERVER, name),
        lambda snapshot: (
            ((*labels, key), value) for labels, server in _servers(snapshot) for key, value in values(server).items()
        ),
    )


def _servers_up(snapshot: Snapshot) -> Iterator[Sample]:
    yield ("controller", None), 1
    for number, answer in snapshot.units.items():
        yield ("unit", str(number)), int(answer is not None)


def _dropped_rows(snapshot: Snapshot) -> Iterator[Sample]:
    for partition in snapshot.partitions:
        for (_, rows), reason in _bounded(partition.dropped, partition.dropped.items()):
            yield (partition.name, reason), rows


def _passed_over_rows(snapshot: Snapshot) -> Iterator[Sample]:
    for partition, task, name in named_tasks(snapshot):
        for reason, rows in partition.passed.get(task.name, {}).items():
            yield (partition.name, name, reason), rows


def _stored_bytes(snapshot: Snapshot) -> Iterator[Sample]:
    return (((each.name, tier), nbytes) for each in snapshot.partitions for tier, nbytes in each.stored.items())


servers_up = Source(SERVER, _servers_up)
"""1 for each server that replied, else 0."""
live_bytes = Source(
    ARENA, lambda snapshot: ((labels, snapshot.live.get(unit, 0)) for labels, (unit, _) in _units(snapshot))
)
"""The bytes of needed blocks of each unit that replied."""
stored_bytes = Source(("partition", "tier"), _stored_bytes)
dropped_rows = Source(("partition", "reason"), _dropped_rows)
passed_over_rows = Source(("partition", "task", "reason"), _passed_over_rows)
"""The number of rows that a task skips and will never be dealt."""
