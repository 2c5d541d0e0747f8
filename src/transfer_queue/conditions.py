"""The condition under which a partition frees samples by itself: `free_when=consumed_by["reward", "update"]`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ConsumedBy:
    """A sample is freed as soon as each of these tasks has consumed and finished it.

    Example:
        >>> tq.consumed_by["reward", "update"].tasks
        ('reward', 'update')
    """

    tasks: tuple[str, ...]
    """The names of the tasks."""


class _ConsumedBy:
    """The type of `consumed_by`: makes a condition from `consumed_by["a", "b"]` or `consumed_by("a", "b")`."""

    def __getitem__(self, tasks: str | tuple[str, ...]) -> ConsumedBy:
        return ConsumedBy(tasks if isinstance(tasks, tuple) else (tasks,))

    def __call__(self, *tasks: str) -> ConsumedBy:
        return ConsumedBy(tasks)


consumed_by = _ConsumedBy()
"""Makes the condition for `create_partition(free_when=consumed_by["reward", "update"])`."""
