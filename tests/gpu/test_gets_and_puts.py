"""Puts from a GPU, gets to it out of registered arenas, and a loader that pins; with rates beside cudaMemcpy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq

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


def test_pages_are_registered(client: tq.TransferQueueClient) -> None:
    """The driver sees the pages of the arena as pinned, so that it needs no buffer of its own."""
    meta = client.put(values(), partition_id="p")
    client.get_data(meta, device=DEVICE)
    (copies,) = client._operations._device_copies.values()
    (arena,) = copies._arenas.values()
    assert not arena.refused, "cudaHostRegister refused the pages of the arena"
    first = arena._starts[0]
    memory = torch.from_numpy(arena._memory)[first << 16 : (first << 16) + 100]
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


def test_rates(client: tq.TransferQueueClient, rate: Callable[..., float]) -> None:
    """Rates of 256 MiB to the device, beside those of cudaMemcpy."""
    nbytes = ROWS * WIDTH * 4
    meta = client.put(values(), partition_id="p")
    target = torch.empty(ROWS, WIDTH, device=DEVICE)
    pageable, pinned = torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH).pin_memory()
    rate("cudaMemcpy from pageable memory", nbytes, lambda: target.copy_(pageable))
    rate("cudaMemcpy from pinned memory", nbytes, lambda: target.copy_(pinned, non_blocking=True))
    rate("get to the host, then to the device", nbytes, lambda: client.get_data(meta, layout="dense")["x"].to(DEVICE))
    rate(
        "get with device=, from the registered arena",
        nbytes,
        lambda: client.get_data(meta, layout="dense", device=DEVICE),
    )
    rate("get into a pinned tensor", nbytes, lambda: client.get_data(meta, out={"x": pinned}))
    there = values(1.0, DEVICE)
    rate("put of tensors on the device", nbytes, lambda: client.clear_samples(client.put(there, partition_id="q")))


def test_overlap_with_computation(client: tq.TransferQueueClient, rate: Callable[..., float]) -> None:
    """The device copies the next batch while it computes on this one, on another stream."""
    nbytes = ROWS * WIDTH * 4
    meta = client.put(values(), partition_id="p")
    weights = torch.randn(8192, 8192, device=DEVICE)
    side = torch.cuda.Stream()

    def compute() -> None:
        for _ in range(8):
            torch.mm(weights, weights)

    def apart() -> None:
        client.get_data(meta, layout="dense", device=DEVICE)
        compute()

    def together() -> None:
        compute()
        with torch.cuda.stream(side):
            client.get_data(meta, layout="dense", device=DEVICE)

    rate("a get, then a computation", nbytes, apart)
    rate("a get on another stream during the computation", nbytes, together)
