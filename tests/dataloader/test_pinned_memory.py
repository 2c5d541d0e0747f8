"""Pinned items. Without an accelerator nothing can be pinned: a stand-in copies and remembers what it was asked for."""

from __future__ import annotations

import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from simulated import ragged, rows_of, same, table
from transfer_queue.client._generated_methods import GeneratedMethods
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset
from transfer_queue.dataloader.worker_processes import Fetched, pin
from transfer_queue.metadata import BatchMeta
from transfer_queue.testing import Client
from transfer_queue.wire.blocks.gather import stack_of


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The addresses of what was pinned."""
    made: set[int] = set()

    def pin(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        assert not tensor.is_nested, "torch would pin its values alone"
        copy = tensor.clone()
        made.add(copy.data_ptr())
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return made


def columns() -> dict[str, Any]:
    rows = [torch.ones(2, 3), torch.zeros(4, 1)]
    return {
        "x": torch.arange(2), "j": ragged(3, 4), "o": ["a", {"b": 1}],
        "t": torch.nested.as_nested_tensor([torch.ones(3, 2), torch.ones(5, 2)], layout=torch.jagged).transpose(1, 2),
        "s": torch.nested.nested_tensor(rows),
    }  # fmt: skip


def test_columns(copies: set[int]) -> None:
    data = table(**columns())
    copy = pin(data)
    assert list(copy.keys()) == list(data.keys())
    assert copy.batch_size == data.batch_size
    for name in "xjts":
        assert all(same(one, other) for one, other in zip(rows_of(copy[name]), rows_of(data[name])))
        assert copy[name].layout == data[name].layout
    assert copy["o"] == data["o"]
    parts = [copy["x"], copy["j"].values(), copy["j"].offsets(), copy["t"].values(), copy["s"].values()]
    assert {part.data_ptr() for part in parts} <= copies
    assert (copy["j"]._maybe_min_seqlen, copy["j"]._maybe_max_seqlen) == (3, 4)


def test_rows_that_are_one_tensor_are_pinned_once(copies: set[int]) -> None:
    one, other = torch.ones(2), torch.zeros(3)
    first, second, third = pin(table(x=stack_of([one, other, one], 3)))["x"].tolist()
    assert first is third
    assert {first.data_ptr(), second.data_ptr()} == copies
    assert (first.tolist(), second.tolist()) == ([1, 1], [0, 0, 0])


def test_whatever_an_item_is(copies: set[int]) -> None:
    pair = namedtuple("pair", "a b")
    meta = BatchMeta([1], ["p"])
    item = pair([torch.ones(1), "text"], {"k": (torch.ones(2), None, meta)})
    copy = pin(item)
    assert type(copy) is pair
    assert copy.a[1] == "text"
    assert copy.b["k"][1:] == (None, meta)
    assert {copy.a[0].data_ptr(), copy.b["k"][0].data_ptr()} == copies


def test_torch_pins_what_workers_send(copies: set[int]) -> None:
    meta = BatchMeta([1, 2], ["p", "p"])
    data = table(**columns())
    sent = pin_memory(Fetched(1, 0, data, meta, [torch.ones(1)]))
    assert (type(sent), sent.version, sent.meta) == (Fetched, 1, meta)
    assert {sent.data["j"].values().data_ptr(), sent.items[0].data_ptr()} <= copies
    assert all(same(one, other) for one, other in zip(rows_of(sent.data["s"]), rows_of(data["s"])))
    assert pin_memory(Fetched(1, 3)) == Fetched(1, 3)


def test_a_loader_without_workers(a: Client, copies: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    a.put(table(x=torch.arange(4), j=ragged(1, 2, 3, 4)), partition_id="p")
    a.seal("p")
    for more in ({}, {"collate_fn": lambda item: item}):
        loader = StreamingDataLoader(stream(a), pin_memory=True, **more)
        items = list(loader)
        assert [meta.global_indexes for _, meta in items] == [[0, 1], [2, 3]]
        assert {data["j"].values().data_ptr() for data, _ in items} <= copies
        assert loader.get_buffer()[0][0]["x"].data_ptr() not in copies


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_without_an_accelerator(workers: int) -> None:
    """A warning, as torch gives it, and the items as they are."""
    loader = StreamingDataLoader(stream(Nothing()), num_workers=workers, pin_memory=True)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        assert list(loader) == []
    assert [str(w.message)[:46] for w in given if w.category is UserWarning and "pin_memory" in str(w.message)] == [
        "'pin_memory' argument is set as true but there"
    ]


class Nothing(GeneratedMethods):
    """A system in which nothing comes."""

    @property
    def _operations(self) -> Any:
        return None

    def _run(self, operation: Any) -> Any:
        raise AssertionError("not asked for here")

    async def _run_async(self, operation: Any) -> Any:
        raise AssertionError("not asked for here")

    def await_batch(self, *arguments: Any, **more: Any) -> Any:
        return BatchMeta(), True

    def await_data(self, *arguments: Any, **more: Any) -> Any:
        return None, BatchMeta(), True

    async def async_await_batch(self, *arguments: Any, **more: Any) -> Any:
        return BatchMeta(), True


def stream(client: Any) -> StreamingDataset:
    return StreamingDataset(client, 4, 2, ["x", "j"], "p", f"t{id(object())}", 0)
