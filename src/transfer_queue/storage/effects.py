"""What a storage unit wants done: the server carries these out and branches on nothing but their type."""

from __future__ import annotations

from collections.abc import Sequence
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


Effect = Union[Answer, Report]
