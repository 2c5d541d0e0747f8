"""What the core asks its server to do. The server branches on the effect's type and on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union

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


class Work(msgspec.Struct, frozen=True):
    """Compute `run()`, which takes long and touches nothing of the core, elsewhere than in the loop.

    What it returns, or the exception that it raises, goes to `Controller.worked` under this number.
    """

    number: int
    run: Callable[[], Any]


Effect = Union[Work, RefuseLeases, Send, FreeExtents]
