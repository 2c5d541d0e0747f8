"""Errors and warnings about partitions that do not exist; their sentences suggest similar names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from transfer_queue.errors import UnknownPartitionError
from transfer_queue.names import nearest

PartitionType = TypeVar("PartitionType")


def require_partition(
    partitions: Mapping[str, PartitionType],
    name: str,
    advice: str = "Pass the name of a partition that exists, or create this one first with create_partition",
) -> PartitionType:
    """Return the partition with this name.

    Args:
        partitions: The partitions by name.
        name: The name to look up.
        advice: The end of the message of the error, which says what to do.

    Raises:
        UnknownPartitionError: There is no such partition. The message suggests similar names.
    """
    partition = partitions.get(name)
    if partition is None:
        raise UnknownPartitionError(f"{no_partition_text(name, partitions)}. {advice}")
    return partition


def no_partition_text(name: str, partitions: Iterable[str]) -> str:
    """Return "partition 'x' does not exist", with the nearest names that exist, otherwise the first ones."""
    return f"partition {name!r} does not exist ({suggestion(name, partitions)})"


def unknown_partition_warning(partitions: Collection[str], name: str, effect: str) -> str | None:
    """Return a warning about a partition that does not exist; None if it exists. effect: what the request then does."""
    return None if name in partitions else f"{no_partition_text(name, partitions)}: {effect}"


def suggestion(name: str, partitions: Iterable[str]) -> str:
    """Return "did you mean 'x'?" with the nearest partitions, otherwise the first ones, or that none exists."""
    there = list(partitions)
    meant = nearest(name, there, most=3)
    if meant:
        return f"did you mean {' or '.join(map(repr, meant))}?"
    if not there:
        return "no partition exists"
    return f"the partitions are: {', '.join(map(repr, there[:10]))}{', ...' if len(there) > 10 else ''}"
