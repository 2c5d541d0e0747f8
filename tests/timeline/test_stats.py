"""The figures of a training's own logger: what they say, how many there are, and about which time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_scenarios import Expected, Scenario, grpo, scenarios
from pipeline_simulation import Pipeline
from timeline_replies import LANES, WALL, event, recorded, reply

from transfer_queue.messages.reports.progress import UnitProgress
from transfer_queue.messages.reports.timeline import Lane
from transfer_queue.messages.system import SystemStatus
from transfer_queue.timeline.events import EventKind
from transfer_queue.timeline.recording import Recording
from transfer_queue.timeline.stats import MAX_TASKS, TIERS, TaskLabels, make_stats

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
SCENARIOS = {each.name: each for each in scenarios()}
NOTHING = SystemStatus([], {})


def stats_of(pipeline: Pipeline, since: float | None = None) -> dict[str, float]:
    return make_stats(pipeline.recording(), pipeline.status(), since, TaskLabels())


def test_figures_of_a_pipeline_with_a_slow_stage():
    stats = stats_of(Pipeline(SCENARIOS["reward takes 3.0 times as long"]).run(300))
    assert stats["tq/seconds"] == 60
    assert stats["tq/train/wait_share"] == pytest.approx(0.66, abs=0.05)
    assert stats["tq/reward/wait_share"] < 0.05
    assert stats["tq/reward/work_share"] > 0.95
    assert stats["tq/rollout/rate"] == stats["tq/rollout/put_rate"] == pytest.approx(8, rel=0.1)
    assert stats["tq/train/rate"] == pytest.approx(8 / 3, rel=0.15)
    assert stats["tq/reward/queue_rows"] > 1000
    assert stats["tq/reward/time_in_queue_p50"] > 100 > stats["tq/reference/time_in_queue_max"]
    assert stats["tq/train/staleness_mean"] > 0
    assert (stats["tq/reward/workers"], stats["tq/reward/workers_gone"]) == (4, 0)
    assert stats["tq/put_bytes_rate"] > 0
    assert stats["tq/tasks"] == 4


def test_figures_count_workers_that_are_gone_and_those_that_are_held():
    assert stats_of(Pipeline(SCENARIOS["two of four ranks of reward die"]).run(180))["tq/reward/workers_gone"] == 2
    held = stats_of(Pipeline(SCENARIOS["train is slow and the capacity holds rollout"]).run(200))
    assert held["tq/rollout/held_share"] > 0.3


def test_a_figure_that_is_not_known_is_left_out():
    recording = recorded([event(EventKind.PUT, 100, 2, fields=2)], 101)
    stats = make_stats(recording, NOTHING, None, TaskLabels())
    assert {name for name in stats if name.startswith("tq/reward/")} == {
        f"tq/reward/{name}" for name in ("workers", "workers_gone", "wait_share", "held_share", "rate", "put_rate")
    }
    assert not any(name.startswith("tq/memory") for name in stats)


def test_bytes_that_were_read():
    recording = recorded([event(EventKind.READ, 6.0, 0, 5.0, age=0.0, bytes=640)], 15.0)
    stats = make_stats(recording, NOTHING, WALL + 5.0, TaskLabels())
    assert stats["tq/read_bytes_rate"] == pytest.approx(64.0)
    assert stats["tq/put_bytes_rate"] == 0


def test_bytes_are_those_of_each_tier():
    units = [UnitProgress(0, "memory", 100, 30), UnitProgress(1, "memory", 100, 5), UnitProgress(2, "store", 0, 7)]
    stats = make_stats(Recording(), SystemStatus([], {}, units=units), None, TaskLabels())
    found = {name: value for name, value in stats.items() if name.endswith("_bytes")}
    assert found == {"tq/memory/held_bytes": 35, "tq/memory/capacity_bytes": 200, "tq/store/held_bytes": 7}


def test_an_empty_timeline_has_no_figures_of_tasks():
    stats = make_stats(Recording(), NOTHING, None, TaskLabels())
    assert stats["tq/tasks"] == 0
    assert all(name.count("/") == 1 for name in stats)


@pytest.mark.parametrize("calls", [4, 10, 40])
def test_windows_of_several_calls_have_all_rows_once(calls):
    pipeline, labels = Pipeline(Scenario("", grpo(), Expected("flowing"))), TaskLabels()
    recording, position, rows, seconds = Recording(), 0, 0.0, 0.0
    since = None
    for number in range(calls):
        pipeline.run(200.0 * (number + 1) / calls)
        page = pipeline.reply(position)
        recording.add(page)
        position = page.position
        stats = make_stats(recording, pipeline.status(), since, labels)
        since = recording.now + 1e-6
        rows += stats.get("tq/train/rate", 0.0) * stats["tq/seconds"]
        seconds += stats["tq/seconds"]
    assert rows == pytest.approx(pipeline.consumed["train"], rel=1e-3)
    assert seconds == pytest.approx(recording.now - recording.start, abs=2.0)


def test_a_call_after_a_long_time_is_about_what_is_recorded():
    pipeline = Pipeline(Scenario("", grpo(), Expected("flowing"))).run(500)
    assert stats_of(pipeline, since=1.0)["tq/seconds"] == 300


def test_two_calls_at_the_same_time_have_no_rates():
    pipeline = Pipeline(Scenario("", grpo(), Expected("flowing"))).run(100)
    stats = stats_of(pipeline, since=pipeline.recording().now + 1e-6)
    assert (stats["tq/seconds"], stats["tq/train/rate"], stats["tq/train/wait_share"]) == (0, 0, 0)


def test_only_the_first_tasks_have_figures_and_keep_their_names():
    labels, recording = TaskLabels(), Recording()
    lanes = [Lane(number, f"c{number}", f"task {number}") for number in range(40)]
    events = [event(EventKind.PUT, 50 + number, number, fields=1) for number in range(40)]
    recording.add(reply(events[:30], 90, lanes=lanes[:30]))
    first = make_stats(recording, NOTHING, None, labels)
    recording.add(reply(events[30:], 100, position=40, lanes=lanes[30:]))
    second = make_stats(recording, NOTHING, None, labels)
    assert (first["tq/tasks"], second["tq/tasks"]) == (30, 40)
    assert set(first) == set(second)
    assert len({name.split("/")[1] for name in first if name.count("/") == 2}) == MAX_TASKS


@settings(max_examples=40)
@given(st.lists(st.text(max_size=80), max_size=20))
def test_labels_are_different_short_and_harmless(tasks):
    labels = TaskLabels()
    found = {task: labels.of(task) for task in tasks}
    assert found == {task: labels.of(task) for task in tasks}
    given_ = [label for label in found.values() if label is not None]
    assert len(set(given_)) == len(given_) == min(len(set(tasks) - {""}), MAX_TASKS)
    assert not set(given_) & set(TIERS)
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]{1,70}", label) for label in given_)


def test_the_page_lists_all_figures():
    names: set[str] = set()
    for name in ("reward takes 3.0 times as long", "train is slow and the capacity holds rollout"):
        names |= set(stats_of(Pipeline(SCENARIOS[name]).run(200)))
    units = [UnitProgress(0, tier, 100, 30) for tier in TIERS]
    names |= set(make_stats(Recording(), SystemStatus([], {}, units=units), None, TaskLabels()))
    tasks = {lane.task for lane in LANES} | {"rollout", "reference"}
    general = {re.sub(rf"/({'|'.join(TIERS)})/", "/TIER/", re.sub(rf"/({'|'.join(tasks)})/", "/TASK/", name))
               for name in names}  # fmt: skip
    rows = re.findall(r"^\| (`tq/.+?) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert listed == general
