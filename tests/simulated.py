"""A simulated system for tests: clusters that are checked and closed at the end, tables, and exact comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from transfer_queue.messages.reports.timeline import Introduce
from transfer_queue.testing import Client, Cluster
from transfer_queue.testing.simulated_client import Task

T = TypeVar("T")
Start = Callable[..., Cluster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(...): a Cluster of the test's own. At the end of the test its invariants are checked."""
    made: list[Cluster] = []

    def make(**arguments: Any) -> Cluster:
        made.append(Cluster(tmp_path / f"arena{len(made)}", **arguments))
        return made[-1]

    yield make
    for cluster in made:
        cluster.run()
        cluster.check()
        cluster.close()


@pytest.fixture
def cluster(start: Start) -> Cluster:
    """A cluster whose fetches wait."""
    return start(seed=1)


@pytest.fixture
def a(cluster: Cluster) -> Client:
    """One client."""
    return cluster.client("a")


@pytest.fixture
def b(cluster: Cluster) -> Client:
    """Another client."""
    return cluster.client("b")


def await_result(cluster: Cluster, task: Task[T]) -> T:
    """Let time pass until an operation has ended, and return its result."""
    cluster.wait(lambda: task.done)
    return task.result()


def introduce(client: Client, task: str, rank: int) -> None:
    """Name the task and rank of a client's process, as `init` does."""
    client.state.introduction = Introduce(task, rank)
    client.call(client.state.learn())
    client.call(client.state.introduce())


def table(**columns: Any) -> TensorDict:
    """A TensorDict of these columns, as long as the first."""
    first = next(iter(columns.values()))
    rows = first.size(0) if isinstance(first, torch.Tensor) else len(first)
    return TensorDict(columns, batch_size=[rows])


def numbers(rows: int, start: int = 0, name: str = "x") -> TensorDict:
    """Scalar rows start, start + 1, ..."""
    return table(**{name: torch.arange(start, start + rows)})


def ragged(*lengths: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A jagged tensor whose row i is full of i + 1."""
    rows = [torch.full((n,), i + 1, dtype=dtype) for i, n in enumerate(lengths)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def rows_of(column: Any) -> list[Any]:
    """The rows of a returned column, whatever holds them."""
    if isinstance(column, torch.Tensor):
        return list(column.unbind(0))
    # a LinkedList is a list; before tensordict 0.11 it has no tolist
    return list(column.tolist() if hasattr(column, "tolist") else column)


def values(items: Iterable[Any]) -> list[int]:
    """The numbers of field x in items of a dataset or loader."""
    return [value for data, _ in items for value in data["x"].tolist()]


def take(items: Iterable[Any], count: int) -> list[Any]:
    """The next items."""
    return list(islice(items, count))


def same(one: Any, other: Any) -> bool:
    """Whether two values are of one type and equal to the last bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and _bytes(one) == _bytes(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool(one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return bool(one.hex() == other.hex())
    return bool(one == other)


def _bytes(tensor: torch.Tensor) -> bytes:
    # A copy: a tensor of one element counts as contiguous whatever its stride is, and `view` refuses some strides.
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


@contextmanager
def reply_on_its_way(cluster: Cluster, client: Client, operation: Any) -> Iterator[Any]:
    """Yield the task of an operation whose reply the client gets at the end of the block."""
    client.get_partition_list()  # so that it knows the storage units
    client.hold()
    task = client.start(operation)
    cluster.run()
    yield task
    client.release()
    cluster.run()


def failure(cluster: Cluster, client: Client, operation: Any) -> BaseException:
    """What an operation raises, with time standing still."""
    task = client.start(operation)
    cluster.run()
    with pytest.raises(Exception) as caught:
        task.result()
    return caught.value
