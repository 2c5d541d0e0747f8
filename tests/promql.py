"""What a PromQL expression asks for, and its result for the text of an endpoint, by a parser of PromQL."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import promql_parser
from promql_parser import AggregateExpr, BinaryExpr, Call, MatrixSelector, NumberLiteral, VectorSelector

from prometheus_text import Values
from transfer_queue.metrics.families import FAMILIES

OF_SCRAPES = {"job", "instance"}  # labels that Prometheus itself adds
INTERVALS = re.compile(r"\$(__rate_interval|__interval|__range|interval|\{\w+\})(?=[\]:])")

Scrape = tuple[float, dict[str, Values]]
"""The time in seconds, and `prometheus_text.read`."""
Vector = dict[frozenset[tuple[str, str]], float]


def parse(expression: str) -> Any:
    """A query of a dashboard, with an interval for Grafana's variables."""
    return promql_parser.parse(INTERVALS.sub("5m", expression))


def selectors_of(parsed: Any) -> list[VectorSelector]:
    return [node for node in nodes(parsed) if isinstance(node, VectorSelector)]


def nodes(parsed: Any) -> Iterator[Any]:
    """An expression and all within it, outermost first."""
    yield parsed
    inside = [getattr(parsed, name, None) for name in ("expr", "lhs", "rhs", "vector_selector")]
    for each in [*inside, *(getattr(parsed, "args", None) or [])]:
        if each is not None:
            yield from nodes(each)


# ---------------------------------------------------------------- what it asks for


def names_served() -> dict[str, set[str]]:
    """Name of a series -> its labels, of everything that an endpoint may serve."""
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
    parsed = parse(expression)
    selectors = selectors_of(parsed)
    assert selectors, expression
    for selector in selectors:
        assert selector.name in served, f"{selector.name} in {expression}"
        asked = {matcher.name for matcher in selector.matchers.matchers}
        assert asked <= served[selector.name], f"{asked} of {selector.name}"
    for node in nodes(parsed):
        if isinstance(node, Call) and node.func.name == "rate":
            (name,) = (inner.name for inner in selectors_of(node))
            family = FAMILIES.get(name) or FAMILIES[name.rpartition("_")[0]]
            assert family.kind in ("counter", "histogram"), f"rate of the gauge {name}"
    return {selector.name for selector in selectors}, _labels(parsed, served)


def _labels(node: Any, served: dict[str, set[str]]) -> set[str]:
    """The labels that the result of an expression may have."""
    if isinstance(node, VectorSelector):
        return served[node.name]
    if isinstance(node, AggregateExpr):
        kept = set(node.modifier.labels) if node.modifier is not None else set()
        assert kept <= _labels(node.expr, served), node.prettify()
        return kept
    if isinstance(node, Call) and node.args:
        return _labels(node.args[-1], served) - ({"le"} if node.func.name == "histogram_quantile" else set())
    if isinstance(node, BinaryExpr):
        sides = [side for side in (node.lhs, node.rhs) if selectors_of(side)]
        return _labels(sides[0], served)  # of the left one, also with group_left
    inner = getattr(node, "vector_selector", None) or getattr(node, "expr", None)
    return set() if inner is None else _labels(inner, served)


# ---------------------------------------------------------------- its result


def evaluate(expression: str, scrapes: list[Scrape]) -> Vector:
    """The series of an instant query at the last scrape. The range of `rate` is from the first scrape to it."""
    found = _value(parse(expression), scrapes)
    assert isinstance(found, dict), expression
    return found


def _value(node: Any, scrapes: list[Scrape]) -> Vector | float:
    if isinstance(node, NumberLiteral):
        return float(node.val)
    if isinstance(node, VectorSelector):
        return _selected(node, scrapes[-1])
    if isinstance(node, AggregateExpr):
        return _aggregated(node, scrapes)
    if isinstance(node, Call):
        return _called(node, scrapes)
    if isinstance(node, BinaryExpr):
        return _combined(node, _value(node.lhs, scrapes), _value(node.rhs, scrapes))
    return _value(node.expr, scrapes)  # parentheses


