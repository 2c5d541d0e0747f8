"""Encodes and decodes Python objects and the values of tags.

`encode_object` and `decode_object` preserve types exactly. `wire.objects.extensions` describes the format;
`wire.objects.object_encoder` writes it and `wire.objects.object_decoder` reads it. This module adds the values of tags.

A tag's value is part of a message that servers read. None, bool, 64-bit int, float, str, bytes, and lists and str-keyed
dicts of these are not changed. numpy and torch scalars become numbers. Every other value becomes an Ext of OBJECT_CODE,
which servers store without decoding it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from transfer_queue.errors import ProtocolError, UncarriableValueError
from transfer_queue.messages.base import DELETE_CODE
from transfer_queue.wire.objects.object_decoder import decode_object
from transfer_queue.wire.objects.object_encoder import MAX_DEPTH, Ext, Refusal, encode_parts

OBJECT_CODE = 65
"""The msgpack Ext of an object's bytes in a tag."""

__all__ = [
    "DELETE",
    "OBJECT_CODE",
    "decode_object",
    "decode_tag_value",
    "encode_object",
    "encode_tag_value",
]

_PLAIN = frozenset({type(None), bool, float})
_ENCODED = frozenset({Ext, list, dict})
"""The types of values in messages that are, or may contain, encoded ones."""


class _Delete:
    """The type of DELETE; there is one instance."""

    _only: _Delete | None = None

    def __new__(cls) -> _Delete:
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "DELETE"

    def __reduce__(self) -> str:
        return "DELETE"


DELETE = _Delete()
"""The value of a tag entry that removes the entry."""


def encode_object(value: Any, *, allow_pickle: bool = True) -> bytes:
    """Encode one object as bytes.

    Raises:
        UncarriableValueError: The value cannot be encoded (for example a lock, a generator or a structure deeper than
            MAX_DEPTH), or it needs pickle and `allow_pickle` is false.
    """
    try:
        return b"".join(encode_parts(value, allow_pickle=allow_pickle))
    except Refusal as refusal:
        raise UncarriableValueError(str(refusal)) from refusal.__cause__


def encode_tag_value(value: Any, *, allow_pickle: bool = True, depth: int = 0) -> Any:
    """Encode a tag's value for a message. Returns the value itself if msgpack can represent it.

    A whole tag can be encoded, too: a dict with str keys becomes a dict with encoded values.

    Args:
        value: The value.
        allow_pickle: See `encode_object`.
        depth: The number of lists and dicts around the value.

    Raises:
        UncarriableValueError: See `encode_object`.
    """
    kind = type(value)
    if kind in _PLAIN or (kind is int and -(2**63) <= value < 2**64):
        return value
    if (kind is str and (value.isascii() or _is_utf8(value))) or (kind is bytes and len(value) < 2**32):
        return value
    if kind is _Delete:
        return Ext(DELETE_CODE, b"")
    if depth < MAX_DEPTH:
        if kind is list:
            return [encode_tag_value(entry, allow_pickle=allow_pickle, depth=depth + 1) for entry in value]
        if kind is dict and all(type(key) is str and _is_utf8(key) for key in value):
            return {
                key: encode_tag_value(entry, allow_pickle=allow_pickle, depth=depth + 1) for key, entry in value.items()
            }
        number = _number(value)
        if number is not value:
            return number
    return Ext(OBJECT_CODE, encode_object(value, allow_pickle=allow_pickle))


def decode_tag_value(value: Any, *, allow_pickle: bool = True) -> Any:
    """Decode a tag's value from a decoded message: the inverse of `encode_tag_value`. Changes lists and dicts in place.

    Raises:
        ProtocolError: The bytes are not a valid object, or the code is unknown.
        UncarriableValueError: A value was pickled, and `allow_pickle` is false.
    """
    kind = type(value)
    if kind is Ext:
        if value.code == DELETE_CODE:
            return DELETE
        if value.code != OBJECT_CODE:
            raise ProtocolError(f"a tag contains a value of unknown code {value.code}")
        return decode_object(value.data, allow_pickle=allow_pickle)
    if kind is list:
        for position, entry in enumerate(value):
            value[position] = decode_tag_value(entry, allow_pickle=allow_pickle)
    elif kind is dict:
        for key, entry in value.items():
            if type(entry) in _ENCODED:
                value[key] = decode_tag_value(entry, allow_pickle=allow_pickle)
    return value


def decode_tag_value_copied(value: Any, *, allow_pickle: bool = True) -> Any:
    """Return the same as `decode_tag_value`, in new lists and dicts. Does not change `value`."""
    return decode_tag_value(_copied(value), allow_pickle=allow_pickle)


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copied(entry) for key, entry in value.items()}
    return [_copied(entry) for entry in value] if type(value) is list else value


def _number(value: Any) -> Any:
    """Return the Python number of a numpy or torch value without dimensions, and any other value itself."""
    if isinstance(value, np.generic | np.ndarray):
        one = value.ndim == 0 and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8
        return value.item() if one else value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        one = not value.is_nested and value.ndim == 0 and not value.dtype.is_complex and not value.is_quantized
        return value.item() if one else value
    return value


def _is_utf8(text: str) -> bool:
    """Whether text has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
