"""Notices to the controller, which get no reply: which batches were handed over or given back, and which claims ended.

A notice is written to a connection at once, and again before the first request on every other connection, until the
reply to a later request on one of these connections shows that the controller has read it. So it adds no round trip,
it is not lost with a connection, and everything that this client requests later is served after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from transfer_queue.messages.claims import ReportBatches
from transfer_queue.messages.envelopes import AnyRequest, RequestEnvelope
from transfer_queue.net.framing import pack_frame

NOTICE = 0
"""The sequence of requests that get no reply."""
_BATCHES = 256
"""Notices in one message, beyond which further ones wait for the next request."""


class Notices:
    """The notices of one client that the controller may not have read. Thread-safe.

    Args:
        encode: Encodes an envelope.
    """

    def __init__(self, encode: Callable[[RequestEnvelope], bytes]) -> None:
        self._encode = encode
        self._lock = threading.Lock()
        self._unread: dict[tuple[str, str, int], tuple[object, int] | None] = {}
        """(kind, partition, number) -> the last connection on which it was written and the sequence before which it
        was; None if it was not written yet."""
        self.on_first: Callable[[], None] = lambda: None
        """Called when there is a notice to be confirmed, after there was none."""

    def __bool__(self) -> bool:
        return bool(self._unread)

    def add(self, report: AnyRequest) -> None:
        """Add the notices of a `ReportBatches`."""
        assert isinstance(report, ReportBatches)
        with self._lock:
            none = not self._unread
            for kind in ("handed_over", "finished", "returned"):
                self._unread.update({(kind, partition, token): None for partition, token in getattr(report, kind)})
            self._unread.update({("withdrawn", "", sequence): None for sequence in report.withdrawn})
            if report.left:
                self._unread["left", "", 0] = None
        if none:
            self.on_first()

    def frame_for(self, connection: object, sequence: int) -> bytes:
        """Return the frame to write to a connection before the request `sequence`; b"" if there is nothing to write."""
        if not self._unread:
            return b""
        found: dict[str, list[Any]] = {
            kind: [] for kind in ("handed_over", "finished", "returned", "withdrawn", "left")
        }
        with self._lock:
            new = [key for key, at in self._unread.items() if at is None or at[0] is not connection][:_BATCHES]
            for key in new:
                kind, partition, number = key
                found[kind].append(number if kind in ("withdrawn", "left") else (partition, number))
                self._unread[key] = connection, sequence
        left = bool(found.pop("left"))
        report = ReportBatches(**found, left=left)
        return pack_frame(self._encode(RequestEnvelope(NOTICE, 0, report))) if new else b""

    def confirm(self, connection: object, sequence: int) -> list[int]:
        """Forget the notices that were written before the request `sequence`, whose reply has arrived.

        Returns the sequences of the withdrawn claims among them.
        """
        with self._lock:
            read = [key for key, at in self._unread.items() if at is not None and at[0] is connection]
            read = [key for key in read if self._unread[key][1] <= sequence]  # type: ignore[index]
            for key in read:
                del self._unread[key]
        return [number for kind, _, number in read if kind == "withdrawn"]
