"""What all messages are: structs that travel as msgpack arrays."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all messages."""
