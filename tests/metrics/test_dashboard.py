"""The dashboard is one that Grafana's own types take whole, and asks for nothing that is not served."""

from __future__ import annotations

import enum
import json
import re
import runpy
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard, prometheus, timeseries

from promql import check, names_served
from transfer_queue.cli import main
from transfer_queue.cli.dashboard import FILE
from transfer_queue.metrics.families import FAMILIES, ROWS
from transfer_queue.metrics.samples import Family

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = FILE.read_text()
DOCUMENT: dict[str, Any] = json.loads(TEXT)
PANELS: list[dict[str, Any]] = [panel for panel in DOCUMENT["panels"] if panel["type"] != "row"]
PAGE = (ROOT / "docs" / "metrics.md").read_text()


def test_the_file_is_what_its_maker_makes() -> None:
    assert (
        subprocess.run([sys.executable, ROOT / "tools" / "make_dashboard.py", "--check"], check=False).returncode == 0
    )


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard"]) == 0
    assert capsys.readouterr().out == TEXT


def test_grafanas_types_take_all_of_it() -> None:
    """Read into the types that Grafana generates from its schema, and written again, nothing of it is missing."""
    plugins.register_default_plugins()
    read = dashboard.Dashboard.from_json(DOCUMENT)
    assert not list(unlike(DOCUMENT, json.loads(JSONEncoder().encode(read)), ""))
    assert not list(wrong(read, dashboard.Dashboard, "dashboard"))
    panel = next(panel for panel in read.panels or [] if isinstance(panel, dashboard.Panel))
    assert isinstance(panel.targets[0], prometheus.Dataquery)
    assert isinstance(panel.options, timeseries.Options)
    assert isinstance(panel.field_config.defaults.custom, common.GraphFieldConfig)


def unlike(mine: Any, theirs: Any, path: str) -> typing.Iterator[str]:
    """Where something of mine is not there, or is another."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key, each in mine.items():
            yield from unlike(each, theirs[key], f"{path}.{key}") if key in theirs else [f"{path}.{key} is unknown"]
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        for number, (one, other) in enumerate(zip(mine, theirs)):
            yield from unlike(one, other, f"{path}[{number}]")
    elif mine != theirs:
        yield f"{path}: {mine!r} became {theirs!r}"


def wrong(value: Any, kind: Any, path: str) -> typing.Iterator[str]:
    """Where a value is not of the type that Grafana's schema gives it."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if all(any(wrong(value, each, path)) for each in inside):
            yield f"{path}: {value!r} is no {kind}"
    elif origin is typing.Literal:
        if value not in inside:
            yield f"{path}: {value!r} is none of {inside}"
    elif origin is list:
        items = value if isinstance(value, list) else [object()]
        for number, each in enumerate(items):
            yield from wrong(each, inside[0], f"{path}[{number}]")
    elif origin is dict:
        if not isinstance(value, dict):
            yield f"{path}: {value!r} is no dict"
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        if value not in [each.value for each in kind]:
            yield f"{path}: {value!r} is no {kind}"
    elif isinstance(kind, type) and kind.__module__.startswith("grafana_foundation_sdk.models"):
        if not isinstance(value, kind):
            yield f"{path}: {value!r} is no {kind}"
            return
        for name, inner in typing.get_type_hints(kind).items():
            yield from wrong(getattr(value, name), inner, f"{path}.{name}")
    elif isinstance(kind, type) and not isinstance(value, (kind, int) if kind is float else kind):
        yield f"{path}: {value!r} is no {kind}"


def test_a_wrong_dashboard_is_found() -> None:
    """The checks above can fail."""
    plugins.register_default_plugins()
    bad = json.loads(TEXT)
    bad["panels"][1]["gridPos"]["w"] = "wide"
    bad["graphTooltip"] = 7
    bad["panels"][1]["fieldConfig"]["defaults"]["colour"] = "red"
    read = dashboard.Dashboard.from_json(bad)
    assert [line.partition(":")[0] for line in wrong(read, dashboard.Dashboard, "")] == [".graph_tooltip", ".panels"]
    assert list(unlike(bad, json.loads(JSONEncoder().encode(read)), "")) == [
        ".panels[1].fieldConfig.defaults.colour is unknown"
    ]


