"""What does a batch cost on its way from a loader's worker to the process that trains?

A batch has 64 rows in 16 micro-batches. It is sent whole and cut by the receiver, as StreamingDataLoader does; as one
list of micro-batches; and one by one. Each is compared with cutting alone.
"""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.harness.machine import clocked
from benchmarks.harness.report import Row, Scale, against
from transfer_queue.dataloader.micro_batches import chunk_batch_fn
from transfer_queue.metadata import BatchMeta

QUESTION = "What does a batch cost from a loader's worker to the training process?"
ROWS, MICRO = 64, 4
FORMS = ("whole", "as a list", "one by one")


def batch() -> tuple[TensorDict, BatchMeta]:
    """Return about 1 MiB in four ragged columns and a dense one."""

    def ragged(dtype: torch.dtype) -> torch.Tensor:
        rows = [torch.ones(512 + row, dtype=dtype) for row in range(ROWS)]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    types = {"ids": torch.int64, "mask": torch.int64, "logprobs": torch.float32, "advantages": torch.float32}
    columns = {name: ragged(dtype) for name, dtype in types.items()}
    data = TensorDict({**columns, "reward": torch.ones(ROWS)}, batch_size=[ROWS])
    return data, BatchMeta(list(range(ROWS)), ["p"] * ROWS)


def cut(item: tuple[TensorDict, BatchMeta]) -> list[Any]:
    """Return the micro-batches of a batch."""
    return list(chunk_batch_fn(*item, micro_batch_size=MICRO))


class Sent(IterableDataset[Any]):
    """Batches in one of the forms."""

    def __init__(self, form: str, count: int) -> None:
        self._form, self._count = form, count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._count):
            if self._form == "one by one":
                yield from cut(batch())
            else:
                yield batch() if self._form == "whole" else cut(batch())


def as_it_is(item: Any) -> Any:
    """Collates nothing."""
    return item


def run(scale: Scale) -> list[Row]:
    """Measure all forms."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count = scale.pick(100, 3)
        here = batch()
        alone = statistics.median(clocked(cut, here) for _ in range(count)) * 1e3
        return [
            against(f"a batch of {ROWS} rows, sent {form}", "ms", _crossing(form, count), alone, "cutting alone")
            for form in FORMS
        ]


def _crossing(form: str, count: int) -> float:
    """Return the milliseconds from one batch to the next, if the worker makes them as fast as it can."""
    items = iter(DataLoader(Sent(form, count + 1), batch_size=None, num_workers=1, collate_fn=as_it_is))
    take: Callable[[], list[Any]] = lambda: next(items)  # noqa: E731
    if form == "whole":
        take = lambda: cut(next(items))  # noqa: E731
    elif form == "one by one":
        take = lambda: list(itertools.islice(items, ROWS // MICRO))  # noqa: E731
    found = []
    for number in range(count + 1):
        got: list[list[Any]] = []
        seconds = clocked(lambda: got.append(take()))  # noqa: B023
        if number:
            found.append(seconds)
        (parts,) = got
        if sum(len(data) for data, _ in parts) != ROWS or float(parts[0][0]["ids"].values().sum()) != 512 * MICRO + 6:
            raise AssertionError("the values of received micro-batches differ from those that were sent")
    return statistics.median(found) * 1e3
