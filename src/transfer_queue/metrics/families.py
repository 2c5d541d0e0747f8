"""Every metric: docs/metrics.md has this table in words, and the dashboard uses nothing else."""

from __future__ import annotations

from typing import NamedTuple

SERVER = ("server", "unit")
"""server: "controller" or "unit"; unit: its number, of a storage unit alone."""

ARENA = ("unit", "tier")
"""tier: "memory", "disk" or "store" (an external one)."""


class Family(NamedTuple):
    """kind: as Prometheus has it. words: what it means. labels: that its samples may have."""

    kind: str
    words: str
    labels: tuple[str, ...] = ()


FAMILIES: dict[str, Family] = {
    # servers
    "tq_server_up": Family("gauge", "1 where a server answered this scrape in time, else 0.", SERVER),
    "tq_process_start_time_seconds": Family("gauge", "When a server's process began, since the epoch.", SERVER),
    "tq_process_cpu_seconds_total": Family("counter", "CPU time of a server, whose loop is one thread.", SERVER),
    "tq_process_resident_bytes": Family("gauge", "Resident memory of a server, touched arena included.", SERVER),
    "tq_connections": Family("gauge", "Connections that are open.", SERVER),
    "tq_connections_accepted_total": Family("counter", "Connections that were made and authenticated.", SERVER),
    "tq_requests_total": Family("counter", "Requests that had their turn.", (*SERVER, "type")),
    "tq_request_seconds": Family(
        "histogram", "Time of a request in the loop, its wait for samples or room apart.", (*SERVER, "type")
    ),
    "tq_wait_seconds": Family(
        "histogram", "How long requests waited that could not be met at once.", (*SERVER, "type", "task")
    ),
    "tq_failures_total": Family("counter", "Answers that were an error.", (*SERVER, "error")),
    "tq_rejected_total": Family("counter", "Connections or messages that were not served.", (*SERVER, "reason")),
    "tq_longest_event_seconds": Family(
        "gauge", "The longest event in the loop within the last one to two minutes.", (*SERVER, "event")
    ),
    # partitions
    "tq_partitions": Family("gauge", "Partitions that exist."),
    "tq_rows": Family("gauge", "Samples of a partition.", ("partition",)),
    "tq_bytes": Family("gauge", "Bytes of the values of a partition.", ("partition",)),
    "tq_stored_bytes": Family("gauge", "Bytes of a partition in a tier, every copy counted.", ("partition", "tier")),
    "tq_stored_values": Family(
        "gauge", "Values of a partition in a tier, one for each field of a sample and copy.", ("partition", "tier")
    ),
    "tq_produced_rows": Family("gauge", "Samples that have a field.", ("partition", "field")),
    "tq_field_produced_total": Family("counter", "Samples that have ever got a field.", ("partition", "field")),
    "tq_lost_rows": Family("gauge", "Samples whose value was lost and not put again.", ("partition", "field")),
    "tq_consumed_rows": Family("gauge", "Samples that a task has consumed.", ("partition", "task")),
    "tq_task_consumed_total": Family("counter", "Samples that a task has ever consumed.", ("partition", "task")),
    "tq_claimed_rows": Family("gauge", "Samples under a lease, not acknowledged yet.", ("partition", "task")),
    "tq_passed_over_rows": Family(
        "gauge", "Samples that a task was not dealt and never will be.", ("partition", "task", "reason")
    ),
    "tq_dropped_rows": Family("gauge", "Samples that were dropped unread, so far.", ("partition", "reason")),
    "tq_dealt_rows_total": Family("counter", "Samples handed out to tasks."),
    "tq_published_rows_total": Family("counter", "Samples, or fields of them, that were put."),
    # who waits now
    "tq_waiting_claims": Family("gauge", "Claims that wait for samples.", ("partition", "task")),
    "tq_longest_wait_seconds": Family("gauge", "How long the oldest of them has waited.", ("partition", "task")),
    "tq_waiting_puts": Family("gauge", "Puts and reservations that wait for room.", ("partition",)),
    # leases
    "tq_leases": Family("gauge", "Leases in force.", ("partition", "task")),
    "tq_leases_granted_total": Family("counter", "Leases that were given.", ("task",)),
    "tq_acknowledged_rows_total": Family("counter", "Samples that were acknowledged.", ("task",)),
    "tq_redelivered_rows_total": Family(
        "counter", "Samples whose delivery ended without an ack, and are delivered again.", ("task", "reason")
    ),
    # arenas
    "tq_unit_info": Family("gauge", "1 for every unit, and where it is.", (*ARENA, "node")),
    "tq_arena_capacity_bytes": Family("gauge", "The most that an arena may grow to.", ARENA),
    "tq_arena_held_bytes": Family("gauge", "What an arena has of the file system: leased and free.", ARENA),
    "tq_arena_leased_bytes": Family("gauge", "What is leased to writers.", ARENA),
    "tq_arena_live_bytes": Family("gauge", "What blocks that are needed take, of what is leased.", ARENA),
    "tq_arena_free_bytes": Family("gauge", "Held and not leased.", ARENA),
    "tq_arena_largest_free_bytes": Family("gauge", "The longest free piece: far below free is fragmented.", ARENA),
    "tq_arena_extents": Family("gauge", "Extents that are leased.", ARENA),
    "tq_arena_waiting_leases": Family("gauge", "Leases that wait for space.", ARENA),
    "tq_arena_longest_wait_seconds": Family("gauge", "How long the oldest of them has waited.", ARENA),
    "tq_unit_draining": Family("gauge", "1 while everything is moved off a unit.", ARENA),
    # journal
    "tq_journal_bytes": Family("gauge", "Bytes of the journal and its snapshot."),
    "tq_journal_trouble": Family("gauge", "1 while the journal cannot be written, so that nobody is answered."),
    "tq_journal_lag_records": Family("gauge", "Records since the last snapshot: what a restart replays."),
    "tq_journal_lag_bytes": Family("gauge", "Their bytes."),
    "tq_journal_snapshot_age_seconds": Family("gauge", "Time since the last snapshot, or since the process began."),
    "tq_journal_snapshot_failing": Family("gauge", "1 where the last snapshot could not be written."),
    "tq_journal_commit_seconds": Family(
        "histogram", "Time of a commit; of those that do not wait for the disk one of 8."
    ),
    "tq_journal_last_commit_seconds": Family("gauge", "Time of the last commit."),
    "tq_journal_commit_failures_total": Family("counter", "Commits, and searches for room, that failed."),
    # samplers of users
    "tq_sampler_asked_total": Family("counter", "Calls of a user's sampler.", ("sampler",)),
    "tq_sampler_seconds_total": Family("counter", "Time that calls of a user's sampler took.", ("sampler",)),
    "tq_sampler_longest_seconds": Family("gauge", "Time of the longest call of a user's sampler.", ("sampler",)),
    "tq_sampler_restarts_total": Family("counter", "Restarts of the process of a user's sampler.", ("sampler",)),
}

LARGEST = {"tq_longest_wait_seconds", "tq_sampler_longest_seconds"}
"""Of these the larger value stands for several that are told as one; all others are added up."""
