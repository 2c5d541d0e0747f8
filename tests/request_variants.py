"""Requests of every kind, each with one wrong number in it."""

from __future__ import annotations

import typing
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
import numpy as np

from transfer_queue.messages.base import RequestBody, name_of

LIMITS = (0, -1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
FLOATS = (-1.0, 1e9, 1e300, float("nan"), float("inf"), float("-inf"))


def array(message: Any) -> Any:
    """Return the encoded array of a message, without the tag."""
    found = msgspec.to_builtins(message, builtin_types=(bytes,))
    return found[1:] if isinstance(message, RequestBody) else found


Examples = dict[type, Any]  # type of a message -> a valid message, as an array


def plain(kind: Any) -> Any:
    """Return any valid value of this type."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if type(None) in inside:
        return plain(next(each for each in inside if each is not type(None)))
    if origin is list:
        return [plain(inside[0])]
    if origin is tuple:
        return tuple(plain(each) for each in inside)
    if origin is dict:
        return {} if inside[1] is Any else {plain(inside[0]): plain(inside[1])}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return [plain(hints[field.name]) for field in msgspec.structs.fields(kind)]
    return {int: 0, float: 0.0, str: "p", bytes: bytes(8), bool: False}.get(kind)


def variants(kind: Any, examples: Examples, ints: Collection[int]) -> Iterator[Any]:
    """Return values of this type, each with one number, or one column, that is one of `ints`, or at a limit."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if type(None) in inside:
        yield from variants(next(each for each in inside if each is not type(None)), examples, ints)
    elif origin is list:
        for value in variants(inside[0], examples, ints):
            yield [value]
    elif origin is tuple:
        for at, each in enumerate(inside):
            for value in variants(each, examples, ints):
                yield [value if i == at else plain(other) for i, other in enumerate(inside)]
    elif origin is dict and inside[1] is Any:
        for key in ("dp_rank", "batch_index", "dp_size", "priority"):
            for value in (*ints, *FLOATS):
                yield {"dp_rank": 0, "batch_index": 0, key: value}
    elif origin is dict:
        for key in variants(inside[0], examples, ints):
            yield {key: plain(inside[1])}
        for value in variants(inside[1], examples, ints):
            yield {plain(inside[0]): value}
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        names = [field.name for field in msgspec.structs.fields(kind)]
        usual = examples.get(kind) or [plain(hints[name]) for name in names]
        for at, name in enumerate(names):
            for value in variants(hints[name], examples, ints):
                yield [*usual[:at], value, *usual[at + 1 :]]
    elif kind is int:
        yield from ints
    elif kind is float:
        yield from FLOATS
    elif kind is bytes:
        yield from (np.array([number], "<i8").tobytes() for number in ints if abs(number) < 2**63)


def bodies(kind: type[RequestBody], examples: Examples, ints: Collection[int] = LIMITS) -> Iterator[list[Any]]:
    """Requests of this kind as arrays, tag first."""
    for value in variants(kind, examples, ints):
        yield [name_of(kind), *value]
