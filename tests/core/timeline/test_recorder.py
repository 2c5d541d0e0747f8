"""What the controller writes into the timeline, and what a reader gets of it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from harness import Harness
from timeline_reader import Reader, kinds

from transfer_queue.core.timeline import event_ring, recorder
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.partitions import Seal, SetGroupDemand, SetPolicyVersion, TakeGroupDemand
from transfer_queue.messages.puts import ClearRows
from transfer_queue.messages.reports.timeline import Introduce, Leave, ReadTimeline, ValueRead
from transfer_queue.messages.system import Status
from transfer_queue.timeline.events import AHEAD, CLOSED, DEMAND, NEW_ROWS, EventKind

REQUESTS = 20  # more than the notes that are written together


@pytest.fixture
def reader(h: Harness) -> Reader:
    return Reader(h)


class TestGets:
    """What clients report of their gets."""

    def report(self, h: Harness, name: str, *reads: ValueRead) -> None:
        client = h.client(name)
        client.sequence += 1
        h.take(
            h.controller.handle(
                name, client.peer, RequestEnvelope(client.sequence, 0, Status(), [], list(reads)), h.now
            )
        )

    def test_a_get_of_a_worker(self, h, reader):
        h.put(3)
        h.claim(2)
        h.now = 9.0
        self.report(h, "r", ValueRead(1.5, 2.0, "p", ["x", "y"], 2, 640))
        event = reader.read()[-1]
        assert event == (EventKind.READ, 9.0, 5.5, "r", "t", "p", ("x", "y"), 2, 0)
        assert (reader.raw[0]["bytes"][-1], reader.raw[0]["age"][-1]) == (640, 1.5)

    def test_a_get_of_a_client_that_is_no_worker(self, h, reader):
        h.put(3)
        self.report(h, "onlooker", ValueRead(0.0, 2.0, "p", ["x"], 2, 640))
        assert kinds(reader.read()) == ["put"]

    def test_a_request_that_is_sent_again_reports_nothing_again(self, h, reader):
        h.put(3)
        envelope = RequestEnvelope(
            h.client("w").sequence + 1, 0, Seal("p"), [], [ValueRead(0.0, 2.0, "p", ["x"], 2, 640)]
        )
        first = h.controller.handle("w", h.client("w").peer, envelope, h.now)
        h.take(first)
        assert h.controller.handle("w", h.client("w").peer, envelope, h.now) == first
        assert kinds(reader.read()) == ["put", "read"]

    def test_times_that_cannot_be(self, h, reader):
        h.put(3)
        h.now = 9.0
        self.report(h, "w", ValueRead(-5.0, -7.0, "p", ["x"], (1 << 63) - 1, 1 << 62))
        assert reader.read()[-1][1:3] == (9.0, 9.0)

    @pytest.mark.parametrize(
        "wrong", [[float("nan"), 0.0, "p", [], 1, 1], [0.0, 0.0, "p", [], -1, 1], [0.0, 0.0, "p", [], 1]]
    )
    def test_a_report_that_is_not_valid(self, wrong):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, ValueRead)


class TestPuts:
    def test_a_put(self, h, reader):
        h.now = 5.0
        h.put(3, ("x", "y"))
        (event,) = reader.read()
        assert event == (EventKind.PUT, 5.0, 5.0, "w", "", "p", ("x", "y"), 3, NEW_ROWS)
        assert reader.raw[0]["bytes"] == 640
        assert reader.raw[0]["block"] == 1

    def test_a_put_of_fields_of_existing_rows(self, h, reader):
        rows = h.put(4)
        h.put(2, ("y",), rows=rows[:2])
        assert [(event.fields, event.rows) for event in reader.read()] == [(("x",), 4), (("y",), 2)]

    def test_a_put_of_tags_has_no_block(self, h, reader):
        rows = h.put(2)
        h.put(2, None, rows=rows, tags=[{"n": 1}, {"n": 2}])
        assert [event.fields for event in reader.read()] == [("x",), ()]
        assert reader.raw[0]["block"].tolist() == [1, 0]

    def test_a_put_that_waited_for_space(self, reader, h):
        h.controller.state.capacity = 2
        rows = h.put(2)
        h.claim(3, wait=50.0)  # otherwise nothing could make space
        h.now = 1.0
        h.send(h.publish(2, wait=20.0, name="late"), "late")
        h.now = 4.0
        h.clear(rows)
        events = reader.read()
        assert kinds(events) == ["put", "clear", "hold", "put"]
        assert events[1][1:] == (4.0, 4.0, "w", "", "p", (), 2, 0)
        assert events[2][1:] == (4.0, 1.0, "late", "", "p", (), 2, 0)
        assert events[3][1:3] == (4.0, 1.0)

    def test_a_put_of_many_fields_has_the_first_ones(self, h, reader):
        h.put(1, [f"f{n}" for n in range(400)])
        (event,) = reader.read()
        assert event.fields == (*(f"f{n}" for n in range(event_ring.MAX_NAMES)), "...")


class TestClaims:
    def test_a_claim_ahead(self, h, reader):
        h.claim(2, wait=10.0, ahead=1)
        h.put(2)
        assert [event.flags for event in reader.read()] == [NEW_ROWS, AHEAD, AHEAD]

    def test_the_row_was_ready_for_some_time(self, h, reader):
        rows = h.put(2)
        h.now = 10.0
        h.put(2, ("y",), rows=rows)
        h.now = 25.0
        h.claim(2, fields=("x", "y"))
        h.claim(2, "u", fields=("x",))
        reader.read()
        assert reader.raw[0]["block"].tolist() == [1, 2, 2, 1]
        assert reader.raw[0]["age"].tolist() == [-1.0, -1.0, 15.0, 25.0]

    def test_of_many_claims_a_part_is_looked_up(self, h, reader, monkeypatch):
        monkeypatch.setattr(recorder, "LOOKUPS", 3)
        h.put(8)
        for now, claims in ((10.0, 4), (10.9, 1), (11.0, 1), (11.5, 1)):
            h.now = now
            for _ in range(claims):
                h.claim(1)
        reader.read()
        assert reader.raw[0]["rows"].tolist() == [8, 1, 1, 1, 1, 1, 1, 1]
        assert reader.raw[0]["block"].tolist() == [1, 1, 1, 1, 0, 0, 1, 1]
        assert reader.raw[0]["age"].tolist() == [-1.0, 10.0, 10.0, 10.0, -1.0, -1.0, 11.0, 11.5]

    def test_a_row_that_was_put_before_the_start_has_no_age(self, h):
        h.put(2)
        h.restart()
        h.claim(2)
        reader = Reader(h)
        reader.read()
        assert reader.raw[0]["age"].tolist() == [-1.0]

    def test_the_policy_is_some_versions_newer(self, h, reader):
        h.put(1)
        h.ask(SetPolicyVersion("p", 1))
        h.put(1)
        h.put(1, tags=[{"policy_version": 0}])
        h.ask(SetPolicyVersion("p", 3))
        for _ in range(3):
            h.claim(1)
        reader.read()
        (events,) = reader.raw
        assert events["staleness"][events["kind"] == EventKind.CLAIM].tolist() == [3, 2, 3]

    def test_without_a_policy_version_nothing_is_stale(self, h, reader):
        h.put(1, tags=[{"policy_version": 0}])
        h.claim(1)
        reader.read()
        assert reader.raw[0]["staleness"].tolist() == [-1, -1]


class TestOtherEvents:
    def test_a_client_that_announced_its_end_has_closed(self, h, reader):
        h.put(1)
        h.claim(1, "t")
        h.ask(Leave(), "r")
        h.disconnect("r")
        h.connect("r")
        h.disconnect("r")
        gone = [(event.kind.name, event.flags) for event in reader.read() if event.client == "r"][1:]
        assert gone == [("GONE", CLOSED), ("GONE", 0)]
        assert h.controller.context.connections.leaving == set()

    def test_a_producer_that_waits_for_group_demand(self, h, reader):
        h.put(1)
        h.ask(Introduce("rollout", 2), "w")
        asked = h.send(TakeGroupDemand("p", "train", most=4, wait=10.0), "w")
        assert kinds(reader.read()) == ["put"]
        assert [(each.rows, each.holds, each.demand) for each in reader.last.open] == [(4, True, True)]
        h.now = 5.0
        h.ask(SetGroupDemand("p", "train", 3), "trainer")
        assert h.result(asked, "w").value == 2  # one of three groups is there
        held = reader.read()
        assert [(e.kind.name, e.since, e.task, e.rows, e.flags) for e in held] == [("HOLD", 0.0, "rollout", 4, DEMAND)]
        assert reader.last.open == []

    def test_a_client_that_did_nothing_is_not_reported_as_gone(self, h, reader):
        h.look(ReadTimeline())
        h.disconnect("onlooker")
        assert reader.read() == []


class TestLanes:
    def test_the_rank_of_a_claim(self, h, reader):
        h.put(2)
        h.claim(2, dp_rank=3)
        reader.read()
        assert [lane.rank for lane in reader.lanes.values()] == [-1, 3]

    def test_an_introduced_client(self, h, reader):
        h.put(2)
        h.ask(Introduce("rollout", 4, "node-1", 99), "w")
        h.put(2)
        h.claim(1, "other", name="w")
        h.put(2)
        assert [event.task for event in reader.read()] == ["", "rollout", "other", "rollout"]
        assert [(lane.task, lane.rank, lane.host, lane.pid) for lane in reader.lanes.values()] == [
            ("", -1, "", 0), ("rollout", 4, "node-1", 99), ("other", 4, "node-1", 99)
        ]  # fmt: skip

    def test_a_lane_that_changes_gets_a_new_number(self, h, reader):
        h.ask(Introduce("rollout", 0))
        h.put(1)
        h.ask(Introduce("rollout", 1))
        h.ask(Introduce("rollout", 1))
        h.put(1)
        reader.read()
        assert [(lane.task, lane.rank) for lane in reader.lanes.values()] == [("rollout", 0), ("rollout", 1)]
        assert reader.raw[0]["lane"].tolist() == [1, 2]

    def test_an_introduction_is_kept_over_a_restart(self, h):
        h.ask(Introduce("rollout", 4, "node-1", 99))
        h.restart()
        reader = Reader(h)
        assert reader.read() == []
        assert next(iter(reader.lanes.values())).task == "rollout"
        h.put(1)
        assert [event.task for event in reader.read()] == ["rollout"]

    def test_an_introduction_is_forgotten_with_its_client(self, h, monkeypatch):
        monkeypatch.setattr("transfer_queue.core.context.MAX_DEPARTED", 1)
        for name in ("a", "b"):
            h.ask(Introduce(name), name)
            h.disconnect(name)
        assert list(h.state.introductions) == ["b"]

    def test_an_equal_introduction_changes_nothing(self, h):
        assert isinstance(h.ask(Introduce("rollout", 4)), Done)
        before = len(h.records)
        h.ask(Introduce("rollout", 4))
        assert [type(record).__name__ for record in h.records[before:]] == ["ReplySent"]


class TestGoneClients:
    """Which clients a reply names as gone."""

    def gone(self, h: Harness) -> dict[str, float]:
        return h.look(ReadTimeline()).departed  # type: ignore[no-any-return]

    def test_a_client_that_dies_is_gone_until_it_connects_again(self, h):
        h.put(4)
        h.dealt(1)
        h.now = 7.0
        h.disconnect("r")
        assert self.gone(h) == {"r": 7.0}
        h.connect("r")
        assert self.gone(h) == {}

    def test_a_client_is_not_gone_if_it_closed_or_took_part_in_nothing(self, h):
        h.put(4)
        h.dealt(1)
        h.ask(Leave(), "r")
        h.ask(Status(), "onlooker")
        for name in ("r", "onlooker"):
            h.disconnect(name)
        assert self.gone(h) == {}

    def test_a_client_whose_last_claim_was_answered_with_the_end_is_not_gone(self, h, reader):
        h.put(1)
        h.ask(Seal("p"))
        for name, rows in (("r", [0]), ("r", None), ("s", None)):
            assert h.dealt(1, name=name) == rows
        h.put(1, partition="q")
        assert h.dealt(1, partition="q", name="s") == [1]
        h.disconnect("r")
        h.disconnect("s")
        assert list(self.gone(h)) == ["s"]
        ends = [(event.client, event.flags) for event in reader.read() if event.kind == EventKind.GONE]
        assert ends == [("r", CLOSED), ("s", 0)]

    def test_the_oldest_clients_are_forgotten(self, h, monkeypatch):
        monkeypatch.setattr(recorder, "MAX_DEPARTED", 2)
        h.put(4)
        for name in ("a", "b", "c"):
            h.dealt(1, name=name)
            h.disconnect(name)
        assert list(self.gone(h)) == ["b", "c"]

    def test_a_client_that_only_names_its_process_has_no_lane(self, h, reader):
        h.ask(Introduce("", -1, "node-1", 17), "r")
        assert (reader.read(), reader.lanes) == ([], {})
        h.put(1)
        h.dealt(1)
        reader.read()
        lane = list(reader.lanes.values())[-1]
        assert (lane.client, lane.task, lane.host, lane.pid) == ("r", "t", "node-1", 17)


class TestReading:
    def test_waits_that_have_not_ended(self, h, reader):
        h.put(1, partition="z", name="another")  # and might clear its row
        h.now = 2.0
        h.claim(2, "t", ("x", "y"), wait=60.0, ahead=2)
        h.now = 3.0
        h.controller.state.capacity = 1
        h.send(h.publish(5, wait=20.0, partition="q"))
        reader.read()
        claim, put = reader.last.open
        assert (claim.since, claim.partition, claim.fields, claim.rows) == (2.0, "p", ["x", "y"], 2)
        assert claim.ahead
        assert not claim.holds
        assert (put.since, put.partition, put.fields, put.rows) == (3.0, "q", [], 5)
        assert put.holds
        assert [reader.lanes[each.lane].client for each in (claim, put)] == ["r", "w"]

    def test_only_the_longest_waits_are_reported(self, h, reader, monkeypatch):
        monkeypatch.setattr(recorder, "MAX_OPEN", 2)
        for at in range(4):
            h.now = float(at)
            h.claim(2, wait=60.0)
        reader.read()
        assert [wait.since for wait in reader.last.open] == [0.0, 1.0]

    def test_connected_clients(self, h, reader):
        h.put(1)
        h.claim(1)
        h.disconnect("r")
        reader.read()
        assert sorted(reader.last.connected) == ["onlooker", "unit-0", "w"]

    def test_the_first_request_begins_some_seconds_ago(self, h):
        for at in range(20):
            h.now = float(at)
            h.put(1)
        assert [event.time for event in Reader(h, seconds=3.0).read()] == [16.0, 17.0, 18.0, 19.0]
        assert len(Reader(h, seconds=1e18).read()) == 20

    def test_long_timelines_are_read_in_several_replies(self, h, monkeypatch):
        monkeypatch.setattr(recorder, "MAX_EVENTS", 3)
        monkeypatch.setattr(recorder, "MAX_NUMBERS", 2)
        for number in range(20):
            h.put(1, (f"f{number % 7}",), f"p{number % 5}", f"w{number % 6}")
        events = Reader(h).read()
        assert [(e.fields, e.partition, e.client) for e in events] == [
            ((f"f{n % 7}",), f"p{n % 5}", f"w{n % 6}") for n in range(20)
        ]

    def test_a_reader_of_another_boot_begins_again(self, h):
        h.put(1)
        reply = h.look(ReadTimeline("another controller", 1000, 60.0, 1000, 1000, 1000))
        assert reply.position == 1
        assert len(reply.events) == 64
        assert len(reply.lanes) == 1

    def test_a_position_beyond_the_end(self, h):
        h.put(1)
        reply = h.look(ReadTimeline("", (1 << 63) - 1))
        assert (reply.position, reply.end, reply.missed, reply.events) == (1, 1, 0, b"")

    def test_a_reader_that_is_too_slow_sees_how_many_events_it_missed(self):
        h = Harness(timeline_events=REQUESTS)
        reader = Reader(h)
        h.put(1)
        assert len(reader.read()) == 1
        for at in range(3 * REQUESTS + 7):
            h.now = float(at)
            h.put(1)
        assert [event.time for event in reader.read()] == [
            float(at) for at in range(2 * REQUESTS + 7, 3 * REQUESTS + 7)
        ]
        assert reader.missed == 2 * REQUESTS + 7

    def test_without_a_ring_only_waits_are_reported(self):
        h = Harness(timeline_events=0)
        h.put(1)
        h.ask(SetPolicyVersion("p", 1))
        h.claim(1)
        h.claim(2, wait=60.0)
        reader = Reader(h)
        assert reader.read() == []
        (wait,) = reader.last.open
        assert reader.lanes[wait.lane].task == "t"
        h.disconnect("r")
        assert reader.read() == []


class TestBounds:
    def test_made_up_names_do_not_fill_memory(self, monkeypatch):
        for name, most in (("MAX_LANES", 8), ("MAX_PARTITIONS", 6), ("MAX_FIELDS", 4)):
            monkeypatch.setattr(event_ring, name, most)
        h = Harness(timeline_events=64)
        timeline = h.controller.context.services[TimelineRecorder]
        h.put(1)
        for number in range(300):
            h.claim(1, f"task {number}", (f"f{number}",), f"p{number}", f"r{number % 40}", wait=0.5)
            h.tick(h.now + 1.0)
            timeline.flush()
            assert len(timeline.lanes.values) <= 9
            assert len(timeline.partitions.values) <= 7
            assert len(timeline.fields.values) <= 5
            assert len(timeline.lanes.current) <= 8
            assert len(timeline.lanes.numbers) <= 8
        reader = Reader(h, seconds=1e9)
        events = reader.read()
        assert len(events) == 64
        assert event_ring.OTHERS in {event.task for event in events}
        assert {event.task for event in events} - {event_ring.OTHERS}  # entries without events were replaced

    def test_long_names_are_cut(self, h, reader):
        h.claim(1, "t" * 10_000, ("x" * 10_000, "y"), "p" * 10_000, wait=1.0)
        h.ask(Introduce("w" * 1024, 0, "h" * 1024))
        h.put(1, [f"{n}" + "f" * 100 for n in range(200)], "q" * 10_000)
        h.tick(2.0)
        events = reader.read()
        for event in events:
            assert len(event.partition) == event_ring.MAX_TEXT + 3
            assert len(event.task) == event_ring.MAX_TEXT + 3
            assert sum(map(len, event.fields)) <= event_ring.MAX_NAMES_TEXT + 3
            assert event.fields[-1] == "..."

    def test_schemas_are_forgotten(self, h, monkeypatch):
        monkeypatch.setattr(recorder, "MAX_FIELDS", 4)
        for number in range(20):
            h.put(1, (f"f{number}",))
        timeline = h.controller.context.services[TimelineRecorder]
        timeline.flush()
        assert len(timeline._names) <= 4

    def test_extreme_numbers(self, h, reader):
        h.claim((1 << 63) - 1, wait=1.0, dp_rank=1 << 62)
        h.claim(1, "u", wait=1.0, dp_rank="zero")
        h.put(1, tags=[{"policy_version": -(1 << 63)}], partition="q")
        h.put(1, tags=[{"policy_version": float("inf")}], partition="q")
        h.ask(SetPolicyVersion("q", (1 << 63) - 1))
        h.claim(1, partition="q")
        h.claim(1, partition="q")
        h.tick(2.0)
        events = reader.read()
        assert {event.rows for event in events} == {1, (1 << 32) - 1}
        staleness = np.concatenate(reader.raw)["staleness"]
        assert staleness.max() == (1 << 31) - 1

    def test_clearing_does_not_disturb(self, h, reader):
        """A dealt batch with cleared rows is returned again; its last row has no block any more."""
        rows = h.put(2)
        h.ask(ClearRows("p", np.array(rows, "<i8").tobytes()))
        h.put(2)
        h.claim(2)
        assert kinds(reader.read()) == ["put", "clear", "put", "claim"]
