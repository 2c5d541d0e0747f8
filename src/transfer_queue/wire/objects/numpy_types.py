"""Converts numpy dtypes and arrays to plain values and bytes and back, without pickle."""

from __future__ import annotations

import math
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
Description = Union[str, list[Any]]  # a dtype's str, or its fields as numpy's `descr` lists them


def describe(dtype: np.dtype[Any]) -> Description | None:
    """Return a description from which `array` makes an equal dtype.

    Returns None if there is none: for dtypes that contain objects, and for those of other packages.
    """
    if dtype.hasobject or dtype.itemsize == 0:
        return None
    description: Description = dtype.str if dtype.names is None else np.lib.format.dtype_to_descr(dtype)
    try:
        rebuilt = _dtype(description)
    except (TypeError, ValueError):
        return None
    same = rebuilt == dtype and rebuilt.isalignedstruct == dtype.isalignedstruct
    return description if same else None


def flat_bytes(array: NDArray[Any]) -> tuple[str, U8]:
    """Return the memory order of an array, "C" or "F", and its bytes in this order, without a copy if possible."""
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    flat = np.ascontiguousarray(array.T if order == "F" else array).reshape(-1)
    return order, flat.view(np.uint8)


def array(description: Any, shape: Any, order: Any, memory: U8) -> NDArray[Any]:
    """Return an array over this memory. Raises `ValueError` or `TypeError` if the arguments do not fit each other."""
    dtype = _dtype(description)
    if any(type(size) is not int or size < 0 for size in shape) or order not in ("C", "F"):
        raise ValueError("the shape or the order of an array is not valid")
    if dtype.itemsize == 0 or dtype.hasobject or math.prod(shape) * dtype.itemsize != len(memory):
        raise ValueError("the bytes of an array do not fit its shape and dtype")
    if not len(memory):
        return np.empty(shape, dtype, order=order)
    return memory.view(dtype).reshape(shape, order=order)


def rebuilt(memory: Any, description: Description, shape: tuple[int, ...], order: str) -> NDArray[Any]:
    """Return the array of a pickled buffer. Pickles contain the name of this function, so it must never change."""
    flat: U8 = np.frombuffer(memory, np.uint8)
    return array(description, shape, order, flat if flat.flags.writeable else flat.copy())


def _dtype(description: Any) -> np.dtype[Any]:
    if isinstance(description, str):
        return np.dtype(description)
    dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(_tupled(description))
    return dtype


def _tupled(fields: Any) -> Any:
    """Convert the lists of a decoded message to the list of tuples that numpy needs."""
    if isinstance(fields, str):
        return fields
    result = []
    for name, inner, *shape in fields:
        title_and_name = name if isinstance(name, str) else tuple(name)
        result.append((title_and_name, _tupled(inner), *(tuple(sizes) for sizes in shape)))
    return result
