"""Tags that are numbers: reading them, and telling apart what is missing from what is no number."""

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
    """What samplers that read tags need of a partition."""

    def get_custom_meta(self, indexes: list[int], /) -> Mapping[int, Mapping[str, Any]]:
        """The tags of these rows by global index; rows without any may be left out."""
        ...


class PartitionTags(ABC):
    """The system's own view of a partition. Samplers call more methods of it than of an object of a user's."""

    @abstractmethod
    def get_custom_meta(self, indexes: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return {global index: tag}, as copies, for those of these rows that live."""

    @abstractmethod
    def tags_of(self, rows: np.ndarray) -> list[dict[str, Any] | None]:
        """Return the tags of live rows (i8 global indexes), not copied. The caller must not change them."""


def number(value: object) -> float | None:
    """A tag as a float, NaN where it is missing (None); None where it is no number. Beyond float64 it is infinite."""
    if value is None:
        return math.nan
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]
    return None if math.isnan(found) else found


def numbers_of(values: list[Any]) -> Floats | None:
    """Plain ints and floats as floats, without a step for each; None where one is something else, or no number."""
    if not set(map(type, values)) <= {int, float}:
        return None
    try:
        found = np.array(values, np.float64)
    except OverflowError:
        return None
    return None if np.isnan(found).any() else found


def numbers(indexes: Sequence[int], tag: str, partition: TagColumns | None) -> Floats:
    """This tag of these rows, NaN where it is missing. Raises InvalidArgumentError for one that is no number."""
    tags = partition.get_custom_meta(list(indexes)) if partition is not None else {}
    out = np.empty(len(indexes))
    for place, index in enumerate(indexes):
        value = (tags.get(index) or {}).get(tag)
        found = number(value)
        if found is None:
            raise no_number(index, tag, value)
        out[place] = found
    return out


def no_number(index: int, tag: str, value: object) -> InvalidArgumentError:
    """The error for a row whose tag is no number."""
    return InvalidArgumentError(
        f"tag {tag!r} of row {index} must be a number, got {reprlib.repr(value)} ({type(value).__name__}); "
        f"set it to a plain int or float"
    )
