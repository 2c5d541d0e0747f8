"""When a partition frees its rows by itself: `create_partition(..., free_when=consumed_by["reward", "update"])`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ConsumedBy:
    """A sample is freed when each of these tasks has consumed it and is through with it."""

    tasks: tuple[str, ...]


class _ConsumedBy:
    """`consumed_by["a", "b"]`, or `consumed_by("a", "b")`."""

    def __getitem__(self, tasks: str | tuple[str, ...]) -> ConsumedBy:
        return ConsumedBy(tasks if isinstance(tasks, tuple) else (tasks,))

    def __call__(self, *tasks: str) -> ConsumedBy:
        return ConsumedBy(tasks)


consumed_by = _ConsumedBy()
