"""Decodes loaded states that older releases wrote into records: trees of plain values and numpy arrays.

This release writes a loaded state into a file of its own, which the record names (`journal.loaded_states`).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

_ARRAY = 1  # msgpack Ext: dtype, a zero byte, the bytes of a one-dimensional array


def _decode(code: int, content: memoryview) -> Any:
    if code != _ARRAY:
        return msgspec.msgpack.Ext(code, bytes(content))
    packed = bytes(content)
    dtype, _, values = packed.partition(b"\0")
    return np.frombuffer(values, np.dtype(dtype.decode())).copy()


_decoder = msgspec.msgpack.Decoder(ext_hook=_decode)


def unpack(packed: bytes) -> Any:
    """Return the tree. Its arrays are copies."""
    return _decoder.decode(packed)
