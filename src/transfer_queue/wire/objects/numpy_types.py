"""numpy dtypes and arrays as plain values and bytes, without pickle."""

from __future__ import annotations

import math
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
Description = Union[str, list[Any]]  # a dtype's str, or its fields as numpy's `descr` lists them


def describe(dtype: np.dtype[Any]) -> Description | None:
    """A description from which `array` makes an equal dtype; None where there is none (objects, foreign dtypes)."""
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
    """The order in which an array's bytes are kept, "C" or "F", and these bytes (the array's own where it can be)."""
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    flat = np.ascontiguousarray(array.T if order == "F" else array).reshape(-1)
    return order, flat.view(np.uint8)


def array(description: Any, shape: Any, order: Any, memory: U8) -> NDArray[Any]:
    """An array over this memory; ValueError or TypeError where description, shape and memory do not fit."""
    dtype = _dtype(description)
    if any(type(size) is not int or size < 0 for size in shape) or order not in ("C", "F"):
        raise ValueError("an array's shape or order is wrong")
    if dtype.itemsize == 0 or dtype.hasobject or math.prod(shape) * dtype.itemsize != len(memory):
        raise ValueError("an array's bytes do not fit its shape and dtype")
    if not len(memory):
        return np.empty(shape, dtype, order=order)
    return memory.view(dtype).reshape(shape, order=order)


def rebuilt(memory: Any, description: Description, shape: tuple[int, ...], order: str) -> NDArray[Any]:
    """The array of a pickled buffer: named in pickles, so never to be renamed."""
    flat: U8 = np.frombuffer(memory, np.uint8)
    return array(description, shape, order, flat if flat.flags.writeable else flat.copy())


def _dtype(description: Any) -> np.dtype[Any]:
    if isinstance(description, str):
        return np.dtype(description)
    dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(_tupled(description))
    return dtype


def _tupled(fields: Any) -> Any:
    """Return what numpy needs, a list of tuples, for the lists that msgpack has."""
    if isinstance(fields, str):
        return fields
    result = []
    for name, inner, *shape in fields:
        title_and_name = name if isinstance(name, str) else tuple(name)
        result.append((title_and_name, _tupled(inner), *(tuple(sizes) for sizes in shape)))
    return result