def _selected(selector: VectorSelector, scrape: Scrape) -> Vector:
    found: Vector = {}
    for key, number in scrape[1].get(selector.name, {}).items():
        labels = dict(key)
        if all(_matches(matcher, labels.get(matcher.name, "")) for matcher in selector.matchers.matchers):
            found[frozenset(key)] = number
    return found


def _matches(matcher: Any, value: str) -> bool:
    hit = re.fullmatch(matcher.value, value) is not None if "Re" in str(matcher.op) else matcher.value == value
    return hit != ("Not" in str(matcher.op))


def _aggregated(node: AggregateExpr, scrapes: list[Scrape]) -> Vector:
    inner = _value(node.expr, scrapes)
    assert isinstance(inner, dict)
    assert node.modifier is None or node.modifier.type == promql_parser.AggModifierType.By
    groups: defaultdict[frozenset[tuple[str, str]], list[float]] = defaultdict(list)
    for labels, number in inner.items():
        groups[_only(labels, node.modifier.labels if node.modifier is not None else [])].append(number)
    combine = {"sum": sum, "max": max, "min": min, "count": len}[str(node.op).split()[0]]
    return {labels: float(combine(numbers)) for labels, numbers in groups.items()}


def _only(labels: frozenset[tuple[str, str]], names: list[str]) -> frozenset[tuple[str, str]]:
    return frozenset(label for label in labels if label[0] in names)


def _called(node: Call, scrapes: list[Scrape]) -> Vector | float:
    if node.func.name == "time":
        return scrapes[-1][0]
    if node.func.name == "rate":
        (matrix,) = node.args
        assert isinstance(matrix, MatrixSelector)
        first, last = (_selected(matrix.vector_selector, scrape) for scrape in (scrapes[0], scrapes[-1]))
        seconds = scrapes[-1][0] - scrapes[0][0]
        assert all(first.get(labels, 0.0) <= number for labels, number in last.items()), "counters do not decrease"
        return {labels: (number - first[labels]) / seconds for labels, number in last.items() if labels in first}
    assert node.func.name == "histogram_quantile", node.func.name
    share, buckets = (_value(each, scrapes) for each in node.args)
    assert isinstance(share, float)
    assert isinstance(buckets, dict)
    groups: defaultdict[frozenset[tuple[str, str]], list[tuple[float, float]]] = defaultdict(list)
    for labels, number in buckets.items():
        rest = frozenset(label for label in labels if label[0] != "le")
        groups[rest].append((float(dict(labels)["le"]), number))
    return {labels: _quantile(share, sorted(found)) for labels, found in groups.items()}


def _quantile(share: float, buckets: list[tuple[float, float]]) -> float:
    """The upper bound of the bucket with the quantile; NaN if nothing was counted, as in Prometheus."""
    total = buckets[-1][1]
    return next(bound for bound, number in buckets if number >= share * total) if total else float("nan")


def _combined(node: BinaryExpr, left: Vector | float, right: Vector | float) -> Vector:
    operation = str(node.op)
    if isinstance(left, float):
        assert isinstance(right, dict)
        return {
            labels: number for labels, each in right.items() if (number := _apply(operation, left, each)) is not None
        }
    if isinstance(right, float):
        return {
            labels: number for labels, each in left.items() if (number := _apply(operation, each, right)) is not None
        }
    matching = node.modifier.matching if node.modifier is not None else None
    names = None if matching is None else list(matching.labels)
    by_key = {labels if names is None else _only(labels, names): each for labels, each in right.items()}
    found: Vector = {}
    for labels, each in left.items():
        other = by_key.get(labels if names is None else _only(labels, names))
        if other is not None and (number := _apply(operation, each, other)) is not None:
            found[labels] = number
    return found


def _apply(operation: str, left: float, right: float) -> float | None:
    """The result of an operator; None if a comparison leaves the series out."""
    if operation == ">":
        return left if left > right else None
    if operation == "/":
        return left / right if right else float("nan")
    return {"-": left - right, "+": left + right, "*": left * right}[operation]
