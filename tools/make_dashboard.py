"""Write the Grafana dashboard, src/transfer_queue/metrics/grafana.json, from the panels below; --check compares only.

A panel is a title, a unit and queries; every metric in a query is one of docs/reference/metrics.md. When the dashboard
is imported into Grafana 10 or later, Grafana asks for a Prometheus data source.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).resolve().parent.parent / "src" / "transfer_queue" / "metrics" / "grafana.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, ACROSS = 8, 8, 3  # of a panel (Grafana has 24 columns), and panels in a row
EACH = "$__rate_interval"
WHO = "{{server}} {{unit}}"
HERE = 'job=~"$job"'
PARTITION = 'job=~"$job", partition=~"$partition"'


class Query(NamedTuple):
    """A query in PromQL, and the legend of its lines."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """A graph. unit: Grafana's name of the unit. words: the description of the graph."""

    title: str
    unit: str
    queries: list[Query]
    words: str = ""


def rate(metric: str, by: str, where: str = HERE) -> str:
    """Return a query for the rate of a counter, summed over all labels except these."""
    return f"sum by ({by}) (rate({metric}{{{where}}}[{EACH}]))"


def percentile(share: float, metric: str, by: str) -> str:
    """Return a query for a quantile of a histogram, for each of these labels."""
    return f"histogram_quantile({share}, sum by (le, {by}) (rate({metric}_bucket{{{HERE}}}[{EACH}])))"


def now(metric: str, where: str = HERE) -> str:
    """A gauge."""
    return f"{metric}{{{where}}}"


