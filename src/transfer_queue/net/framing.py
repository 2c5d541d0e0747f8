"""Frames on a byte stream: a body (msgpack) and an optional payload of raw bytes.

    frame = u4 body length, u8 payload length (little-endian), body, payload

`FrameReader` takes the bytes of a socket in pieces of any size and returns complete frames. It checks the lengths as
soon as it has the header, before it stores any byte of the frame. This module does not depend on sockets, and does not
interpret bodies.
"""

from __future__ import annotations

import struct
from typing import Union

from transfer_queue.errors import ProtocolError

HEADER = struct.Struct("<IQ")
HEADER_SIZE = HEADER.size
MAX_BODY = 1 << 30
MAX_PAYLOAD = 1 << 40

Frame = tuple[bytes, Union[memoryview, None]]


def pack_frame(body: bytes, payload_length: int = 0) -> bytes:
    """Return header and body of a frame. The bytes of the payload, if there is one, must follow on the stream."""
    return HEADER.pack(len(body), payload_length) + body


class FrameReader:
    """Divides a stream into frames."""

    __slots__ = ("_kept", "_needed", "held", "max_body", "max_payload", "missing")

    def __init__(self, max_body: int = MAX_BODY, max_payload: int = MAX_PAYLOAD) -> None:
        self.max_body = max_body
        """The largest body in bytes. After a frame that announces more, the stream cannot be read any further."""
        self.max_payload = max_payload
        """The largest payload in bytes."""
        self._kept = bytearray()
        """The beginning of the frame that is not complete yet, always shorter than `_needed`."""
        self._needed = HEADER_SIZE
        """The length of that frame if its header has arrived, otherwise of a header."""
        self.missing = HEADER_SIZE
        """The least number of bytes that the unfinished frame lacks: a hint for the size of the next read."""
        self.held = 0
        """The number of bytes of the unfinished frame that have arrived."""

    @property
    def clean(self) -> bool:
        """Whether no byte of an unfinished frame has arrived."""
        return not self._kept

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Return the frames that `data` completes, in order. The payload of a frame without one is None.

        Payloads are views of memory that nothing else uses. Raises `ProtocolError` if a frame announces a length over
        the limit.
        """
        if self._kept:
            self._kept += data
            if len(self._kept) < self._needed:
                self._note_kept()
                return []
            data = self._kept
            self._kept = bytearray()
        elif not isinstance(data, bytes):
            data = bytes(data)
        elif len(data) >= HEADER_SIZE:
            body_length, payload_length = HEADER.unpack_from(data)
            if len(data) - HEADER_SIZE == body_length <= self.max_body and not payload_length:
                return [(data[HEADER_SIZE:], None)]  # the usual case: one whole frame without a payload
        return self._cut(data)

    def _cut(self, data: bytes | bytearray) -> list[Frame]:
        frames: list[Frame] = []
        start, end = 0, len(data)
        view = memoryview(data)
        needed = HEADER_SIZE
        while end - start >= HEADER_SIZE:
            body_length, payload_length = HEADER.unpack_from(data, start)
            if body_length > self.max_body or payload_length > self.max_payload:
                raise ProtocolError(self._refusal(body_length, payload_length))
            body_start = start + HEADER_SIZE
            body_end = body_start + body_length
            needed = body_end + payload_length - start
            if end - start < needed:
                break
            payload = view[body_end : body_end + payload_length] if payload_length else None
            frames.append((bytes(view[body_start:body_end]), payload))
            start += needed
            needed = HEADER_SIZE
        self._needed = needed
        if start < end:
            self._kept += view[start:end]
        self._note_kept()
        return frames

    def _note_kept(self) -> None:
        self.held = len(self._kept)
        self.missing = self._needed - self.held

    def _refusal(self, body_length: int, payload_length: int) -> str:
        return (
            f"a frame must have a body of at most {self.max_body} bytes and a payload of at most {self.max_payload} "
            f"bytes, got {body_length} and {payload_length}. The peer is not a transfer_queue process, or the stream "
            "is broken"
        )
