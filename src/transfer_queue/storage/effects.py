"""What a storage unit wants done: the server carries these out and branches on nothing but their type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Union

from transfer_queue.messages import AnyReply, ExtentsGone, Freed, Measured, Moved, Recalled, SpaceShort, WriterGone


@dataclass(frozen=True, slots=True)
class Answer:
    """Send `reply` to the request `sequence` of the connection `peer`, with this payload."""

    peer: int
    sequence: int
    reply: AnyReply
    payload: Sequence[memoryview] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Send this to the controller, and again until it has answered."""

    body: WriterGone | SpaceShort | Freed | Moved | Recalled | ExtentsGone | Measured


@dataclass(frozen=True, slots=True)
class Fetch:
    """Receive blocks from units on other nodes into memory here, and say which of them came.

    number: of this fetch. wanted: unit, offset, generation and length of each block. remotes: unit -> "host:port".
    into: where each goes.
    """

    number: int
    wanted: Sequence[tuple[int, int, int, int]]
    remotes: Mapping[int, str]
    into: Sequence[memoryview]


Effect = Union[Answer, Report, Fetch]
