"""What a PromQL expression asks for, by a parser of PromQL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import promql_parser

from transfer_queue.metrics.families import FAMILIES

OF_SCRAPES = {"job", "instance"}  # labels that Prometheus itself adds


def names_served() -> dict[str, set[str]]:
    """Name of a series -> its labels, of everything that an endpoint may tell."""
    served: dict[str, set[str]] = {}
    for name, family in FAMILIES.items():
        labels = {*family.labels, *OF_SCRAPES}
        if family.kind == "histogram":
            served |= {f"{name}_bucket": {*labels, "le"}, f"{name}_sum": labels, f"{name}_count": labels}
        else:
            served[name] = labels
    return served


def check(expression: str) -> tuple[set[str], set[str]]:
    """Metrics that it asks for, and labels that its result may have; every one of them is served."""
    served = names_served()
    parsed = promql_parser.parse(expression.replace("$__rate_interval", "5m"))
    selectors = [node for node in nodes(parsed) if isinstance(node, promql_parser.VectorSelector)]
    assert selectors, expression
    for selector in selectors:
        assert selector.name in served, f"{selector.name} in {expression}"
        asked = {matcher.name for matcher in selector.matchers.matchers}
        assert asked <= served[selector.name], f"{asked} of {selector.name}"
    left = set[str]().union(*(served[selector.name] for selector in selectors))
    for node in nodes(parsed):
        if isinstance(node, promql_parser.AggregateExpr):
            kept = set(node.modifier.labels) if node.modifier is not None else set()
            within = [inner.name for inner in nodes(node) if isinstance(inner, promql_parser.VectorSelector)]
            assert all(kept <= served[name] for name in within), f"{kept} in {expression}"
            left = kept
        elif isinstance(node, promql_parser.Call) and node.func.name == "rate":
            (name,) = (inner.name for inner in nodes(node) if isinstance(inner, promql_parser.VectorSelector))
            family = FAMILIES.get(name) or FAMILIES[name.rpartition("_")[0]]
            assert family.kind in ("counter", "histogram"), f"rate of the gauge {name}"
    return {selector.name for selector in selectors}, left


def nodes(parsed: Any) -> Iterator[Any]:
    """An expression and all within it, outermost first."""
    yield parsed
    inside = [getattr(parsed, name, None) for name in ("expr", "lhs", "rhs", "vector_selector")]
    for each in [*inside, *(getattr(parsed, "args", None) or [])]:
        if each is not None:
            yield from nodes(each)
