"""A system's metrics in the text format of Prometheus, version 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TypeVar

from transfer_queue.messages import Measured, PartitionProgress, ServerMeasures, Timing
from transfer_queue.metrics.families import FAMILIES, LARGEST
from transfer_queue.metrics.snapshot import JournalMeasures, LeaseMeasures, Snapshot
from transfer_queue.metrics.timing import LOOP_BOUNDS, OTHER, WAIT_BOUNDS

MOST_OF_A_PARTITION = 50  # fields, tasks, and reasons to drop, of one partition that are told by name
LINES = 200  # of a piece

Labels = tuple[tuple[str, str], ...]
T = TypeVar("T")


def exposition(snapshot: Snapshot) -> Iterator[str]:
    """The text, in pieces of some lines: who makes it in a thread can let others work between two of them."""
    samples = _Samples()
    _server(samples, (("server", "controller"),), snapshot.server)
    for unit in snapshot.infos:
        samples.add("tq_unit_info", (("unit", str(unit.unit)), ("tier", unit.told_tier), ("node", unit.node)), 1)
    for number, answer in snapshot.units.items():
        _unit(samples, str(number), answer, snapshot.live.get(number, 0))
    samples.add("tq_partitions", (), snapshot.count)
    for partition in snapshot.partitions:
        _partition(samples, partition)
    for (name, tier), count in snapshot.values.items():
        samples.add("tq_stored_values", (("partition", name), ("tier", tier)), count)
    for name in ("dealt_rows", "published_rows"):
        samples.add(f"tq_{name}_total", (), snapshot.counters[name])
    _leases(samples, snapshot.leases)
    if snapshot.journal is not None:
        _journal(samples, snapshot.journal)
    for cost in snapshot.samplers:
        labels = (("sampler", cost.name),)
        samples.add("tq_sampler_asked_total", labels, cost.asked)
        samples.add("tq_sampler_seconds_total", labels, cost.seconds)
        samples.add("tq_sampler_longest_seconds", labels, cost.longest)
        samples.add("tq_sampler_restarts_total", labels, cost.restarts)
    return samples.text()


class _Samples:
    """All samples by family, each of them once: what has equal labels is told as one."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = {name: {} for name in FAMILIES}
        self._histograms: dict[str, dict[Labels, tuple[tuple[float, ...], Timing]]] = {}

    def add(self, name: str, labels: Labels, value: float) -> None:
        """One value; it joins one of the same labels."""
        values = self._values[name]
        if labels not in values:
            values[labels] = value
        elif name in LARGEST:
            values[labels] = max(values[labels], value)
        else:
            values[labels] += value

    def histogram(self, name: str, labels: Labels, bounds: tuple[float, ...], timing: Timing) -> None:
        """One histogram."""
        self._histograms.setdefault(name, {})[labels] = bounds, timing

    def text(self) -> Iterator[str]:
        """The pieces."""
        lines: list[str] = []
        for name, (kind, words, _) in FAMILIES.items():
            of_family = self._family(name)
            first = next(of_family, None)
            if first is None:
                continue
            lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}", first]
            for line in of_family:
                lines.append(line)
                if len(lines) >= LINES:
                    yield "\n".join(lines) + "\n"
                    lines = []
        yield "\n".join(lines) + "\n"

    def _family(self, name: str) -> Iterator[str]:
        for labels, value in self._values[name].items():
            yield _line(name, labels, value)
        for labels, (bounds, timing) in self._histograms.get(name, {}).items():
            reached = list(accumulate(timing.counts))
            for bound, count in zip((*map(repr, bounds), "+Inf"), reached, strict=True):
                yield _line(f"{name}_bucket", (*labels, ("le", bound)), count)
            yield _line(f"{name}_sum", labels, timing.seconds)
            yield _line(f"{name}_count", labels, reached[-1])


