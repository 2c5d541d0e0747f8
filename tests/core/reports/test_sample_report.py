"""The report about one sample, asked page by page."""

from __future__ import annotations

import pytest
from harness import OBJECT, Harness, column, tensor
from report_reader import describe

from transfer_queue.core.reports import sample_report
from transfer_queue.messages.claims import RankGone
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.messages.puts import ClearKeys, Drop
from transfer_queue.messages.reports.samples import DescribeSample, FindStuck
from transfer_queue.messages.reports.timeline import Introduce


class TestFields:
    def test_shapes_and_bytes_of_each_layout(self, h: Harness) -> None:
        shapes = [(2,), (5,)]
        rows = h.put(2, {"a": tensor("float32", (4, 2)), "b": tensor("int64", shapes), "c": OBJECT,
                         "d": tensor("bfloat16", [(3,), (2, 2)]), "e": tensor("bool", ())})  # fmt: skip
        found = {field.name: (field.dtype, field.shape, field.nbytes) for field in describe(h, rows[1]).fields}
        assert found == {
            "a": ("float32", [4, 2], 32), "b": ("int64", [5], 40), "c": ("object", None, 9),
            "d": ("bfloat16", [2, 2], 8), "e": ("bool", [], 1),
        }  # fmt: skip

    def test_fields_come_in_pages(self, h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sample_report, "MAX_FIELDS", 3)
        names = [f"f{number}" for number in range(8)]
        rows = h.put(1, names)
        h.put(1, ["other"])
        report = describe(h, rows[0])
        assert [field.name for field in report.fields] == names
        assert report.missing == ["other"]
        assert report.next_field is None

    def test_any_number_may_be_asked_for(self, h: Harness) -> None:
        rows = h.put(1)
        largest = (1 << 63) - 1
        for request in (
            DescribeSample("p", rows[0], field=largest), DescribeSample("p", rows[0], before=largest),
            DescribeSample("p", -largest), DescribeSample("p", largest), DescribeSample("p"),
            FindStuck(1e9, ["p"], start=largest, most=largest), FindStuck(-1e9, ["q", "p"], made=largest),
        ):  # fmt: skip
            h.look(request)

    def test_of_very_many_fields_only_equal_shapes_are_known(self, h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sample_report, "MAX_SCHEMA", 1)
        rows = h.put(2, {"a": tensor("float32", (4,)), "b": tensor("int64", [(1,), (2,)])})
        assert [(field.shape, field.nbytes) for field in describe(h, rows[0]).fields] == [([4], 16), (None, None)]

    def test_a_value_has_the_client_that_put_it(self, h: Harness) -> None:
        h.ask(Introduce("rollout", 3), "w")
        h.now = 5.0
        rows = h.put(2, ("x",))
        h.now = 8.0
        h.put(1, ("y",), name="v", rows=rows[:1])
        x, y = describe(h, rows[0]).fields
        assert (x.client, x.task, x.rank, x.time) == ("w", "rollout", 3, 5.0)
        assert (y.client, y.task, y.rank, y.time) == ("v", "", -1, 8.0)

    def test_without_a_timeline_the_client_is_still_known(self) -> None:
        h = Harness(timeline_events=0)
        rows = h.put(1)
        report = describe(h, rows[0])
        assert [(field.client, field.time) for field in report.fields] == [("w", None)]
        assert (report.history, report.complete) == ([], False)

    def test_after_a_restart_older_events_are_not_kept(self, h: Harness) -> None:
        rows = h.put(1)
        h.restart()
        h.put(1, ("y",), rows=rows)
        report = describe(h, rows[0])
        assert [event.fields for event in report.history] == [["y"]]
        assert not report.complete
        assert [field.client for field in report.fields] == ["w", "w"]