def test_panels_lie_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DOCUMENT["panels"]:
        at = panel["gridPos"]
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not mine & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= mine
    assert len({panel["id"] for panel in DOCUMENT["panels"]}) == len(DOCUMENT["panels"])
    rows = [panel["title"] for panel in DOCUMENT["panels"] if panel["type"] == "row"]
    assert len(rows) == 11


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_query_asks_for_what_is_served(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        _, labels = check(target["expr"])
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, target


def test_every_metric_is_in_a_panel_unless_it_is_not_shown() -> None:
    asked = {name for panel in PANELS for target in panel["targets"] for name in check(target["expr"])[0]}
    shown = {
        f"{name}_bucket" if family.kind == "histogram" else name for name, family in FAMILIES.items() if family.shown
    }
    assert asked == shown


def test_a_new_metric_gets_a_panel_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator need not be edited: a metric that names no panel has one of its own."""
    maker = runpy.run_path(str(ROOT / "tools" / "make_dashboard.py"))
    new = {
        "tq_late_rows_total": Family("counter", "Late samples.", ("task",), lambda snapshot: []),
        "tq_late_seconds": Family("histogram", "Time that samples were late.", (), lambda snapshot: [], bounds=(1.0,)),
        "tq_late_bytes": Family("gauge", "Late bytes.", ("partition",), lambda snapshot: []),
        "tq_secret": Family("gauge", "Not shown.", (), lambda snapshot: [], shown=False),
    }
    monkeypatch.setitem(ROWS, "Late samples", new)
    *_, row, rate, quantiles, value = maker["dashboard"]()["panels"]
    assert (row["title"], rate["title"], quantiles["title"]) == (
        "Late samples",
        "tq_late_rows_total",
        "tq_late_seconds",
    )
    assert [panel["fieldConfig"]["defaults"]["unit"] for panel in (rate, quantiles, value)] == ["rowsps", "s", "bytes"]
    assert rate["description"] == "Late samples."
    lines = [(target["expr"], target["legendFormat"]) for panel in (rate, value) for target in panel["targets"]]
    assert lines == [
        ('sum by (task) (rate(tq_late_rows_total{job=~"$job"}[$__rate_interval]))', "{{task}}"),
        ('tq_late_bytes{job=~"$job", partition=~"$partition"}', "{{partition}}"),
    ]
    buckets = 'sum by (le) (rate(tq_late_seconds_bucket{job=~"$job"}[$__rate_interval]))'
    assert [target["expr"] for target in quantiles["targets"]] == [
        f"histogram_quantile(0.5, {buckets})",
        f"histogram_quantile(0.99, {buckets})",
    ]


def test_metrics_of_one_panel_are_shown_together(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = runpy.run_path(str(ROOT / "tools" / "make_dashboard.py"))
    new = {
        "tq_early": Family(
            "gauge", "Early samples.", ("task",), lambda snapshot: [], panel="Times", legend="{{task}} early"
        ),
        "tq_late_seconds": Family(
            "gauge", "Delay.", ("task",), lambda snapshot: [], panel="Times", queries=(("METRIC / 2", "half"),)
        ),
    }
    monkeypatch.setitem(ROWS, "Late samples", new)
    panel = maker["dashboard"]()["panels"][-1]
    assert (panel["title"], panel["description"]) == ("Times", "Early samples. Delay.")
    assert panel["fieldConfig"]["defaults"]["unit"] == "short", "two units have none in common"
    assert [(target["expr"], target["legendFormat"]) for target in panel["targets"]] == [
        ('tq_early{job=~"$job"}', "{{task}} early"),
        ('tq_late_seconds{job=~"$job"} / 2', "half"),
    ]


def test_the_choices_are_of_what_is_served() -> None:
    for variable in DOCUMENT["templating"]["list"][1:]:
        selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
        (name,), _ = check(selector)
        assert label in names_served()[name]


def test_the_alerts_of_the_page_ask_for_what_is_served() -> None:
    (block,) = re.findall(r"```yaml\n(groups:.*?)```", PAGE, re.DOTALL)
    (group,) = yaml.safe_load(block)["groups"]
    assert len(group["rules"]) == 3
    for rule in group["rules"]:
        assert {"alert", "expr", "for", "annotations"} <= set(rule)
        _, labels = check(rule["expr"])
        said = re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))
        assert set(said) <= labels
