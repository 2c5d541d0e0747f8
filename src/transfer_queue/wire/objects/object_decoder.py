"""Decodes bytes to objects.

The decoder trusts only pickles. It compares every length with the available bytes before it uses it, and raises
`ProtocolError` for bytes that are not valid. Another process may overwrite the source during a read, so the decoder
copies each part once, before it checks the part. torch is imported only when one of its codes appears.

`lone_number` reads the number in a value of one element, decoded or not, and never imports torch.
"""

from __future__ import annotations

import math
import pickle
import struct
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import ProtocolError, TransferQueueError, UncarriableValueError
from transfer_queue.wire.buffers.copies import U8, allocate, copy_bytes
from transfer_queue.wire.objects import extensions as codes
from transfer_queue.wire.objects import numpy_types


def decode_object(source: Any, *, allow_pickle: bool = True) -> Any:
    """Decode the object in a flat buffer of bytes. The object is a copy, writable if its type is.

    Raises:
        ProtocolError: The bytes are not a valid object.
        UncarriableValueError: The object was pickled, and `allow_pickle` is false.
    """
    view = memoryview(source)
    try:
        if len(view) and view[0] == 0:
            return (_DECODER if allow_pickle else _STRICT_DECODER).decode(bytes(view[1:]))
        return _decode_with_buffers(view, allow_pickle)
    except TransferQueueError:
        raise
    except (AttributeError, ImportError) as error:
        raise ProtocolError(
            f"a stored object cannot be loaded in this process: {type(error).__name__}: {error}. Its class must be "
            f"importable here under the name that it had where it was put: define it in a module, not in __main__"
        ) from error
    except Exception as error:  # hostile or torn bytes, or a user's class that cannot be unpickled
        raise ProtocolError(f"stored bytes are not a valid object: {type(error).__name__}: {error}") from error


def _decode_with_buffers(view: memoryview, allow_pickle: bool) -> Any:
    tag, count, main_length = codes.HEAD.unpack(bytes(view[: codes.HEAD.size]))
    start = codes.HEAD.size + 8 * count
    if tag != 1 or start + main_length > len(view):
        raise ValueError("the header is not valid")
    lengths = struct.unpack(f"<{count}Q", bytes(view[codes.HEAD.size : start]))
    start += main_length
    if start + sum(lengths) != len(view):
        raise ValueError("the sum of the buffers' lengths is not the length of the bytes")
    main = bytes(view[start - main_length : start])
    buffers = []
    for length in lengths:
        buffers.append(view[start : start + length])
        start += length
    return ObjectDecoder(buffers, allow_pickle).decode(main)


class ObjectDecoder:
    """Makes objects of decoded msgpack: the inverse of `ObjectEncoder`."""

    def __init__(self, buffers: list[memoryview], allow_pickle: bool):
        self._buffers = buffers
        self._allow_pickle = allow_pickle
        self._decoder = msgspec.msgpack.Decoder(ext_hook=self._raise)
        self.decode = self._decoder.decode

    def memory(self, reference: Any) -> U8:
        """Return a writable copy of a buffer."""
        if type(reference) is bytes:
            return np.frombuffer(bytearray(reference), np.uint8)
        source: U8 = np.frombuffer(self._buffers[_natural(reference)], np.uint8)
        copy = allocate(len(source))
        copy_bytes(copy, source)
        return copy

    def raw(self, reference: Any) -> bytes:
        """Return an immutable copy of a buffer."""
        return reference if type(reference) is bytes else bytes(self._buffers[_natural(reference)])

    def _raise(self, code: int, content: memoryview) -> Any:
        how = _RAISERS.get(code)
        if how is not None:
            return how(self, content)
        if code in codes.TORCH_CODES:
            from transfer_queue.wire.objects import torch_objects

            return torch_objects.decode_value(self.memory, code, self.decode(content))
        raise ValueError(f"unknown code {code}")

    def items(self, content: memoryview) -> list[Any]:
        """Return the list in the content of an Ext."""
        listed: list[Any] = _exactly(self.decode(content), list)
        return listed

    def _mapping(self, content: memoryview) -> dict[Any, Any]:
        flat = iter(self.items(content))
        return dict(zip(flat, flat, strict=True))

    def _array(self, content: memoryview) -> NDArray[Any]:
        description, shape, order, reference = self.decode(content)
        return numpy_types.array(description, shape, order, self.memory(reference))

    def _object_array(self, content: memoryview) -> NDArray[Any]:
        shape, items = self.decode(content)
        if math.prod(map(_natural, shape)) != len(items):
            raise ValueError("the number of objects of an array does not fit its shape")
        return np.fromiter(items, dtype=object, count=len(items)).reshape(shape)

    def _scalar(self, content: memoryview) -> Any:
        description, reference = self.decode(content)
        if description is None:
            return np.str_(reference) if type(reference) is str else np.bytes_(_exactly(reference, bytes))
        return numpy_types.array(description, [1], "C", self.memory(reference))[0]

    def _pickled(self, content: memoryview) -> Any:
        if not self._allow_pickle:
            raise UncarriableValueError(
                "a stored value was pickled by its writer, but security.allow_pickle is false in this process"
            )
        reference, numbers = self.decode(content)
        return pickle.loads(self.raw(reference), buffers=[self.memory(_natural(number)) for number in numbers])

    def _refused(self, content: memoryview) -> Any:
        message = bytes(content).rstrip(b"\0").decode("utf-8", "ignore")
        raise UncarriableValueError(
            f"{message}: this value needs pickle, but its checkpoint was loaded with allow_pickle=False; if you trust "
            f"the author of the checkpoint, load it with allow_pickle=True"
        )


_RAISERS: dict[int, Callable[[ObjectDecoder, memoryview], Any]] = {
    codes.INT: lambda decoder, content: int.from_bytes(content, "little", signed=True),
    codes.COMPLEX: lambda decoder, content: complex(*struct.unpack("<dd", content)),
    codes.TEXT: lambda decoder, content: decoder.raw(decoder.decode(content)).decode("utf-8", "surrogatepass"),
    codes.BYTES: lambda decoder, content: decoder.raw(decoder.decode(content)),
    codes.BYTEARRAY: lambda decoder, content: bytearray(decoder.raw(decoder.decode(content))),
    codes.TUPLE: lambda decoder, content: tuple(decoder.items(content)),
    codes.SET: lambda decoder, content: set(decoder.items(content)),
    codes.FROZENSET: lambda decoder, content: frozenset(decoder.items(content)),
    codes.MAPPING: ObjectDecoder._mapping,
    codes.ARRAY: ObjectDecoder._array,
    codes.OBJECT_ARRAY: ObjectDecoder._object_array,
    codes.SCALAR: ObjectDecoder._scalar,
    codes.PICKLE: ObjectDecoder._pickled,
    codes.REFUSED: ObjectDecoder._refused,
}


def _natural(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"expected an int that is not negative, got {number!r:.40}")
    return number


def _exactly(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


# shared by all objects without buffers out of band, which need no state
_DECODER = ObjectDecoder([], allow_pickle=True)
_STRICT_DECODER = ObjectDecoder([], allow_pickle=False)


LONGEST = 256  # bytes; an encoded array of one element is shorter
Ext = msgspec.msgpack.Ext


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
