"""Many short columns as one long one, so that saving them costs two buffers and not one each."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np


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
