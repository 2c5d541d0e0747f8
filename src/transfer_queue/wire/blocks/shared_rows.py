"""Finds the rows of a column that share memory, so that their value is stored once. Nothing is read or hashed.

Each function returns None as soon as it knows that no rows are shared, because most columns share nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

LEAST_SAVED = 16 << 10
"""Bytes that a column must save to be stored once. A further block costs the put as much as copying these bytes."""


class SharedRows(NamedTuple):
    """The distinct values of a column."""

    firsts: list[int]
    """For each distinct value the first row that has it, ascending."""
    slots: NDArray[np.int32]
    """For each row the position of its value in `firsts`."""


def rows_of_one_value(rows: int) -> SharedRows:
    """Return the description of rows that all have the same value."""
    return SharedRows([0], np.zeros(rows, np.int32))


def find_equal_keys(keys: Sequence[Hashable]) -> SharedRows | None:
    """Return which of these keys are equal, one for each row; None if all of them differ."""
    if len(set(keys)) == len(keys):
        return None
    numbers: dict[Hashable, int] = {}
    firsts: list[int] = []
    slots = []
    for row, key in enumerate(keys):
        number = numbers.setdefault(key, len(firsts))
        if number == len(firsts):
            firsts.append(row)
        slots.append(number)
    return SharedRows(firsts, np.array(slots, np.int32))


def find_same_objects(values: Sequence[Any]) -> SharedRows | None:
    """Return which rows are the same object; None if every row is an object of its own."""
    return find_equal_keys(list(map(id, values)))


def find_same_memory(tensors: Sequence[torch.Tensor]) -> SharedRows | None:
    """Return which of these tensors of one dtype are views of the same elements; None if there are none."""
    places = [tensor.data_ptr() for tensor in tensors]
    if len(set(places)) == len(places):
        return None
    return find_equal_keys(
        [
            (place, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg(), tensor.device)
            for place, tensor in zip(places, tensors, strict=True)
        ]
    )
