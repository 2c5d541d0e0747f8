"""The format of one object's bytes, which `object_encoder` writes and `object_decoder` reads.

    0x00, msgpack                                   no buffers out of band
    0x01, 7 zero bytes, u8 count, u8 length of the msgpack part, u8 length of each buffer, msgpack, buffers

The msgpack part represents None, bool, 64-bit int, float, str, bytes, list, and dicts with str and int keys directly.
Every other value is an Ext with one of the codes below, and the content of most codes is msgpack again. The meaning of
a code never changes, because stored objects contain it.
"""

from __future__ import annotations

import struct
from typing import Any, Protocol, Union

HEAD = struct.Struct("<B7xQQ")  # tag 1, count of buffers, length of the msgpack part
OUT_OF_BAND = 64 << 10
"""Bytes from which a buffer is not in the msgpack part."""

INT, COMPLEX, TEXT, BYTEARRAY, TUPLE, SET, FROZENSET, MAPPING = range(1, 9)
ARRAY, OBJECT_ARRAY, SCALAR, PICKLE, BYTES = range(9, 14)
REFUSED = 14  # replaces a value that needs pickle, if a checkpoint is loaded without pickle; contains its name as text
TENSOR, JAGGED, NESTED, TABLE, NON_TENSOR, NON_TENSOR_STACK, LAZY_STACK = range(20, 27)
TORCH_CODES = range(TENSOR, LAZY_STACK + 1)

_EXT8, _EXT32 = struct.Struct(">BBb"), struct.Struct(">BIb")


def encode_refused(length: int, message: str) -> bytes:
    """Return the replacement of a refused value, of `length` bytes (0: as many as needed), with its name as text.

    The name is cut off if it does not fit.
    """
    text = message.encode()
    if not length:
        length = 1 + _EXT32.size + len(text)
    head = _EXT8 if length - 1 - _EXT8.size < 256 else _EXT32
    size = max(0, length - 1 - head.size)
    content = text[:size].ljust(size, b"\0")
    return (b"\0" + head.pack(0xC7 if head is _EXT8 else 0xC9, size, REFUSED) + content)[:length]


Buffer = Union[bytes, bytearray, memoryview]
Reference = Union[bytes, int]  # bytes in the msgpack part, or the number of a buffer out of band


class PartEncoder(Protocol):
    """What the encoding of a value needs for the parts of the value: `object_encoder.ObjectEncoder`."""

    def encode_value(self, value: Any, depth: int) -> Any:
        """Return the value itself, or a tree of msgpack's types and Ext."""

    def pack(self, code: int, content: Any) -> Any:
        """Return an Ext of lowered content."""

    def reference(self, buffer: Buffer) -> Reference:
        """Keep a buffer and return the reference to it."""
