"""The verdict is right about pipelines with known bottlenecks, and silent where there is none."""

from __future__ import annotations

import random
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_scenarios import Expected, Scenario, Stage, grpo, scenarios
from pipeline_simulation import Pipeline
from timeline_replies import LANES, event, recorded, reply

from transfer_queue.messages.reports.progress import TaskProgress
from transfer_queue.messages.reports.timeline import OpenWait
from transfer_queue.messages.system import SystemStatus
from transfer_queue.timeline.events import EVENT, EventKind
from transfer_queue.timeline.recording import Recording
from transfer_queue.timeline.trace import trace_json
from transfer_queue.timeline.verdict import judge, judge_with_account

SEEDS = 3
PHASES = 5
SCENARIOS = {each.name: each for each in scenarios()}


@pytest.fixture(autouse=True)
def _utc(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("name", SCENARIOS)
def test_verdict_names_the_known_bottleneck(name):
    scenario = SCENARIOS[name]
    expected = scenario.expected
    for seed in range(SEEDS):
        phases = random.Random(seed)
        pipeline = Pipeline(scenario, seed)
        first, last = scenario.between
        for until in sorted([first, last, *(phases.uniform(first, last) for _ in range(PHASES - 2))]):
            pipeline.run(until)
            verdict = judge(pipeline.recording(), pipeline.status())
            where = f"seed {seed} at {until:.1f} s: {verdict}"
            assert (verdict.state, verdict.stage) == (expected.state, expected.stage), where
            assert expected.field in (None, verdict.field), where
            assert expected.cause in verdict.cause, where
            assert not (expected.no_cause and verdict.cause), where


@pytest.mark.parametrize("name", [name for name, each in SCENARIOS.items() if each.between == (150.0, 400.0)])
def test_verdict_is_the_same_for_a_reader_that_begins_in_the_middle(name):
    scenario = SCENARIOS[name]
    pipeline = Pipeline(scenario).run(390)
    verdict = judge(pipeline.recording(70.0), pipeline.status())
    assert (verdict.state, verdict.stage) == (scenario.expected.state, scenario.expected.stage), verdict


def verdict_of(name: str, until: float, seed: int = 0):
    pipeline = Pipeline(SCENARIOS[name], seed).run(until)
    return judge(pipeline.recording(), pipeline.status())


def test_verdict_works_without_a_status_but_knows_no_queue():
    pipeline = Pipeline(SCENARIOS["reward takes 3.0 times as long"]).run(200)
    verdict = judge(pipeline.recording())
    assert (verdict.state, verdict.stage, verdict.field, verdict.queue_rows) == ("slow", "reward", "reward", 0)


def test_the_queue_has_partitions_to_which_the_stage_will_come_and_no_others():
    """A partition counts if a task of the same pipeline claims from it, and does not if only another task does."""
    pipeline = Pipeline(SCENARIOS["reward takes 3.0 times as long"]).run(200)
    recording, status = pipeline.recording(), pipeline.status()
    before = judge(recording, status).queue_rows
    first = status.partitions[0]
    fields = [msgspec.structs.replace(each, produced=100) for each in first.fields]

    def with_partition(task: str) -> SystemStatus:
        tasks = [TaskProgress(task, 100, 0, 0.0)]
        more = msgspec.structs.replace(first, name="more", fields=fields, tasks=tasks, passed={})
        return msgspec.structs.replace(status, partitions=[*status.partitions, more])

    assert "reference" in {each.name for each in first.tasks}
    assert judge(recording, with_partition("reference")).queue_rows == before + 100
    assert judge(recording, with_partition("evaluation")).queue_rows == before


def test_since_is_when_ranks_ended():
    verdict = verdict_of("two of four ranks of reward die", 180)
    assert verdict.since == pytest.approx(1_700_005_100, abs=5)


def test_since_is_when_the_rate_changed():
    base = Scenario("", grpo(), Expected("slow", "reward")).with_stage("reward", pause=(200.0, 240.0))
    pipeline = Pipeline(base).run(239)
    verdict = judge(pipeline.recording(), pipeline.status())
    assert verdict.stage == "reward"
    assert verdict.since == pytest.approx(1_700_005_200, abs=15)


def test_since_is_unknown_if_nothing_changed():
    assert verdict_of("reference takes 3.0 times as long", 350).since is None


def test_advice_is_the_rate_that_comes_by_the_rate_of_a_rank():
    verdict = verdict_of("reference takes 3.0 times as long", 200)
    assert verdict.advice.startswith("reference needs 6 ranks and has 2: ")  # 8 rows come, and a rank does 8 in 6 s
    assert verdict_of("no stage is slow", 200).advice == ""


@pytest.mark.parametrize(
    ("name", "until", "text"),
    [
        (
            "two of four ranks of reward die", 180.0,
            "reward is the slowest stage: train waits 50 % of the time for `reward`, which reward puts; 340 samples "
            "queue before it, 4.4 more each second; 2 of 4 reward workers are gone (rank 0, pid 106, node; "
            "rank 3, pid 109, node) since 23:38:20.",
        ),
        ("no stage is slow", 300.0, "Flowing: train takes 8.0 samples each second."),
        (
            "train is slow and the capacity holds rollout", 200.0,
            "train is the slowest stage: rollout is held 52 % of the time by the capacity; 48 samples queue before it, "
            "0.3 fewer each second.",
        ),
        (
            "rollout dies and all wait", 300.0,
            "Stopped: all rollout workers are gone (rank 0, pid 100, node; rank 1, pid 101, node; rank 2, pid 102, "
            "node; rank 3, pid 103, node) since 23:38:20; train waits 100 % of the time for `response`, which rollout "
            "puts.",
        ),
        (
            "reference dies", 101.0,
            "Stopped: all reference workers are gone (rank 0, pid 104, node; rank 1, pid 105, node) since 23:38:20; "
            "32 samples queue before it.",
        ),
        (
            "reward is slow from the beginning", 18.0,
            "Starting: so far train waits 86 % of the time for `reward`, which reward puts; reward waits 22 % of the "
            "time for `response`, which rollout puts.",
        ),
        (
            "a rank that is not needed dies", 110.0,
            "Flowing: train takes 8.0 samples each second; 1 of 4 reward workers is gone (rank 0, pid 106, node) "
            "since 23:38:20.",
        ),
        (
            "the first rollouts take long", 30.0,
            "Starting: reward waits for `response`, which no task has put yet.",
        ),
        (
            "one rank of reward is slow", 250.0,
            "reward is the slowest stage: train waits 48 % of the time for `reward`, which reward puts; 924 samples "
            "queue before it, 3.9 more each second; rank 2 of reward takes 5.9 times as long as its other ranks "
            "(pid 108, node).",
        ),
        (
            "rollout takes 3.0 times as long", 250.0,
            "rollout is the slowest stage: train waits 67 % of the time for `reward`, which reward puts; reward waits "
            "65 % of the time for `response`, which rollout puts.",
        ),
        (
            "the first rollouts take very long", 90.0,
            "Stopped: nothing was dealt for 90 s; reward waits 100 % of the time for `response`; no task has put "
            "`response` since the timeline begins.",
        ),
        (
            "rollout and train take turns", 200.0,
            "No single task is the slowest: train waits 51 % of the time for `reward`, which reward puts; reward waits "
            "53 % of the time for `response`, which rollout puts; rollout is held 54 % of the time by the policy "
            "version.",
        ),
    ],
)  # fmt: skip
def test_texts(name, until, text):
    assert verdict_of(name, until).text == text


def test_two_stages_that_are_equally_slow_are_both_named():
    stages = (
        Stage("rollout", 1, (), ("response",), 16, 1.0),
        Stage("reference", 1, ("response",), ("ref_log_prob",), 16, 4.0, spread=0.9),
        Stage("reward", 1, ("response",), ("reward",), 16, 4.0, spread=0.9),
        Stage("train", 1, ("response", "ref_log_prob", "reward"), (), 16, 1.0),
    )
    pipeline = Pipeline(Scenario("", stages, Expected("slow", None), capacity=32), 1).run(280)
    verdict = judge(pipeline.recording(), pipeline.status())
    assert (verdict.state, verdict.stage) == ("slow", None)
    assert "which reference puts" in verdict.text
    assert "which reward puts" in verdict.text


def test_a_system_without_claims_is_idle():
    assert judge(Recording()).state == "idle"
    recording = recorded([event(EventKind.PUT, 10, 2, fields=2), event(EventKind.CLAIM, 11, 0, fields=2)], 200.0)
    verdict = judge(recording)
    assert verdict.text == "Idle: no claim is open, and the last event was 3 minutes ago."
    assert verdict.since == 1_700_000_011


def test_workers_that_closed_before_the_recording_began_are_not_gone():
    recording = recorded([event(EventKind.CLAIM, 9, 0, fields=2)], 10.0, connected=["a"])
    verdict, account = judge_with_account(recording)
    assert (account.tasks["train"].lost, account.tasks["reward"].lost) == (0, 0)
    assert "gone" not in verdict.text


def test_workers_that_died_before_the_recording_began_are_named_if_the_system_has_stopped():
    waits = [OpenWait(0, 1.0, "train_0", ["response", "reward"], 8)]
    recording = recorded([event(EventKind.CLAIM, 1, 0)], 100.0, open_=waits, connected=["a"], gone={"c": -7000.0})
    verdict = judge(recording)
    assert verdict.text == (
        "Stopped: nothing was dealt for 99 s; train waits 100 % of the time for `response`; no task has put `response` "
        "since the timeline begins; the only reward worker is gone (client c) since 20:16:40."
    )


def test_a_stage_that_dies_after_its_work_has_not_stopped_the_others():
    """Every sample of its sealed partitions has its fields."""
    pipeline = Pipeline(SCENARIOS["reference dies"]).run(120)
    status = pipeline.status()
    assert judge(pipeline.recording(), status).state == "stopped"
    done = [
        msgspec.structs.replace(
            each, sealed=True, rows=100,
            fields=[msgspec.structs.replace(field, produced=100) for field in each.fields],
            tasks=[msgspec.structs.replace(task, consumed=100) for task in each.tasks],
        )
        for each in status.partitions
    ]  # fmt: skip
    verdict = judge(pipeline.recording(), msgspec.structs.replace(status, partitions=done))
    assert verdict.state != "stopped"
    assert "all reference workers are gone" in verdict.text


def test_samples_that_may_be_lost_are_named():
    pipeline = Pipeline(SCENARIOS["two of four ranks of reward die"]).run(180)
    status = pipeline.status()
    tasks = [
        msgspec.structs.replace(
            task,
            abandoned={"reward rank 0, pid 106, node": 4, "reward rank 3, pid 109, node": 4}
            if task.name == "reward"
            else {},
        )
        for task in status.partitions[0].tasks
    ]
    partition = msgspec.structs.replace(status.partitions[0], tasks=tasks)
    verdict = judge(pipeline.recording(), msgspec.structs.replace(status, partitions=[partition]))
    assert verdict.text.endswith(
        " since 23:38:20. 8 samples of partition 'train_0' may be lost to task 'reward', because the processes that "
        "had claimed them without a lease are gone (reward rank 0, pid 106, node; reward rank 3, pid 109, node): call "
        "reset_consumption('train_0', 'reward') to deliver all samples to this task again, and claim with lease= to "
        "avoid such losses."
    )
    assert verdict.cause.startswith("2 of 4 reward workers are gone")


def test_a_system_at_the_end_of_its_partitions_is_idle_at_once():
    recording = recorded([event(EventKind.CLAIM, 9, 0, fields=2), event(EventKind.END, 10, 0, fields=2)], 11.0)
    assert judge(recording).state == "idle"


def test_a_field_that_nobody_puts_is_named():
    waits = [OpenWait(0, 1.0, "train_0", ["response", "reward"], 8)]
    recording = Recording()
    events = [event(EventKind.CLAIM, 0.5, 0, fields=3), event(EventKind.PUT, 0.6, 2, fields=1)]
    recording.add(reply(events, 50.0, open_=waits))
    verdict = judge(recording)
    assert verdict.stage is None
    assert verdict.cause == "no task has put `reward` since the timeline begins"


numbers = st.integers(0, 6)
times = st.one_of(st.floats(0, 100), st.sampled_from([0.0, 50.0, 1e300, -1e300, float("nan"), float("inf")]))
rows = st.tuples(
    times, times, st.integers(0, 255), st.integers(0, 255), st.just(0), numbers, numbers, numbers,
    st.integers(0, 2**32 - 1), st.just(0), st.integers(0, 2**64 - 1), numbers,
    st.sampled_from([-1.0, 0.5, float("nan")]), st.integers(-(2**31), 2**31 - 1),
)  # fmt: skip
events_of_time = st.tuples(
    times, times, st.integers(0, 12), st.integers(0, 3), numbers, numbers, st.integers(0, 64)
).map(lambda e: event(e[2], e[0], e[4], e[1], flags=e[3], fields=e[5], rows=e[6], block=e[6]))
opens = st.builds(
    OpenWait, lane=st.integers(-5, 2**63), since=times, partition=st.sampled_from(["train_0", "x"]),
    fields=st.lists(st.sampled_from(["response", "reward", "?"]), max_size=3), rows=st.integers(0, 2**40),
    holds=st.booleans(), ahead=st.booleans(),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.one_of(rows, events_of_time), max_size=40), min_size=1, max_size=3),
    st.lists(opens, max_size=5), st.booleans(), st.binary(max_size=70), st.booleans(),
)  # fmt: skip
def test_random_events_never_raise(batches, open_, restarts, more, named):
    recording = Recording(limit=64)
    status = Pipeline(SCENARIOS["no stage is slow"]).run(5).status()
    for number, batch in enumerate(batches):
        made = reply(
            np.array(batch, EVENT), 40.0 * (number + 1), boot=f"{number * restarts}", open_=open_, missed=number,
            lanes=LANES if named else [], connected=["a"] * named,
        )  # fmt: skip
        made = type(made)(**{name: getattr(made, name) for name in made.__struct_fields__ if name != "events"},
                          events=made.events + more)  # fmt: skip
        recording.add(made)
        verdict = judge(recording, status)
        assert verdict.state in ("starting", "flowing", "slow", "stopped", "idle")
        assert verdict.text.endswith(".")
        assert 0 <= verdict.wait_share <= 1 + 1e-9
        trace_json(recording)
