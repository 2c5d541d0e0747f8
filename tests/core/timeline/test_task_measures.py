"""What metrics say of tasks, against the same numbers counted one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Harness, finished
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.core.reports.status import StateMeasures, measure
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.core.timeline import task_measures
from transfer_queue.core.timeline.event_ring import PACKING, EventRing, LaneTable
from transfer_queue.core.timeline.task_measures import TaskMeasures
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.partitions import SetGroupDemand, SetPolicyVersion, TakeGroupDemand
from transfer_queue.messages.reports.timeline import Introduce
from transfer_queue.metrics.timing import MAX_NAMES, OTHER, STALENESS_BOUNDS, WAIT_BOUNDS
from transfer_queue.timeline.events import AHEAD, EventKind

TICKS = 20
SAMPLES, CAPACITY, DEMAND = task_measures.REASONS


def measured(h: Harness) -> StateMeasures:
    return finished(measure(h.controller.context, h.now))


def waited(h: Harness, task: str, reason: str = SAMPLES) -> float:
    return measured(h).series["task_wait_seconds"].get((task, reason), 0.0)


def counts(h: Harness, name: str, task: str) -> tuple[int, float]:
    """The number of values in a histogram, and their sum."""
    (found,) = (timing for timing in measured(h).timings[name] if timing.task == task)
    return sum(found.counts), found.seconds


# ---------------------------------------------------------------- of a controller


def test_waits_that_ended_and_those_that_have_not(h: Harness) -> None:
    h.claim(2, "t", wait=100.0)
    h.now = 3.0
    assert waited(h, "t") == 3.0, "it has not ended"
    h.now = 5.0
    h.put(2)
    h.now = 50.0
    assert waited(h, "t") == 5.0
    h.claim(2, "t", wait=10.0)
    h.tick(60.0)
    assert waited(h, "t") == 15.0, "a wait that gets nothing is one, too"


def test_simultaneous_waits_of_a_client_count_once_and_those_of_two_clients_twice(h: Harness) -> None:
    h.claim(2, "t", wait=100.0)
    h.now = 4.0
    h.claim(5, "t", wait=100.0)
    h.claim(9, "t", wait=100.0, name="other")
    h.now = 10.0
    assert waited(h, "t") == 10.0 + 6.0
    h.put(2)
    h.now = 12.0
    assert waited(h, "t") == 12.0 + 8.0
    h.tick(104.0)
    assert waited(h, "t") == 104.0 + 100.0


def test_a_claim_ahead_is_not_a_wait(h: Harness) -> None:
    h.claim(2, "t", wait=100.0, ahead=1)
    h.now = 5.0
    assert waited(h, "t") == 0.0
    h.put(2)
    assert waited(h, "t") == 0.0
    assert counts(h, "queue", "t") == (1, 0.0), "it took samples like any other"


def test_a_put_that_waits_for_space_counts_for_the_task_of_its_client(h: Harness) -> None:
    h.controller.state.capacity = 2
    h.ask(Introduce("rollout"), "late")
    rows = h.put(2)
    h.claim(3, wait=50.0)
    h.send(h.publish(2, wait=40.0, name="late"), "late")
    h.now = 7.0
    assert waited(h, "rollout", CAPACITY) == 7.0
    h.clear(rows)
    h.now = 9.0
    assert waited(h, "rollout", CAPACITY) == 7.0
    assert waited(h, "rollout", SAMPLES) == 0.0


def test_a_producer_that_waits_for_group_demand_has_a_reason_of_its_own(h: Harness) -> None:
    h.put(1)
    h.ask(Introduce("rollout"), "w")
    h.send(TakeGroupDemand("p", "train", most=4, wait=10.0), "w")
    h.now = 3.0
    assert waited(h, "rollout", DEMAND) == 3.0, "it has not ended"
    h.now = 5.0
    h.ask(SetGroupDemand("p", "train", 3), "trainer")
    h.now = 9.0
    assert [waited(h, "rollout", reason) for reason in (SAMPLES, CAPACITY, DEMAND)] == [0.0, 0.0, 5.0]


def test_how_long_a_batch_was_ready_and_how_old_its_policy_was(h: Harness) -> None:
    h.create()
    h.ask(SetPolicyVersion("p", 1))
    h.put(4)
    h.now = 2.0
    h.ask(SetPolicyVersion("p", 4))
    h.claim(2, "t")
    h.now = 12.0
    h.claim(2, "t")
    assert counts(h, "queue", "t") == (2, 14.0)
    assert counts(h, "staleness", "t") == (2, 6.0)
    (timing,) = measured(h).timings["queue"]
    assert timing.counts[WAIT_BOUNDS.index(2.5)] == 1, "2 s"
    assert timing.counts[WAIT_BOUNDS.index(30.0)] == 1, "12 s"
    (timing,) = measured(h).timings["staleness"]
    assert timing.counts[STALENESS_BOUNDS.index(3)] == 2


def test_ready_rows_by_task(h: Harness) -> None:
    rows = h.put(6)
    assert h.dealt(2, "t") is not None
    h.put(3, ("y",), rows=rows[:3])
    assert h.dealt(1, "u", fields=("x", "y")) is not None
    h.put(4)
    found = measured(h).series["ready_rows"]
    assert found == {("p", "t"): 8, ("p", "u"): 2}, "puts that no claim has looked at yet count as well"
    h.put(1, ("y",), rows=rows[3:4])
    assert h.dealt(1, "t", fields=("y",)) is not None
    assert measured(h).series["ready_rows"]["p", "t"] == 1, "of the fields that the task fetched last"


def test_clients_of_a_task_are_those_that_are_connected(h: Harness) -> None:
    h.put(4)
    h.claim(1, "t", name="a")
    h.claim(1, "t", name="b")
    h.claim(1, "u", name="b")
    h.ask(Introduce("rollout"), "w")
    h.put(1)
    found = measured(h).series["task_clients"]
    assert found == {("t",): 2, ("u",): 1, ("rollout",): 1}
    h.disconnect("b")
    assert measured(h).series["task_clients"] == {("t",): 1, ("rollout",): 1}


def test_nothing_is_measured_without_a_timeline() -> None:
    h = Harness(timeline_events=0)
    h.put(2)
    h.claim(2)
    found = measured(h)
    assert not found.timings
    assert not found.series["task_clients"]


def test_rows_that_were_removed_are_counted(h: Harness) -> None:
    h.put(5)
    rows = h.put(3)
    h.clear(rows[:2])
    assert measured(h).series["cleared_rows"] == {(): 2}
    assert measured(h).series["global_indexes"] == {(): 8}


# ---------------------------------------------------------------- against a count of each tick


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_measures, "IN_A_STEP", 2)


waits = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from("tu"), st.integers(0, TICKS), st.integers(0, TICKS),
              st.booleans()),
    max_size=30,
)  # fmt: skip


@given(waits, st.integers(0, TICKS), st.sampled_from([8, 64]), st.lists(st.integers(0, TICKS), max_size=4))
def test_seconds_are_those_in_which_a_client_waits(
    requests: list[tuple[str, str, int, int, bool]], now: int, capacity: int, scrapes: list[int]
) -> None:
    """A tick of a client and task counts once, with all overlaps and at all times of scrapes."""
    requests = [(client, task, min(ends), max(ends), ahead) for client, task, *ends, ahead in requests]
    system = _System(capacity)
    last: dict[tuple[str, ...], float] = {}
    for tick in range(now + 1):
        for client, task, since, until, ahead in requests:
            if until == tick:
                system.end(client, task, since, until, ahead)
        if tick in scrapes or tick == now:
            found = system.scrape(requests, tick)
            assert all(found.get(key, 0.0) >= seconds for key, seconds in last.items()), "a counter does not decrease"
            last = found
    ticks = {
        (client, task, tick)
        for client, task, since, until, ahead in requests
        for tick in range(since, min(until, now))
        if not ahead
    }
    for task in "tu":
        assert last.get((task, SAMPLES), 0.0) == sum(1 for _, each, _ in ticks if each == task)


class _System:
    def __init__(self, capacity: int) -> None:
        self.ring = EventRing(capacity)
        self.lanes = LaneTable(self.ring, {})
        self.measures = TaskMeasures(self.ring, self.lanes)
        finished(self.measures.measure([], [], 0.0))  # the first scrape

    def end(self, client: str, task: str, since: int, until: int, ahead: bool) -> None:
        self.write(EventKind.WAIT, self.lanes.of_task(client, task, -1), since, until, flags=AHEAD * ahead)

    def write(self, kind: int, lane: int, since: float, time: float, flags: int = 0, age: float = -1.0) -> None:
        PACKING.pack_into(
            self.ring.memory, self.ring.end % self.ring.capacity * PACKING.size,
            time, since, kind, flags, 0, lane, 0, 0, 1, 0, 0, 0, age, -1, 1, 0, 0,
        )  # fmt: skip
        self.ring.end += 1
        if self.ring.end >= self.measures.due:
            finished(self.measures.count_events())

    def scrape(self, requests: list[tuple[str, str, int, int, bool]], now: int) -> dict[tuple[str, ...], float]:
        waiting = [
            ParkedRequest(client, number, since, until, Claim("p", task, ["x"], 1, {}, 1.0, ahead=int(ahead)))
            for number, (client, task, since, until, ahead) in enumerate(requests)
            if since <= now < until
        ]
        return finished(self.measures.measure(waiting, [], now))["task_wait_seconds"]


@given(st.lists(st.tuples(st.integers(0, 2 * MAX_NAMES), st.floats(0, 4000, width=32)), max_size=300))
def test_histograms_have_each_value_once(claims: list[tuple[int, float]]) -> None:
    system = _System(32)
    for number, age in claims:
        system.write(EventKind.CLAIM, system.lanes.of_task("r", f"t{number}", -1), 0.0, 1.0, age=age)
    finished(system.measures.count_events())
    timings = {timing.task: timing for timing in system.measures.timings()["queue"]}
    assert sum(sum(timing.counts) for timing in timings.values()) == len(claims)
    assert len(timings) <= MAX_NAMES + 1
    for task, timing in timings.items():
        ages = [age for number, age in claims if f"t{number}" == task]
        if task != OTHER:
            assert np.cumsum(timing.counts).tolist() == [sum(a <= bound for a in ages) for bound in (*WAIT_BOUNDS, 1e9)]
            assert timing.seconds == pytest.approx(sum(ages))


def test_a_ring_that_was_written_over_misses_events_and_nothing_else(h: Harness) -> None:
    system = _System(8)
    system.measures.due = 10**9
    for number in range(20):
        system.write(EventKind.CLAIM, system.lanes.of_task("r", "t", -1), 0.0, 1.0, age=float(number))
    finished(system.measures.count_events())
    (timing,) = system.measures.timings()["queue"]
    assert (sum(timing.counts), timing.seconds) == (8, sum(range(12, 20)))


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_measures, "MAX_LANES", 4)
    monkeypatch.setattr(task_measures, "MAX_SPANS", 3)
    system = _System(64)
    for number in range(40):
        for client in range(20):
            system.end(f"c{client}", "t", 10 * number, 10 * number + 1, False)
    finished(system.measures.count_events())
    measures: Any = system.measures
    assert len(measures._spans) <= 8
    assert all(len(spans) <= 2 * 3 for spans in measures._spans.values())
    assert finished(measures.measure([], [], 400.0))["task_wait_seconds"] == {("t", SAMPLES): 800.0}
    system.write(EventKind.GONE, system.lanes.of_task("c19", "t", -1), 400.0, 400.0)
    before = len(measures._spans)
    finished(measures.count_events())
    assert len(measures._spans) == before - 1
