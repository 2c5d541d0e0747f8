"""Many short columns as one long one, so that saving them costs two buffers and not one each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

PIECE = 4096
"""Texts of one piece of those that are saved as bytes."""

_encode = msgspec.msgpack.Encoder().encode
_decode_texts = msgspec.msgpack.Decoder(list[str]).decode


def joined(columns: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """Columns of one dtype, one behind the other, and where each ends. Without any they are i8."""
    parts = list(columns)
    ends = np.cumsum([len(part) for part in parts], dtype="i8")
    return {"ends": ends, "values": np.concatenate(parts) if parts else np.zeros(0, "i8")}


def parted(saved: Any) -> list[np.ndarray]:
    """The columns that were joined, as views. ValueError where they cannot have been."""
    values, ends = saved["values"], [0, *saved["ends"].tolist()]
    if ends != sorted(ends) or ends[-1] != len(values):
        raise ValueError(f"{len(values)} numbers cannot be parted at {ends[1:][:5]}")
    return [values[a:b] for a, b in pairwise(ends)]


def packed_texts(texts: list[str]) -> dict[str, np.ndarray]:
    """Texts as bytes, in pieces: one piece is decoded in a millisecond, while other threads wait."""
    return joined([np.frombuffer(_encode(texts[at : at + PIECE]), "u1") for at in range(0, len(texts), PIECE)])


def unpacked_texts(saved: Any) -> Iterator[list[str]]:
    """The texts that were packed, piece by piece. ValueError or msgspec.DecodeError where they cannot have been.

    Older releases saved them as one list, which is parted here.
    """
    if isinstance(saved, list):
        for at in range(0, len(saved), PIECE):
            yield saved[at : at + PIECE]
    else:
        for piece in parted(saved):
            yield _decode_texts(piece.data)
