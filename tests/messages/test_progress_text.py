"""What a status shows in a notebook and as text, with names that are hostile and partitions that are many."""

from __future__ import annotations

import pytest

from html_checks import HOSTILE, check_html
from transfer_queue.messages.descriptors import DISK, MEMORY
from transfer_queue.messages.reports.progress import (
    FieldProgress,
    PartitionProgress,
    PolicyProgress,
    TaskProgress,
    UnitProgress,
)
from transfer_queue.messages.reports.progress_text import notes_of
from transfer_queue.messages.reports.timeline import Verdict
from transfer_queue.messages.system import SystemStatus


def partition(name: str, fields: int = 2, tasks: int = 1) -> PartitionProgress:
    return PartitionProgress(
        name, 1024, 0, True, 8, 3 << 20, [FieldProgress(f"f{n}", 512, "int64[3]") for n in range(fields)],
        [TaskProgress(f"t{n}", 256, 2, 63.25, claimed=12) for n in range(tasks)],
    )  # fmt: skip


def test_the_repr_is_a_line() -> None:
    assert repr(SystemStatus([], {})) == "SystemStatus(0 partitions, 0 samples, 0 B, partitions [])"
    status = SystemStatus([partition("train_0"), partition("train_1")], {}, trouble="the disk is full")
    assert repr(status) == (
        "SystemStatus(2 partitions, 2,048 samples, 6.0 MiB, partitions ['train_0', 'train_1'], "
        "trouble: 'the disk is full')"
    )
    assert len(repr(SystemStatus([partition("x" * 1000)] * 1000, {}, trouble="y" * 10_000))) < 400


def test_the_verdict_comes_first() -> None:
    evil = "reward <b>is</b> the slowest stage\n" + "x" * 1000
    status = SystemStatus([partition("train_0")], {}, verdict=Verdict(evil, "slow"))
    assert repr(status).startswith("SystemStatus('reward <b>is</b> the slowest stage\\nx")
    assert len(repr(status)) < 400
    text = check_html(status._repr_html_()).text
    assert text.startswith("SystemStatus 1 partition, 1,024 samples, 3.0 MiB'reward <b>is</b> the slowest stage\\nx")
    assert text.index("train_0") < 900


def test_a_notebook_shows_partitions_fields_tasks_and_units() -> None:
    units = [UnitProgress(0, MEMORY, 25 << 30, 8 << 30), UnitProgress(1, DISK, 0, 5, True)]
    text = check_html(SystemStatus([partition("train_0")], {}, units=units)._repr_html_()).text
    assert text == (
        "SystemStatus 1 partition, 1,024 samples, 3.0 MiB"
        "train_0 1,024 samples, 3.0 MiB, groups of 8, sealed"
        "fieldf0512 / 1,024int64[3]fieldf1512 / 1,024int64[3]"
        "taskt0256 / 1,02412 claimed, not acknowledged yet, 2 claims waiting, the longest 63.2 s"
        "storage unitvaluesleasedcapacity0in memory8.0 GiB25.0 GiB1on disk5 Bbeing drained"
    )


def test_a_partition_with_a_limit_says_how_full_it_is() -> None:
    full = PartitionProgress("p", 3, 0, False, None, 0, [], [], waiting_puts=1, max_rows=2, open_rows=2)
    assert notes_of(full) == ["3 samples", "0 B", "full, 2 of at most 2 rows (max_rows)", "1 put waits for space"]
    full = PartitionProgress("p", 3, 0, False, None, 0, [], [], waiting_puts=2, max_rows=2, open_rows=0)
    assert notes_of(full) == ["3 samples", "0 B", "0 of at most 2 rows (max_rows)", "2 puts wait for space"]


def test_what_is_wrong_is_shown() -> None:
    lost = PartitionProgress(
        "p", 5, 0, False, None, 0, [FieldProgress("x", 5, "int64[]", 5, 3)], [TaskProgress("t", 0, 0, 0.0)],
        passed={"t": {"poison": 1}},
    )  # fmt: skip
    text = check_html(SystemStatus([lost], {}, trouble="the disk is full")._repr_html_()).text
    assert "Changes are blocked: the disk is full" in text
    assert "3 LOST with their storage unit; put them again" in text
    assert "1 sample skipped" in text


def test_many_partitions_fields_and_units_are_bounded() -> None:
    many = SystemStatus(
        [partition(f"train_{n}", 100, 100) for n in range(1000)], {},
        units=[UnitProgress(n, MEMORY, 1 << 30, 0) for n in range(64)],
    )  # fmt: skip
    page = many._repr_html_()
    text = check_html(page).text
    assert page.count("<tr") < 60
    assert len(page) < 60_000
    assert "… 92 more fields" in text
    assert "… 92 more tasks" in text
    assert "… 998 more partitions" in text
    assert "… 56 more storage units" in text


@pytest.mark.parametrize("evil", HOSTILE)
def test_hostile_names_are_text(evil: str) -> None:
    progress = PartitionProgress(
        evil, 1, 0, False, None, 1, [FieldProgress(evil, 1, evil)], [TaskProgress(evil, 1, 1, 1.0)],
        dropped={evil: 1}, wanted={evil: (1, 2)}, stored={evil: 1, MEMORY: 2}, policy=PolicyProgress(1, 2, 3),
    )  # fmt: skip
    status = SystemStatus([progress], {}, trouble=evil, units=[UnitProgress(0, evil, 1, 1)])
    check_html(status._repr_html_())
    assert len(repr(status)) < 400
