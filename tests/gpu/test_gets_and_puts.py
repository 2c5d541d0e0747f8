"""Puts from a GPU, gets to it out of registered arenas, and a loader that pins. `benchmarks gpu` has their rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from transfer_queue.dataloader.micro_batches import chunk_batch_fn

DEVICE = torch.device("cuda")
ROWS, WIDTH = 1024, 64 * 1024  # 256 MiB of float32


def values(fill: float = 1.0, device: torch.device | str = "cpu") -> TensorDict:
    return TensorDict({"x": torch.full((ROWS, WIDTH), fill, device=device)}, batch_size=ROWS)


def test_a_put_of_tensors_on_the_device(client: tq.TransferQueueClient) -> None:
    meta = client.put(values(3.0, DEVICE), partition_id="p")
    assert client.get_data(meta, layout="dense")["x"].eq(3).all()


@pytest.mark.parametrize("layout", ["jagged", "dense", "padded", "list"])
def test_a_get_to_the_device(client: tq.TransferQueueClient, layout: str) -> None:
    meta = client.put(values(3.0), partition_id="p")
    for _ in range(3):
        got = client.get_data(meta, layout=layout, device=DEVICE)["x"]
        rows = got.unbind(0) if isinstance(got, torch.Tensor) else got.tolist()
        assert all(row.is_cuda for row in rows)
        assert all(bool(row.eq(3).all()) for row in rows)


@pytest.mark.parametrize("layout", ["jagged", "padded", "list"])
@pytest.mark.parametrize("width", [100, 100_000])
def test_ragged_rows_of_several_puts(client: tq.TransferQueueClient, layout: str, width: int) -> None:
    """Long rows are copied one at a time, short ones are gathered on the host first. Objects stay there."""
    parts = []
    for put in range(5):
        rows = [torch.full((width + put + row, 2), 10.0 * put + row) for row in range(3)]
        jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
        data = TensorDict({"x": jagged, "o": NonTensorStack(*[{"row": row} for row in range(3)])}, batch_size=3)
        parts.append(client.put(data, partition_id="p"))
    meta = tq.BatchMeta.concat(parts).select_samples([14, 3, 4, 5, 0, 9, 9])
    there, here = client.get_data(meta, layout=layout, device=DEVICE), client.get_data(meta, layout=layout)
    rows, wanted = (
        got["x"].unbind(0) if isinstance(got["x"], torch.Tensor) else got["x"].tolist() for got in (there, here)
    )
    assert all(row.is_cuda and torch.equal(row.cpu(), other) for row, other in zip(rows, wanted, strict=True))
    assert there["o"].tolist() == here["o"].tolist()


def test_a_put_over_space_that_is_registered_in_part(client: tq.TransferQueueClient) -> None:
    """A copy that meets two registered ranges, or one and other memory, must be divided."""
    small = [client.put(values(float(number)).narrow(0, 0, 256), partition_id="p") for number in range(4)]
    for meta in small[::2]:
        client.get_data(meta, device=DEVICE)
    for meta in small:
        client.clear_samples(meta)
    for fill in (5.0, 6.0):
        meta = client.put(values(fill, DEVICE), partition_id="p")
        assert client.get_data(meta, layout="dense")["x"].eq(fill).all()
        assert client.get_data(meta, layout="dense", device=DEVICE)["x"].eq(fill).all()
        out = torch.empty(ROWS, WIDTH, device=DEVICE)
        assert client.get_data(meta, out={"x": out})["x"].eq(fill).all()
        client.clear_samples(meta)


def test_tensors_of_the_caller_from_space_that_is_registered_in_part(client: tq.TransferQueueClient) -> None:
    meta = client.put(values(3.0), partition_id="p")
    client.get_data(meta.select_samples(list(range(256, 512))), device=DEVICE)
    out = torch.empty(ROWS, WIDTH, device=DEVICE)
    assert client.get_data(meta, out={"x": out})["x"].eq(3).all()


def test_pages_are_registered(client: tq.TransferQueueClient) -> None:
    """The driver sees the pages of the arena as pinned, so that it needs no buffer of its own."""
    meta = client.put(values(), partition_id="p")
    client.get_data(meta, device=DEVICE)
    (copies,) = client._operations.attachment.devices._copies.values()
    (arena,) = copies._arenas.values()
    assert not arena.refused, "cudaHostRegister refused the pages of the arena"
    first, _ = arena._ranges[0]
    memory = torch.from_numpy(arena.arena.memory)[first << 16 : (first << 16) + 100]
    assert memory.is_pinned()


def test_space_is_used_again_after_the_copies(client: tq.TransferQueueClient) -> None:
    """Each batch takes the space of the one before it; what the device copied is never a later batch."""
    for fill in range(20):
        meta = client.put(values(float(fill)), partition_id="p")
        got = client.get_data(meta, layout="dense", device=DEVICE)["x"]
        client.clear_samples(meta)
        assert got.eq(fill).all()


def test_out_on_the_device_and_pinned(client: tq.TransferQueueClient) -> None:
    meta = client.put(values(4.0), partition_id="p")
    for out in (torch.empty(ROWS, WIDTH, device=DEVICE), torch.empty(ROWS, WIDTH, pin_memory=True)):
        assert client.get_data(meta, out={"x": out})["x"].eq(4).all()
        assert out.eq(4).all()


@pytest.mark.parametrize("more", [{}, {"max_tokens": 3000, "length_field": "x"}, {"pack": True}])
def test_a_loader_on_the_device(client: tq.TransferQueueClient, more: dict[str, Any]) -> None:
    """Batches are cut without waiting for the device."""
    rows = [torch.full((number % 7 + 1000,), number) for number in range(64)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    client.put(TensorDict({"x": jagged, "y": jagged.clone()}, batch_size=64), partition_id="p")
    client.seal("p")
    items, others = (
        list(tq.StreamingDataset(None, 16, 4, ["x", "y"], "p", str(device), 0, device=device, **more))
        for device in (None, "cuda")
    )
    assert len(items) == len(others) >= 4
    for (item, _), (other, _) in zip(items, others, strict=True):
        for name in ("x", "y", *(["cu_seqlens", "position_ids"] if "pack" in more else [])):
            assert other[name].is_cuda
            assert all(
                torch.equal(a, b.cpu()) for a, b in zip(item[name].unbind(0), other[name].unbind(0), strict=True)
            )
    data, meta = tq.get_client().await_data(["x", "y"], 64, "p", "cut", device="cuda")[:2]
    torch.cuda.set_sync_debug_mode("error")
    try:
        parts = list(chunk_batch_fn(data, meta, 4))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(part) for part, _ in parts] == [4] * 16
    assert bool((parts[3][0]["x"] + parts[3][0]["y"]).values().eq(parts[3][0]["x"].values() * 2).all())


def test_a_loader_that_pins(client: tq.TransferQueueClient) -> None:
    client.put(values(5.0), partition_id="p")
    client.seal("p")
    dataset = tq.StreamingDataset(None, 64, 64, ["x"], "p", "t", 0, copy=False, keep_batches=0)
    loader = tq.StreamingDataLoader(dataset, pin_memory=True)
    seen = 0
    for data, _ in loader:
        assert data["x"].values().is_pinned()
        assert data["x"].to(DEVICE, non_blocking=True).values().eq(5).all()
        seen += len(data)
    assert seen == ROWS
