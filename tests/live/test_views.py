"""The parts of a view over recordings of simulated pipelines: they agree with the account of time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from pipeline_scenarios import grpo, scenarios
from pipeline_simulation import simulate
from timeline_replies import event, recorded, reply

from transfer_queue.live import payload
from transfer_queue.live.view import flow_parts
from transfer_queue.live.view.lane_book import MAX_LANES, OWN_LANES, STATE_NUMBERS, LaneBook, task_order
from transfer_queue.live.view.observation import Observation
from transfer_queue.live.view.opened_bands import OpenedBands
from transfer_queue.live.view.view_maker import StepTimes
from transfer_queue.messages.reports.timeline import Lane, OpenWait
from transfer_queue.messages.system import SystemStatus
from transfer_queue.timeline.account import Account, make_account
from transfer_queue.timeline.event_table import EventTable
from transfer_queue.timeline.events import EventKind
from transfer_queue.timeline.recording import Recording
from transfer_queue.timeline.spans import SpanState, measure_spans
from transfer_queue.timeline.verdict import Verdict, judge

SCENARIOS = {each.name: each for each in scenarios()}
SECONDS = 60.0


def account_of(recording: Recording, status: SystemStatus | None = None) -> Account:
    table = EventTable(recording)
    return make_account(table, status, max(recording.now - SECONDS, recording.start), recording.now)


@pytest.fixture(scope="module", params=list(SCENARIOS)[:6])
def simulated(request: pytest.FixtureRequest) -> tuple[Recording, SystemStatus]:
    return simulate(SCENARIOS[request.param], 0, 200.0)


def shown_seconds(lane: payload.LaneView, state: SpanState) -> float:
    return sum(span[1] - span[0] for span in lane.spans if span[2] == STATE_NUMBERS[state])


def test_the_spans_of_a_lane_have_the_lengths_of_the_account(simulated: Any) -> None:
    recording, status = simulated
    account = account_of(recording, status)
    book = LaneBook(recording.start)
    timeline = book.update(account)
    spans = measure_spans(account.table, book.origin, book.origin + timeline.until)
    workers = account.table.workers
    for lane in timeline.lanes:
        mine = [
            worker
            for worker in range(len(workers))
            if workers.tasks[workers.task[worker]] == lane.task and int(workers.rank[worker]) == lane.rank
        ]
        if lane.rank < 0 or not account.table.takes.get(lane.task):
            continue
        for state in (SpanState.WORKS, SpanState.WAITS, SpanState.HELD):
            expected = float(spans.seconds[mine[0], state])
            assert shown_seconds(lane, state) == pytest.approx(expected, abs=1.0)


def test_a_flow_lists_tasks_after_those_whose_fields_they_take() -> None:
    recording, status = simulate(SCENARIOS[next(iter(SCENARIOS))], 0, 100.0)
    account = account_of(recording, status)
    order = task_order(account)
    for taker in order:
        for maker in order:
            feeds = set(account.table.puts.get(maker, ())) & set(account.table.takes.get(taker, ()))
            backwards = set(account.table.puts.get(taker, ())) & set(account.table.takes.get(maker, ()))
            if feeds and not backwards and maker != taker:
                assert order.index(maker) < order.index(taker)


def test_the_parts_have_the_numbers_of_the_account(simulated: Any) -> None:
    recording, status = simulated
    account = account_of(recording, status)
    verdict = judge(recording, status)
    last = flow_parts.last_task(account)
    shown = flow_parts.verdict_part(verdict, last)
    assert shown.text == verdict.text
    assert shown.headline in verdict.text
    tasks = {task.name: task for task in flow_parts.task_parts(account)}
    assert len(tasks) == len(grpo()) or len(tasks) == len(account.tasks)
    for name, task in tasks.items():
        its = account.tasks[name]
        assert (task.alive, task.gone) == (its.alive, its.lost)
        assert task.waits == pytest.approx(its.waits, abs=0.001)
        assert len(task.rank_state) == sum(task.states.values())
        assert task.states["gone"] == task.rank_state.count("x")
    seen = Observation(recording, status)
    for wait in flow_parts.wait_parts(seen, account):
        assert wait.count <= wait.of
        assert 0.0 <= wait.share <= 1.0
    for queue in flow_parts.queue_parts(account, list(tasks)):
        assert queue.rows == account.tasks[queue.task].queue_rows
    points = flow_parts.rate_points(account, last, verdict.stage or last)
    assert len(points) <= payload.HISTORY_SECONDS / flow_parts.POINT
    assert all(a.t < b.t for a, b in pairwise(points))
    if points and last:
        recent = [point.rows for point in points[-25:]]
        assert np.mean(recent) == pytest.approx(account.tasks[last].claim_rate, rel=0.5, abs=2.0)


def test_the_headline_of_a_stopped_system_says_for_how_long() -> None:
    text = "Stopped: nothing was dealt for 80 s; `train` waits 100 % of the time for `x`; 4 of 4 workers are gone."
    shown = flow_parts.verdict_part(Verdict(text, "stopped", "reward", "x", 1.0, 0, 0.0, 5.0, "", ""), "train")
    assert shown.headline == "Stopped: nothing was dealt for 80 s"
    assert shown.detail == "`train` waits 100 % of the time for `x`; 4 of 4 workers are gone."


def test_deltas_of_the_timeline_add_up_to_the_complete_timeline() -> None:
    """A page that cuts each lane at `since` and appends has what a new viewer gets."""
    lanes = [Lane(0, "a", "train", 0), Lane(1, "b", "train", 1)]
    recording, position = Recording(), 0
    book: LaneBook | None = None
    kept: dict[int, list[Any]] = {}
    for second in range(1, 20):
        now = float(second)
        events = [event(EventKind.CLAIM, now - 0.4, second % 2), event(EventKind.WAIT, now - 0.1, 1, now - 0.3)]
        position += len(events)
        open_ = [OpenWait(0, now - 0.2, "train_0", ["reward"], 8)]
        recording.add(reply(events, now, position=position, lanes=lanes, open_=open_, connected=["a", "b"]))
        account = account_of(recording)
        book = LaneBook(recording.start) if book is None else book
        timeline = book.update(account)
        kept = {} if book.renewed else kept
        for lane in timeline.lanes:
            before = [
                (t0, min(t1, timeline.since), *rest) for t0, t1, *rest in kept.get(lane.id, []) if t0 < timeline.since
            ]
            kept[lane.id] = [*before, *lane.spans]
    assert book is not None
    for lane in book.timeline(account).lanes:
        assert _joined(kept[lane.id]) == _joined(lane.spans)
        states = {span[2] for span in lane.spans}
        assert STATE_NUMBERS[SpanState.WAITS] in states


def _joined(spans: list[Any]) -> list[list[float]]:
    found: list[list[float]] = []
    for t0, t1, state, why in spans:
        if found and found[-1][1:] == [t0, state, why]:
            found[-1][1] = t1
        else:
            found.append([t0, t1, state, why])
    return found


@pytest.mark.parametrize("tasks", [1, 4, 40])
def test_a_thousand_ranks_have_at_most_64_lanes(tasks: int) -> None:
    count = 1024
    lanes = [Lane(number, f"c{number}", f"task {number % tasks:02}", number // tasks) for number in range(count)]
    events = [event(EventKind.CLAIM, 1.0 + number / count, number) for number in range(count)]
    events += [event(EventKind.WAIT, 4.0, 0, 2.5), event(EventKind.GONE, 4.5, 1)]
    connected = [lane.client for lane in lanes if lane.number != 1]
    recording = recorded(events, 10.0, lanes=lanes, connected=connected)
    account = account_of(recording)
    book = LaneBook(recording.start)
    timeline = book.update(account)
    assert len(timeline.lanes) <= MAX_LANES
    assert sum(lane.ranks for lane in timeline.lanes) == count
    bands = [lane for lane in timeline.lanes if lane.ranks > 1]
    assert bands
    assert all(0 <= share <= 100 for lane in bands for point in lane.band for share in point[1:])
    gone = [lane for lane in timeline.lanes if lane.gone_at is not None]
    if tasks < 16:
        assert [(lane.task, lane.label) for lane in gone] == [(f"task {1 % tasks:02}", f"rank {1 // tasks}")]
    assert len(payload.to_json(timeline)) < 40_000
    parts = flow_parts.task_parts(account)
    assert len(parts) <= 16
    assert sum(part.alive for part in parts) == count - 1
    assert not parts[0].rank_state or tasks > 16
    later = book.update(account)
    assert not book.renewed
    assert later.order == timeline.order


def recording_of_many(tasks: int, seconds: int) -> Recording:
    """Return a recording of 200 ranks of each task, which wait for half of each second."""
    lanes = [Lane(number, f"c{number}", f"task {number // 200}", number % 200) for number in range(200 * tasks)]
    recording = Recording()
    for second in range(1, seconds + 1):
        add_second(recording, lanes, float(second))
    return recording


def add_second(recording: Recording, lanes: list[Lane], now: float) -> None:
    events = [event(EventKind.WAIT, now - 0.3, lane.number, now - 0.8) for lane in lanes]
    events += [event(EventKind.CLAIM, now - 0.3, lane.number) for lane in lanes]
    position = len(recording.events) + len(events)
    connected = [lane.client for lane in lanes]
    recording.add(reply(events, now, position=position, lanes=lanes, connected=connected))


def test_the_single_ranks_of_a_band_are_answered_a_page_at_a_time() -> None:
    recording = recording_of_many(2, 5)
    account = account_of(recording)
    book = LaneBook(recording.start)
    book.update(account)
    opened = OpenedBands(recording.start)
    joined = book.joined["task 1"]
    assert len(joined) == 200 - OWN_LANES
    seen: list[int] = []
    for first in range(0, len(joined), 64):
        answer = opened.answer(joined, account, "task 1", first, 64, "")
        assert (answer.first, answer.ranks) == (first, len(joined))
        assert len(answer.timeline.lanes) == min(64, len(joined) - first)
        assert {(lane.task, lane.ranks) for lane in answer.timeline.lanes} == {("task 1", 1)}
        seen += [lane.rank for lane in answer.timeline.lanes]
        for lane in answer.timeline.lanes:
            assert shown_seconds(lane, SpanState.WAITS) == pytest.approx(0.5 * 5, abs=0.3)
    own = {lane.rank for lane in book.timeline(account).lanes if lane.task == "task 1" and lane.ranks == 1}
    assert sorted(seen) == sorted(set(range(200)) - own)
    beyond = opened.answer(joined, account, "task 1", 10**18, 10**18, "")
    assert (beyond.first, len(beyond.timeline.lanes)) == (192, len(joined) - 192)


def test_single_ranks_are_continued_for_a_viewer_who_has_them() -> None:
    recording = recording_of_many(1, 5)
    lanes = recording.lanes[1:]
    book, opened = LaneBook(recording.start), OpenedBands(recording.start)
    account = account_of(recording)
    book.update(account)
    joined = book.joined["task 0"]
    answer = opened.answer(joined, account, "task 0", 0, 8, "")
    kept = {lane.id: list(lane.spans) for lane in answer.timeline.lanes}
    assert answer.timeline.since == 0
    for second in range(6, 12):
        add_second(recording, lanes, float(second))
        account = account_of(recording)
        answer = opened.answer(joined, account, "task 0", 0, 8, answer.epoch)
        since = answer.timeline.since
        assert 0 < since < answer.timeline.until
        for lane in answer.timeline.lanes:
            assert all(span[0] >= since for span in lane.spans)
            before = [(t0, min(t1, since), *rest) for t0, t1, *rest in kept[lane.id] if t0 < since]
            kept[lane.id] = [*before, *lane.spans]
    whole = opened.answer(joined, account, "task 0", 0, 8, "")
    assert [_joined(kept[lane.id]) for lane in whole.timeline.lanes] == [
        _joined(lane.spans) for lane in whole.timeline.lanes
    ]
    for after in (whole.epoch.replace("-", "9-"), f"{whole.epoch}9", "x", "nan-nan", "1-", "9" * 400):
        assert opened.answer(joined, account, "task 0", 0, 8, after).timeline.since == 0
    assert opened.answer(joined[1:], account, "task 0", 0, 8, whole.epoch).timeline.since == 0  # other ranks


def test_many_fields_are_summed() -> None:
    fields = {0: [], **{number: [f"field {number}"] for number in range(1, 81)}}
    events = [event(EventKind.PUT, 1.0 + number / 100, 0, fields=number) for number in range(1, 81)]
    answer = reply(events, 10.0, lanes=[Lane(0, "a", "maker", 0)], connected=["a"])
    recording = Recording()
    recording.add(
        type(answer)(*(fields if name == "fields" else getattr(answer, name) for name in answer.__struct_fields__))
    )
    account = account_of(recording)
    found = flow_parts.field_parts(account, ["maker"])
    assert len(found) == 50
    assert found[-1].name == "other"
    assert sum(field.rate for field in found) == pytest.approx(sum(flow.rows for flow in account.flows), rel=0.01)


def steps_of(events: list[Any], names: dict[int, str], now: float) -> list[payload.StepsView]:
    """Return the steps after the first half of the events, and after all of them."""
    times, recording, found = StepTimes(), Recording(), []
    for some in (events[: len(events) // 2], events[len(events) // 2 :]):
        end = now if found else some[-1][0] + 0.01
        position = len(recording.events) + len(some)
        answer = reply(some, float(end), position=position, lanes=[Lane(0, "a", "train", 0)], connected=["a"])
        recording.add(replace(answer, partitions=names))
        found.append(times.update(account_of(recording), "train"))
    return found


def test_a_step_is_the_time_from_one_policy_version_to_the_next() -> None:
    events = [event(EventKind.POLICY, 10.0 * number, 0, rows=number) for number in range(1, 7)]
    first, last = steps_of(events, {}, 65.0)
    assert (first.by, len(first.steps)) == ("version", 2)
    assert [(each.name, each.seconds) for each in last.steps] == [(f"v{number}", 10.0) for number in range(2, 7)]
    assert last.since == pytest.approx(last.steps[-1].end)


def test_without_policy_versions_a_step_is_the_time_between_the_first_claims_of_partitions() -> None:
    claims = [(1.0, 1), (2.0, 1), (11.0, 2), (12.0, 1), (31.0, 3), (32.0, 2), (36.0, 4)]
    events = [event(EventKind.CLAIM, time, 0, partition=partition) for time, partition in claims]
    _, last = steps_of(events, {number: f"step_{number}" for number in range(1, 5)}, 40.0)
    # When the first partition began is not known, because the recording may begin in the middle of it.
    assert [(each.name, each.seconds) for each in last.steps] == [("step_2", 20.0), ("step_3", 5.0)]
    assert (last.by, last.task) == ("partition", "train")


def test_a_partition_that_is_not_sealed_has_no_end() -> None:
    recording, status = simulate(SCENARIOS[next(iter(SCENARIOS))], 0, 100.0)
    account = account_of(recording, status)
    last = flow_parts.last_task(account)
    seen = Observation(recording, status, {each.name: each for each in status.partitions})
    step = flow_parts.step_part(seen, account, last)
    assert step is not None
    assert not step.sealed
    assert step.eta is None
    sealed = {each.name: replace(each, sealed=True) for each in status.partitions}
    step = flow_parts.step_part(Observation(recording, status, sealed), account, last)
    assert step is not None
    assert step.eta is not None


@pytest.mark.parametrize(
    ("lane", "label"),
    [
        (Lane(1, "0123456789abcdef", "t", 3, "node-1", 17), "rank 3, pid 17, node-1"),
        (Lane(1, "0123456789abcdef", "t", -1, "node-1", 17), "pid 17, node-1"),
        (Lane(1, "0123456789abcdef", "t", 3), "rank 3"),
        (Lane(1, "0123456789abcdef", ""), "client 01234567"),
    ],
)
def test_a_label_is_what_is_known_of_a_client(lane: Lane, label: str) -> None:
    assert lane.label == label