ROWS: dict[str, list[Panel]] = {
    "Throughput and latency by type": [
        Panel("Samples a second", "rowsps", [
            Query(f"sum(rate(tq_published_rows_total{{{HERE}}}[{EACH}]))", "put"),
            Query(f"sum(rate(tq_dealt_rows_total{{{HERE}}}[{EACH}]))", "dealt"),
        ]),
        Panel("Requests", "reqps", [Query(rate("tq_requests_total", "server, unit, type"), f"{WHO} {{{{type}}}}")]),
        Panel("Time in the loop, 99th percentile", "s", [
            Query(percentile(0.99, "tq_request_seconds", "server, unit, type"), f"{WHO} {{{{type}}}}"),
        ], "The time for which requests occupy the loop of their server. Waits for samples or space are shown below."),
        Panel("Longest event of the last minutes", "s", [
            Query(now("tq_longest_event_seconds"), f"{WHO} {{{{event}}}}"),
        ], "Only a user's sampler should occupy a loop for more than 5 ms."),
        Panel("How busy each loop is", "percentunit", [
            Query(f"rate(tq_process_cpu_seconds_total{{{HERE}}}[{EACH}])", WHO),
        ], "A server is one thread: at 100 % it is the bottleneck."),
        Panel("Servers up, and errors", "short", [
            Query(f"sum(tq_server_up{{{HERE}}})", "servers up"),
            Query(f"count(tq_server_up{{{HERE}}})", "servers"),
            Query(rate("tq_failures_total", "error"), "{{error}} a second"),
        ]),
    ],
    "Samples and bytes by partition and tier": [
        Panel("Samples", "short", [Query(now("tq_rows", PARTITION), "{{partition}}")]),
        Panel("Bytes", "bytes", [
            Query(now("tq_stored_bytes", PARTITION), "{{partition}} in {{tier}}"),
            Query(f"sum by (tier) (tq_arena_live_bytes{{{HERE}}})", "all partitions, in {{tier}}"),
        ], "Every copy counts. If there are several tiers, old blocks move to disk and are read there."),
        Panel("Values by tier", "short", [
            Query(now("tq_stored_values", PARTITION), "{{partition}} in {{tier}}"),
        ], "One for each field of a sample, and each copy."),
        Panel("Dropped, skipped, lost", "short", [
            Query(now("tq_dropped_rows", PARTITION), "{{partition}} dropped: {{reason}}"),
            Query(now("tq_passed_over_rows", PARTITION), "{{partition}} {{task}} skipped: {{reason}}"),
            Query(now("tq_lost_rows", PARTITION) + " > 0", "{{partition}} {{field}} lost"),
        ]),
    ],
    "Progress by task and field": [
        Panel("Samples that have a field", "short", [
            Query(now("tq_produced_rows", PARTITION), "{{partition}} {{field}}"),
        ]),
        Panel("Samples that a task has consumed", "short", [
            Query(now("tq_consumed_rows", PARTITION), "{{partition}} {{task}}"),
        ]),
        Panel("Produced and consumed per second", "rowsps", [
            Query(rate("tq_field_produced_total", "field", PARTITION), "produced: {{field}}"),
            Query(rate("tq_task_consumed_total", "task", PARTITION), "consumed: {{task}}"),
        ]),
    ],
    "Waiting claims and puts": [
        Panel("Claims that wait", "short", [
            Query(now("tq_waiting_claims", PARTITION) + " > 0", "{{partition}} {{task}}"),
            Query(now("tq_waiting_puts", PARTITION) + " > 0", "{{partition}}: puts that wait for space"),
        ]),
        Panel("The oldest claim has waited", "s", [
            Query(now("tq_longest_wait_seconds", PARTITION) + " > 0", "{{partition}} {{task}}"),
        ]),
        Panel("Waits that ended, 99th percentile", "s", [
            Query(percentile(0.99, "tq_wait_seconds", "server, type, task"), "{{type}} {{task}}"),
        ]),
    ],
    "Leases and redeliveries": [
        Panel("Leases in force, samples under them", "short", [
            Query(now("tq_leases", PARTITION), "{{partition}} {{task}}: leases"),
            Query(now("tq_claimed_rows", PARTITION) + " > 0", "{{partition}} {{task}}: samples"),
        ]),
        Panel("Granted and acknowledged", "short", [
            Query(rate("tq_leases_granted_total", "task"), "{{task}}: leases a second"),
            Query(rate("tq_acknowledged_rows_total", "task"), "{{task}}: samples acknowledged a second"),
        ]),
        Panel("Redelivered", "rowsps", [
            Query(rate("tq_redelivered_rows_total", "task, reason"), "{{task}}: {{reason}}"),
        ], "Consumers that die, are too slow for their leases, or return samples."),
    ],
    "Arenas": [
        Panel("Leased, live and held", "bytes", [
            Query(now("tq_arena_capacity_bytes"), "unit {{unit}}: capacity"),
            Query(now("tq_arena_held_bytes"), "unit {{unit}}: held"),
            Query(now("tq_arena_leased_bytes"), "unit {{unit}}: leased"),
            Query(now("tq_arena_live_bytes"), "unit {{unit}}: live"),
        ]),
        Panel("Fragmentation of free space", "percentunit", [
            Query(
                f"1 - tq_arena_largest_free_bytes{{{HERE}}} / (tq_arena_free_bytes{{{HERE}}} > 0)",
                "unit {{unit}}",
            ),
        ], "0: all free space is in one piece."),
        Panel("Writers that wait for space", "short", [
            Query(now("tq_arena_waiting_leases"), "unit {{unit}}: leases"),
            Query(now("tq_arena_longest_wait_seconds"), "unit {{unit}}: seconds of the oldest"),
            Query(now("tq_arena_extents"), "unit {{unit}}: extents leased"),
        ]),
    ],
    "Journal": [
        Panel("Lag behind the snapshot", "short", [
            Query(now("tq_journal_lag_records"), "records"),
            Query(now("tq_journal_snapshot_age_seconds"), "seconds"),
        ], "The records that a restart of the controller replays."),
        Panel("Commits", "s", [
            Query(
                f"histogram_quantile(0.99, sum by (le) (rate(tq_journal_commit_seconds_bucket{{{HERE}}}[{EACH}])))",
                "99th percentile",
            ),
            Query(now("tq_journal_last_commit_seconds"), "the last one"),
        ]),
        Panel("Trouble", "short", [
            Query(now("tq_journal_trouble"), "cannot be written"),
            Query(now("tq_journal_snapshot_failing"), "snapshots fail"),
            Query(f"rate(tq_journal_commit_failures_total{{{HERE}}}[{EACH}])", "failures a second"),
        ]),
    ],
    "Samplers of users": [
        Panel("Share of the loop's time", "percentunit", [
            Query(rate("tq_sampler_seconds_total", "sampler"), "{{sampler}}"),
        ]),
        Panel("Time of a claim, mean and longest", "s", [
            Query(
                f"{rate('tq_sampler_seconds_total', 'sampler')} / {rate('tq_sampler_asked_total', 'sampler')}",
                "{{sampler}}: mean",
            ),
            Query(now("tq_sampler_longest_seconds"), "{{sampler}}: longest"),
        ]),
    ],
    "Rejected": [
        Panel("Connections and messages not served", "short", [
            Query(rate("tq_rejected_total", "server, unit, reason"), f"{WHO} {{{{reason}}}}"),
        ]),
        Panel("Connections", "short", [
            Query(now("tq_connections"), f"{WHO}: open"),
            Query(rate("tq_connections_accepted_total", "server, unit"), f"{WHO}: accepted a second"),
        ]),
        Panel("Memory", "bytes", [Query(now("tq_process_resident_bytes"), WHO)]),
    ],
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's format."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        panels.append({"type": "row", "id": len(panels) + 1, "title": title, "collapsed": False, "gridPos": place,
                       "panels": []})  # fmt: skip
        y += 1
        for number, panel in enumerate(row):
            x, down = number % ACROSS * WIDTH, number // ACROSS * HEIGHT
            panels.append(graph(len(panels) + 1, panel, x, y + down))
        y += -(-len(row) // ACROSS) * HEIGHT
    return {
        "title": "transfer_queue",
        "uid": "transfer-queue",
        "tags": ["transfer_queue"],
        "schemaVersion": 36,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "time": {"from": "now-30m", "to": "now"},
        "refresh": "10s",
        "templating": {"list": [
            {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus"},
            variable("job", "label_values(tq_server_up, job)"),
            variable("partition", 'label_values(tq_rows{job=~"$job"}, partition)'),
        ]},
        "panels": panels,
    }  # fmt: skip


def variable(name: str, query: str) -> dict[str, Any]:
    """Return a variable, which is a selection above the panels. All values are selected at first."""
    return {
        "type": "query", "name": name, "label": name, "datasource": SOURCE, "query": query, "refresh": 2,
        "includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def graph(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    """One panel."""
    targets = [
        {
            "refId": chr(ord("A") + at), "datasource": SOURCE, "expr": query.expression, "legendFormat": query.legend,
            "range": True,
        }
        for at, query in enumerate(panel.queries)
    ]  # fmt: skip
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "description": panel.words,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": x, "y": y},
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 10}}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def main() -> int:
    """Write the dashboard; with --check, compare only."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file is not up to date")
    text = json.dumps(dashboard(), indent=1) + "\n"
    if parser.parse_args().check:
        return int(FILE.read_text() != text)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
