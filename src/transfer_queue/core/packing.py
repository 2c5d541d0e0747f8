"""A tree of plain values and numpy arrays as bytes, for a record; as a file it is `journal.state_file`'s."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

_ARRAY = 1  # msgpack Ext: dtype, a zero byte, the bytes of a one-dimensional array


def _encode(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray) or value.ndim != 1:
        raise TypeError(f"a saved state has plain values and flat arrays in it, and here a {type(value).__name__}")
    return msgspec.msgpack.Ext(_ARRAY, value.dtype.str.encode() + b"\0" + value.tobytes())


def _decode(code: int, content: memoryview) -> Any:
    if code != _ARRAY:
        return msgspec.msgpack.Ext(code, bytes(content))
    packed = bytes(content)
    dtype, _, values = packed.partition(b"\0")
    return np.frombuffer(values, np.dtype(dtype.decode())).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode)
_decoder = msgspec.msgpack.Decoder(ext_hook=_decode)


def pack(tree: Any) -> bytes:
    """The tree as bytes."""
    return _encoder.encode(tree)


def unpack(packed: bytes) -> Any:
    """The tree again; its arrays are the caller's."""
    return _decoder.decode(packed)
