"""A recording collects replies, stays bounded, and outlives restarts of the controller."""

from __future__ import annotations

import numpy as np
import pytest
from pipeline_scenarios import Expected, Scenario, grpo
from pipeline_simulation import Pipeline
from timeline_replies import LANES, WALL, event, recorded, reply

from transfer_queue.messages.reports.timeline import Lane, OpenWait, ReadTimeline
from transfer_queue.timeline.events import EventKind
from transfer_queue.timeline.recording import Recording
from transfer_queue.timeline.verdict import judge


def test_the_request_goes_on_where_the_last_reply_ended():
    recording = Recording(60)
    assert recording.request() == ReadTimeline(seconds=60, most=recording.limit)
    recording.add(reply([event(EventKind.PUT, 1, 0)], 2, position=7, end=9))
    assert recording.request() == ReadTimeline("boot", 7, 60, 4, 2, 4, most=recording.limit)
    assert not recording.caught_up


def test_pages_of_a_reply_are_the_same_as_one_reply():
    pipeline = Pipeline(Scenario("", grpo(), Expected("flowing"))).run(120)
    whole, paged = pipeline.recording(), Recording()
    position = 0
    while not paged.caught_up:
        page = pipeline.reply(position, 37)
        paged.add(page)
        position = page.position
    assert (paged.events == whole.events).all()
    assert judge(paged, pipeline.status()) == judge(whole, pipeline.status())


def test_old_events_are_dropped_and_their_producers_remembered():
    recording = Recording(10)
    recording.add(reply([event(EventKind.PUT, 1, 2, fields=2)], 2))
    recording.add(reply([event(EventKind.PUT, 30, 0, fields=1)], 31, lanes=[]))
    assert (recording.events["time"] - WALL).tolist() == [30]
    assert recording.producers == {"reward": {"reward": WALL + 1}}


def test_only_the_newest_events_are_kept():
    recording = Recording(limit=3)
    for batch in range(4):
        recording.add(reply([event(EventKind.PUT, batch, 0, rows=2 * batch + at) for at in range(2)], batch + 0.5))
    assert recording.events["rows"].tolist() == [5, 6, 7]


def test_a_restart_is_a_gap_and_numbers_get_their_new_names():
    recording = recorded([event(EventKind.PUT, 100, 0)], 101)
    lanes = [Lane(0, "new", "reference", 1), Lane(1, "a", "train", 0)]
    recording.add(
        reply([event(EventKind.PUT, 5, 1), event(EventKind.PUT, 6, 0)], 7, boot="2", lanes=lanes, wall=WALL + 105)
    )
    assert [recording.lanes[at].client for at in recording.events["lane"]] == ["a", "a", "new"]
    assert (recording.events["time"] - WALL).tolist() == [100, 110, 111]
    assert [(gap.start - WALL, gap.end - WALL, gap.missed) for gap in recording.gaps] == [(101, 110, 0)]


def test_missed_events_are_a_gap():
    recording = recorded([], 10)
    recording.add(reply([event(EventKind.PUT, 15, 0)], 20, missed=3))
    assert [(gap.start - WALL, gap.end - WALL, gap.missed) for gap in recording.gaps] == [(10, 15, 3)]


def test_open_waits_have_unix_times_and_positions_of_lanes():
    recording = recorded([], 10, open_=[OpenWait(2, 4.0, "train_0", ["reward"], 8)], connected=["a"])
    (wait,) = recording.open
    assert (recording.lanes[wait.lane].client, wait.since) == ("c", WALL + 4)
    assert recording.connected == {"a"}
    recording.add(reply([], 11, position=1, end=5, open_=[OpenWait(2, 4.0, "train_0", ["reward"], 8)]))
    assert recording.open == []


def test_unknown_names_and_hostile_times_are_harmless():
    recording = Recording()
    hostile = [
        event(EventKind.PUT, np.nan, 0),
        event(EventKind.PUT, 1e300, 99),
        event(EventKind.CLAIM, -1e300, 2**32 - 1),
    ]
    recording.add(reply(hostile, 10, lanes=[*LANES, Lane(2**62, "x", "y")]))
    assert (recording.events["time"] <= WALL + 10).all()
    assert recording.events["lane"].tolist() == [0] * len(recording.events)
    recording.add(reply([], float("nan")))
    assert recording.now == WALL + 10


def test_tables_of_names_stay_bounded():
    recording = Recording()
    for batch in range(8):
        lanes = [Lane(number, f"c{number}", "train") for number in range(batch * 20_000, (batch + 1) * 20_000)]
        recording.add(reply([event(EventKind.PUT, batch, (batch + 1) * 20_000 - 1)], batch + 0.5, lanes=lanes))
    assert len(recording.lanes) < 120_000
    assert [recording.lanes[at].client for at in recording.events["lane"]][-1] == "c159999"
    assert recording.request().lanes == 160_000


@pytest.mark.parametrize(("seconds", "limit"), [(0, 5), (float("nan"), 5), (5, 0)])
def test_arguments_are_checked(seconds, limit):
    with pytest.raises(ValueError, match="must be a positive"):
        Recording(seconds, limit)


def test_a_recording_knows_whether_it_has_everything_since_the_start_of_the_controller():
    recording = Recording(10)
    assert not recording.from_boot
    recording.add(reply([event(EventKind.PUT, 1, 0)], 2, position=1))
    assert recording.from_boot
    recording.add(reply([event(EventKind.PUT, 30, 0)], 31, position=2))
    assert not recording.from_boot  # the first event is too old
    late = Recording()
    late.add(reply([event(EventKind.PUT, 1, 0)], 2, position=5))
    assert not late.from_boot
