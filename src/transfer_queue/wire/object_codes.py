"""The format of one object's bytes: what `lowering` writes and `raising` reads.

    0x00, msgpack                                   no buffers out of band
    0x01, 7 zero bytes, u8 count, u8 length of the msgpack part, u8 length of each buffer, msgpack, buffers

msgpack carries None, bool, 64-bit int, float, str, bytes, list, and dicts with str and int keys. All else is an Ext
with one of the codes below; the content of most is msgpack again. A stored code is never given another meaning.
"""

from __future__ import annotations

import struct
from typing import Union

HEAD = struct.Struct("<B7xQQ")  # tag 1, count of buffers, length of the msgpack part

INT, COMPLEX, TEXT, BYTEARRAY, TUPLE, SET, FROZENSET, MAPPING = range(1, 9)
ARRAY, OBJECT_ARRAY, SCALAR, PICKLE, BYTES = range(9, 14)
TENSOR, JAGGED, NESTED, TABLE, NON_TENSOR, NON_TENSOR_STACK, LAZY_STACK = range(20, 27)
TORCH_CODES = range(TENSOR, LAZY_STACK + 1)

Buffer = Union[bytes, bytearray, memoryview]
Reference = Union[bytes, int]  # bytes in the msgpack part, or the number of a buffer out of band
