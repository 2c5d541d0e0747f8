"""What the core asks its server to do. The server branches on the effect's type and on nothing else."""

from __future__ import annotations

from typing import Union

import msgspec

from transfer_queue.messages import AnyReply


class Send(msgspec.Struct, frozen=True):
    """Answer request `sequence` of the connection `peer`."""

    peer: int
    sequence: int
    reply: AnyReply


class FreeExtents(msgspec.Struct, frozen=True):
    """Tell this unit that nothing lives in these extents any more."""

    unit: int
    extents: list[int]


class RefuseLeases(msgspec.Struct, frozen=True):
    """Tell this unit to refuse the leases that wait for space."""

    unit: int
    words: str


Effect = Union[RefuseLeases, Send, FreeExtents]
