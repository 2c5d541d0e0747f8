"""Every metric, declared once. The endpoint and the reference page are made from this table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transfer_queue.metrics.samples import (
    Samples,
    counter_of_controller,
    dropped_rows,
    live_bytes,
    of_field,
    of_journal,
    of_partition,
    of_partition_by_name,
    of_requests,
    of_sampler,
    of_server,
    of_server_by_name,
    of_task,
    of_unit,
    of_waits,
    passed_over_rows,
    series,
    servers_up,
)
from transfer_queue.metrics.timing import LOOP_BOUNDS, WAIT_BOUNDS

SERVER = ("server", "unit")
"""server: "controller" or "unit"; unit: its number, of a storage unit alone."""

ARENA = ("unit", "tier")
"""tier: "memory", "disk" or "store" (an external one)."""


@dataclass(frozen=True)
class Family:
    """A metric: all samples of one name."""

    kind: str
    """The type as Prometheus names it: "counter", "gauge" or "histogram"."""
    help: str
    """What it means, for the endpoint and the reference page."""
    labels: tuple[str, ...]
    """The names of the labels that its samples may have."""
    sample: Samples
    """Returns the samples of a snapshot."""
    combine: Callable[[tuple[float, float]], float] = sum
    """Makes one number of two samples with equal labels. max: for a longest time."""
    bounds: tuple[float, ...] = ()
    """The upper bounds of the buckets of a histogram, in seconds."""


FAMILIES: dict[str, Family] = {
    # servers
    "tq_server_up": Family(
        "gauge", "1 where a server answered this scrape in time, else 0.", SERVER, sample=servers_up
    ),
    "tq_process_start_time_seconds": Family(
        "gauge",
        "When a server's process began, since the epoch.",
        SERVER,
        sample=of_server(lambda server: server.started),
    ),
    "tq_process_cpu_seconds_total": Family(
        "counter",
        "CPU time of a server, whose loop is one thread.",
        SERVER,
        sample=of_server(lambda server: server.cpu),
    ),
    "tq_process_resident_bytes": Family(
        "gauge",
        "Resident memory of a server, touched arena included.",
        SERVER,
        sample=of_server(lambda server: server.resident),
    ),
    "tq_connections": Family(
        "gauge", "Connections that are open.", SERVER, sample=of_server(lambda server: server.connections)
    ),
    "tq_connections_accepted_total": Family(
        "counter",
        "Connections that were made and authenticated.",
        SERVER,
        sample=of_server(lambda server: server.accepted),
    ),
    "tq_requests_total": Family(
        "counter",
        "Requests that had their turn.",
        (*SERVER, "type"),
        sample=of_requests(lambda timing: sum(timing.counts)),
    ),
    "tq_request_seconds": Family(
        "histogram",
        "Time of a request in the loop, its wait for samples or room apart.",
        (*SERVER, "type"),
        sample=of_requests(lambda timing: timing),
        bounds=LOOP_BOUNDS,
    ),
    "tq_wait_seconds": Family(
        "histogram",
        "How long requests waited that could not be met at once.",
        (*SERVER, "type", "task"),
        sample=of_waits(lambda timing: timing),
        bounds=WAIT_BOUNDS,
    ),
    "tq_failures_total": Family(
        "counter",
        "Answers that were an error.",
        (*SERVER, "error"),
        sample=of_server_by_name(lambda server: server.failures),
    ),
    "tq_rejected_total": Family(
        "counter",
        "Connections or messages that were not served.",
        (*SERVER, "reason"),
        sample=of_server_by_name(lambda server: server.rejected),
    ),
    "tq_longest_event_seconds": Family(
        "gauge",
        "The longest event in the loop within the last one to two minutes.",
        (*SERVER, "event"),
        sample=of_server_by_name(lambda server: server.longest),
    ),
    # partitions
    "tq_partitions": Family("gauge", "Partitions that exist.", (), sample=lambda snapshot: [((), snapshot.count)]),
    "tq_rows": Family(
        "gauge", "Samples of a partition.", ("partition",), sample=of_partition(lambda partition: partition.rows)
    ),
    "tq_bytes": Family(
        "gauge",
        "Bytes of the values of a partition.",
        ("partition",),
        sample=of_partition(lambda partition: partition.nbytes),
    ),
    "tq_stored_bytes": Family(
        "gauge",
        "Bytes of a partition in a tier, every copy counted.",
        ("partition", "tier"),
        sample=of_partition_by_name(lambda partition: partition.stored),
    ),
    "tq_stored_values": Family(
        "gauge",
        "Values of a partition in a tier, one for each field of a sample and copy.",
        ("partition", "tier"),
        sample=series("stored_values"),
    ),
    "tq_produced_rows": Family(
        "gauge", "Samples that have a field.", ("partition", "field"), sample=of_field(lambda field: field.produced)
    ),
    "tq_field_produced_total": Family(
        "counter",
        "Samples that have ever got a field.",
        ("partition", "field"),
        sample=of_field(lambda field: field.produced_ever),
    ),
    "tq_lost_rows": Family(
        "gauge",
        "Samples whose value was lost and not put again.",
        ("partition", "field"),
        sample=of_field(lambda field: field.lost),
    ),
    "tq_consumed_rows": Family(
        "gauge", "Samples that a task has consumed.", ("partition", "task"), sample=of_task(lambda task: task.consumed)
    ),
    "tq_task_consumed_total": Family(
        "counter",
        "Samples that a task has ever consumed.",
        ("partition", "task"),
        sample=of_task(lambda task: task.consumed_ever),
    ),
    "tq_claimed_rows": Family(
        "gauge",
        "Samples under a lease, not acknowledged yet.",
        ("partition", "task"),
        sample=of_task(lambda task: task.claimed),
    ),
    "tq_passed_over_rows": Family(
        "gauge",
        "Samples that a task was not dealt and never will be.",
        ("partition", "task", "reason"),
        sample=passed_over_rows,
    ),
    "tq_dropped_rows": Family(
        "gauge", "Samples that were dropped unread, so far.", ("partition", "reason"), sample=dropped_rows
    ),
    "tq_dealt_rows_total": Family(
        "counter", "Samples handed out to tasks.", (), sample=counter_of_controller("dealt_rows")
    ),
    "tq_published_rows_total": Family(
        "counter", "Samples, or fields of them, that were put.", (), sample=counter_of_controller("published_rows")
    ),
    # who waits now
    "tq_waiting_claims": Family(
        "gauge", "Claims that wait for samples.", ("partition", "task"), sample=of_task(lambda task: task.waiting)
    ),
    "tq_longest_wait_seconds": Family(
        "gauge",
        "How long the oldest of them has waited.",
        ("partition", "task"),
        sample=of_task(lambda task: task.longest_wait),
        combine=max,
    ),
    "tq_waiting_puts": Family(
        "gauge",
        "Puts and reservations that wait for space.",
        ("partition",),
        sample=of_partition(lambda partition: partition.waiting_puts),
    ),
    # leases
    "tq_leases": Family("gauge", "Leases in force.", ("partition", "task"), sample=series("leases")),
    "tq_leases_granted_total": Family("counter", "Leases that were given.", ("task",), sample=series("leases_granted")),
    "tq_acknowledged_rows_total": Family(
        "counter", "Samples that were acknowledged.", ("task",), sample=series("acknowledged_rows")
    ),
    "tq_redelivered_rows_total": Family(
        "counter",
        "Samples whose delivery ended without an ack, and are delivered again.",
        ("task", "reason"),
        sample=series("redelivered_rows"),
    ),
    # arenas
    "tq_unit_info": Family(
        "gauge",
        "1 for every unit, and where it is.",
        (*ARENA, "node"),
        sample=lambda snapshot: [((str(unit.unit), unit.told_tier, unit.node), 1) for unit in snapshot.infos],
    ),
    "tq_arena_capacity_bytes": Family(
        "gauge", "The most that an arena may grow to.", ARENA, sample=of_unit(lambda unit: unit.space.capacity)
    ),
    "tq_arena_held_bytes": Family(
        "gauge",
        "What an arena has of the file system: leased and free.",
        ARENA,
        sample=of_unit(lambda unit: unit.space.held),
    ),
    "tq_arena_leased_bytes": Family(
        "gauge", "What is leased to writers.", ARENA, sample=of_unit(lambda unit: unit.space.leased)
    ),
    "tq_arena_live_bytes": Family(
        "gauge", "What blocks that are needed take, of what is leased.", ARENA, sample=live_bytes
    ),
    "tq_arena_free_bytes": Family("gauge", "Held and not leased.", ARENA, sample=of_unit(lambda unit: unit.space.free)),
    "tq_arena_largest_free_bytes": Family(
        "gauge",
        "The longest free piece: far below free is fragmented.",
        ARENA,
        sample=of_unit(lambda unit: unit.space.largest_free),
    ),
    "tq_arena_extents": Family("gauge", "Extents that are leased.", ARENA, sample=of_unit(lambda unit: unit.extents)),
    "tq_arena_waiting_leases": Family(
        "gauge", "Leases that wait for space.", ARENA, sample=of_unit(lambda unit: unit.waiting)
    ),
    "tq_arena_longest_wait_seconds": Family(
        "gauge", "How long the oldest of them has waited.", ARENA, sample=of_unit(lambda unit: unit.longest_wait)
    ),
    "tq_unit_draining": Family(
        "gauge", "1 while everything is moved off a unit.", ARENA, sample=of_unit(lambda unit: int(unit.draining))
    ),
    # journal
    "tq_journal_bytes": Family(
        "gauge", "Bytes of the journal and its snapshot.", (), sample=of_journal(lambda journal: journal.size)
    ),
    "tq_journal_trouble": Family(
        "gauge",
        "1 while the journal cannot be written, so that nobody is answered.",
        (),
        sample=of_journal(lambda journal: int(journal.trouble)),
    ),
    "tq_journal_lag_records": Family(
        "gauge",
        "Records since the last snapshot: what a restart replays.",
        (),
        sample=of_journal(lambda journal: journal.records),
    ),
    "tq_journal_lag_bytes": Family("gauge", "Their bytes.", (), sample=of_journal(lambda journal: journal.nbytes)),
    "tq_journal_snapshot_age_seconds": Family(
        "gauge",
        "Time since the last snapshot, or since the process began.",
        (),
        sample=of_journal(lambda journal: journal.age),
    ),
    "tq_journal_snapshot_failing": Family(
        "gauge",
        "1 where the last snapshot could not be written.",
        (),
        sample=of_journal(lambda journal: int(journal.snapshot_failing)),
    ),
    "tq_journal_commit_seconds": Family(
        "histogram",
        "Time of a commit; of those that do not wait for the disk one of 8.",
        (),
        sample=of_journal(lambda journal: journal.commits),
        bounds=LOOP_BOUNDS,
    ),
    "tq_journal_last_commit_seconds": Family(
        "gauge", "Time of the last commit.", (), sample=of_journal(lambda journal: journal.last_commit)
    ),
    "tq_journal_commit_failures_total": Family(
        "counter",
        "Commits, and searches for room, that failed.",
        (),
        sample=of_journal(lambda journal: journal.failures),
    ),
    # samplers of users
    "tq_sampler_asked_total": Family(
        "counter", "Calls of a user's sampler.", ("sampler",), sample=of_sampler(lambda cost: cost.asked)
    ),
    "tq_sampler_seconds_total": Family(
        "counter",
        "Time that calls of a user's sampler took.",
        ("sampler",),
        sample=of_sampler(lambda cost: cost.seconds),
    ),
    "tq_sampler_longest_seconds": Family(
        "gauge",
        "Time of the longest call of a user's sampler.",
        ("sampler",),
        sample=of_sampler(lambda cost: cost.longest),
        combine=max,
    ),
    "tq_sampler_restarts_total": Family(
        "counter",
        "Restarts of the process of a user's sampler.",
        ("sampler",),
        sample=of_sampler(lambda cost: cost.restarts),
    ),
}
