"""Converts values to tensors for fields of tensors: NumPy arrays and scalars, Python numbers, tensors."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from transfer_queue.wire.buffers.block_layout import ITEM_SIZES
from transfer_queue.wire.buffers.tensors import DTYPES


def tensors_of(values: Sequence[Any], dtypes: Sequence[str]) -> list[torch.Tensor] | None:
    """Return a tensor for each value, all of one dtype; None if a value cannot be one, or the dtypes are not promoted.

    Arrays and NumPy scalars keep their dtype. A Python number takes the dtype of the field as in torch's arithmetic: a
    float in a field of float16 becomes float16, and a float in a field of integers has torch's default dtype.

    Args:
        values: The values.
        dtypes: The dtypes of the field's live rows, in the order in which they appeared.
    """
    own = _promoted([DTYPES[name] for name in dtypes if name in DTYPES]) or torch.get_default_dtype()
    made = []
    for value in values:
        tensor = _tensor(value, own)
        if tensor is None:
            return None
        made.append(tensor)
    dtype = _promoted(list({tensor.dtype for tensor in made}))
    return None if dtype is None else [tensor.to(dtype) for tensor in made]


def first_without_tensor(values: Sequence[Any], dtypes: Sequence[str]) -> int:
    """Return the position of the first value because of which `tensors_of` returns None; the end if there is none."""
    return bisect.bisect_left(range(len(values)), True, key=lambda at: tensors_of(values[: at + 1], dtypes) is None)


def _promoted(dtypes: list[torch.dtype]) -> torch.dtype | None:
    try:
        return functools.reduce(torch.promote_types, dtypes) if dtypes else None
    except RuntimeError:
        return None


def _tensor(value: Any, dtype: torch.dtype) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return None if value.is_nested else value
    if isinstance(value, np.ndarray | np.generic):
        if (
            value.dtype.kind not in "biufc"
            or value.dtype.name not in ITEM_SIZES
            or isinstance(value, np.ma.MaskedArray)
        ):
            return None
        # a copy, because torch does not support negative strides and other byte orders, and warns about read-only
        # memory
        return torch.from_numpy(np.array(value, value.dtype.newbyteorder("="), order="C"))
    if type(value) not in (bool, int, float):
        return None
    try:
        its = torch.result_type(torch.empty(1, dtype=dtype), value)
        if type(value) is int and not its.is_floating_point and not its.is_complex:
            limits = torch.iinfo(its)
            its = its if limits.min <= value <= limits.max else torch.int64
        return torch.tensor(value, dtype=its)
    except (RuntimeError, OverflowError, TypeError, ValueError):
        return None
