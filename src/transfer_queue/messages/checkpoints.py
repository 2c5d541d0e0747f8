"""Requests that save and load the state."""

from __future__ import annotations

from transfer_queue.messages.base import (
    Natural,
    Position,
    Reply,
    Request,
)


class FetchState(Request, frozen=True):
    """Asks for a part of a state file, for a client on another node.

    The reply is `Done` with how many bytes there are from `start` on (None if there is no such file), and `length` of
    them as payload.
    """

    name: str
    start: Natural
    length: Natural


class SendState(Request, frozen=True):
    """The payload goes to this place of a state file, for a client on another node that is about to load it.

    start: -1 removes the file.
    """

    name: str
    start: Position


class BeginCheckpoint(Request, frozen=True):
    """The asking client saves the system as it is now. name: 32 hex digits of its own choice.

    The state is in the file of this name, in the system's folder of state files, when this is answered; and until
    `EndCheckpoint`, or until the client has gone, no space that its values lie in is used again.
    """

    name: str


class EndCheckpoint(Request, frozen=True):
    """The asking client is through with a checkpoint; answered by whether all of it was there until now."""

    name: str


class LoadState(Request, frozen=True):
    """The state in the file of this name, in the system's folder of state files, becomes the system's."""

    name: str


class BeginCheckpointReply(Reply, frozen=True, tag="CutReply"):
    """origin: equal block numbers of equal origins are the same block.

    origins: other origins -> block numbers below this one are the same blocks there.
    """

    origin: str
    origins: dict[str, int] = {}
