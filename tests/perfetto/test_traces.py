"""Perfetto's trace processor reads what `tq trace` writes, and answers questions about it in SQL."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_scenarios import scenarios
from pipeline_simulation import Pipeline
from tensordict import TensorDict

import transfer_queue as tq
from tests.perfetto.perfetto_ui import PerfettoUi
from transfer_queue.cli import main
from transfer_queue.timeline.trace import trace_json

ERRORS = "select name, value from stats where severity = 'error' and value > 0"
TRACKS = "select process.name, thread.name from thread join process using (upid) where thread.name is not null"


def rows(count: int, *fields: str) -> TensorDict:
    return TensorDict({field: torch.zeros(count, 4) for field in fields}, batch_size=[count])


@pytest.fixture
def client() -> Iterator[tq.TransferQueueClient]:
    tq.init({"system": {"name": "perfetto"}}, task="rollout", rank=3)
    yield tq.get_client()
    tq.close()


def args_of(ui: PerfettoUi, name: str) -> list[dict[str, Any]]:
    """The arguments of each slice with a name, in order."""
    found: dict[int, dict[str, Any]] = {}
    for number, key, text, integer in ui.query(
        "select slice.id, key, string_value, int_value from slice left join args using (arg_set_id) "
        f"where slice.name = '{name}' order by slice.ts"
    ):
        found.setdefault(number, {})[str(key).removeprefix("args.")] = integer if text is None else text
    return list(found.values())


def test_a_real_system(client: tq.TransferQueueClient, ui: PerfettoUi, tmp_path: Path) -> None:
    meta = client.put(rows(6, "prompt", "tokens"), partition_id="train_0")
    client.put(rows(4, "reward"), meta[:4])
    client.set_policy_version("train_0", 2)
    first = client.get_meta(["tokens", "reward"], 3, "train_0", task_name="train", sampling_config={"dp_rank": 1})
    client.get_data(first)
    client.seal("train_0")  # reports the get
    path = tmp_path / "trace.json"
    assert main(["trace", str(path), "--name", "perfetto"]) == 0
    ui.open(path.read_bytes())
    assert ui.query(ERRORS) == []
    assert {("rollout", "rank 3 puts"), ("train", "rank 1 claims"), ("rollout", "rank 3 gets")} <= set(ui.query(TRACKS))
    puts = args_of(ui, "put")
    assert [(each["rows"], each["bytes"] > 0, each["partition"]) for each in puts] == [
        (6, True, "train_0"), (4, True, "train_0"),
    ]  # fmt: skip
    assert {puts[0]["fields[0]"], puts[0]["fields[1]"]} == {"prompt", "tokens"}
    (claim,) = args_of(ui, "claim")
    assert (claim["rows"], claim["staleness"], claim["partition"]) == (3, 2, "train_0")
    (get,) = args_of(ui, "get")
    assert (get["rows"], get["bytes"]) == (3, 3 * 2 * 16)
    arrows = """
        select a.name, thread.name, b.name from flow
        join slice a on a.id = flow.slice_out join slice b on b.id = flow.slice_in
        join thread_track on thread_track.id = b.track_id join thread using (utid)
    """
    assert ui.query(arrows) == [("put", "rank 1 claims", "claim")]
    counters = dict(
        ui.query("select t.name, max(value) from counter join counter_track t on t.id = track_id group by 1")
    )
    assert counters["rows put: tokens rows"] == 6
    assert counters["rows put: reward rows"] == 4
    assert counters["queue of train rows"] == 4
    assert counters["staleness of train versions"] == 2
    assert counters["bytes put bytes"] == sum(each["bytes"] for each in puts)


@pytest.mark.parametrize("scenario", scenarios()[::9], ids=lambda each: each.name)
def test_nothing_of_a_pipeline_is_lost(ui: PerfettoUi, scenario: Any) -> None:
    trace = trace_json(Pipeline(scenario).run(120).recording())
    events = json.loads(trace)["traceEvents"]
    ui.open(trace)
    assert ui.query(ERRORS) == []
    slices = Counter(each["name"] for each in events if each["ph"] == "X")
    assert dict(ui.query("select name, count(*) from slice group by name")) == slices
    assert ui.query("select max(depth) from slice") == [(0,)]
    assert ui.query("select count(*) from flow") == [(sum(each["ph"] == "s" for each in events),)]
    assert ui.query("select count(*) from counter") == [(sum(each["ph"] == "C" for each in events),)]
    waits = "select count(*) from slice where name = 'wait' and extract_arg(arg_set_id, 'args.rows') is null"
    assert ui.query(waits) == [(0,)]
