"""Histograms, the longest events of late, and that what they count by does not grow without end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.messages.claims import Claim
from transfer_queue.messages.puts import Publish
from transfer_queue.metrics.timing import (
    LOOP_BOUNDS,
    MAX_NAMES,
    OTHER,
    WAIT_BOUNDS,
    WINDOW,
    Histogram,
    Load,
    Longest,
    Waits,
    bounded_key,
    quantile,
)

seconds = st.one_of(st.sampled_from([0.0, *LOOP_BOUNDS, *WAIT_BOUNDS]), st.floats(0, 1e5))


@given(st.lists(seconds), st.sampled_from([LOOP_BOUNDS, WAIT_BOUNDS]))
def test_a_bucket_has_what_is_at_most_its_bound(values: list[float], bounds: tuple[float, ...]) -> None:
    histogram = Histogram(bounds)
    for each in values:
        histogram.add(each)
    timing = histogram.to_timing("x")
    reached = np.cumsum(timing.counts).tolist()
    assert reached == [sum(each <= bound for each in values) for bound in (*bounds, np.inf)]
    assert timing.seconds == sum(values)


@given(st.lists(seconds, min_size=1), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_the_value_that_it_is(values: list[float], share: float) -> None:
    histogram = Histogram(LOOP_BOUNDS)
    for each in values:
        histogram.add(each)
    rank = int(np.ceil(share * len(values) - 1e-9))
    exact = sorted(values)[max(rank, 1) - 1]
    ends = (0.0, *LOOP_BOUNDS)
    at = int(np.searchsorted(LOOP_BOUNDS, exact))
    found = quantile(LOOP_BOUNDS, histogram.counts, share)
    if at < len(LOOP_BOUNDS):
        assert ends[at] - 1e-12 <= found <= ends[at + 1] + 1e-12
    else:
        assert found == LOOP_BOUNDS[-1], "no more is known"


def test_no_values_have_no_quantile() -> None:
    assert quantile(LOOP_BOUNDS, Histogram(LOOP_BOUNDS).counts, 0.99) == 0.0


def test_requests_by_type_and_the_longest_of_them() -> None:
    load = Load()
    load.record_request(Claim, 1.0, 1.25)
    load.record_request(Claim, 1.0, 1.75)  # of the same turn of its connection: it began when the one before had ended
    load.record_request(Publish, 2.0, 2.0009)
    assert [(t.name, sum(t.counts), t.seconds) for t in load.timings()] == [
        ("Claim", 2, 0.75), ("Publish", 1, pytest.approx(0.0009)),
    ]  # fmt: skip
    assert load.longest.by_event(2.0) == {"request": (0.5, "Claim")}, "what is below a millisecond is not noted"
    assert load.longest.longest(2.0) == ("Claim", 0.5)
    load.record_failure("CapacityError")
    load.record_failure("CapacityError")
    assert load.failures == {"CapacityError": 2}


def test_the_longest_is_told_for_one_minute_at_least_and_two_at_most() -> None:
    longest = Longest()
    longest.record("work", 0.5, 100.0)
    longest.record("work", 0.1, 101.0)
    longest.record("tick", 0.2, 102.0)
    assert longest.longest(100.0 + WINDOW - 1) == ("work", 0.5)
    longest.record("work", 0.3, 101.0 + WINDOW)
    assert longest.by_event(102.0 + WINDOW) == {"tick": (0.2, "tick"), "work": (0.5, "work")}
    assert longest.by_event(102.0 + 2 * WINDOW) == {"work": (0.3, "work")}
    assert longest.longest(103.0 + 4 * WINDOW) == ("", 0.0), "nobody noted anything meanwhile"


def test_tasks_without_end_are_counted_together() -> None:
    waits = Waits()
    for number in range(1000):
        waits.record("Claim", f"task-{number}", 0.01)
    waits.record("Publish", "", 2.0)
    timings = {(timing.name, timing.task): sum(timing.counts) for timing in waits.timings()}
    assert len(timings) <= MAX_NAMES + 2
    assert timings["Claim", OTHER] == 1000 - MAX_NAMES
    assert sum(timings.values()) == 1001
    assert bounded_key(("Claim", "task-3"), timings) == ("Claim", "task-3"), "one that is known stays so"
