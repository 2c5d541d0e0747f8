"""The payloads of the benchmarks. Writer and reader make them from the same seed, so the reader can compare every byte.

The module imports nothing of this package, so that other systems can be measured with the same payloads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict


@dataclass(frozen=True)
class Payload:
    """A batch. kind: "dense", "jagged", "objects" or "mixed". width: numbers of a dense row; mean of a jagged one."""

    kind: str
    rows: int
    fields: int
    width: int

    @property
    def name(self) -> str:
        """Return the name for a row of a table."""
        if self.kind == "dense":
            return f"{self.rows} rows x {self.fields} x {self.width} f32"
        return f"{self.rows} rows, {self.kind}"

    @property
    def keys(self) -> list[str]:
        """Return the keys of the rows."""
        return [f"k{i}" for i in range(self.rows)]


def make(payload: Payload, seed: int) -> TensorDict:
    """Return the batch [rows]."""
    return TensorDict({name: column(payload, name, seed) for name in names(payload)}, batch_size=[payload.rows])


def names(payload: Payload) -> list[str]:
    """Return the names of the fields."""
    if payload.kind == "mixed":
        return ["dense", "ids", "mask", "logprobs", "reward", "text"]
    return [f"f{i}" for i in range(payload.fields)]


def column(payload: Payload, name: str, seed: int) -> Any:
    """Return one field: a tensor, a jagged tensor or a list."""
    if payload.kind == "objects":
        return _objects(payload.rows, seed) if name == "f0" else _texts(payload.rows, seed + int(name[1:]))
    if payload.kind == "dense":
        return _dense(payload.rows, payload.width, seed * 31 + int(name[1:]))
    if payload.kind == "jagged":
        return _jagged(payload, torch.float32 if int(name[1:]) % 2 else torch.int64, seed)
    if name == "dense":
        return _dense(payload.rows, 2 * payload.width, seed)
    if name == "reward":
        return _dense(payload.rows, 1, seed).view(payload.rows)
    if name == "text":
        return _texts(payload.rows, seed)
    return _jagged(payload, torch.float32 if name == "logprobs" else torch.int64, seed)


def lengths(rows: int, mean: int, seed: int) -> np.ndarray:
    """Return log-normal lengths, like those of a model's answers, at least 1 and with this mean; int64 [rows]."""
    drawn = np.exp(np.random.default_rng(seed).normal(0, 0.7, rows))
    found: np.ndarray = np.maximum(1, drawn * (mean / drawn.mean())).astype(np.int64)
    return found


def _dense(rows: int, width: int, seed: int) -> torch.Tensor:
    start = seed * 1_000_003 % 2**30
    return torch.arange(start, start + rows * width, dtype=torch.int32).view(torch.float32).view(rows, width)


def _jagged(payload: Payload, dtype: torch.dtype, seed: int) -> torch.Tensor:
    ends = np.cumsum(lengths(payload.rows, payload.width, seed))
    offsets = torch.from_numpy(np.concatenate(([0], ends)))
    values = torch.arange(seed, seed + int(ends[-1]), dtype=torch.int32).to(dtype)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _texts(rows: int, seed: int) -> list[str]:
    return [f"answer {seed} of row {row}: " + "word " * (row % 40) for row in range(rows)]


def _objects(rows: int, seed: int) -> list[dict[str, Any]]:
    return [{"uid": row + seed, "source": "math", "turns": [1, 2, row], "score": row / 7} for row in range(rows)]


def nbytes(batch: TensorDict) -> int:
    """Return the bytes of the values. A text counts its characters, another object the characters of its repr."""
    total = 0
    for name in names_of(batch):
        value = batch.get(name)
        if isinstance(value, torch.Tensor):
            value = value.values() if value.is_nested else value
            total += value.numel() * value.element_size()
        else:
            total += sum(len(each if isinstance(each, str) else repr(each)) for each in value.tolist())
    return total


def names_of(batch: TensorDict) -> list[str]:
    """Return the names of the fields."""
    return [str(name) for name in batch.keys()]  # noqa: SIM118 (iterating a TensorDict gives rows)


def differences(got: TensorDict, payload: Payload, seed: int) -> list[str]:
    """Return the names of the fields that are missing or whose bytes differ."""
    there = set(names_of(got))
    return [n for n in names(payload) if n not in there or not _same(got.get(n), column(payload, n, seed))]


def _same(got: Any, wanted: Any) -> bool:
    if not isinstance(wanted, torch.Tensor):
        return bool(list(got.tolist() if hasattr(got, "tolist") else got) == wanted)
    if got.dtype != wanted.dtype or got.shape[0] != wanted.shape[0]:
        return False
    one, of_one = _flat(got)
    other, of_other = _flat(wanted)
    return torch.equal(of_one, of_other) and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _flat(tensor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all values, and the length of each row."""
    if tensor.is_nested and tensor.layout == torch.jagged:
        return tensor.values().contiguous().view(-1), tensor.offsets().diff() * tensor.values()[:1].numel()
    rows = list(tensor.unbind()) if tensor.is_nested else None
    if rows is not None:
        return torch.cat([row.reshape(-1) for row in rows]), torch.tensor([row.numel() for row in rows])
    width = tensor[:1].numel()
    return tensor.reshape(-1), torch.full((len(tensor),), width)
