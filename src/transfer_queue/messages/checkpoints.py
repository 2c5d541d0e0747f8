"""Requests that save and load the state of the system."""

from __future__ import annotations

from transfer_queue.messages.base import (
    Natural,
    Position,
    Reply,
    RequestBody,
)


class FetchState(RequestBody, frozen=True):
    """Ask for a part of a state file, for a client on another node.

    The reply is `Done` with the number of bytes from `start` on (None if there is no such file); its payload has at
    most `length` of them.
    """

    name: str
    start: Natural
    length: Natural


class SendState(RequestBody, frozen=True):
    """Write the payload at a position of a state file, for a client on another node that is about to load it."""

    name: str
    start: Position
    """The position in bytes; -1 removes the file."""


class BeginCheckpoint(RequestBody, frozen=True):
    """Begin a pending save of the present state for this client.

    When the reply is sent, the state is in the file of this name in the system's folder of state files. The space of
    its values is not used again until `EndCheckpoint`, or until the client is gone.
    """

    name: str
    """32 hex digits, chosen by the client."""


class EndCheckpoint(RequestBody, frozen=True):
    """End a pending save. The reply says whether all its values were available until now."""

    name: str


class LoadState(RequestBody, frozen=True):
    """Replace the state of the system by that in the file of this name in the system's folder of state files."""

    name: str
    merge: bool = False
    """Whether to add the partitions of that state to the system, and to replace nothing."""


class BeginCheckpointReply(Reply, frozen=True, tag="CutReply"):
    """Identifies the blocks of a checkpoint, so that the client copies only those that an earlier one does not have."""

    origin: str
    """In checkpoints of equal origin, equal block numbers mean the same block."""
    origins: dict[str, int] = {}
    """Other origin -> number below which block numbers mean the same blocks there."""
