"""The texts about samples and systems: widths, colors, hostile names, values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from transfer_queue.cli.samples.first_values import ShownValue, shown, text_of_numbers
from transfer_queue.cli.samples.report_text import lines_of, who
from transfer_queue.cli.samples.stuck import lines_of as stuck_lines
from transfer_queue.cli.shell.json_output import plain
from transfer_queue.cli.shell.terminal import Styles, clock_text, columns_text, duration_text
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
            SampleField("prompt", "tensor", "uint8", [5], 5, 0, "memory", 3, -1, "abcdef0123", "rollout", 2, 990.0),
            SampleField("meta", "object", "object", None, None, 1, "disk", 4, 0),
        ],
        "missing": ["reward"],
        "tasks": [
            SampleTask("train", "waiting", ["reward"]),
            SampleTask("reward", "claimed", [], "abcdef0123", 1, 5, True, 995.0, 2),
            SampleTask("eval", "skipped", reason="poison"),
        ],
        "history": [
            SampleEvent(990.0, "put", "abcdef0123", "rollout", 2, ["prompt"], 4),
            SampleEvent(995.0, "claimed", "abcdef0123", "reward", 1, ["prompt"], 1),
        ],
        "explanation": "Sample 'a_0' is missing the fields ['reward'].",
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
        assert "prompt  uint8[5]  5 B  unit 0 in memory  rollout/2 abcdef01  10 s ago" in text
        assert "      'hello'" in lines
        assert "unit 1+0 on disk" in text
        assert "missing: reward" in text
        assert "train   waiting  lacks reward" in text
        assert "claimed  by rank 1 abcdef01, 5 s ago, under a lease, batch 5, 2 deliveries not acknowledged" in text
        assert "10 s ago  put      rollout/2 abcdef01  prompt (with 3 others)" in text
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
        event = SampleEvent(995.0, "cleared", "abcdef0123", "train", 1)
        cleared = report(state="cleared", fields=[], missing=[], tasks=[], group=None, tags={}, history=[event])
        first = lines_of(cleared, {}, 160, PLAIN)[0]
        assert first.endswith(f"cleared at {clock_text(995.0, 1000.0)} by train/1 abcdef01")

    @pytest.mark.parametrize(
        ("events", "how"),
        [
            ([SampleEvent(990.0, "put", "w", "", -1)], " with its partition"),
            ([], ", at the latest with its partition"),
        ],
    )
    def test_a_sample_that_was_cleared_with_its_partition(self, events: list[SampleEvent], how: str) -> None:
        end = SampleEvent(995.0, "partition cleared", "abcdef0123", "train", 1)
        cleared = report(
            state="cleared", fields=[], missing=[], tasks=[], group=None, tags={}, history=[*events, end],
            complete=bool(events),
        )  # fmt: skip
        first = lines_of(cleared, {}, 160, PLAIN)[0]
        assert first.endswith(f"cleared{how} at {clock_text(995.0, 1000.0)} by train/1 abcdef01")

    def test_colors(self) -> None:
        assert "\x1b[32mlive\x1b[0m" in lines_of(report(), {}, 160, COLORED)[0]
        assert not any("\x1b" in line for line in lines_of(report(), {}, 160, PLAIN))

    def test_who(self) -> None:
        assert who("", -1, "") == "the controller"
        assert who("train", -1, "0123456789") == "train 01234567"
        assert who("", 3, "0123456789") == "rank 3 01234567"


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


class TestStuckAndSystems:
    def test_stuck(self) -> None:
        some = [
            StuckSample("p", 1, "a_0", "a", 10.0, "abcdef0123", "rollout", 2, ["reward"], []),
            StuckSample(
                "p", 2, None, "", None, "", "", -1, [], [SampleTask("train", "claimed"), SampleTask("x", "ready")]
            ),
        ]
        text = "\n".join(stuck_lines(StuckReport(100.0, 60.0, 5, {"p": 5}, some), 160, PLAIN))
        assert text.splitlines()[0] == "5 samples are unchanged for 1 min or longer and not finished: 5 in p"
        assert "p, prompt a\n  a_0  1 min 30 s  by rollout/2 abcdef01  lacks reward" in text
        assert "since the start" in text
        assert "claimed by train, not acknowledged; not consumed by x" in text
        assert text.endswith("3 more are not shown; --limit shows more")

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
