"""Every metric, declared once. The endpoint, the reference page and the dashboard follow from this table."""

from __future__ import annotations

from transfer_queue.metrics.samples import (
    ARENA,
    Family,
    Source,
    counter,
    counter_of_controller,
    dropped_rows,
    gauge,
    histogram,
    journal_value,
    live_bytes,
    named_series,
    passed_over_rows,
    per_field,
    per_partition,
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
    stored_bytes,
)
from transfer_queue.metrics.timing import LOOP_BOUNDS, STALENESS_BOUNDS, WAIT_BOUNDS

ROWS: dict[str, dict[str, Family]] = {
    "Throughput and latency": {
        "tq_published_rows_total": counter(
            "Samples, or fields of samples, that were put.",
            counter_of_controller("published_rows"),
            "Samples per second",
            "put",
        ),
        "tq_dealt_rows_total": counter(
            "Samples that were dealt to tasks.", counter_of_controller("dealt_rows"), "Samples per second", "dealt"
        ),
        "tq_cleared_rows_total": counter(
            "Samples that were removed: cleared, dropped, or finished by all tasks.",
            series("cleared_rows"),
            "Samples per second",
            "removed",
        ),
        "tq_requests_total": counter(
            "Requests that were handled.", per_request_type(lambda timing: sum(timing.counts)), "Requests"
        ),
        "tq_request_seconds": histogram(
            "Time of a request in the loop of the server, without its wait for samples or space.",
            per_request_type(lambda timing: timing),
            LOOP_BOUNDS,
            "Time in the loop",
        ),
        "tq_longest_event_seconds": gauge(
            "The longest event in the loop within the last one to two minutes.",
            per_server_and_name("event", lambda server: server.longest),
            "Longest event of the last minutes",
        ),
        "tq_process_cpu_seconds_total": counter(
            "CPU time of a server. Its loop is one thread.",
            per_server(lambda server: server.cpu),
            "CPU use of each loop",
        ),
        "tq_server_up": gauge(
            "1 if a server replied to this scrape in time, else 0.",
            servers_up,
            "Servers and errors",
            queries=(("sum(METRIC)", "servers up"), ("count(METRIC)", "servers")),
        ),
        "tq_failures_total": counter(
            "Replies with an error.",
            per_server_and_name("error", lambda server: server.failures),
            "Servers and errors",
            "{{server}} {{unit}}: {{error}} per second",
        ),
    },
    "Where tasks wait": {
        "tq_task_wait_seconds_total": counter(
            "Time for which the clients of a task have waited, including waits that have not ended. Waits of one "
            "client that overlap count once.",
            named_series("task_wait_seconds", "task", "reason"),
            "Waiting share of each task",
            queries=(
                (
                    "sum by (task, reason) (rate(METRIC[$__rate_interval]))"
                    ' / on (task) group_left sum by (task) (tq_task_clients{job=~"$job"} > 0)',
                    "{{task}} waits for {{reason}}",
                ),
            ),
        ),
        "tq_task_clients": gauge(
            "Connected clients that have worked for a task.",
            named_series("task_clients", "task"),
            "Clients of each task",
            "{{task}}",
        ),
        "tq_ready_rows": gauge(
            "Samples that a task could fetch now, with the fields of its last fetch.",
            series("ready_rows", "partition", "task"),
            "Ready samples",
            "{{partition}} {{task}}",
        ),
        "tq_queue_seconds": histogram(
            "Time for which a batch was complete before a fetch of the task took it.",
            per_task_timing("queue"),
            WAIT_BOUNDS,
            "Time in the queue",
            "{{task}}",
        ),
        "tq_staleness_versions": histogram(
            "Policy versions by which the oldest sample of a batch was behind when a fetch of the task took it.",
            per_task_timing("staleness"),
            STALENESS_BOUNDS,
            "Staleness in policy versions",
            "{{task}}",
        ),
    },
    "Samples and bytes by partition and tier": {
        "tq_rows": gauge(
            "Samples of a partition.", per_partition(lambda partition: partition.rows), "Samples", "{{partition}}"
        ),
        "tq_partitions": gauge(
            "Partitions that exist.", Source((), lambda snapshot: [((), snapshot.count)]), "Samples", "partitions"
        ),
        "tq_bytes": gauge(
            "Bytes of the values of a partition, each counted once.",
            per_partition(lambda partition: partition.nbytes),
            "Bytes",
            "{{partition}}",
        ),
        "tq_saved_bytes": gauge(
            "Bytes that a partition saves because equal values are stored once.",
            per_partition(lambda partition: partition.saved),
            "Bytes",
            "{{partition}} saved",
        ),
        "tq_stored_bytes": gauge(
            "Bytes of a partition in a tier, every replica counted.",
            stored_bytes,
            "Bytes",
            queries=(
                ("METRIC", "{{partition}} in {{tier}}"),
                ('sum by (tier) (tq_arena_live_bytes{job=~"$job"})', "all partitions in {{tier}}"),
            ),
        ),
        "tq_stored_values": gauge(
            "Values of a partition in a tier: one for each field of a sample, every replica counted.",
            series("stored_values", "partition", "tier"),
            "Values by tier",
        ),
        "tq_dropped_rows": gauge(
            "Samples that were dropped unread so far.",
            dropped_rows,
            "Dropped, skipped and lost samples",
            "{{partition}} dropped: {{reason}}",
        ),
        "tq_passed_over_rows": gauge(
            "Samples that a task skipped.",
            passed_over_rows,
            "Dropped, skipped and lost samples",
            "{{partition}} {{task}} skipped: {{reason}}",
        ),
        "tq_lost_rows": gauge(
            "Samples whose value was lost and not put again.",
            per_field(lambda field: field.lost),
            "Dropped, skipped and lost samples",
            queries=(("METRIC > 0", "{{partition}} {{field}} lost"),),
        ),
    },
    "Progress by task and field": {
        "tq_produced_rows": gauge(
            "Samples that have a field.", per_field(lambda field: field.produced), "Samples that have a field"
        ),
        "tq_consumed_rows": gauge(
            "Samples that a task has consumed.",
            per_task(lambda task: task.consumed),
            "Samples that a task has consumed",
        ),
        "tq_field_produced_total": counter(
            "Samples that have got a field so far.",
            per_field(lambda field: field.produced_ever),
            "Produced and consumed per second",
            "{{partition}} produced: {{field}}",
        ),
        "tq_task_consumed_total": counter(
            "Samples that a task has consumed so far, including those cleared since.",
            per_task(lambda task: task.consumed_ever),
            "Produced and consumed per second",
            "{{partition}} consumed: {{task}}",
        ),
    },
    "Waiting requests": {
        "tq_waiting_claims": gauge(
            "Claims that wait for samples.",
            per_task(lambda task: task.waiting),
            "Waiting claims and puts",
            queries=(("METRIC > 0", "{{partition}} {{task}}"),),
        ),
        "tq_waiting_puts": gauge(
            "Puts and reservations that wait for capacity.",
            per_partition(lambda partition: partition.waiting_puts),
            "Waiting claims and puts",
            queries=(("METRIC > 0", "{{partition}}: puts"),),
        ),
        "tq_longest_wait_seconds": gauge(
            "Time that the oldest claim has waited.",
            per_task(lambda task: task.longest_wait),
            "Longest wait of a claim",
            combine=max,
            queries=(("METRIC > 0", "{{partition}} {{task}}"),),
        ),
        "tq_wait_seconds": histogram(
            "Time that requests waited if they could not be answered at once.",
            per_wait(lambda timing: timing),
            WAIT_BOUNDS,
            "Waits that have ended",
        ),
    },
    "Leases and redeliveries": {
        "tq_leases": gauge(
            "Leases in force.",
            series("leases", "partition", "task"),
            "Leases in force and their samples",
            "{{partition}} {{task}}: leases",
        ),
        "tq_claimed_rows": gauge(
            "Samples under a lease that are not acknowledged yet.",
            per_task(lambda task: task.claimed),
            "Leases in force and their samples",
            queries=(("METRIC > 0", "{{partition}} {{task}}: samples"),),
        ),
        "tq_leases_granted_total": counter(
            "Leases that were granted.",
            series("leases_granted", "task"),
            "Granted and acknowledged per second",
            "{{task}}: leases granted",
        ),
        "tq_acknowledged_rows_total": counter(
            "Samples that were acknowledged.",
            series("acknowledged_rows", "task"),
            "Granted and acknowledged per second",
            "{{task}}: samples acknowledged",
        ),
        "tq_redelivered_rows_total": counter(
            "Samples that are delivered again, because no acknowledgement came.",
            series("redelivered_rows", "task", "reason"),
            "Redelivered samples per second",
        ),
    },
    "Arenas": {
        "tq_arena_capacity_bytes": gauge(
            "The size to which an arena may grow.",
            per_unit(lambda unit: unit.space.capacity),
            "Space",
            "unit {{unit}}: capacity",
        ),
        "tq_arena_held_bytes": gauge(
            "Space that an arena has allocated in the file system, leased or free.",
            per_unit(lambda unit: unit.space.held),
            "Space",
            "unit {{unit}}: allocated",
        ),
        "tq_arena_leased_bytes": gauge(
            "Space that is leased to writers.",
            per_unit(lambda unit: unit.space.leased),
            "Space",
            "unit {{unit}}: leased",
        ),
        "tq_arena_live_bytes": gauge(
            "Leased space that contains blocks which are needed.", live_bytes, "Space", "unit {{unit}}: live"
        ),
        "tq_arena_viewed_bytes": gauge(
            "Leased space that is free when the last view of it ends (a get with copy=False).",
            per_unit(lambda unit: unit.space.viewed),
            "Space",
            "unit {{unit}}: held by views alone",
        ),
        "tq_view_bytes": gauge(
            "Values of which processes have views (a get with copy=False), once for each client.",
            per_unit(lambda unit: sum(hold.nbytes for hold in unit.holds)),
            "Space",
            "unit {{unit}}: views",
        ),
        "tq_arena_free_bytes": gauge(
            "Space that is allocated and not leased.",
            per_unit(lambda unit: unit.space.free),
            "Space",
            "unit {{unit}}: free",
        ),
        "tq_arena_largest_free_bytes": gauge(
            "The longest run of free space. The arena is fragmented if it is much less than all free space.",
            per_unit(lambda unit: unit.space.largest_free),
            "Fragmentation of free space",
            queries=(("1 - METRIC / (tq_arena_free_bytes > 0)", "unit {{unit}}"),),
        ),
        "tq_arena_extents": gauge(
            "Extents that are leased.",
            per_unit(lambda unit: unit.extents),
            "Leased extents and waiting writers",
            "unit {{unit}}: extents",
        ),
        "tq_arena_waiting_leases": gauge(
            "Writers that wait for space.",
            per_unit(lambda unit: unit.waiting),
            "Leased extents and waiting writers",
            "unit {{unit}}: waiting writers",
        ),
        "tq_arena_longest_wait_seconds": gauge(
            "Time that the oldest of these writers has waited.",
            per_unit(lambda unit: unit.longest_wait),
            "Leased extents and waiting writers",
            "unit {{unit}}: longest wait in seconds",
        ),
        "tq_unit_draining": gauge(
            "1 while everything is moved off a unit.",
            per_unit(lambda unit: int(unit.draining)),
            "Units that are drained",
            queries=(("METRIC > 0", "unit {{unit}}"),),
        ),
        "tq_store_server_up": gauge(
            "1 while the server of an external store runs on a node, 0 while it is down.",
            series("store_server_up", "backend", "node"),
            "Servers of external stores that are down",
            queries=(("METRIC == 0", "{{backend}} on {{node}}"),),
        ),
        "tq_store_server_ends_total": counter(
            "Ends of these servers since the controller started.",
            series("store_server_ends", "backend", "node"),
            "Ends of servers of external stores",
        ),
        "tq_unit_info": gauge(
            "1 for every storage unit, with its node.",
            Source(
                (*ARENA, "node"),
                lambda snapshot: [((str(unit.unit), unit.report_tier, unit.node), 1) for unit in snapshot.infos],
            ),
            shown=False,
        ),
    },
    "Journal": {
        "tq_journal_lag_records": gauge(
            "Records since the last snapshot, which a restart replays.",
            journal_value(lambda journal: journal.records),
            "Lag behind the snapshot",
            "records",
        ),
        "tq_journal_lag_bytes": gauge(
            "Bytes of the records since the last snapshot.",
            journal_value(lambda journal: journal.nbytes),
            "Size of the journal",
            "since the snapshot",
        ),
        "tq_journal_snapshot_age_seconds": gauge(
            "Time since the last snapshot, or since the start of the process.",
            journal_value(lambda journal: journal.age),
            "Lag behind the snapshot",
            "seconds",
        ),
        "tq_journal_bytes": gauge(
            "Bytes of the journal and its snapshot.",
            journal_value(lambda journal: journal.size),
            "Size of the journal",
            "with the snapshot",
        ),
        "tq_journal_commit_seconds": histogram(
            "Time of a commit. If commits do not wait for the disk, one of 8 is measured.",
            journal_value(lambda journal: journal.commits),
            LOOP_BOUNDS,
            "Commits",
        ),
        "tq_journal_last_commit_seconds": gauge(
            "Time of the last commit.", journal_value(lambda journal: journal.last_commit), "Commits", "last commit"
        ),
        "tq_journal_trouble": gauge(
            "1 while the journal cannot be written, so that requests are not answered.",
            journal_value(lambda journal: int(journal.trouble)),
            "Trouble",
            "cannot be written",
        ),
        "tq_journal_snapshot_failing": gauge(
            "1 if the last snapshot could not be written.",
            journal_value(lambda journal: int(journal.snapshot_failing)),
            "Trouble",
            "snapshots fail",
        ),
        "tq_journal_commit_failures_total": counter(
            "Commits, and allocations of space for them, that failed.",
            journal_value(lambda journal: journal.failures),
            "Trouble",
            "failures per second",
        ),
    },
    "Mirror": {
        "tq_mirror_lag_bytes": gauge(
            "Bytes of published values that are not on disk yet (durability.values: machine).",
            series("mirror_lag_bytes"),
            "Values that are not on disk yet",
        ),
        "tq_mirror_lag_seconds": gauge(
            "Time for which the oldest of these values has been published.",
            Source(
                (),
                lambda snapshot: [
                    (labels, value / 1000)
                    for labels, value in snapshot.series.get("mirror_lag_milliseconds", {}).items()
                ],
            ),
            "Age of the oldest value that is not on disk yet",
        ),
        "tq_mirror_waiting_puts": gauge(
            "Puts whose reply waits for the disk.", series("mirror_waiting"), "Puts that wait for the disk"
        ),
        "tq_mirror_full": gauge(
            "1 while the disk has no space for further values, so that puts wait.",
            series("mirror_full"),
            "Puts that wait for the disk",
            "the disk is full",
        ),
        "tq_mirror_copied_bytes_total": counter(
            "Bytes of values that were written to disk since the controller started.",
            series("mirror_copied"),
            "Values written to disk",
        ),
    },
    "Users' samplers": {
        "tq_sampler_seconds_total": counter(
            "Time of all calls of a user's sampler.", per_sampler(lambda cost: cost.seconds), "Share of the loop's time"
        ),
        "tq_sampler_longest_seconds": gauge(
            "Time of the longest call of a user's sampler.",
            per_sampler(lambda cost: cost.longest),
            "Time of a call",
            combine=max,
            queries=(
                ("METRIC", "{{sampler}}: longest"),
                (
                    'sum by (sampler) (rate(tq_sampler_seconds_total{job=~"$job"}[$__rate_interval]))'
                    ' / sum by (sampler) (rate(tq_sampler_asked_total{job=~"$job"}[$__rate_interval]))',
                    "{{sampler}}: mean",
                ),
            ),
        ),
        "tq_sampler_asked_total": counter(
            "Calls of a user's sampler.",
            per_sampler(lambda cost: cost.calls),
            "Calls and restarts per second",
            "{{sampler}}: calls",
        ),
        "tq_sampler_restarts_total": counter(
            "Restarts of the process of a user's sampler.",
            per_sampler(lambda cost: cost.restarts),
            "Calls and restarts per second",
            "{{sampler}}: restarts",
        ),
    },
    "Connections and processes": {
        "tq_rejected_total": counter(
            "Connections or messages that were rejected.",
            per_server_and_name("reason", lambda server: server.rejected),
            "Rejected connections and messages per second",
        ),
        "tq_connections": gauge(
            "Open connections.",
            per_server(lambda server: server.connections),
            "Connections",
            "{{server}} {{unit}}: open",
        ),
        "tq_connections_accepted_total": counter(
            "Connections that were accepted and authenticated.",
            per_server(lambda server: server.accepted),
            "Connections",
            "{{server}} {{unit}}: accepted per second",
        ),
        "tq_process_resident_bytes": gauge(
            "Resident memory of a server, including the used part of its arena.",
            per_server(lambda server: server.resident),
            "Memory",
        ),
        "tq_process_start_time_seconds": gauge(
            "The start of a server's process, in seconds since the epoch.",
            per_server(lambda server: server.started),
            "Time since the start",
            queries=(("time() - METRIC", "{{server}} {{unit}}"),),
        ),
    },
}
"""Title of a row of the dashboard -> its metrics by name."""

FAMILIES: dict[str, Family] = {name: family for row in ROWS.values() for name, family in row.items()}
"""All metrics by name."""
