"""Encodes objects as bytes.

The encoder compares types exactly, so that a subclass is never decoded as its base class. It pickles values whose type
has no code (protocol 5), or refuses them if pickle is not allowed. Buffers of 64 KiB and more are not in the msgpack
part, whose lengths are at most 2**32 - 1. torch is imported only when one of its values appears.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from transfer_queue.wire.objects import extensions as codes
from transfer_queue.wire.objects import numpy_types
from transfer_queue.wire.objects.extensions import Buffer, Reference

MAX_DEPTH = 100
"""Levels of nested containers; far below the interpreter's recursion limit when decoding."""

Ext = msgspec.msgpack.Ext

_ENCODER = msgspec.msgpack.Encoder()
_SIMPLE = frozenset({type(None), bool, float, str})
_PLAIN = frozenset({type(None), bool, int, float, str})
_KEYS = frozenset({str, int})


class Refusal(Exception):
    """A value that cannot be encoded. The caller adds the field and the row."""

    def __init__(self, value: object, reason: str):
        kind = type(value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        super().__init__(f"a value of type {name} cannot be stored: {reason}")


def encode_parts(value: Any, *, allow_pickle: bool = True) -> list[Buffer]:
    """Encode an object as buffers to write one after the other. Large buffers are the memory of the value itself.

    Raises:
        Refusal: The value cannot be encoded.
    """
    kind = type(value)
    if kind in _SIMPLE:
        try:
            return [b"\0" + _ENCODER.encode(value)]
        except (UnicodeEncodeError, OverflowError):
            pass  # a lone surrogate, which the careful encoder below handles
    try:
        try:
            lowering = ObjectEncoder(allow_pickle, careful=False)
            main = _ENCODER.encode(lowering.encode_value(value, 0))
        except (OverflowError, ValueError):
            # an int beyond 64 bits, a lone surrogate, or a str too long for msgpack: rare, so checked only now
            lowering = ObjectEncoder(allow_pickle, careful=True)
            main = _ENCODER.encode(lowering.encode_value(value, 0))
    except RecursionError as error:
        raise Refusal(value, "it is nested too deeply, or contains itself") from error
    except (OverflowError, ValueError, MemoryError) as error:
        raise Refusal(value, str(error)) from error
    buffers = lowering.buffers
    if not buffers:
        return [b"\0" + main]
    lengths = [len(buffer) for buffer in buffers]
    head = codes.HEAD.pack(1, len(buffers), len(main)) + struct.pack(f"<{len(lengths)}Q", *lengths)
    return [head + main, *buffers]


class ObjectEncoder:
    """Converts one object to values that msgpack can represent, and collects its buffers out of band.

    Args:
        allow_pickle: Whether to pickle values whose type has no code.
        careful: Whether to check for ints and strs that msgpack cannot represent.
    """

    def __init__(self, allow_pickle: bool, careful: bool):
        self.buffers: list[Buffer] = []
        self.allow_pickle = allow_pickle
        self._careful = careful

    def encode_value(self, value: Any, depth: int) -> Any:
        """Return the value itself, or a tree of the types of msgpack and Ext."""
        kind = type(value)
        if kind in _PLAIN:
            return self._checked(value) if self._careful else value
        if depth >= MAX_DEPTH:
            raise Refusal(value, f"it is nested deeper than {MAX_DEPTH} containers, or contains itself")
        how = _LOWERERS.get(kind)
        if how is not None:
            return how(self, value, depth + 1)
        if isinstance(value, np.generic | np.ndarray):
            lowered = self._numpy(value, depth + 1)
        elif str(kind.__module__).startswith(("torch", "tensordict")) or _is_tensor(value):
            from transfer_queue.wire.objects import torch_objects

            lowered = torch_objects.encode_value(self, value, depth + 1)
        else:
            lowered = None
        return self._pickled(value) if lowered is None else lowered

    def pack(self, code: int, content: Any) -> Any:
        """Return an Ext of content that was converted already."""
        return Ext(code, _ENCODER.encode(content))

    def reference(self, buffer: Buffer) -> Reference:
        """Add a flat buffer of bytes and return its reference: the bytes of a small buffer, else its number."""
        if len(buffer) < codes.OUT_OF_BAND:
            return bytes(buffer)
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def items(self, values: Sequence[Any], depth: int) -> Sequence[Any]:
        """Convert each value. Returns the sequence itself if no value changes."""
        if not self._careful and _PLAIN.issuperset(map(type, values)):
            return values
        return [self.encode_value(value, depth) for value in values]

    def _checked(self, value: Any) -> Any:
        if _fits(value):
            return value
        if type(value) is int:
            return Ext(codes.INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        return self.pack(codes.TEXT, self.reference(value.encode("utf-8", "surrogatepass")))

    def _bytes(self, value: bytes, depth: int) -> Any:
        return value if len(value) < codes.OUT_OF_BAND else self.pack(codes.BYTES, self.reference(value))

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        if not _KEYS.issuperset(map(type, value)) or (self._careful and not all(map(_fits, value))):
            flat = [item for pair in value.items() for item in pair]
            return self.pack(codes.MAPPING, self.items(flat, depth))
        if not self._careful and _PLAIN.issuperset(map(type, value.values())):
            return value
        return {key: self.encode_value(entry, depth) for key, entry in value.items()}

    def _numpy(self, value: Any, depth: int) -> Any:
        """Convert an array or scalar of numpy's own types. Returns None for subclasses and dtypes of other packages."""
        if type(value) is np.ndarray:
            if value.dtype == object and value.dtype.metadata is None:
                return self.pack(codes.OBJECT_ARRAY, [value.shape, self.items(value.ravel().tolist(), depth)])
            description = numpy_types.describe(value.dtype)
            if description is None:
                return None
            order, flat = numpy_types.flat_bytes(value)
            return self.pack(codes.ARRAY, [description, value.shape, order, self.reference(flat.data)])
        if isinstance(value, np.ndarray) or type(value) is not value.dtype.type:
            return None
        if isinstance(value, np.str_ | np.bytes_):
            plain = str(value) if isinstance(value, np.str_) else bytes(value)
            return self.pack(codes.SCALAR, [None, self.encode_value(plain, depth)])
        description = numpy_types.describe(value.dtype)
        return None if description is None else self.pack(codes.SCALAR, [description, self.reference(value.tobytes())])

    def _pickled(self, value: Any) -> Any:
        if not self.allow_pickle:
            raise Refusal(value, "it needs pickle, which this system does not allow; put plain values or tensors")
        start = len(self.buffers)

        def keep(buffer: pickle.PickleBuffer) -> bool:
            """Whether the buffer goes into the pickle itself."""
            raw = buffer.raw()
            if len(raw) < codes.OUT_OF_BAND:
                return True
            self.buffers.append(raw)
            return False

        stream = io.BytesIO()
        try:
            _Pickler(stream, protocol=5, buffer_callback=keep).dump(value)
        except Exception as error:  # a user's class may raise anything
            del self.buffers[start:]
            raise Refusal(value, f"{type(error).__name__}: {error}") from error
        numbers = list(range(start, len(self.buffers)))
        return self.pack(codes.PICKLE, [self.reference(stream.getvalue()), numbers])


class _Pickler(pickle.Pickler):
    """Pickles only the elements of tensors and arrays.

    torch would pickle the whole storage of a view. numpy would lose the byte order of dates, and arrays would become
    read-only.
    """

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.ndarray and (description := numpy_types.describe(obj.dtype)) is not None:
            order, flat = numpy_types.flat_bytes(obj)
            return numpy_types.rebuilt, (pickle.PickleBuffer(flat.data), description, obj.shape, order)
        if _is_tensor(obj):
            from transfer_queue.wire.objects import torch_objects

            return torch_objects.reduce_tensor(obj)
        return NotImplemented


_LOWERERS: dict[type, Callable[[ObjectEncoder, Any, int], Any]] = {
    list: ObjectEncoder.items,
    dict: ObjectEncoder._dict,
    bytes: ObjectEncoder._bytes,
    bytearray: lambda encoder, value, depth: encoder.pack(codes.BYTEARRAY, encoder.reference(value)),
    complex: lambda encoder, value, depth: Ext(codes.COMPLEX, struct.pack("<dd", value.real, value.imag)),
    tuple: lambda encoder, value, depth: encoder.pack(codes.TUPLE, encoder.items(value, depth)),
    set: lambda encoder, value, depth: encoder.pack(codes.SET, encoder.items(list(value), depth)),
    frozenset: lambda encoder, value, depth: encoder.pack(codes.FROZENSET, encoder.items(list(value), depth)),
}


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _fits(value: Any) -> bool:
    """Whether msgpack can represent a value of a type of _PLAIN."""
    kind = type(value)
    if kind is int:
        return bool(-(2**63) <= value < 2**64)
    if kind is not str:
        return True
    try:
        encoded: bytes = value.encode()
    except UnicodeEncodeError:
        return False
    return len(encoded) < codes.OUT_OF_BAND
