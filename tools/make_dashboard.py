"""Writes the Grafana dashboard, src/transfer_queue/metrics/grafana.json; --check only compares.

The rows are those of metrics/families.py, and each metric there names its panel. Imported into Grafana 10 or later, the
dashboard asks for a Prometheus data source.
"""

from __future__ import annotations

import json
from typing import Any

from generated_files import ROOT, write_or_check

from transfer_queue.metrics.families import ROWS
from transfer_queue.metrics.samples import Family

FILE = ROOT / "src" / "transfer_queue" / "metrics" / "grafana.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, ACROSS = 8, 8, 3
"""The size of a panel, in a grid of 24 columns, and the number of panels side by side."""
INTERVAL = "$__rate_interval"
QUANTILES = (0.5, 0.99)

ADVICE = {
    "CPU use of each loop": "At 100 % the server is the bottleneck.",
    "Longest event of the last minutes": "Only a user's sampler should occupy a loop for more than 5 ms.",
    "Bytes": "If there are several tiers, the oldest blocks are moved to disk, and are read there.",
    "Redelivered samples per second": "Consumers die, are too slow for their leases, or return samples.",
    "Fragmentation of free space": "0: all free space is in one piece.",
}
"""Title of a panel -> what its description says besides the meaning of its metrics."""


def selector(name: str, family: Family) -> str:
    """Return the selector of a metric, filtered by the choices above the panels."""
    partitions = ', partition=~"$partition"' if "partition" in family.labels else ""
    return f'{name}{{job=~"$job"{partitions}}}'


def queries(name: str, family: Family, shared: bool) -> list[tuple[str, str]]:
    """Return the queries of a metric and the names of their lines.

    Args:
        name: The metric.
        family: Its declaration.
        shared: Whether the panel has other metrics.
    """
    where = selector(name, family)
    if family.queries:
        return [(query.replace("METRIC", where), legend) for query, legend in family.queries]
    labels = " ".join(f"{{{{{label}}}}}" for label in family.labels)
    legend = family.legend or (f"{labels} {name}".strip() if shared or not labels else labels)
    if family.kind == "gauge":
        return [(where, legend)]
    if family.kind == "counter":
        return [(f"{summed(family.labels)}(rate({where}[{INTERVAL}]))", legend)]
    buckets = f"{summed(('le', *family.labels))}(rate({selector(f'{name}_bucket', family)}[{INTERVAL}]))"
    words = "" if legend == name else f"{legend}: "
    return [(f"histogram_quantile({share}, {buckets})", f"{words}{100 * share:g}th percentile") for share in QUANTILES]


def summed(labels: tuple[str, ...]) -> str:
    """Return the aggregation that sums over all labels but these."""
    return f"sum by ({', '.join(labels)}) " if labels else "sum"


def unit(name: str, family: Family) -> str:
    """Return Grafana's name for the unit of a metric: of a counter, for the unit of its rate."""
    if any(query.startswith("1 - ") for query, _ in family.queries):
        return "percentunit"
    parts = name.split("_")
    if family.kind == "counter":
        rates = {"seconds": "percentunit", "bytes": "Bps", "rows": "rowsps", "requests": "reqps"}
        return next((found for part, found in rates.items() if part in parts), "cps")
    return "s" if "seconds" in parts else "bytes" if "bytes" in parts else "short"


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's form."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, families in ROWS.items():
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        panels.append({"type": "row", "id": len(panels) + 1, "title": title, "collapsed": False, "gridPos": place,
                       "panels": []})  # fmt: skip
        y += 1
        row = panels_of(families)
        for number, (name, metrics) in enumerate(row.items()):
            x, down = number % ACROSS * WIDTH, number // ACROSS * HEIGHT
            panels.append(graph(len(panels) + 1, name, metrics, x, y + down))
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


def panels_of(families: dict[str, Family]) -> dict[str, dict[str, Family]]:
    """Return the panels of a row: their titles and metrics, in the order of their first metrics."""
    row: dict[str, dict[str, Family]] = {}
    for name, family in families.items():
        if family.shown:
            row.setdefault(family.panel or name, {})[name] = family
    return row


def variable(name: str, query: str) -> dict[str, Any]:
    """Return a choice above the panels; at first, everything is chosen."""
    return {
        "type": "query", "name": name, "label": name, "datasource": SOURCE, "query": query, "refresh": 2,
        "includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def graph(number: int, title: str, metrics: dict[str, Family], x: int, y: int) -> dict[str, Any]:
    """Return a panel."""
    lines = [line for name, family in metrics.items() for line in queries(name, family, len(metrics) > 1)]
    units = {unit(name, family) for name, family in metrics.items()}
    words = [family.help for family in metrics.values()]
    targets = [
        {
            "refId": chr(ord("A") + at), "datasource": SOURCE, "expr": query, "legendFormat": legend, "range": True,
        }
        for at, (query, legend) in enumerate(lines)
    ]  # fmt: skip
    return {
        "type": "timeseries",
        "id": number,
        "title": title,
        "description": " ".join([*words, *([ADVICE[title]] if title in ADVICE else [])]),
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": x, "y": y},
        "targets": targets,
        "fieldConfig": {
            "defaults": {
                "unit": units.pop() if len(units) == 1 else "short", "min": 0, "custom": {"fillOpacity": 10},
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }  # fmt: skip


if __name__ == "__main__":
    write_or_check({FILE: json.dumps(dashboard(), indent=1) + "\n"})
