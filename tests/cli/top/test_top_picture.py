"""The state that `tq top` shows, computed from simulated pipelines, whose ranks and queues are known."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
from pipeline_scenarios import Expected, Scenario, grpo, scenarios
from pipeline_simulation import PARTITION, WALL, Pipeline
from timeline_replies import event, reply
from top_pilot import empty_picture, partition, picture_at, timing, with_system

from transfer_queue.cli.top.picture import HISTORY_BINS, list_load, list_memory, list_ranks, list_samples, make_picture
from transfer_queue.messages.descriptors import DISK, MEMORY
from transfer_queue.messages.queries import SnapshotReply
from transfer_queue.messages.reports.progress import UnitProgress
from transfer_queue.messages.system import SystemStatus
from transfer_queue.timeline.events import EventKind
from transfer_queue.timeline.recording import Recording
from transfer_queue.timeline.verdict import judge, judge_with_account


@pytest.mark.parametrize("scenario", scenarios()[::5], ids=lambda scenario: scenario.name)
def test_the_verdict_with_its_account_is_the_verdict(scenario: Scenario) -> None:
    pipeline = Pipeline(scenario, 2).run(scenario.between[1])
    recording, status = pipeline.recording(), pipeline.status()
    verdict, account = judge_with_account(recording, status)
    assert verdict == judge(recording, status)
    picture = make_picture(recording, status)
    assert picture.verdict == verdict
    assert [row.name for row in picture.stages if row.slowest] == [verdict.stage] * (verdict.stage is not None)
    assert {row.name for row in picture.stages} == set(account.tasks)


def test_stages_are_in_the_order_of_the_pipeline() -> None:
    picture = picture_at(200.0)
    names = [row.name for row in picture.stages]
    assert names[0] == "rollout"
    assert names[-1] == "train"


def test_stages_in_a_cycle_have_an_order() -> None:
    first = dataclasses.replace(grpo()[1], takes=("prompt", "reward"), puts=("ref_log_prob",))
    second = dataclasses.replace(grpo()[2], takes=("ref_log_prob",), puts=("reward",))
    recording = Recording()
    pipeline = Pipeline(Scenario("", (grpo()[0], first, second), Expected("slow")), 1).run(100.0)
    recording.add(pipeline.reply())
    assert make_picture(recording, pipeline.status()).stages[0].name == "rollout"


def test_a_stage_says_what_it_waits_for_and_who_puts_it() -> None:
    train = picture_at(200.0).stage("train")
    field, maker, share = train.missing[0]
    assert (field, maker) == ("reward", "reward")
    assert share > 0.9
    assert train.state == "waits"
    assert len(train.history) == HISTORY_BINS
    assert sum(train.history) * 2.0 == pytest.approx(train.account.claim_rate * 60.0, rel=0.2)


def test_the_states_of_stages() -> None:
    picture = picture_at(200.0)
    states = {row.name: row.state for row in picture.stages}
    assert states == {"rollout": "works", "reference": "works", "reward": "works", "train": "waits"}
    gone = picture_at(200.0, Scenario("", grpo(), Expected("slow")).with_stage("train", gone={0: 150.0, 1: 150.0}))
    train = gone.stage("train")
    assert train.state == "gone"


def test_waits_are_grouped_by_what_they_wait_for() -> None:
    picture = picture_at(200.0)
    waits = {(row.task, row.fields): row for row in picture.waits}
    row = waits["train", ("response", "ref_log_prob", "reward")]
    assert row.partition == PARTITION
    assert row.rarest == "reward"
    assert row.producers == ("reward",)
    assert row.seconds == row.members[0].seconds == max(each.seconds for each in row.members)
    assert {each.lane.name for each in row.members} <= {"rank 0", "rank 1"}
    assert sum(len(each.members) for each in picture.waits) == len(picture.account.table.recording.open)


def test_puts_that_wait_are_held() -> None:
    scenario = dataclasses.replace(Scenario("", grpo(), Expected("slow")).with_stage("train", seconds=8.0), capacity=96)
    rows = [row for row in picture_at(300.0, scenario).waits if row.kind == "held"]
    assert [(row.task, row.fields, row.rarest, row.producers) for row in rows] == [("rollout", (), "", ())]
    rollout = picture_at(300.0, scenario).stage("rollout")
    assert rollout.state == "held"


def test_partitions_name_their_rarest_field_and_slowest_task() -> None:
    picture = picture_at(200.0, more=[partition("p", rows=20, produced=5, consumed=3, waiting_puts=2)])
    row = picture.partition("p")
    assert (row.rarest.name, row.rarest.produced) == ("reward", 5)
    assert (row.slowest.name, row.slowest.consumed, row.waiting) == ("train", 3, 2)
    first = picture.partition(PARTITION)
    assert first.put_rate > 0
    assert picture.partition("other") is None


def test_ranks_have_shares_that_add_up_and_spans_that_fill_the_window() -> None:
    picture = picture_at(200.0)
    ranks = list_ranks(picture, "reward")
    assert [row.lane.name for row in ranks] == [f"rank {number}" for number in range(4)]
    assert ranks[3].state == "gone"
    for row in ranks:
        assert sum(row.shares.values()) == pytest.approx(1.0)
        begins, ends, _ = row.spans
        assert (ends - begins).sum() == pytest.approx(picture.window)
    assert list_ranks(picture, "other") == []


def test_memory_is_summed_by_tier() -> None:
    units = [UnitProgress(0, MEMORY, 100, 40), UnitProgress(1, MEMORY, 100, 10), UnitProgress(2, DISK, 0, 7)]
    parts = [partition("p"), msgspec.structs.replace(partition("q"), stored={DISK: 5, "mooncake": 3})]
    rows = list(list_memory(SystemStatus(parts, {}, units=units)))
    assert [(row.tier, row.unit is None, row.held, row.leased, row.capacity) for row in rows] == [
        (MEMORY, True, 1000, 50, 200), (MEMORY, False, None, 40, 100), (MEMORY, False, None, 10, 100),
        (DISK, True, 5, 7, 0), (DISK, False, None, 7, 0), ("mooncake", True, 3, 0, 0),
    ]  # fmt: skip


def test_load_is_what_was_added_since_the_earlier_status() -> None:
    before = SystemStatus([], {}, requests=[timing("Claim", 100, 1.0), timing("Put", 50, 0.5)])
    after = SystemStatus([], {}, requests=[timing("Claim", 120, 2.0), timing("Put", 10, 0.1)])
    rows = {row.name: row for row in list_load(after, before, 4.0)}
    assert (rows["Claim"].rate, rows["Claim"].busy) == (5.0, 0.25)
    assert rows["Put"].rate == 2.5, "after a restart of the controller the counts begin again"
    first = {row.name: row for row in list_load(after, None, 0.0)}
    assert (first["Claim"].rate, first["Claim"].busy, first["Claim"].total) == (None, None, 120)


def test_rates_of_a_partition_come_from_its_counters() -> None:
    pipeline = Pipeline(Scenario("", grpo(), Expected("flowing")), 1).run(100.0)
    before = pipeline.status()
    after = pipeline.run(110.0).status()
    picture = make_picture(pipeline.recording(), after, before, 10.0)
    (progress,) = after.partitions
    grown = progress.fields[0].produced_ever - before.partitions[0].fields[0].produced_ever
    assert picture.rates_of(progress)[PARTITION, "field", progress.fields[0].name] == grown / 10.0
    assert make_picture(pipeline.recording(), after).rates_of(progress) == {}


def test_a_restart_of_the_controller_is_a_gap() -> None:
    recording = Recording()
    recording.add(reply([event(EventKind.PUT, 100, 0)], 101))
    assert make_picture(recording, SystemStatus([], {})).gap is None
    recording.add(reply([event(EventKind.PUT, 5, 1)], 7, boot="2", wall=WALL + 105))
    gap = make_picture(recording, SystemStatus([], {})).gap
    assert (gap.start, gap.end, gap.missed) == (WALL + 101, WALL + 110, 0)


def test_an_empty_system_has_an_empty_picture() -> None:
    picture = empty_picture()
    assert (picture.stages, picture.waits, picture.partitions, picture.memory, picture.load) == ((), (), (), (), ())
    assert picture.verdict.state == "idle"


def test_a_page_of_samples() -> None:
    rows = np.arange(5, 7)
    produced = np.array([[1, 0], [1, 1]], np.int8)
    first, second = list_samples(
        SnapshotReply(True, 3, rows.tobytes(), ["a", "b"], produced.tobytes(), {"t": b"\x01\x00"}, None, None, 9)
    )
    assert (first.index, first.key, first.missing, first.consumers) == (5, None, ["b"], ["t"])
    assert (second.missing, second.consumers) == ([], [])


def test_units_and_requests_are_those_of_the_status() -> None:
    picture = make_picture(Recording(), with_system(SystemStatus([], {})))
    assert [row.leased for row in picture.memory] == [3 << 28, 1 << 28, 1 << 29]
    assert [row.name for row in picture.load] == ["Claim", "Publish"]
