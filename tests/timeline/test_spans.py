"""Spans of waiting, work and back-pressure, and their shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from timeline_replies import LANES, WALL, event, recorded, reply

from transfer_queue.messages.reports.timeline import OpenWait
from transfer_queue.timeline.event_table import EventTable
from transfer_queue.timeline.events import AHEAD, CLOSED, TIMED_OUT, EventKind
from transfer_queue.timeline.spans import Intervals, Line, SpanState, measure_spans, merge, paint

WAIT, CLAIM, END, PUT, HOLD, GONE = (
    EventKind.WAIT, EventKind.CLAIM, EventKind.END, EventKind.PUT, EventKind.HOLD, EventKind.GONE,
)  # fmt: skip


def spans_of(events, now, *, start=0.0, **more):
    recording = recorded(sorted(events, key=lambda each: each[0]), now, **more)
    return measure_spans(EventTable(recording), WALL + start, WALL + now)


def states_of(spans, worker):
    mine = spans.worker == worker
    rows = zip((spans.start[mine] - WALL).tolist(), (spans.end[mine] - WALL).tolist(), spans.state[mine].tolist())
    return [(round(start, 6), round(end, 6), SpanState(state).name) for start, end, state in rows]


def test_work_is_between_an_answer_and_the_next_claim():
    spans = spans_of([event(CLAIM, 2, 0), event(WAIT, 8, 0, 5), event(CLAIM, 8, 0, 5)], 10)
    assert states_of(spans, 0) == [(2, 5, "WORKS"), (5, 8, "WAITS"), (8, 10, "WORKS")]


def test_a_claim_ahead_is_not_a_wait():
    spans = spans_of([event(CLAIM, 2, 0), event(WAIT, 8, 0, 3, flags=AHEAD), event(CLAIM, 8, 0, 3, flags=AHEAD)], 10)
    assert states_of(spans, 0) == [(2, 10, "WORKS")]


def test_after_the_end_a_worker_is_idle_until_it_leaves_which_is_not_a_loss():
    spans = spans_of([event(CLAIM, 2, 0), event(END, 4, 0), event(GONE, 6, 0, flags=CLOSED)], 10)
    assert states_of(spans, 0) == [(2, 4, "WORKS"), (4, 6, "IDLE")]


def test_nothing_is_shown_of_a_worker_that_closed_until_its_rank_is_back():
    spans = spans_of([event(CLAIM, 2, 0), event(GONE, 4, 0, flags=CLOSED), event(CLAIM, 8, 0)], 10)
    assert states_of(spans, 0) == [(2, 4, "WORKS"), (8, 10, "WORKS")]
    assert spans.seconds[0].sum() == pytest.approx(10)


def test_a_worker_that_dies_after_its_rank_came_back_is_gone():
    spans = spans_of([event(CLAIM, 2, 0), event(GONE, 4, 0, flags=CLOSED), event(CLAIM, 6, 0), event(GONE, 8, 0)], 10)
    assert states_of(spans, 0) == [(2, 4, "WORKS"), (6, 8, "WORKS"), (8, 10, "GONE")]


def test_a_worker_is_idle_after_a_claim_that_timed_out():
    spans = spans_of([event(CLAIM, 2, 0), event(WAIT, 6, 0, 4, flags=TIMED_OUT)], 10)
    assert states_of(spans, 0) == [(2, 4, "WORKS"), (4, 6, "WAITS"), (6, 10, "IDLE")]


def test_a_worker_is_gone_until_its_rank_is_back():
    spans = spans_of([event(CLAIM, 2, 0), event(GONE, 4, 0), event(WAIT, 4, 0, 3, flags=TIMED_OUT),
                      event(CLAIM, 8, 0)], 10)  # fmt: skip
    assert states_of(spans, 0) == [(2, 3, "WORKS"), (3, 4, "WAITS"), (4, 8, "GONE"), (8, 10, "WORKS")]


def test_open_waits_last_until_now():
    waits = [OpenWait(0, 5.0, "train_0", ["reward"], 8), OpenWait(1, 6.0, "train_0", ["reward"], 8, ahead=True),
             OpenWait(2, 7.0, "train_0", [], 8, holds=True)]  # fmt: skip
    spans = spans_of([event(CLAIM, 2, 0), event(CLAIM, 2, 1), event(PUT, 2, 2)], 10, open_=waits)
    assert states_of(spans, 0) == [(2, 5, "WORKS"), (5, 10, "WAITS")]
    assert states_of(spans, 1) == [(2, 10, "WORKS")]
    assert states_of(spans, 2) == [(2, 7, "IDLE"), (7, 10, "HELD")]


def test_clients_of_one_rank_are_one_worker_and_their_waits_merge():
    lanes = [*LANES[:1], type(LANES[0])(1, "b", "train", 0)]
    spans = spans_of([event(WAIT, 6, 0, 2), event(WAIT, 8, 1, 4)], 10, lanes=lanes)
    assert states_of(spans, 0) == [(2, 8, "WAITS"), (8, 10, "IDLE")]


def test_the_state_of_a_worker_is_not_known_in_a_gap():
    recording = recorded([event(CLAIM, 2, 0)], 4)
    recording.add(reply([event(CLAIM, 8, 0)], 10, missed=5))
    spans = measure_spans(EventTable(recording), WALL, WALL + 10)
    assert states_of(spans, 0) == [(2, 4, "WORKS"), (8, 10, "WORKS")]
    assert spans.seconds[0, SpanState.UNKNOWN] == pytest.approx(6)


intervals = st.lists(st.tuples(st.integers(0, 2), st.integers(-5, 25), st.integers(0, 10)), max_size=25)


def naive_cover(chosen, worker):
    return {second for w, start, length in chosen for second in range(start, start + length)
            if w == worker and 0 <= second < 20}  # fmt: skip


def place(line, chosen):
    table = np.array(chosen, np.float64).reshape(-1, 3)
    return line.place(table[:, 0].astype(np.int64), table[:, 1], table[:, 1] + table[:, 2])


@given(intervals)
def test_merging_is_as_a_naive_union(chosen):
    line = Line(0.0, 20.0, 3)
    worker, start, end = line.locate(merge(place(line, chosen)))
    for number in range(3):
        found = [each for a, b in zip(start[worker == number].tolist(), end[worker == number].tolist())
                 for each in range(int(a), int(b))]  # fmt: skip
        assert len(found) == len(set(found))
        assert set(found) == naive_cover(chosen, number)


@given(st.lists(intervals, min_size=1, max_size=4))
def test_a_later_layer_hides_the_earlier_ones(layers):
    line = Line(0.0, 20.0, 3)
    places, layer = paint([merge(place(line, chosen)) for chosen in layers])
    worker, start, end = line.locate(places)
    found = {(int(w), second): int(at) for w, a, b, at in zip(worker, start, end, layer)
             for second in range(int(a), int(b))}  # fmt: skip
    wanted = {
        (w, second): at for at, chosen in enumerate(layers) for w in range(3) for second in naive_cover(chosen, w)
    }
    assert found == wanted


timed = st.tuples(st.sampled_from(list(EventKind)), st.floats(0, 50), st.floats(0, 20), st.integers(0, 5),
                  st.integers(0, 3), st.integers(0, 9))  # fmt: skip


@settings(deadline=None)
@example([], 59.5, False)
@given(st.lists(timed, max_size=60), st.floats(0, 60), st.booleans())
def test_shares_are_between_0_and_1_and_add_up(chosen, start, known):
    events = [event(kind, time, lane, time - before, flags=flags, rows=rows)
              for kind, time, before, lane, flags, rows in chosen]  # fmt: skip
    spans = spans_of(events, 60.0, start=start, connected=["a"] * known)
    shares = spans.shares()
    assert ((shares >= 0) & (shares <= 1 + 1e-6)).all()
    if WALL + start < WALL + 60:  # the window is not empty
        assert shares.sum(axis=1) == pytest.approx(1, abs=1e-4)
    for worker in range(len(spans.workers)):
        mine = spans.worker == worker
        assert (spans.start[mine][1:] >= spans.end[mine][:-1] - 1e-6).all()
    waits = [(lane, time - before, time) for kind, time, before, lane, flags, _ in chosen
             if kind == WAIT and not flags & AHEAD and lane < 4]  # fmt: skip
    held = spans.seconds[:, SpanState.WAITS] + spans.seconds[:, SpanState.GONE]
    for worker in range(4):
        mine = sorted((max(a, start), b) for w, a, b in waits if w == worker and b > start)
        union, reach = 0.0, start
        for a, b in mine:
            union += max(b - max(a, reach), 0.0)
            reach = max(reach, b)
        assert held[worker] >= union - 1e-4  # a worker that is gone hides its waits


def test_merge_of_nothing_is_nothing():
    assert len(merge(Intervals(np.zeros(0), np.zeros(0)))) == 0
