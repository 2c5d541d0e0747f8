"""The items of the benchmark of queues, for ours and for those of peers: the module imports nothing of this package."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

SMALL, LARGE = "small", "8 MB"


def item_of(kind: str) -> Any:
    """Return an item. `kind` is SMALL or LARGE."""
    if kind == SMALL:
        return {name: torch.arange(64.0) for name in ("prompt", "mask", "score")}
    return torch.arange(2 << 20, dtype=torch.float32)


def copy_of(item: Any) -> Any:
    """Return a copy, because multiprocessing shares the memory of a tensor that it has sent once."""
    return {name: value.clone() for name, value in item.items()} if isinstance(item, dict) else item.clone()


def pairs(put: Callable[[Any], None], get: Callable[[], Any], item: Any, count: int) -> float:
    """Return the pairs of a put and a get per second."""
    took = 0.0
    for _ in range(count):
        one = copy_of(item)
        began = time.perf_counter()
        put(one)
        got = get()
        took += time.perf_counter() - began
        check(got, item)
    return count / took


def check(got: Any, item: Any) -> None:
    """Raise AssertionError if the item that came out of a queue is not the one that was put."""
    tensors = zip(got.values(), item.values(), strict=True) if isinstance(item, dict) else [(got, item)]
    for one, other in tensors:
        # all bytes of large items would take longer than the queue
        if len(one) != len(other) or one[-1] != other[-1] or one[len(one) // 2] != other[len(one) // 2]:
            raise AssertionError("an item that came out of a queue is not the one that was put")
