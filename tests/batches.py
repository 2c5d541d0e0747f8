"""Batches of four rows with ascending numbers: no two elements of any batches are alike in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

ROWS = 4


class Batches:
    """width: int32 numbers of a row. A `client` is one, or the package."""

    def __init__(self, width: int) -> None:
        self.width = width

    @property
    def nbytes(self) -> int:
        """Bytes of a batch."""
        return ROWS * self.width * 4

    def keys(self, number: int) -> list[str]:
        return [f"{number}-{row}" for row in range(ROWS)]

    def values(self, number: int) -> torch.Tensor:
        return torch.arange(ROWS * self.width, dtype=torch.int32).reshape(ROWS, -1) * 7 + number * 1_000_003

    def put(self, client: Any, number: int, **more: Any) -> None:
        client.kv_batch_put(self.keys(number), "p", {"x": self.values(number)}, **more)

    def check(self, client: Any, numbers: Iterable[int]) -> None:
        """All these batches have their values, bit by bit."""
        for number in numbers:
            found = client.kv_batch_get(self.keys(number), "p")["x"]
            assert torch.equal(torch.stack(list(found.unbind())), self.values(number))

    def clear(self, client: Any, number: int) -> None:
        client.kv_clear(self.keys(number), "p")
