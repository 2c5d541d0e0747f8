"""What `tq status` prints: tables of fields and tasks with headings, and the views of readers."""

from __future__ import annotations

from transfer_queue.cli.status_table import Layout, TimelineFacts, format_table, status_as_json
from transfer_queue.messages.descriptors import MEMORY
from transfer_queue.messages.reports.overview import UnitViews, ViewsReply
from transfer_queue.messages.reports.progress import (
    FieldProgress,
    PartitionProgress,
    PolicyProgress,
    TaskProgress,
    UnitProgress,
)
from transfer_queue.messages.storage import ReadHold
from transfer_queue.messages.system import SystemStatus
from transfer_queue.timeline.account import Spread

UNITS = [UnitProgress(0, MEMORY, 8 << 20, 3 << 20), UnitProgress(1, MEMORY, 8 << 20, 0)]


def test_views_are_shown_by_client_and_process() -> None:
    status = SystemStatus([], {}, units=UNITS)
    assert format_table(status) == "no partitions"
    holds = [ReadHold("trainer", 42, 1.7e9, 3 << 20, 2), ReadHold("critic", 43, 1.6e9, 1 << 20, 1)]
    shown = ViewsReply([UnitViews(0, 2 << 20, holds)]).with_views(status)
    assert [unit.unit for unit in shown.units] == [0, 1]
    first, critic, trainer = format_table(shown).split("\n\n")[-1].splitlines()
    assert first == ("unit 0: readers have views of 4.0 MiB; 2.0 MiB were cleared, and become free when the views end")
    assert critic.startswith("  pid 43: 1 view, 1.0 MiB, the oldest since 2020-")
    assert trainer.startswith("  pid 42: 2 views, 3.0 MiB, the oldest since 2023-")
    known = TimelineFacts(clients={"trainer": "train rank 0, pid 42, node-1"})
    assert "  train rank 0, pid 42, node-1: 2 views" in format_table(shown, None, known)
    assert status_as_json(shown)["units"][0]["views"][0]["pid"] == 42


def partition() -> PartitionProgress:
    fields = [FieldProgress("prompt", 2048, "int64[4]", 2048), FieldProgress("reward", 7, "float32[]", 7, lost=1)]
    tasks = [TaskProgress("reward", 1024, 0, 0.0, claimed=16), TaskProgress("train", 0, 2, 35.2)]
    return PartitionProgress(
        "train_0", 2048, 0, False, None, 1 << 20, fields, tasks, policy=PolicyProgress(3, 2048, 4096, 2),
        passed={"train": {"poison": 1}},
    )  # fmt: skip


FACTS = TimelineFacts({"prompt": ["rollout"], "reward": ["reward"]}, {"reward": Spread(0.0, 0.5, 2.0)})


def test_fields_and_tasks_have_headings_and_staleness_is_a_number() -> None:
    assert format_table(SystemStatus([partition()], {}), None, FACTS).splitlines() == [
        "train_0: 2,048 samples, 1.0 MiB, policy version 3, staleness at most 2, 2,048 of 4,096 samples admitted",
        "  field         produced  type       put by",
        "  prompt  2,048 of 2,048  int64[4]   rollout",
        "  reward      7 of 2,048  float32[]  reward",
        "      1 value LOST with its storage unit; put it again",
        "  task          consumed  claimed  waiting  longest  staleness",
        "  reward  1,024 of 2,048       16                    mean 0.5, max 2 versions",
        "  train       0 of 2,048                 2   35.2 s",
        "      1 skipped (poison: delivered max_deliveries times, never acknowledged)",
    ]


def test_rates_are_a_column_and_lines_fit_a_narrow_terminal() -> None:
    speeds = {("train_0", "field", "prompt"): 1234.5, ("train_0", "task", "reward"): 0.0}
    lines = format_table(SystemStatus([partition()], {}), speeds, FACTS, Layout(80)).splitlines()
    assert "  prompt  2,048 of 2,048     1,234.5  int64[4]   rollout" in lines
    assert max(map(len, lines)) <= 80


def test_json_has_producers_and_staleness() -> None:
    (found,) = status_as_json(SystemStatus([partition()], {}), None, FACTS)["partitions"]
    assert [field["producers"] for field in found["fields"]] == [["rollout"], ["reward"]]
    assert [task["staleness"] for task in found["tasks"]] == [{"mean": 0.5, "max": 2.0}, None]


def test_names_are_shown_in_print() -> None:
    holds = [ReadHold("evil\x1b[2J\n", 42, 1.7e9, 8, 1)]
    shown = format_table(ViewsReply([UnitViews(1, 0, holds)]).with_views(SystemStatus([], {}, units=UNITS)))
    assert "\x1b" not in shown
    assert "unit 1: readers have views of 8 B" in shown
