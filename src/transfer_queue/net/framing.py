"""Frames on a byte stream: a body (msgpack) and, out of band, an optional payload of raw bytes.

    frame = u4 body length, u8 payload length (little-endian), body, payload

`FrameReader` takes what a socket gave, in pieces of any size, and hands out whole frames. Lengths
are judged as soon as they are known, before any byte of the frame is kept. This module knows
nothing of sockets or of what a body means.
"""

from __future__ import annotations

import struct
from typing import Union

from transfer_queue.errors import ProtocolError

HEADER = struct.Struct("<IQ")
MAX_BODY = 1 << 30
MAX_PAYLOAD = 1 << 40

Frame = tuple[bytes, Union[memoryview, None]]


def pack_frame(body: bytes, payload_length: int = 0) -> bytes:
    """Header and body of a frame; the payload's bytes, if any, must follow on the stream."""
    return HEADER.pack(len(body), payload_length) + body


class FrameReader:
    """Cuts a stream into frames.

    max_body, max_payload: bytes; a frame that announces more is a ProtocolError, after which the
    stream cannot be read any further.
    """

    __slots__ = ("_kept", "_needed", "max_body", "max_payload")

    def __init__(self, max_body: int = MAX_BODY, max_payload: int = MAX_PAYLOAD) -> None:
        self.max_body = max_body
        self.max_payload = max_payload
        # the beginning of the frame that is not whole yet; shorter than _needed, which is the length of
        # that frame once its header is here, and of a header before
        self._kept = bytearray()
        self._needed = HEADER.size

    @property
    def missing(self) -> int:
        """How many bytes the frame under way lacks at least; a hint for the size of the next read."""
        return self._needed - len(self._kept)

    @property
    def held(self) -> int:
        """How many bytes of the frame under way are kept."""
        return len(self._kept)

    @property
    def clean(self) -> bool:
        """True between frames: nothing of a next frame has come yet."""
        return not self._kept

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """The frames that `data` completes, in order; a frame without payload has None.

        Payloads are views of memory that is theirs alone. Raises ProtocolError for an announced length
        over the limit.
        """
        if self._kept:
            self._kept += data
            if len(self._kept) < self._needed:
                return []
            data = self._kept
            self._kept = bytearray()
        elif not isinstance(data, bytes):
            data = bytes(data)
        return self._cut(data)

    def _cut(self, data: bytes | bytearray) -> list[Frame]:
        frames: list[Frame] = []
        start, end = 0, len(data)
        view = memoryview(data)
        needed = HEADER.size
        while end - start >= HEADER.size:
            body_length, payload_length = HEADER.unpack_from(data, start)
            if body_length > self.max_body or payload_length > self.max_payload:
                raise ProtocolError(self._refusal(body_length, payload_length))
            body_start = start + HEADER.size
            body_end = body_start + body_length
            needed = body_end + payload_length - start
            if end - start < needed:
                break
            payload = view[body_end : body_end + payload_length] if payload_length else None
            frames.append((bytes(view[body_start:body_end]), payload))
            start += needed
            needed = HEADER.size
        self._needed = needed
        if start < end:
            self._kept += view[start:end]
        return frames

    def _refusal(self, body_length: int, payload_length: int) -> str:
        return (
            f"a frame announces a body of {body_length} and a payload of {payload_length} bytes; at most "
            f"{self.max_body} and {self.max_payload} are taken here. The peer is no transfer_queue process, or the "
            "stream is broken"
        )
