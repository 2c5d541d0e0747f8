"""What a batch costs on its way from a loader's worker to the process that trains: whole, or in micro-batches.

    python benchmarks/loader.py

Prints milliseconds a batch (median of 100), of 64 rows in 16 micro-batches: sent whole and cut by the receiver, as
StreamingDataLoader does; sent as one list of micro-batches; sent one by one; and cutting alone. Then how long a loader
takes to end two workers that wait for rows. And a JSON line.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import own_runtime_dir
from tensordict import TensorDict
from torch.utils.data import DataLoader, IterableDataset

from transfer_queue.dataloader.micro_batches import chunk_batch_fn
from transfer_queue.metadata import BatchMeta

BATCHES, ROWS, MICRO = 100, 64, 4


def batch() -> tuple[TensorDict, BatchMeta]:
    """About 1 MiB in four ragged columns and a dense one."""

    def ragged(dtype: torch.dtype) -> torch.Tensor:
        rows = [torch.ones(512 + row, dtype=dtype) for row in range(ROWS)]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    types = {"ids": torch.int64, "mask": torch.int64, "logprobs": torch.float32, "advantages": torch.float32}
    columns = {name: ragged(dtype) for name, dtype in types.items()}
    data = TensorDict({**columns, "reward": torch.ones(ROWS)}, batch_size=[ROWS])
    return data, BatchMeta(list(range(ROWS)), ["p"] * ROWS)


def cut(item: tuple[TensorDict, BatchMeta]) -> list[Any]:
    """The micro-batches of a batch."""
    return list(chunk_batch_fn(*item, micro_batch_size=MICRO))


class Sent(IterableDataset):
    """Batches in some form."""

    def __init__(self, form: str) -> None:
        self.form = form

    def __iter__(self) -> Iterator[Any]:
        """The items that cross."""
        for _ in range(BATCHES + 10):
            if self.form == "one by one":
                yield from cut(batch())
            else:
                yield batch() if self.form == "whole" else cut(batch())


def median(times: list[float]) -> float:
    """Milliseconds."""
    return sorted(times)[len(times) // 2] * 1e3


def crossing(form: str) -> float:
    """Milliseconds from one batch to the next, the worker making them as fast as it can."""
    items = iter(DataLoader(Sent(form), batch_size=None, num_workers=1, collate_fn=lambda item: item))
    take: Callable[[], Any] = lambda: next(items)  # noqa: E731
    if form == "whole":
        take = lambda: cut(next(items))  # noqa: E731
    elif form == "one by one":
        take = lambda: list(itertools.islice(items, ROWS // MICRO))  # noqa: E731
    times = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        take()
        times.append(time.perf_counter() - start)
    return median(times)


def ending() -> float:
    """Seconds that `del loader` takes."""
    import transfer_queue as tq

    tq.init()
    dataset = tq.StreamingDataset(None, 4, 4, ["x"], "p", "t", 0)
    loader = tq.StreamingDataLoader(dataset, num_workers=2)
    items = iter(loader)
    while not any(task.waiting for p in tq.get_client().status().partitions for task in p.tasks):
        tq.get_client().create_partition("p")  # a claim in no partition is not shown
    start = time.perf_counter()
    del loader, items
    seconds = time.perf_counter() - start
    tq.close()
    return seconds


def main() -> None:
    """All of it."""
    warnings.simplefilter("ignore")
    found = {form: round(crossing(form), 2) for form in ("whole", "list", "one by one")}
    here, times = batch(), []
    for _ in range(BATCHES):
        start = time.perf_counter()
        cut(here)
        times.append(time.perf_counter() - start)
    found["cutting alone"] = round(median(times), 2)
    with tempfile.TemporaryDirectory() as folder:
        own_runtime_dir(folder)
        found["del loader, ms"] = round(ending() * 1e3, 1)
    for name, value in found.items():
        print(f"{name:>15}: {value:8.2f} ms")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
