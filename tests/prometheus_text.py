"""Reads the text of a metrics endpoint with Prometheus's own parser, and checks what that lets pass."""

from __future__ import annotations

import math
import urllib.request
from collections import Counter, defaultdict

from prometheus_client.parser import text_string_to_metric_families

from transfer_queue.metrics.exposition import COMPATIBLE
from transfer_queue.metrics.families import FAMILIES

DECLARED = {**FAMILIES, **COMPATIBLE}
Values = dict[tuple[tuple[str, str], ...], float]


def read(endpoint: str | None, seconds: float = 60) -> dict[str, Values]:
    """Family -> labels, sorted -> value, of what an endpoint tells."""
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=seconds) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return checked(reply.read().decode())


def checked(text: str) -> dict[str, Values]:
    """Sample name -> labels, sorted -> value. Every family is declared once, before its samples, and consistent."""
    lines = text.split("\n")
    assert lines[-1] == ""
    declared = Counter(tuple(line.split(" ", 3)[1:3]) for line in lines if line.startswith("#"))
    assert max(declared.values()) == 1, "HELP and TYPE once"
    found: dict[str, Values] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        declared = DECLARED[family.name if DECLARED.get(family.name) else f"{family.name}_total"]
        assert (family.type, family.documentation) == (declared.kind, declared.help)
        for sample in family.samples:
            key = tuple(sorted(sample.labels.items()))
            name = sample.name
            if name not in DECLARED and name.removesuffix("_total") in DECLARED:
                name = name.removesuffix("_total")  # the parser adds it to the name of every counter
            assert key not in found[name], f"{sample} twice"
            assert set(sample.labels) <= {*declared.labels, "le"}
            found[name][key] = sample.value
        if family.type == "histogram":
            _check_histogram(family.name, found)
    return dict(found)


def _check_histogram(name: str, found: dict[str, Values]) -> None:
    buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = defaultdict(list)
    for labels, value in found[f"{name}_bucket"].items():
        buckets[tuple(label for label in labels if label[0] != "le")].append((float(dict(labels)["le"]), value))
    assert buckets.keys() == found[f"{name}_count"].keys() == found[f"{name}_sum"].keys()
    for labels, reached in buckets.items():
        assert reached == sorted(reached), "buckets ascend, and so do their counts"
        assert [bound for bound, _ in reached].count(math.inf) == 1
        assert reached[-1] == (math.inf, found[f"{name}_count"][labels])
        least = sum(count * low for (low, _), count in zip([(0.0, 0), *reached], _each(reached)))
        assert found[f"{name}_sum"][labels] >= least * (1 - 1e-9)


def _each(reached: list[tuple[float, float]]) -> list[float]:
    counts = [count for _, count in reached]
    return [count - before for before, count in zip([0.0, *counts], counts)]


def value(found: dict[str, Values], name: str, **labels: str) -> float:
    """One value."""
    return found[name][tuple(sorted(labels.items()))]