def _line(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
    return f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _server(samples: _Samples, labels: Labels, server: ServerMeasures) -> None:
    samples.add("tq_server_up", labels, 1)
    samples.add("tq_process_start_time_seconds", labels, server.started)
    samples.add("tq_process_cpu_seconds_total", labels, server.cpu)
    samples.add("tq_process_resident_bytes", labels, server.resident)
    samples.add("tq_connections", labels, server.connections)
    samples.add("tq_connections_accepted_total", labels, server.accepted)
    for timing in server.requests:
        named = (*labels, ("type", timing.name))
        samples.add("tq_requests_total", named, sum(timing.counts))
        samples.histogram("tq_request_seconds", named, LOOP_BOUNDS, timing)
    for timing in server.waits:
        named = (*labels, ("type", timing.name), *((("task", timing.task),) if timing.task else ()))
        samples.histogram("tq_wait_seconds", named, WAIT_BOUNDS, timing)
    for name, found, label in (
        ("tq_failures_total", server.failures, "error"),
        ("tq_rejected_total", server.rejected, "reason"),
        ("tq_longest_event_seconds", server.longest, "event"),
    ):
        for key, value in found.items():
            samples.add(name, (*labels, (label, key)), value)


def _unit(samples: _Samples, number: str, answer: Measured | None, live: int) -> None:
    labels: Labels = (("unit", number),)
    if answer is None:
        samples.add("tq_server_up", (("server", "unit"), *labels), 0)
        return
    _server(samples, (("server", "unit"), *labels), answer.server)
    unit = answer.storage
    labels = (*labels, ("tier", unit.space.tier))
    for name, value in (
        ("tq_arena_capacity_bytes", unit.space.capacity),
        ("tq_arena_held_bytes", unit.space.held),
        ("tq_arena_leased_bytes", unit.space.leased),
        ("tq_arena_live_bytes", live),
        ("tq_arena_free_bytes", unit.space.free),
        ("tq_arena_largest_free_bytes", unit.space.largest_free),
        ("tq_arena_extents", unit.extents),
        ("tq_arena_waiting_leases", unit.waiting),
        ("tq_arena_longest_wait_seconds", unit.longest_wait),
        ("tq_unit_draining", int(unit.draining)),
    ):
        samples.add(name, labels, value)


def _partition(samples: _Samples, partition: PartitionProgress) -> None:
    labels = (("partition", partition.name),)
    samples.add("tq_rows", labels, partition.rows)
    samples.add("tq_bytes", labels, partition.nbytes)
    for tier, nbytes in partition.stored.items():
        samples.add("tq_stored_bytes", (*labels, ("tier", tier)), nbytes)
    samples.add("tq_waiting_puts", labels, partition.waiting_puts)
    for (_, rows), reason in _named(partition.dropped, partition.dropped.items()):
        samples.add("tq_dropped_rows", (*labels, ("reason", reason)), rows)
    for field, name in _named((field.name for field in partition.fields), partition.fields):
        named = (*labels, ("field", name))
        samples.add("tq_produced_rows", named, field.produced)
        samples.add("tq_field_produced_total", named, field.produced_ever)
        samples.add("tq_lost_rows", named, field.lost)
    for task, name in _named((task.name for task in partition.tasks), partition.tasks):
        named = (*labels, ("task", name))
        samples.add("tq_consumed_rows", named, task.consumed)
        samples.add("tq_task_consumed_total", named, task.consumed_ever)
        samples.add("tq_claimed_rows", named, task.claimed)
        samples.add("tq_waiting_claims", named, task.waiting)
        samples.add("tq_longest_wait_seconds", named, task.longest_wait)
        for reason, rows in partition.passed.get(task.name, {}).items():
            samples.add("tq_passed_over_rows", (*named, ("reason", reason)), rows)


def _named(names: Iterable[str], found: Iterable[T]) -> Iterator[tuple[T, str]]:
    """What is found, and the name under which it is told."""
    for number, (name, each) in enumerate(zip(names, found)):
        yield each, name if number < MOST_OF_A_PARTITION else OTHER


def _leases(samples: _Samples, leases: LeaseMeasures) -> None:
    for (partition, task), count in leases.in_force.items():
        samples.add("tq_leases", (("partition", partition), ("task", task)), count)
    for task, count in leases.granted.items():
        samples.add("tq_leases_granted_total", (("task", task),), count)
    for task, count in leases.acknowledged.items():
        samples.add("tq_acknowledged_rows_total", (("task", task),), count)
    for (task, reason), count in leases.redelivered.items():
        samples.add("tq_redelivered_rows_total", (("task", task), ("reason", reason)), count)


def _journal(samples: _Samples, journal: JournalMeasures) -> None:
    for name, value in (
        ("tq_journal_bytes", journal.size),
        ("tq_journal_trouble", int(journal.trouble)),
        ("tq_journal_lag_records", journal.records),
        ("tq_journal_lag_bytes", journal.nbytes),
        ("tq_journal_snapshot_age_seconds", journal.age),
        ("tq_journal_snapshot_failing", int(journal.snapshot_failing)),
        ("tq_journal_last_commit_seconds", journal.last_commit),
        ("tq_journal_commit_failures_total", journal.failures),
    ):
        samples.add(name, (), value)
    samples.histogram("tq_journal_commit_seconds", (), LOOP_BOUNDS, journal.commits)
