"""The texts about samples and systems: widths, colors, hostile names, values."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from transfer_queue.cli.samples.report_text import ShownValue, lines_of, shown, text_of_numbers
from transfer_queue.cli.samples.stuck import KnownWorkers
from transfer_queue.cli.samples.stuck import lines_of as stuck_lines
from transfer_queue.cli.shell.terminal import Styles, clock_text, columns_text, duration_text, plain
from transfer_queue.cli.systems import ListedSystem
from transfer_queue.cli.systems import lines_of as system_lines
from transfer_queue.messages.reports.samples import (
    SampleEvent,
    SampleField,
    SampleGroup,
    SampleMember,
    SampleReport,
    SampleTask,
    StuckReport,
    StuckSample,
)

HOSTILE = "x\x1b[2J\n\u202ey"
PLAIN, COLORED = Styles(False), Styles(True)


def report(**more: object) -> SampleReport:
    values: dict[str, object] = {
        "partition": "train_0", "state": "live", "now": 1000.0, "index": 7, "key": "a_0",
        "tags": {"length": 3},
        "group": SampleGroup("g", 2, [SampleMember(7, "a_0", 0), SampleMember(8, None, 2)], 2),
        "fields": [
            SampleField(
                "prompt", "tensor", "uint8", [5], 5, 0, "memory", 3, -1, "abcdef0123", "rollout", 2, 990.0, "node-1", 17
            ),
            SampleField("meta", "object", "object", None, None, 1, "disk", 4, 0),
        ],
        "missing": ["reward"],
        "tasks": [
            SampleTask("train", "waiting", ["reward"]),
            SampleTask("reward", "claimed", [], "abcdef0123", 1, 5, True, 995.0, 2, "", "node-2", 21),
            SampleTask("eval", "skipped", reason="poison"),
        ],
        "history": [
            SampleEvent(990.0, "put", "abcdef0123", "rollout", 2, ["prompt"], 4, 3, "node-1", 17),
            SampleEvent(995.0, "claimed", "abcdef0123", "reward", 1, ["prompt"], 1, 0, "node-2", 21),
        ],
        "explanation": "Sample 'a_0' is missing the field 'reward'.",
        **more,
    }  # fmt: skip
    return SampleReport(**values)  # type: ignore[arg-type]


class TestReport:
    def test_decoded_token_ids_have_a_line_below_them(self) -> None:
        value = ShownValue(first=[2, 3], decoded="what\n\x1b[31m\u202e" + "x" * 400)
        lines = lines_of(report(), {"prompt": value}, 80, PLAIN)
        at = lines.index("      2, 3")
        assert lines[at + 1].startswith("      text: 'what\\n\\x1b[31m\\u202exxx")
        assert len(lines[at + 1]) <= 80

    def test_at_160_columns(self) -> None:
        lines = lines_of(report(), {"prompt": ShownValue("hello")}, 160, PLAIN)
        text = "\n".join(lines)
        assert lines[0] == "sample 'a_0' of partition train_0, index 7: live"
        assert "g: 2 of 2 samples exist: a_0 (this one), 8 lacks 2 fields" in text
        assert "field   type      size  stored            put by                          ago" in text
        assert "prompt  uint8[5]   5 B  unit 0 in memory  rollout rank 2, pid 17, node-1  10 s" in text
        assert "      'hello'" in lines
        assert "unit 1+0 on disk" in text
        assert "missing: reward" in text
        assert "task    state    details" in text
        assert "train   waiting  lacks reward" in text
        claimed = "claimed  by rank 1, pid 21, node-2, 5 s ago, under a lease, batch 5, 2 deliveries not acknowledged"
        assert claimed in text
        assert "10 s  put      rollout rank 2, pid 17, node-1  prompt (with 3 other samples)" in text
        assert "abcdef" not in text
        assert "history, the newest last; older events are not kept" in lines

    @pytest.mark.parametrize("width", [40, 80])
    def test_lines_fit(self, width: int) -> None:
        many = [SampleField(f"field_{n}" * 9, "tensor", "float32", [1] * n, 9, 0, "memory", n) for n in range(20)]
        values = {many[0].name: ShownValue("long " * 99)}
        wide = report(fields=many, missing=[f"m{n}" * 9 for n in range(40)], explanation="word " * 99)
        lines = lines_of(wide, values, width, PLAIN)
        assert max(map(len, lines[1:])) <= width

    def test_names_cannot_move_the_cursor(self) -> None:
        field = SampleField(HOSTILE, "tensor", "uint8", [5], 5, 0, "memory", 3, -1, HOSTILE, HOSTILE)
        event = SampleEvent(1.0, "cleared", HOSTILE, HOSTILE, -1, [HOSTILE])
        hostile = report(
            partition=HOSTILE, key=HOSTILE, tags={HOSTILE: HOSTILE}, fields=[field], missing=[HOSTILE],
            tasks=[SampleTask(HOSTILE, "skipped", reason=HOSTILE)], history=[event], explanation=HOSTILE,
            group=SampleGroup(HOSTILE, 1, [SampleMember(1, HOSTILE, 0)], 1),
        )  # fmt: skip
        values = {HOSTILE: ShownValue(HOSTILE), "": ShownValue(error=HOSTILE)}
        for line in lines_of(hostile, values, 160, PLAIN):
            assert line.isprintable()

    def test_a_cleared_sample_says_when_and_by_whom(self) -> None:
        event = SampleEvent(995.0, "cleared", "abcdef0123", "train", 1, host="node-1", pid=9)
        cleared = report(state="cleared", fields=[], missing=[], tasks=[], group=None, tags={}, history=[event])
        first = lines_of(cleared, {}, 160, PLAIN)[0]
        assert first.endswith(f"cleared at {clock_text(995.0, 1000.0)} by train rank 1, pid 9, node-1")

    @pytest.mark.parametrize(
        ("events", "how"),
        [
            ([SampleEvent(990.0, "put", "w", "", -1)], " with its partition"),
            ([], ", at the latest with its partition"),
        ],
    )
    def test_a_sample_that_was_cleared_with_its_partition(self, events: list[SampleEvent], how: str) -> None:
        end = SampleEvent(995.0, "partition cleared", "abcdef0123", "train", 1, host="node-1", pid=9)
        cleared = report(
            state="cleared", fields=[], missing=[], tasks=[], group=None, tags={}, history=[*events, end],
            complete=bool(events),
        )  # fmt: skip
        first = lines_of(cleared, {}, 160, PLAIN)[0]
        assert first.endswith(f"cleared{how} at {clock_text(995.0, 1000.0)} by train rank 1, pid 9, node-1")

    def test_colors(self) -> None:
        assert "\x1b[32mlive\x1b[0m" in lines_of(report(), {}, 160, COLORED)[0]
        assert not any("\x1b" in line for line in lines_of(report(), {}, 160, PLAIN))


class TestValues:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (torch.tensor(list(b"What is 2 + 2?"), dtype=torch.uint8), "What is 2 + 2?"),
            (torch.tensor([*"Grüße".encode(), 0, 0]), "Grüße"),
            ("a str", "a str"),
            (b"bytes", "bytes"),
            (torch.tensor([104, 105, 40_000]), None),
            (torch.tensor([1, 2, 3]), None),
            (torch.tensor([65.0, 66.0]), None),
            (torch.zeros(3, dtype=torch.uint8), None),
            (torch.tensor([255, 254, 65, 66, 67, 68, 69], dtype=torch.uint8), None),
        ],
    )  # fmt: skip
    def test_text_is_decoded(self, value: object, text: str | None) -> None:
        assert shown(value).text == text

    def test_a_long_text_may_end_within_a_character(self) -> None:
        assert text_of_numbers(list("ab€".encode()[:4])) == "ab"

    def test_numbers(self) -> None:
        value = shown(torch.arange(20).reshape(4, 5))
        assert (value.first, value.more) == ([0, 1, 2, 3, 4, 5, 6, 7], 12)
        assert shown(torch.zeros(0)) == ShownValue()

    def test_objects(self) -> None:
        assert shown({"a": 1}).other == "dict: {'a': 1}"
        assert shown(np.float32(2.5)).other.startswith("float32: ")


def stuck_sample(index: int, key: str | None = None, **more: object) -> StuckSample:
    values: dict[str, object] = {
        "partition": "p", "index": index, "key": key, "prompt": "", "time": 10.0, "client": "abcdef0123",
        "task": "rollout", "rank": 2, "missing": [], "tasks": [], "host": "node-1", "pid": 17, **more,
    }  # fmt: skip
    return StuckSample(**values)  # type: ignore[arg-type]


class TestStuckAndSystems:
    WORKERS = KnownWorkers({"reward": ["reward"], "prompt": ["rollout"]}, frozenset({"dead"}))

    def text(self, *some: StuckSample, total: int | None = None, width: int = 160) -> str:
        count = len(some) if total is None else total
        found = StuckReport(100.0, 60.0, count, {"p": count}, list(some))
        return "\n".join(stuck_lines(found, width, PLAIN, self.WORKERS))

    def test_samples_with_one_cause_are_one_line_of_ranges(self) -> None:
        waits = [SampleTask("reward", "ready"), SampleTask("train", "waiting", ["reward"])]
        some = [stuck_sample(index, missing=["reward"], tasks=waits) for index in [*range(1024, 2048), 7, 8, 9, 4000]]
        lines = self.text(*some).splitlines()
        assert lines[0] == "1,028 samples are unchanged for 1 min or longer and not finished: 1,028 in p"
        assert lines[2:5] == [
            "p",
            "  samples                  count  unchanged  lacks   last changed by                 why",
            "  7-9, 1,024-2,047, 4,000  1,028  1 min      reward  rollout rank 2, pid 17, node-1  "
            "task reward puts reward, and has not claimed them",
        ]  # fmt: skip

    def test_the_lacking_field_and_its_producer_are_named(self) -> None:
        held = SampleTask("reward", "consumed", client="dead", rank=1, host="node-2", pid=21)
        text = self.text(
            stuck_sample(1, "a_0", missing=["reward"], consumed=[held]),
            stuck_sample(2, missing=["reward"], consumed=[msgspec.structs.replace(held, client="alive")]),
            stuck_sample(3, tasks=[SampleTask("train", "waiting", ["score"])], time=None),
            stuck_sample(4, tasks=[SampleTask("train", "claimed", [], "c", 0, host="node-3", pid=5)]),
            stuck_sample(5, tasks=[SampleTask("eval", "ready")]),
            stuck_sample(6, missing=["score"]),
            total=7,
            width=500,
        )
        for words in (
            "1 (a_0)",
            "reward rank 1, pid 21, node-2, which is gone, claimed it and has not put reward",
            "reward rank 1, pid 21, node-2 claimed it and has not put reward",
            "no task has put score",
            "the timeline does not show which task puts score",
            "since start",
            "claimed by train rank 0, pid 5, node-3, not acknowledged",
            "not claimed by eval, although ready",
            "1 more is not shown; --limit shows more",
            "one sample with its history: tq show p a_0",
        ):
            assert words in text
        assert "abcdef" not in text

    def test_lines_fit_a_narrow_terminal(self) -> None:
        held = SampleTask("reward", "consumed", client="dead", rank=1, host="node-2", pid=21)
        text = self.text(stuck_sample(1, missing=["reward"], consumed=[held]), width=80)
        assert max(map(len, text.splitlines())) <= 80
        assert "reward rank 1, pid 21, node-2, which is\n" in text

    def test_none_is_stuck(self) -> None:
        lines = list(stuck_lines(StuckReport(100.0, 60.0, 0, {}, []), 80, PLAIN))
        assert lines == ["no sample that is not finished has been unchanged for 1 min or longer"]

    def test_systems(self) -> None:
        found = [
            ListedSystem(
                "a", "running", "/run/a", "", "local", "SimpleStorage", 2, 12, 40.0, "python train.py", False, 1 << 20,
                partitions=3, rows=1200,
            ),
            ListedSystem("b", "crashed", "/run/b", "the last one crashed; its logs are in /run/b/logs"),
        ]  # fmt: skip
        lines = system_lines(found, 100.0, 160, PLAIN)
        assert lines[0] == "a  running  for 1 min  pid 12  1.0 MiB  3 partitions, 1,200 samples"
        assert lines[1] == "    local, SimpleStorage, 2 units; of python train.py"
        assert lines[-1] == "    the last one crashed; its logs are in /run/b/logs"


def test_durations() -> None:
    found = [duration_text(seconds) for seconds in (0, 0.2, 12, 60, 185, 3600, 90_061)]
    assert found == ["0 s", "200 ms", "12 s", "1 min", "3 min 5 s", "1 h", "1 d 1 h"]


def test_columns_are_aligned() -> None:
    assert columns_text([("a", "1"), ("bbb", "22")], right=frozenset({1})) == ["  a     1", "  bbb  22"]
    assert columns_text([]) == []


def test_json_has_no_nan() -> None:
    assert plain([float("nan"), {"a": (1.5, None)}]) == [None, {"a": [1.5, None]}]


def test_no_color_and_dumb_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert Styles()("a", "red") == "\x1b[31ma\x1b[0m"
    monkeypatch.setenv("TERM", "dumb")
    assert Styles()("a", "red") == "a"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert Styles()("a", "red") == "a"
