"""The trace has the structure that Perfetto and chrome://tracing need."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict

import pytest
from pipeline_scenarios import scenarios
from pipeline_simulation import Pipeline
from timeline_replies import event, recorded, reply

from transfer_queue.messages.reports.timeline import Lane, OpenWait
from transfer_queue.timeline.event_table import EventTable
from transfer_queue.timeline.events import EventKind
from transfer_queue.timeline.recording import Recording
from transfer_queue.timeline.trace import find_sources, trace_json


@pytest.fixture(
    scope="module", params=["reward takes 1.5 times as long", "train is slow and the capacity holds rollout"]
)
def trace(request):
    scenario = next(each for each in scenarios() if each.name == request.param)
    return json.loads(trace_json(Pipeline(scenario).run(120).recording()))


def of_phase(trace, phase):
    return [each for each in trace["traceEvents"] if each["ph"] == phase]


def test_tasks_are_processes_and_ranks_are_threads(trace):
    names = defaultdict(set)
    for each in of_phase(trace, "M"):
        names[each["name"]].add((each["pid"], each["args"]["name"]))
    assert {name for _, name in names["process_name"]} == {"rollout", "reference", "reward", "train"}
    reward = next(pid for pid, name in names["process_name"] if name == "reward")
    tracks = {name for pid, name in names["thread_name"] if pid == reward}
    assert {"rank 0", "rank 3", "rank 0 puts", "rank 0 claims"} <= tracks


def test_slices_of_a_track_do_not_overlap(trace):
    tracks = defaultdict(list)
    for each in of_phase(trace, "X"):
        assert each["ts"] >= 0
        assert each["dur"] >= 0
        tracks[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
    named = {(each["pid"], each["tid"]) for each in of_phase(trace, "M") if each["name"] == "thread_name"}
    assert set(tracks) <= named
    for slices in tracks.values():
        slices.sort()
        assert all(later[0] >= earlier[1] for earlier, later in itertools.pairwise(slices))


def test_waits_name_what_they_waited_for(trace):
    waits = [each for each in of_phase(trace, "X") if each["name"] == "wait"]
    assert waits
    assert all(each["args"]["fields"] and each["args"]["rows"] > 0 for each in waits)


def test_arrows_lead_from_puts_to_claims(trace):
    slices = defaultdict(list)
    for each in of_phase(trace, "X"):
        slices[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"], each["name"]))
    begins = {each["id"]: each for each in of_phase(trace, "s")}
    ends = {each["id"]: each for each in of_phase(trace, "f")}
    assert begins
    assert begins.keys() == ends.keys()
    for arrow, name in ((begins, "put"), (ends, "claim")):
        for each in arrow.values():
            around = slices[each["pid"], each["tid"]]
            assert any(start <= each["ts"] <= end and name == kind for start, end, kind in around)
    assert all(begins[number]["ts"] <= ends[number]["ts"] for number in begins)


def test_counters_have_rows_bytes_depth_and_staleness(trace):
    names = {each["name"] for each in of_phase(trace, "C")}
    assert {"rows put: response", "bytes put", "queue of train", "staleness of train"} <= names
    depth = [each["args"]["rows"] for each in of_phase(trace, "C") if each["name"] == "queue of reward"]
    assert min(depth) == 0
    assert max(depth) > 0


def test_an_arrow_begins_at_the_block_or_the_next_smaller_one_of_the_partition():
    puts = [(1, 0), (4, 0), (2, 1), (9, 0)]
    claims = [(4, 0), (8, 0), (1, 1), (3, 1), (0, 0)]
    events = [event(EventKind.PUT, 1, 0, block=block, partition=at) for block, at in puts]
    events += [event(EventKind.CLAIM, 2, 0, block=block, partition=at) for block, at in claims]
    recording = recorded(events, 3)
    table = EventTable(recording)
    assert find_sources(table.of(EventKind.PUT), table.of(EventKind.CLAIM)).tolist() == [1, 1, -1, 2, -1]


def test_gets_have_their_bytes_and_do_not_overlap():
    gets = [(5.0, 1.0, 1.0), (5.0, 1.5, 0.5), (8.0, 6.0, 0.0)]  # reported at, begun at, ended before that
    recording = Recording()
    events = [event(EventKind.READ, at, 0, since, age=age, fields=3, bytes=640) for at, since, age in gets]
    recording.add(reply(events, 10))
    trace = json.loads(trace_json(recording))
    slices = [each for each in of_phase(trace, "X") if each["name"] == "get"]
    assert [(each["ts"], each["dur"]) for each in slices] == [(0, 3e6), (3e6, 5e5), (5e6, 2e6)]
    assert slices[0]["args"] == {"fields": ["response", "reward"], "rows": 8, "partition": "train_0", "bytes": 640}
    assert "rank 0 gets" in [each["args"]["name"] for each in of_phase(trace, "M")]


def test_a_wait_that_is_open_has_its_fields():
    recording = recorded([], 10, open_=[OpenWait(0, 4.0, "train_0", ["reward"], 8)])
    (wait,) = of_phase(json.loads(trace_json(recording)), "X")
    assert wait["args"] == {"fields": ["reward"], "rows": 8, "partition": "train_0"}
    assert (wait["ts"], wait["dur"]) == (0, 6e6)


def test_names_are_text_whatever_they_contain():
    hostile = '"}]<b>\x00é'
    recording = recorded([event(EventKind.PUT, 1, 0)], 10, lanes=[Lane(0, "c", hostile)])
    trace = json.loads(trace_json(recording))
    assert hostile in [each["args"]["name"] for each in of_phase(trace, "M")]


def test_a_recording_without_events_is_a_trace_without_slices():
    assert of_phase(json.loads(trace_json(Recording())), "X") == []
