"""The form in which a metric is declared, and the labels that many metrics have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transfer_queue.metrics.samples import Samples

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
