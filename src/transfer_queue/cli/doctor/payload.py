"""What the self-test puts, and how its reader knows that every byte of it came: both make it out of a seed."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict

ROW = 1 << 20  # bytes of a dense row
SMALL_ROWS = 4096
SMALL = 16  # numbers of a small row
TEXT = 24  # letters of its text


def dense(nbytes: int, seed: int) -> TensorDict:
    """Rows of 1 MiB, int64 [rows, 131072]."""
    rows = max(1, nbytes // ROW)
    numbers = np.random.default_rng(seed).integers(-(2**62), 2**62, (rows, ROW // 8), "i8")
    return TensorDict({"values": torch.from_numpy(numbers)}, batch_size=[rows])


def small(seed: int) -> TensorDict:
    """4096 rows of a tensor (int64 [16]) and a text of 24 letters each."""
    random = np.random.default_rng(seed)
    numbers = random.integers(-(2**62), 2**62, (SMALL_ROWS, SMALL), "i8")
    letters = random.integers(97, 123, (SMALL_ROWS, TEXT), "u1").tobytes().decode()
    texts = [letters[i * TEXT : (i + 1) * TEXT] for i in range(SMALL_ROWS)]
    return TensorDict({"numbers": torch.from_numpy(numbers), "text": texts}, batch_size=[SMALL_ROWS])


def make(kind: str, nbytes: int, seed: int) -> TensorDict:
    """The payload "dense" or "small"."""
    return dense(nbytes, seed) if kind == "dense" else small(seed)


def keys(payload: TensorDict) -> list[str]:
    """The keys of its rows."""
    return [f"k{i}" for i in range(payload.batch_size[0])]


def differences(got: TensorDict, wanted: TensorDict) -> list[str]:
    """The fields that are not the same to the byte."""
    return [name for name in map(str, wanted.keys()) if not _same(got, wanted, name)]


def _same(got: TensorDict, wanted: TensorDict, name: str) -> bool:
    if name not in got.keys():  # noqa: SIM118
        return False
    if name == "text":
        return bool(got.get(name).tolist() == wanted.get(name).tolist())
    one, other = got[name], wanted[name]
    return one.dtype == other.dtype and torch.equal(one, other)
