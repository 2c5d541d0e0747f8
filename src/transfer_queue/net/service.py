"""What a server serves, and what it is told to send."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from transfer_queue.net.handshake import Hello
from transfer_queue.net.peer import Payload


class Outgoing(NamedTuple):
    """A frame for a peer; one that is gone by then gets nothing.

    payload: its parts, to be sent one after the other from where they lie.
    """

    peer: int
    body: bytes
    payload: Sequence[Payload] = ()


class Service(Protocol):
    """What a server serves. Called by the loop's thread alone; must not block. `now` is the server's clock.

    An exception in `received` ends that connection (`closed` follows); ProtocolError says that its message
    made no sense. Peers are numbered from 1 and never again.
    """

    def opened(self, peer: int, hello: Hello) -> None:
        """A peer has connected and proved that it holds the key."""

    def received(self, peer: int, body: bytes, payload: memoryview | None, now: float) -> Iterable[Outgoing]:
        """A frame has come; what to send, to this peer and others."""

    def closed(self, peer: int, now: float) -> Iterable[Outgoing]:
        """A peer is gone; nothing can be sent to it."""

    def next_deadline(self) -> float | None:
        """When `ticked` wants to be called; None for never."""

    def ticked(self, now: float) -> Iterable[Outgoing]:
        """A deadline has passed."""
