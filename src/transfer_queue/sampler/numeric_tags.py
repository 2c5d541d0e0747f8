"""Reads tags as numbers, and distinguishes a missing tag from one that is not a number."""

from __future__ import annotations

import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import InvalidArgumentError

Floats: TypeAlias = NDArray[np.float64]


class TagColumns(Protocol):
    """The method of a partition by which samplers read tags."""

    def get_custom_meta(self, indexes: list[int], /) -> Mapping[int, Mapping[str, Any]]:
        """Return the tags of these rows by global index. Rows without tags may be left out."""
        ...


class PartitionTags(ABC):
    """The system's own view of a partition, with a method that a user's object need not have."""

    @abstractmethod
    def get_custom_meta(self, indexes: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return {global index: tag}, as copies, for those of these rows that exist."""

    @abstractmethod
    def entries_of(self, rows: np.ndarray, name: str) -> list[Any]:
        """Return this entry of the tags of rows (i8 global indexes); None for a row without it."""


def number(value: object) -> float | None:
    """Return a tag as a float: NaN if it is missing (None), infinite beyond float64. Returns None for other values."""
    if value is None:
        return math.nan
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        converted = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]
    return None if math.isnan(converted) else converted


def numbers_of(values: list[Any]) -> Floats | None:
    """Return plain ints and floats as an array in one step; None if a value is of another type, NaN or too large."""
    if not set(map(type, values)) <= {int, float}:
        return None
    try:
        converted = np.array(values, np.float64)
    except OverflowError:
        return None
    return None if np.isnan(converted).any() else converted


def entries_of(indexes: Sequence[int], tag: str, partition: TagColumns | None) -> list[Any]:
    """Return this entry of the tags of rows, in one step if the partition can; None for a row without it."""
    if partition is None:
        return [None] * len(indexes)
    if isinstance(partition, PartitionTags):
        return partition.entries_of(np.asarray(indexes, "i8"), tag)
    tags = partition.get_custom_meta(list(indexes))
    return [(tags.get(index) or {}).get(tag) for index in indexes]


def numbers(indexes: Sequence[int], tag: str, partition: TagColumns | None) -> Floats:
    """Return this tag of these rows, NaN if it is missing. Raises InvalidArgumentError if one is not a number."""
    values = entries_of(indexes, tag, partition)
    quick = numbers_of(values)
    if quick is not None:
        return quick
    out = np.empty(len(indexes))
    for place, (index, value) in enumerate(zip(indexes, values, strict=True)):
        converted = number(value)
        if converted is None:
            raise not_a_number_error(index, tag, value)
        out[place] = converted
    return out


def not_a_number_error(index: int, tag: str, value: object) -> InvalidArgumentError:
    """Return the error for a row whose tag is not a number."""
    return InvalidArgumentError(
        f"tag {tag!r} of row {index} must be a number, got {reprlib.repr(value)} ({type(value).__name__}); "
        f"set it to a plain int or float"
    )
