"""Which partitions the account of the page considers."""

from __future__ import annotations

from transfer_queue.live.reading.system_reader import unfinished_partitions
from transfer_queue.messages.reports.progress import PartitionProgress, TaskProgress


def partition(name: str, rows: int = 8, **consumed: int) -> PartitionProgress:
    tasks = [TaskProgress(task, count, 0, 0.0) for task, count in consumed.items()]
    return PartitionProgress(name, rows, 0, True, None, 0, [], tasks)


def names(*partitions: PartitionProgress) -> list[str]:
    return [each.name for each in unfinished_partitions(partitions)]


def test_a_partition_to_which_a_later_task_has_not_come_yet_is_not_finished() -> None:
    assert names(
        partition("done", reference=8, reward=8, train=8),
        partition("now", reference=8, reward=8, train=2),
        partition("next", reference=8, reward=3),
        partition("later", reference=8),
    ) == ["now", "next", "later"]


def test_the_tasks_of_another_pipeline_do_not_come() -> None:
    assert names(
        partition("done", reward=8, train=8), partition("step", reward=8), partition("evaluation", metrics=8),
        partition("other", metrics=7),
    ) == ["step", "other"]  # fmt: skip


def test_partitions_without_rows_or_tasks_are_finished() -> None:
    assert names(partition("empty", 0, train=0), partition("new")) == []


def test_tasks_of_one_pipeline_are_found_over_several_partitions() -> None:
    assert names(partition("a", one=8, two=8), partition("b", two=8, three=8), partition("c", one=8)) == ["a", "b", "c"]
