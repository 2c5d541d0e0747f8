"""Every container that a get returns goes through every path of a loader: cut, sent, pinned, replayed, resumed."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

import transfer_queue as tq
from simulated import rows_of, same, table
from transfer_queue.dataloader.streaming_dataloader import identity
from transfer_queue.dataloader.streaming_dataset import chunk_batch_fn
from transfer_queue.dataloader.worker_processes import Fetched
from transfer_queue.metadata import BatchMeta
from transfer_queue.wire.blocks.gather import stack_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning"),
]
ROWS, BATCH, MICRO = 10, 4, 3  # the last batch is a remainder, and so is the last micro-batch of each
_numbers = itertools.count()


def filled(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """A row of each shape, full of different numbers."""
    starts = itertools.accumulate((torch.Size(shape).numel() for shape in shapes), initial=0)
    return [
        torch.arange(start, start + torch.Size(shape).numel()).to(dtype).reshape(shape)
        for start, shape in zip(starts, shapes)
    ]


TWO = [(1, 4), (2, 3), (3, 1), (0, 3), (3, 0), (2, 2), (1, 1), (5, 2), (0, 0), (1, 6)]
COLUMNS: dict[str, list[Any]] = {
    "scalars": filled([()] * ROWS, torch.int64),
    "flags": filled([()] * ROWS, torch.bool),
    "equal": filled([(3,)] * ROWS),
    "jagged": filled([(n,) for n in (3, 0, 1, 2, 0, 0, 5, 1, 1, 4)], torch.bfloat16),
    "jagged_outside": filled([(n, 2) for n in range(ROWS)], torch.float16),
    "jagged_inside": filled([(2, n) for n in reversed(range(ROWS))], torch.complex64),
    "empty": filled([(0, 3)] * ROWS),
    "strided": filled(TWO),
    "strided_in_three": filled([(n, 1 + n % 3, n % 2) for n in range(ROWS)], torch.int16),
    "strided_around_one": filled([(n, 2, 1 + n % 3) for n in range(ROWS)], torch.uint8),
    "ranks": filled([(), (2,), (2, 2), (), (1,), (0,), (1, 1), (), (3,), (1, 1, 1)]),
    "objects": [None, "a", b"b", 1, 2.5, {"k": [1]}, [torch.ones(2)], (), np.arange(3), True],
    "texts": [f"row {n}" for n in range(ROWS)],
    "repeated": [torch.full((2, 2), 1.0)] * ROWS,
}
LAYOUTS = {
    "equal": torch.jagged, "jagged": torch.jagged, "jagged_outside": torch.jagged, "jagged_inside": torch.jagged,
    "empty": torch.jagged, "strided": torch.strided, "strided_in_three": torch.strided,
    "strided_around_one": torch.strided, "repeated": torch.jagged,
}  # fmt: skip
"""The layouts of the columns that a get returns as nested tensors."""
INNER = ["scalars", "jagged", "strided", "ranks", "texts"]


def column(name: str) -> Any:
    rows = COLUMNS[name]
    if name in LAYOUTS:
        return torch.nested.as_nested_tensor(rows, layout=LAYOUTS[name])
    return torch.stack(rows) if name in ("scalars", "flags") else stack_of(rows, len(rows))


def everything() -> TensorDict:
    """All columns; some of them again in a TensorDict, and in one inside that."""
    whole = table(**{name: column(name) for name in COLUMNS})
    whole["nested"] = table(**{name: column(name) for name in INNER})
    whole["nested", "deeper"] = table(**{name: column(name) for name in INNER})
    return whole


FIELDS = [*COLUMNS, "nested"]


@pytest.fixture(scope="module")
def system() -> Iterator[Any]:
    yield tq.init(OmegaConf.create({"controller": {"polling_mode": True, "sampler": "RankAwareSampler"}}))
    tq.close()


@pytest.fixture(scope="module")
def partition(system: Any) -> str:
    tags = [{"total_lengths": 1}] * ROWS
    keys = [f"k{row}" for row in range(ROWS)]
    tq.get_client().kv_batch_put(keys, "p", everything(), tags)
    tq.get_client().seal("p")
    return "p"


def dataset(system: Any, **more: Any) -> tq.StreamingDataset:
    task = f"t{next(_numbers)}"
    return tq.StreamingDataset(system, BATCH, MICRO, FIELDS, "p", task, 0, **more)


# --- what must hold of items


def leaves(data: TensorDict) -> Iterator[tuple[str, str, Any]]:
    """Path, name in COLUMNS, and column of every field."""
    for name in COLUMNS:
        yield name, name, data.get(name)
    for table_name in ("nested", ("nested", "deeper")):
        for name in INNER:
            yield f"{table_name}.{name}", name, data.get(table_name).get(name)


def check_container(path: str, name: str, found: Any) -> None:
    if name in LAYOUTS:
        assert isinstance(found, torch.Tensor), path
        assert (found.is_nested, found.layout, found.dtype) == (True, LAYOUTS[name], COLUMNS[name][0].dtype), path
        assert found.is_contiguous() or found._ragged_idx > 1, path  # type: ignore[attr-defined]
        assert rows_of(found.to(torch.complex128))[0].dtype == torch.complex128, path
    elif name in ("scalars", "flags"):
        assert isinstance(found, torch.Tensor), path
        assert (found.is_nested, found.dim(), found.dtype) == (False, 1, COLUMNS[name][0].dtype), path
    else:
        assert isinstance(found, NonTensorStack), path


def check(items: list[Any], rows: list[int] | None = None) -> None:
    """Check that the items have these rows (all by default), in order, in the containers of the batch."""
    wanted = list(range(ROWS)) if rows is None else rows
    at = 0
    for data, meta in items:
        here = wanted[at : at + len(meta)]
        assert meta.global_indexes == here
        assert data.batch_size == torch.Size([len(meta)])
        assert {str(name) for name in data.keys()} == set(FIELDS)  # noqa: SIM118
        for path, name, found in leaves(data):
            check_container(path, name, found)
            expected = [COLUMNS[name][row] for row in here]
            assert all(map(same, rows_of(found), expected)), path
            assert len(rows_of(found)) == len(here), path
        at += len(meta)
    assert at == len(wanted)


# --- paths


def of_loader(system: Any, more: dict[str, Any] | None = None, **of_loader: Any) -> Any:
    return tq.StreamingDataLoader(dataset(system, **(more or {})), **of_loader)


def consumed(loader: Any) -> list[Any]:
    return list(loader)


def awaited(loader: Any) -> list[Any]:
    async def main() -> list[Any]:
        return [item async for item in loader]

    return asyncio.run(main())


def replayed(loader: Any) -> list[Any]:
    first = list(loader)
    loader.reset()
    again = list(loader)
    check(first)
    return again


def resumed(loader: Any) -> list[Any]:
    """Half of the items, and the rest from a second loader that continues in the middle of a batch."""
    taken = [next(items := iter(loader))]
    state = json.loads(json.dumps(loader.state_dict()))
    del items
    loader.load_state_dict(state)
    return taken + list(loader)


def by_function(data: TensorDict, meta: BatchMeta, micro_batch_size: int) -> list[Any]:
    return chunk_batch_fn(data, meta, min(micro_batch_size, len(meta)))


WORKERS = {"num_workers": 2}
PATHS: dict[str, tuple[Callable[[Any], list[Any]], Callable[[Any], Any]]] = {
    "dataset": (consumed, dataset),
    "dataset, async": (awaited, dataset),
    "dataset, replayed": (replayed, dataset),
    "dataset, views": (consumed, partial(dataset, copy=False)),
    "dataset, device": (consumed, partial(dataset, device="cpu")),
    "dataset, by tokens": (consumed, partial(dataset, max_tokens=2)),
    "dataset, with a function": (consumed, partial(dataset, process_batch_fn=by_function)),
    "dataset, with leases": (consumed, partial(dataset, delivery="at_least_once")),
    "loader": (consumed, of_loader),
    "loader, async": (awaited, of_loader),
    "loader, resumed": (resumed, of_loader),
    "loader, collated": (consumed, partial(of_loader, collate_fn=identity)),
    "loader, pinned": (consumed, partial(of_loader, pin_memory=True)),
    "workers": (consumed, partial(of_loader, **WORKERS)),
    "workers, async": (awaited, partial(of_loader, **WORKERS)),
    "workers, replayed": (replayed, partial(of_loader, **WORKERS)),
    "workers, views": (consumed, partial(of_loader, more={"copy": False}, **WORKERS)),
    "workers, resumed": (resumed, partial(of_loader, **WORKERS)),
    "workers, by tokens": (consumed, partial(of_loader, more={"max_tokens": 2}, **WORKERS)),
    "workers, with a function": (consumed, partial(of_loader, more={"process_batch_fn": by_function}, **WORKERS)),
    "workers, collated": (consumed, partial(of_loader, collate_fn=identity, **WORKERS)),
    "plain loader": (consumed, lambda system: DataLoader(dataset(system), batch_size=None, collate_fn=identity)),
    "plain loader, worker": (
        consumed,
        lambda system: DataLoader(dataset(system), batch_size=None, collate_fn=identity, num_workers=1),
    ),
}


@pytest.mark.parametrize("path", PATHS)
def test_all_containers(system: Any, partition: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "pinned" in path:
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor.clone())
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    consume, build = PATHS[path]
    check(consume(build(system)))


@pytest.mark.parametrize("workers", [0, 1])
def test_packed_beside_all_containers(system: Any, partition: str, workers: int) -> None:
    """Columns of other lengths keep a value for each row."""
    at = 0
    for data, meta in of_loader(system, {"pack": True, "length_field": "jagged"}, num_workers=workers):
        here = range(at, at + len(meta))
        assert data["jagged"].tolist() == [[x for row in here for x in COLUMNS["jagged"][row].tolist()]]
        for path, name, found in leaves(data):
            if name in ("strided", "strided_in_three", "strided_around_one", "ranks", "objects", "texts", "scalars"):
                assert all(map(same, rows_of(found), [COLUMNS[name][row] for row in here])), path
        at += len(meta)
    assert at == ROWS


@pytest.mark.parametrize(("size", "pinned"), [(1, None), (7, None), (2, "before"), (2, "after")])
def test_what_was_cut_or_pinned_is_cut_again(
    partition: str, size: int, pinned: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers send whole batches, which torch pins before they are cut, or items that a function has cut there."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor.clone())
    client = tq.get_client()
    meta = client.get_meta(FIELDS, None, partition, mode="force_fetch")
    whole: Any = (client.get_data(meta), meta)
    if pinned == "before":
        whole = pin_memory(Fetched(0, 0, *whole))
        whole = whole.data, whole.meta
    items = chunk_batch_fn(*whole, size)
    if pinned == "after":
        items = pin_memory(Fetched(0, 0, None, None, items)).items
    check(items)
    check([part for item in items for part in chunk_batch_fn(*item, 1)])


@pytest.mark.parametrize("layout", ["list", "padded"])
def test_other_layouts(partition: str, layout: str) -> None:
    client = tq.get_client()
    fields = [name for name in COLUMNS if layout == "list" or name != "ranks"]
    meta = client.get_meta(fields, None, partition, mode="force_fetch")
    data = client.get_data(meta, layout=layout)
    items = chunk_batch_fn(data, meta, MICRO)
    for name in fields:
        whole, parts = rows_of(data.get(name)), [row for item, _ in items for row in rows_of(item.get(name))]
        assert len(whole) == len(parts) == ROWS
        assert all(map(same, parts, whole))


def test_rows_of_a_jagged_tensor_that_are_not_one_after_the_other() -> None:
    """As a `fetch_batch_fn` may return them."""
    apart = torch.nested.nested_tensor_from_jagged(
        torch.arange(9.0), torch.tensor([0, 3, 6, 9]), torch.tensor([2, 3, 1])
    )
    across = torch.nested.as_nested_tensor(
        [torch.ones(2, 3), torch.zeros(4, 2), torch.ones(1, 1)], layout=torch.strided
    )
    data = TensorDict({"apart": apart, "across": across.transpose(1, 2)}, batch_size=3)
    items = chunk_batch_fn(data, BatchMeta([1, 2, 3], ["p"] * 3), 2)
    assert [row.tolist() for item, _ in items for row in item["apart"].unbind()] == [[0, 1], [3, 4, 5], [6]]
    assert [tuple(row.shape) for item, _ in items for row in item["across"].unbind()] == [(3, 2), (2, 4), (1, 1)]
    assert all(same(one, other) for (item, _), start in zip(items, (0, 2)) for one, other in zip(
        item["across"].unbind(), data["across"].unbind()[start:]))  # fmt: skip
