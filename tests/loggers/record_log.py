"""Reads the files that W&B and SwanLab write offline: a header, then records in the format of LevelDB's log.

Both packages write this format, and neither has a public reader of it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

BLOCK = 32_768
HEADER = struct.Struct("<IHB")  # checksum, length, kind
FULL, FIRST, LAST = 1, 2, 4


def records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file in their order."""
    data = path.read_bytes()
    at, parts = HEADER.size, []
    while at + HEADER.size <= len(data):
        if BLOCK - at % BLOCK < HEADER.size:  # the rest of a block is filled with zeros
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        part = data[at + HEADER.size : at + HEADER.size + length]
        assert len(part) == length, f"{path} ends in the middle of a record"
        at += HEADER.size + length
        parts = [part] if kind in (FULL, FIRST) else [*parts, part]
        if kind in (FULL, LAST):
            yield b"".join(parts)
