"""Reads the number in a tag's value of one element, decoded or still encoded, without importing torch."""

from __future__ import annotations

import math
import sys
from typing import Any

import msgspec
import numpy as np

from transfer_queue.wire.objects import extensions as codes
from transfer_queue.wire.objects.object_encoder import Ext

LONGEST = 256  # bytes; an encoded array of one element is shorter


def lone_number(value: Any) -> Any:
    """Return the number in a list, tuple, array or tensor of one element; any other value itself.

    Args:
        value: The value that was put, or its form in a message. A bfloat16 in a message is returned as it is, because
            only torch can read it.
    """
    if type(value) is Ext:
        value = _carried(value)
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if isinstance(value, np.ndarray | np.generic):
        return value.item() if value.size == 1 and value.dtype.kind in "biuf" else value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and not value.is_nested and value.numel() == 1:
        return value.item()
    return value


def _carried(value: Ext) -> Any:
    """Return the one-element array or sequence in an object of a message; the value itself for anything else."""
    content = bytes(memoryview(value.data)[: LONGEST + 1])
    if len(content) > LONGEST or content[:1] != b"\0":
        return value
    try:
        inner = msgspec.msgpack.decode(content[1:])
        if type(inner) is not Ext or inner.code not in (codes.TUPLE, codes.ARRAY, codes.TENSOR):
            return value
        parts = msgspec.msgpack.decode(inner.data)
        if inner.code == codes.TUPLE:
            return parts if len(parts) == 1 else value
        dtype, shape, memory = np.dtype(parts[0]), parts[1], parts[-1]
        return np.frombuffer(memory, dtype) if math.prod(shape) == 1 and len(memory) == dtype.itemsize else value
    except (msgspec.DecodeError, TypeError, ValueError, LookupError):
        return value
