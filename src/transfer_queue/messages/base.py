"""The base classes of messages, and the types of their attributes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all messages: a struct that is encoded as a msgpack array."""


LONGEST_SECONDS = 1e9

Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A count, a global index, a version, a token or a sequence: a number that fits into a column of i8."""
AnyIndex = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""A global index that a user has passed; it need not exist."""
Version = Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]
"""A version of a partition; -1 if the partition did not exist yet."""
Position = Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]
"""A position in a file; -1: none."""
Bytes = Annotated[int, Meta(ge=0, le=1 << 62)]
"""A number of bytes, or an offset in an arena."""
Unit = Annotated[int, Meta(ge=0, le=(1 << 23) - 1)]
"""The number of a storage unit. Together with an `ExtentNumber` it fits into a column of i8
(`core.units.migration_planner`).
"""
AnyUnit = Annotated[int, Meta(ge=-1, le=(1 << 23) - 1)]
"""The number of a storage unit; -1: any unit."""
ExtentNumber = Annotated[int, Meta(ge=0, le=(1 << 40) - 1)]
"""The number of an extent of a unit."""
Begin = Annotated[int, Meta(ge=-1, le=1 << 62)]
"""The offset of the first byte of an extent; -1 if it is not known."""
Small = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
"""A number that fits into a column of i4: the rows of a block, the number of a slot."""
Dimensions = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
"""Dimensions of a row; -1: see `FieldSpec`."""
Seconds = Annotated[float, Meta(ge=-LONGEST_SECONDS, le=LONGEST_SECONDS)]
"""A duration; a negative one means 0."""
Finite = Annotated[float, Meta(ge=-1e18, le=1e18)]
"""A measured value."""


PROTOCOL_VERSION = 2


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of decoding bytes that are not a valid message."""


DELETE_CODE = 64
"""The msgpack Ext of a tag entry to remove (`wire.objects.object_values.DELETE`)."""


class RequestBody(Message, frozen=True, tag=True):
    """Base of all requests."""


class Reply(Message, frozen=True, tag=True):
    """Base of all replies."""


def name_of(kind: type[Message]) -> str:
    """Return the name of a type of message in its encoding and in metrics: its tag."""
    return str(kind.__struct_config__.tag)


class Failure(Reply, frozen=True):
    """An error reply: an exception of `errors` by its class name."""

    kind: str
    """The name of the exception class."""
    message: str
    tensors: dict[str, list[str]] = {}
    """See `errors.FieldTypeError`."""
    field: str = ""
    """See `errors.FieldTypeError`."""


class Done(Reply, frozen=True):
    """The request was carried out."""

    value: Any = None
    """A short result."""
    warning: str | None = None
    """A message for the client's log; None for no message."""
