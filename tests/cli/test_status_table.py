"""What `tq status` prints about the views of readers."""

from __future__ import annotations

from transfer_queue.cli.status_table import format_table, status_as_json
from transfer_queue.messages.descriptors import MEMORY
from transfer_queue.messages.reports.overview import UnitViews, ViewsReply
from transfer_queue.messages.reports.progress import UnitProgress
from transfer_queue.messages.storage import ReadHold
from transfer_queue.messages.system import SystemStatus

UNITS = [UnitProgress(0, MEMORY, 8 << 20, 3 << 20), UnitProgress(1, MEMORY, 8 << 20, 0)]


def test_views_are_shown_by_client_and_process() -> None:
    status = SystemStatus([], {}, units=UNITS)
    assert format_table(status) == "no partitions"
    holds = [ReadHold("trainer", 42, 1.7e9, 3 << 20, 2), ReadHold("critic", 43, 1.6e9, 1 << 20, 1)]
    shown = ViewsReply([UnitViews(0, 2 << 20, holds)]).with_views(status)
    assert [unit.unit for unit in shown.units] == [0, 1]
    first, critic, trainer = format_table(shown).split("\n\n")[-1].splitlines()
    assert first == ("unit 0: readers have views of 4.0 MiB; 2.0 MiB were cleared, and become free when the views end")
    assert critic.startswith("  client critic, process 43: 1 view, 1.0 MiB, the oldest since 2020-")
    assert trainer.startswith("  client trainer, process 42: 2 views, 3.0 MiB, the oldest since 2023-")
    assert status_as_json(shown)["units"][0]["views"][0]["pid"] == 42


def test_names_are_shown_in_print() -> None:
    holds = [ReadHold("evil\x1b[2J\n", 42, 1.7e9, 8, 1)]
    shown = format_table(ViewsReply([UnitViews(1, 0, holds)]).with_views(SystemStatus([], {}, units=UNITS)))
    assert "\x1b" not in shown
    assert "unit 1: readers have views of 8 B" in shown
