"""Existing dashboards for this interface show a system that serves the names that they query."""

from __future__ import annotations

import math
import re
import time

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from other_dashboards import Query, choices, dashboards, queries
from prometheus_text import DECLARED, read, value
from promql import Scrape, evaluate, parse, selectors_of
from transfer_queue.metrics.exposition import COMPATIBLE
from transfer_queue.metrics.families import FAMILIES

OTHERS = {
    "rl_insight_monitor_": "metrics that the trainer itself exports: steps, rewards, losses, times of its stages",
    "vllm:": "the vLLM engine",
    "vllm_omni:": "the vLLM-Omni engine",
    "sglang:": "the SGLang engine",
    "sglang_": "the SGLang engine",
    "npu_": "the exporter of the accelerator",
    "node_": "the exporter of the host",
}
"""The beginnings of the names of metrics that other programs serve -> which ones."""
ROWS = 8


@pytest.fixture(scope="module")
def scrapes() -> list[Scrape]:
    """Two scrapes of a system that works between them."""
    tq.init({"metrics": {"enabled": True, "compatible_names": True}, "system": {"name": "shown"}}, attach="never")
    try:
        endpoint = tq.get_metrics_endpoint()
        found = [_scrape(endpoint)]
        _work("train_0")
        found.append(_scrape(endpoint))
        _work("train_1")
        tq.kv_clear(["0", "1"], "train_0")
        return [*found[1:], _scrape(endpoint)]
    finally:
        tq.close()


def _scrape(endpoint: str | None) -> Scrape:
    return time.monotonic(), read(endpoint)


def _work(partition: str) -> None:
    client = tq.get_client()
    keys = [str(number) for number in range(ROWS)]
    client.kv_batch_put(keys, partition, {"prompt": torch.zeros(ROWS, 1024)})
    meta = client.get_meta(["prompt"], ROWS // 2, partition, task_name="rollout")
    assert client.get_data(meta)["prompt"].size(0) == ROWS // 2
    client.put(TensorDict({"response": torch.ones(ROWS // 2, 4)}, batch_size=ROWS // 2), meta)
    client.get_meta(["response"], 2, partition, task_name="train")


def test_every_query_is_ours_or_of_a_program_that_is_known() -> None:
    ours = 0
    for query in _all_queries():
        if query.source != "prometheus":
            assert query.source == "tempo", query  # traces
            continue
        names = _names(query.expression)
        others = [name for name in names if name.startswith(tuple(OTHERS))]
        assert others == names or set(map(_family, names)) <= set(COMPATIBLE), query
        ours += not others
    assert ours >= 3 * 22, "three of the dashboards show this system"


def test_every_panel_finds_a_series_with_the_labels_of_its_legend(scrapes: list[Scrape]) -> None:
    for name, dashboard in dashboards().items():
        chosen = choices(dashboard)
        for query in queries(name, dashboard):
            if query.source != "prometheus" or not _names(query.expression)[0].startswith("tq_"):
                continue
            text = query.expression
            for variable in re.findall(r"\$(\w+)", text):
                if not variable.startswith("__"):
                    text = text.replace(f"${variable}", chosen[variable].all)
            assert evaluate(text, scrapes), query
            labels = set(re.findall(r"\{\{ *(\w+) *\}\}", query.legend))
            assert all(labels == dict(series).keys() for series in evaluate(text, scrapes)), query


def test_every_metric_is_in_a_panel(scrapes: list[Scrape]) -> None:
    asked = {
        _family(name) for query in _all_queries() if query.source == "prometheus" for name in _names(query.expression)
    }
    assert set(COMPATIBLE) <= asked
    assert {_family(name) for name in scrapes[-1][1]} >= set(COMPATIBLE)
    assert not set(COMPATIBLE) & set(FAMILIES)


def test_the_choices_above_the_panels_have_values(scrapes: list[Scrape]) -> None:
    for name, dashboard in dashboards().items():
        chosen = choices(dashboard)
        if not any(
            _names(query.expression)[0].startswith("tq_")
            for query in queries(name, dashboard)
            if query.source == "prometheus"
        ):
            continue
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", chosen["task_name"].query).groups()  # type: ignore[union-attr]
        assert {dict(key)[label] for key in scrapes[-1][1][metric]} == {"rollout", "train"}
        types = {dict(key)["op_type"] for metric in ("tq_controller_request_total", "tq_storage_request_ops")
                 for key in scrapes[-1][1][metric]}  # fmt: skip
        assert set(chosen["op_type"].query.split(",")) <= types


def test_what_the_metrics_say(scrapes: list[Scrape]) -> None:
    (began, before), (ended, found) = scrapes
    assert value(found, "tq_partitions_total") == 2
    assert value(found, "tq_partition_samples_total", partition_id="train_0") == ROWS - 2
    assert value(found, "tq_global_index_allocated_total") == 2 * ROWS
    produced = {
        (partition, task): value(found, "tq_partition_production_progress", partition_id=partition, task_name=task)
        for partition in ("train_0", "train_1")
        for task in ("rollout", "train")
    }
    assert produced["train_1", "rollout"] == 1.0, "all samples have a prompt"
    assert produced["train_1", "train"] == 0.5, "half of them have a response"
    consumed = {"partition_id": "train_1", "task_name": "train"}
    assert value(found, "tq_partition_consumption_progress", **consumed) == 2 / ROWS
    units = {dict(key)["storage_unit_id"] for key in found["tq_storage_active_keys_total"]}
    assert units == {dict(key)["storage_unit_id"] for key in found["tq_storage_utilization_ratio"]}
    assert sum(found["tq_storage_active_keys_total"].values()) == 2 * (ROWS + ROWS // 2) - 2 - 2
    (capacity,) = found["tq_storage_capacity_total"].values()
    assert capacity > 1000
    cleared = {"op_type": "CLEAR_META"}
    assert value(found, "tq_controller_request_samples_total", **cleared) == 2
    assert value(before, "tq_controller_request_samples_total", **cleared) == 0
    assert value(found, "tq_controller_request_samples_total", op_type="GET_META") == 2 * (ROWS // 2 + 2)
    assert value(found, "tq_controller_request_total", op_type="NOTIFY_DATA_UPDATE") == 4
    uptime = value(found, "tq_controller_uptime_seconds") - value(before, "tq_controller_uptime_seconds")
    assert math.isclose(uptime, ended - began, abs_tol=30)


def test_without_the_setting_they_are_not_served() -> None:
    tq.init({"metrics": {"enabled": True}, "system": {"name": "plain"}}, attach="never")
    try:
        assert not set(read(tq.get_metrics_endpoint())) & set(COMPATIBLE)
    finally:
        tq.close()


def _all_queries() -> list[Query]:
    return [query for name, dashboard in dashboards().items() for query in queries(name, dashboard)]


def _names(expression: str) -> list[str]:
    """The names of the metrics in a query, or how they begin if it asks for them by a regular expression."""
    found = []
    for selector in selectors_of(parse(expression)):
        named = [matcher.value for matcher in selector.matchers.matchers if matcher.name == "__name__"]
        found.append(selector.name or re.sub(r"\[(.).*", r"\1", named[0]))
    return found


def _family(name: str) -> str:
    return name if name in DECLARED else name.rpartition("_")[0]
