"""Every metric, declared once. The endpoint, the reference page and the dashboard follow from this table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transfer_queue.metrics.samples import (
    Samples,
    counter_of_controller,
    dropped_rows,
    journal_value,
    live_bytes,
    named_series,
    passed_over_rows,
    per_field,
    per_partition,
    per_partition_and_name,
    per_request_type,
    per_sampler,
    per_server,
    per_server_and_name,
    per_task,
    per_task_timing,
    per_unit,
    per_wait,
    series,
    servers_up,
)
from transfer_queue.metrics.timing import LOOP_BOUNDS, STALENESS_BOUNDS, WAIT_BOUNDS

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


ROWS: dict[str, dict[str, Family]] = {
    "Throughput and latency": {
        "tq_published_rows_total": Family(
            "counter",
            "Samples, or fields of samples, that were put.",
            (),
            sample=counter_of_controller("published_rows"),
            panel="Samples per second",
            legend="put",
        ),
        "tq_dealt_rows_total": Family(
            "counter",
            "Samples that were dealt to tasks.",
            (),
            sample=counter_of_controller("dealt_rows"),
            panel="Samples per second",
            legend="dealt",
        ),
        "tq_cleared_rows_total": Family(
            "counter",
            "Samples that were removed: cleared, dropped, or finished by all tasks.",
            (),
            sample=series("cleared_rows"),
            panel="Samples per second",
            legend="removed",
        ),
        "tq_requests_total": Family(
            "counter",
            "Requests that were handled.",
            (*SERVER, "type"),
            sample=per_request_type(lambda timing: sum(timing.counts)),
            panel="Requests",
        ),
        "tq_request_seconds": Family(
            "histogram",
            "Time of a request in the loop of the server, without its wait for samples or space.",
            (*SERVER, "type"),
            sample=per_request_type(lambda timing: timing),
            bounds=LOOP_BOUNDS,
            panel="Time in the loop",
        ),
        "tq_longest_event_seconds": Family(
            "gauge",
            "The longest event in the loop within the last one to two minutes.",
            (*SERVER, "event"),
            sample=per_server_and_name(lambda server: server.longest),
            panel="Longest event of the last minutes",
        ),
        "tq_process_cpu_seconds_total": Family(
            "counter",
            "CPU time of a server. Its loop is one thread.",
            SERVER,
            sample=per_server(lambda server: server.cpu),
            panel="CPU use of each loop",
        ),
        "tq_server_up": Family(
            "gauge",
            "1 if a server replied to this scrape in time, else 0.",
            SERVER,
            sample=servers_up,
            panel="Servers and errors",
            queries=(("sum(METRIC)", "servers up"), ("count(METRIC)", "servers")),
        ),
        "tq_failures_total": Family(
            "counter",
            "Replies with an error.",
            (*SERVER, "error"),
            sample=per_server_and_name(lambda server: server.failures),
            panel="Servers and errors",
            legend="{{server}} {{unit}}: {{error}} per second",
        ),
    },
    "Where tasks wait": {
        "tq_task_wait_seconds_total": Family(
            "counter",
            "Time for which the clients of a task have waited, for samples or for capacity, including waits that have "
            "not ended. Waits of one client that overlap count once.",
            ("task", "reason"),
            sample=named_series("task_wait_seconds"),
            panel="Waiting share of each task",
            queries=(
                (
                    "sum by (task, reason) (rate(METRIC[$__rate_interval]))"
                    ' / on (task) group_left sum by (task) (tq_task_clients{job=~"$job"} > 0)',
                    "{{task}} waits for {{reason}}",
                ),
            ),
        ),
        "tq_task_clients": Family(
            "gauge",
            "Connected clients that have worked for a task.",
            ("task",),
            sample=named_series("task_clients"),
            panel="Clients of each task",
            legend="{{task}}",
        ),
        "tq_ready_rows": Family(
            "gauge",
            "Samples that a task could fetch now: they have the fields of its last fetch, and it has not got them yet.",
            ("partition", "task"),
            sample=series("ready_rows"),
            panel="Ready samples",
            legend="{{partition}} {{task}}",
        ),
        "tq_queue_seconds": Family(
            "histogram",
            "Time for which a batch was complete before a fetch of the task took it.",
            ("task",),
            sample=per_task_timing("queue"),
            bounds=WAIT_BOUNDS,
            panel="Time in the queue",
            legend="{{task}}",
        ),
        "tq_staleness_versions": Family(
            "histogram",
            "By how many policy versions the newest sample of a batch was old when a fetch of the task took it.",
            ("task",),
            sample=per_task_timing("staleness"),
            bounds=STALENESS_BOUNDS,
            panel="Staleness in policy versions",
            legend="{{task}}",
        ),
    },
    "Samples and bytes by partition and tier": {
        "tq_rows": Family(
            "gauge",
            "Samples of a partition.",
            ("partition",),
            sample=per_partition(lambda partition: partition.rows),
            panel="Samples",
            legend="{{partition}}",
        ),
        "tq_partitions": Family(
            "gauge",
            "Partitions that exist.",
            (),
            sample=lambda snapshot: [((), snapshot.count)],
            panel="Samples",
            legend="partitions",
        ),
        "tq_bytes": Family(
            "gauge",
            "Bytes of the values of a partition, each counted once.",
            ("partition",),
            sample=per_partition(lambda partition: partition.nbytes),
            panel="Bytes",
            legend="{{partition}}",
        ),
        "tq_stored_bytes": Family(
            "gauge",
            "Bytes of a partition in a tier, every replica counted.",
            ("partition", "tier"),
            sample=per_partition_and_name(lambda partition: partition.stored),
            panel="Bytes",
            queries=(
                ("METRIC", "{{partition}} in {{tier}}"),
                ('sum by (tier) (tq_arena_live_bytes{job=~"$job"})', "all partitions in {{tier}}"),
            ),
        ),
        "tq_stored_values": Family(
            "gauge",
            "Values of a partition in a tier: one for each field of a sample, every replica counted.",
            ("partition", "tier"),
            sample=series("stored_values"),
            panel="Values by tier",
        ),
        "tq_dropped_rows": Family(
            "gauge",
            "Samples that were dropped unread so far.",
            ("partition", "reason"),
            sample=dropped_rows,
            panel="Dropped, skipped and lost samples",
            legend="{{partition}} dropped: {{reason}}",
        ),
        "tq_passed_over_rows": Family(
            "gauge",
            "Samples that a task skipped and will never be dealt.",
            ("partition", "task", "reason"),
            sample=passed_over_rows,
            panel="Dropped, skipped and lost samples",
            legend="{{partition}} {{task}} skipped: {{reason}}",
        ),
        "tq_lost_rows": Family(
            "gauge",
            "Samples whose value was lost and not put again.",
            ("partition", "field"),
            sample=per_field(lambda field: field.lost),
            panel="Dropped, skipped and lost samples",
            queries=(("METRIC > 0", "{{partition}} {{field}} lost"),),
        ),
    },
    "Progress by task and field": {
        "tq_produced_rows": Family(
            "gauge",
            "Samples that have a field.",
            ("partition", "field"),
            sample=per_field(lambda field: field.produced),
            panel="Samples that have a field",
        ),
        "tq_consumed_rows": Family(
            "gauge",
            "Samples that a task has consumed.",
            ("partition", "task"),
            sample=per_task(lambda task: task.consumed),
            panel="Samples that a task has consumed",
        ),
        "tq_field_produced_total": Family(
            "counter",
            "Samples that have got a field so far.",
            ("partition", "field"),
            sample=per_field(lambda field: field.produced_ever),
            panel="Produced and consumed per second",
            legend="{{partition}} produced: {{field}}",
        ),
        "tq_task_consumed_total": Family(
            "counter",
            "Samples that a task has consumed so far, including those cleared since.",
            ("partition", "task"),
            sample=per_task(lambda task: task.consumed_ever),
            panel="Produced and consumed per second",
            legend="{{partition}} consumed: {{task}}",
        ),
    },
    "Waiting requests": {
        "tq_waiting_claims": Family(
            "gauge",
            "Claims that wait for samples.",
            ("partition", "task"),
            sample=per_task(lambda task: task.waiting),
            panel="Waiting claims and puts",
            queries=(("METRIC > 0", "{{partition}} {{task}}"),),
        ),
        "tq_waiting_puts": Family(
            "gauge",
            "Puts and reservations that wait for capacity.",
            ("partition",),
            sample=per_partition(lambda partition: partition.waiting_puts),
            panel="Waiting claims and puts",
            queries=(("METRIC > 0", "{{partition}}: puts"),),
        ),
        "tq_longest_wait_seconds": Family(
            "gauge",
            "Time that the oldest claim has waited.",
            ("partition", "task"),
            sample=per_task(lambda task: task.longest_wait),
            combine=max,
            panel="Longest wait of a claim",
            queries=(("METRIC > 0", "{{partition}} {{task}}"),),
        ),
        "tq_wait_seconds": Family(
            "histogram",
            "Time that requests waited if they could not be answered at once.",
            (*SERVER, "type", "task"),
            sample=per_wait(lambda timing: timing),
            bounds=WAIT_BOUNDS,
            panel="Waits that have ended",
        ),
    },
    "Leases and redeliveries": {
        "tq_leases": Family(
            "gauge",
            "Leases in force.",
            ("partition", "task"),
            sample=series("leases"),
            panel="Leases in force and their samples",
            legend="{{partition}} {{task}}: leases",
        ),
        "tq_claimed_rows": Family(
            "gauge",
            "Samples under a lease that are not acknowledged yet.",
            ("partition", "task"),
            sample=per_task(lambda task: task.claimed),
            panel="Leases in force and their samples",
            queries=(("METRIC > 0", "{{partition}} {{task}}: samples"),),
        ),
        "tq_leases_granted_total": Family(
            "counter",
            "Leases that were granted.",
            ("task",),
            sample=series("leases_granted"),
            panel="Granted and acknowledged per second",
            legend="{{task}}: leases granted",
        ),
        "tq_acknowledged_rows_total": Family(
            "counter",
            "Samples that were acknowledged.",
            ("task",),
            sample=series("acknowledged_rows"),
            panel="Granted and acknowledged per second",
            legend="{{task}}: samples acknowledged",
        ),
        "tq_redelivered_rows_total": Family(
            "counter",
            "Samples whose delivery ended without an acknowledgement, so that they are delivered again.",
            ("task", "reason"),
            sample=series("redelivered_rows"),
            panel="Redelivered samples per second",
        ),
    },
    "Arenas": {
        "tq_arena_capacity_bytes": Family(
            "gauge",
            "The size to which an arena may grow.",
            ARENA,
            sample=per_unit(lambda unit: unit.space.capacity),
            panel="Space",
            legend="unit {{unit}}: capacity",
        ),
        "tq_arena_held_bytes": Family(
            "gauge",
            "Space that an arena has allocated in the file system, leased or free.",
            ARENA,
            sample=per_unit(lambda unit: unit.space.held),
            panel="Space",
            legend="unit {{unit}}: allocated",
        ),
        "tq_arena_leased_bytes": Family(
            "gauge",
            "Space that is leased to writers.",
            ARENA,
            sample=per_unit(lambda unit: unit.space.leased),
            panel="Space",
            legend="unit {{unit}}: leased",
        ),
        "tq_arena_live_bytes": Family(
            "gauge",
            "Leased space that contains blocks which are needed.",
            ARENA,
            sample=live_bytes,
            panel="Space",
            legend="unit {{unit}}: live",
        ),
        "tq_arena_free_bytes": Family(
            "gauge",
            "Space that is allocated and not leased.",
            ARENA,
            sample=per_unit(lambda unit: unit.space.free),
            panel="Space",
            legend="unit {{unit}}: free",
        ),
        "tq_arena_largest_free_bytes": Family(
            "gauge",
            "The longest run of free space. If it is much less than all free space, the arena is fragmented.",
            ARENA,
            sample=per_unit(lambda unit: unit.space.largest_free),
            panel="Fragmentation of free space",
            queries=(("1 - METRIC / (tq_arena_free_bytes > 0)", "unit {{unit}}"),),
        ),
        "tq_arena_extents": Family(
            "gauge",
            "Extents that are leased.",
            ARENA,
            sample=per_unit(lambda unit: unit.extents),
            panel="Leased extents and waiting writers",
            legend="unit {{unit}}: extents",
        ),
        "tq_arena_waiting_leases": Family(
            "gauge",
            "Writers that wait for space.",
            ARENA,
            sample=per_unit(lambda unit: unit.waiting),
            panel="Leased extents and waiting writers",
            legend="unit {{unit}}: waiting writers",
        ),
        "tq_arena_longest_wait_seconds": Family(
            "gauge",
            "Time that the oldest of these writers has waited.",
            ARENA,
            sample=per_unit(lambda unit: unit.longest_wait),
            panel="Leased extents and waiting writers",
            legend="unit {{unit}}: longest wait in seconds",
        ),
        "tq_unit_draining": Family(
            "gauge",
            "1 while everything is moved off a unit.",
            ARENA,
            sample=per_unit(lambda unit: int(unit.draining)),
            panel="Units that are drained",
            queries=(("METRIC > 0", "unit {{unit}}"),),
        ),
        "tq_unit_info": Family(
            "gauge",
            "1 for every storage unit, with its node.",
            (*ARENA, "node"),
            sample=lambda snapshot: [((str(unit.unit), unit.told_tier, unit.node), 1) for unit in snapshot.infos],
            shown=False,
        ),
    },
    "Journal": {
        "tq_journal_lag_records": Family(
            "gauge",
            "Records since the last snapshot, which a restart replays.",
            (),
            sample=journal_value(lambda journal: journal.records),
            panel="Lag behind the snapshot",
            legend="records",
        ),
        "tq_journal_lag_bytes": Family(
            "gauge",
            "Bytes of the records since the last snapshot.",
            (),
            sample=journal_value(lambda journal: journal.nbytes),
            panel="Size of the journal",
            legend="since the snapshot",
        ),
        "tq_journal_snapshot_age_seconds": Family(
            "gauge",
            "Time since the last snapshot, or since the start of the process.",
            (),
            sample=journal_value(lambda journal: journal.age),
            panel="Lag behind the snapshot",
            legend="seconds",
        ),
        "tq_journal_bytes": Family(
            "gauge",
            "Bytes of the journal and its snapshot.",
            (),
            sample=journal_value(lambda journal: journal.size),
            panel="Size of the journal",
            legend="with the snapshot",
        ),
        "tq_journal_commit_seconds": Family(
            "histogram",
            "Time of a commit. Of commits that do not wait for the disk, one of 8 is measured.",
            (),
            sample=journal_value(lambda journal: journal.commits),
            bounds=LOOP_BOUNDS,
            panel="Commits",
        ),
        "tq_journal_last_commit_seconds": Family(
            "gauge",
            "Time of the last commit.",
            (),
            sample=journal_value(lambda journal: journal.last_commit),
            panel="Commits",
            legend="last commit",
        ),
        "tq_journal_trouble": Family(
            "gauge",
            "1 while the journal cannot be written, so that requests are not answered.",
            (),
            sample=journal_value(lambda journal: int(journal.trouble)),
            panel="Trouble",
            legend="cannot be written",
        ),
        "tq_journal_snapshot_failing": Family(
            "gauge",
            "1 if the last snapshot could not be written.",
            (),
            sample=journal_value(lambda journal: int(journal.snapshot_failing)),
            panel="Trouble",
            legend="snapshots fail",
        ),
        "tq_journal_commit_failures_total": Family(
            "counter",
            "Commits, and allocations of space for them, that failed.",
            (),
            sample=journal_value(lambda journal: journal.failures),
            panel="Trouble",
            legend="failures per second",
        ),
    },
    "Users' samplers": {
        "tq_sampler_seconds_total": Family(
            "counter",
            "Time of all calls of a user's sampler.",
            ("sampler",),
            sample=per_sampler(lambda cost: cost.seconds),
            panel="Share of the loop's time",
        ),
        "tq_sampler_longest_seconds": Family(
            "gauge",
            "Time of the longest call of a user's sampler.",
            ("sampler",),
            sample=per_sampler(lambda cost: cost.longest),
            combine=max,
            panel="Time of a call",
            queries=(
                ("METRIC", "{{sampler}}: longest"),
                (
                    'sum by (sampler) (rate(tq_sampler_seconds_total{job=~"$job"}[$__rate_interval]))'
                    ' / sum by (sampler) (rate(tq_sampler_asked_total{job=~"$job"}[$__rate_interval]))',
                    "{{sampler}}: mean",
                ),
            ),
        ),
        "tq_sampler_asked_total": Family(
            "counter",
            "Calls of a user's sampler.",
            ("sampler",),
            sample=per_sampler(lambda cost: cost.asked),
            panel="Calls and restarts per second",
            legend="{{sampler}}: calls",
        ),
        "tq_sampler_restarts_total": Family(
            "counter",
            "Restarts of the process of a user's sampler.",
            ("sampler",),
            sample=per_sampler(lambda cost: cost.restarts),
            panel="Calls and restarts per second",
            legend="{{sampler}}: restarts",
        ),
    },
    "Connections and processes": {
        "tq_rejected_total": Family(
            "counter",
            "Connections or messages that were rejected.",
            (*SERVER, "reason"),
            sample=per_server_and_name(lambda server: server.rejected),
            panel="Rejected connections and messages per second",
        ),
        "tq_connections": Family(
            "gauge",
            "Open connections.",
            SERVER,
            sample=per_server(lambda server: server.connections),
            panel="Connections",
            legend="{{server}} {{unit}}: open",
        ),
        "tq_connections_accepted_total": Family(
            "counter",
            "Connections that were accepted and authenticated.",
            SERVER,
            sample=per_server(lambda server: server.accepted),
            panel="Connections",
            legend="{{server}} {{unit}}: accepted per second",
        ),
        "tq_process_resident_bytes": Family(
            "gauge",
            "Resident memory of a server, including the used part of its arena.",
            SERVER,
            sample=per_server(lambda server: server.resident),
            panel="Memory",
        ),
        "tq_process_start_time_seconds": Family(
            "gauge",
            "The start of a server's process, in seconds since the epoch.",
            SERVER,
            sample=per_server(lambda server: server.started),
            panel="Time since the start",
            queries=(("time() - METRIC", "{{server}} {{unit}}"),),
        ),
    },
}
"""Title of a row of the dashboard -> its metrics by name."""

FAMILIES: dict[str, Family] = {name: family for row in ROWS.values() for name, family in row.items()}
"""All metrics by name."""