class TestTasks:
    def test_each_state(self, h: Harness) -> None:
        rows = h.put(2, ("x", "y"))
        h.claim(1, "consumes")
        reply = h.lease(1, "claims", lease=60.0)
        h.claim(9, "waits", ("x", "z"), wait=50.0)
        h.claim(9, "takes", ("x",), wait=50.0)
        tasks = {task.name: task for task in describe(h, rows[0]).tasks}
        assert {name: task.state for name, task in tasks.items()} == {
            "consumes": "consumed", "claims": "claimed", "waits": "waiting", "takes": "ready",
        }  # fmt: skip
        assert tasks["waits"].lacks == ["z"]
        assert (tasks["claims"].client, tasks["claims"].leased) == ("r", True)
        h.nack(reply)
        again = {task.name: task for task in describe(h, rows[0]).tasks}
        assert (again["claims"].state, again["claims"].deliveries) == ("ready", 1)

    def test_a_skipped_sample_says_why(self, h: Harness) -> None:
        h.create(max_deliveries=1)
        rows = h.put(1)
        h.nack(h.lease(1, "t"))
        (task,) = describe(h, rows[0]).tasks
        assert (task.state, task.reason) == ("skipped", "poison")


class TestAbsent:
    def test_a_cleared_key_has_its_history(self, h: Harness) -> None:
        h.put(1, keys=["a"])
        h.ask(ClearKeys("p", ["a"]), "c")
        report = describe(h, key="a")
        assert (report.state, report.index) == ("cleared", 0)
        assert [(event.kind, event.client) for event in report.history] == [("put", "w"), ("cleared", "c")]

    def test_a_dropped_sample_says_why(self, h: Harness) -> None:
        rows = h.put(1)
        h.ask(Drop("p", "too long", column(rows)), "c")
        report = describe(h, rows[0])
        assert report.state == "cleared"
        assert "it was dropped: too long" in report.explanation

    def test_a_sample_of_a_dropped_partition(self, h: Harness) -> None:
        rows = h.put(1)
        h.ask(ClearPartition("p"), "c")
        h.put(1)
        h.ask(ClearPartition("p"), "d")
        report = describe(h, rows[0])
        assert report.state == "cleared"
        assert [(event.kind, event.client) for event in report.history] == [("put", "w"), ("partition cleared", "c")]

    def test_rows_that_free_when_has_cleared_name_the_task(self, h: Harness) -> None:
        h.create(free_when=["t"])
        rows = h.put(1)
        h.claim(1)
        h.put(1)
        h.claim(1)
        assert [(event.kind, event.task) for event in describe(h, rows[0]).history] == [
            ("put", ""), ("claimed", "t"), ("cleared", "t"),
        ]  # fmt: skip

    def test_a_key_that_never_existed(self, h: Harness) -> None:
        h.put(2, keys=["prompt-1", "prompt-2"])
        report = describe(h, key="promt-2")
        assert (report.state, report.index, report.history) == ("unknown", -1, [])
        assert "Did you mean 'prompt-2'?" in report.explanation

    def test_a_partition_that_does_not_exist(self, h: Harness) -> None:
        report = describe(h, key="a", partition="q")
        assert report.state == "unknown"
        assert "Partition 'q' does not exist" in report.explanation


class TestHistory:
    def test_it_has_the_newest_32_events(self, h: Harness) -> None:
        rows = h.put(1)
        for number in range(40):
            h.now = float(number)
            h.put(1, None, rows=rows, tags=[{"number": number}])
        report = describe(h, rows[0])
        assert [event.time for event in report.history] == [float(number) for number in range(8, 40)]
        assert not report.complete

    def test_the_rows_of_a_rank_that_is_gone_are_returned(self, h: Harness) -> None:
        rows = h.put(1)
        h.lease(1, "t", lease=5.0)
        h.tick(10.0)
        assert [event.kind for event in describe(h, rows[0]).history] == ["put", "claimed", "returned"]
        h.ask(RankGone("p", "t", 0))

    def test_a_group_names_its_members(self, h: Harness) -> None:
        h.create(group_size=3)
        rows = h.put(2, ("x", "y"), groups=["g", "g"])
        h.put(1, ("x",), groups=["other"])
        group = describe(h, rows[0]).group
        assert group is not None
        assert (group.key, group.size, group.count) == ("g", 3, 2)
        assert [(member.index, member.lacks) for member in group.members] == [(rows[0], 0), (rows[1], 0)]
