"""Puts from a device and gets to one, through systems with real stores. The host's memory stands for a device's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from transfer_queue.storage.stores import mooncake, yuanrong_npu
from transfer_queue.storage.stores.mooncake import GpuDirect
from transfer_queue.storage.stores.yuanrong_npu import NpuTransport

STORE_BYTES = 192 << 20
MOONCAKE = {
    "storage_backend": "MooncakeStore",
    "MooncakeStore": {
        "master_server_address": "127.0.0.1:0",
        "global_segment_size": STORE_BYTES,
        "use_gdr": True,
    },
}
YUANRONG = {
    "storage_backend": "Yuanrong",
    "Yuanrong": {
        "worker_port": 0,
        "metastore_port": 0,
        "worker_args": f"--shared_memory_size_mb {STORE_BYTES >> 20}",
        "enable_yr_npu_transport": True,
    },
}
ROWS = 6


class Uses:
    """What went past the host's memory, counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
        self.writes = self.reads = 0
        write, read = kind.write, kind.read

        def counted_write(path: Any, *arguments: Any) -> None:
            self.writes += 1
            write(path, *arguments)

        def counted_read(path: Any, *arguments: Any) -> Any:
            self.reads += 1
            return read(path, *arguments)

        monkeypatch.setattr(kind, "write", counted_write)
        monkeypatch.setattr(kind, "read", counted_read)


@pytest.fixture(scope="module", params=["MooncakeStore", "Yuanrong"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """A system in which the store is told to move the memory of devices."""
    try:
        tq.init({"runtime": "local", "backend": {"MooncakeStore": MOONCAKE, "Yuanrong": YUANRONG}[request.param]})
        yield request.param
    finally:
        tq.close()


@pytest.fixture
def connected_anew(backend: str) -> Iterator[str]:
    """Its connection to the store is of this test."""
    yield backend
    for name in tq.get_client().get_partition_list():
        tq.get_client().clear_partition(name)
    tq.get_client()._operations.attachment.units.stores.close()


@pytest.fixture
def uses(connected_anew: str, monkeypatch: pytest.MonkeyPatch) -> Uses:
    """This process takes the host for a device of the kind that the store knows."""
    module, kind = {
        "MooncakeStore": (mooncake, GpuDirect),
        "Yuanrong": (yuanrong_npu, NpuTransport),
    }[connected_anew]
    monkeypatch.setattr(module, "obstacle", lambda *arguments: None)
    monkeypatch.setattr(kind, "kind", "cpu")
    return Uses(monkeypatch, kind)


def batch(scale: int) -> TensorDict:
    lengths = [3, 1, 4, 1, 5, 9]
    return TensorDict(
        {
            "dense": torch.arange(ROWS * scale, dtype=torch.float32).reshape(ROWS, scale),
            "ragged": torch.nested.as_nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged),
            "reward": torch.arange(ROWS, dtype=torch.bfloat16),
            "mixed": NonTensorStack(*[torch.ones((2,) * (1 + row % 2)) * row for row in range(ROWS)]),
            "prompt": NonTensorStack(*[f"prompt {row}" * 100 for row in range(ROWS)]),
        },
        batch_size=ROWS,
    )


def rows(column: Any) -> list[torch.Tensor]:
    return list(column.unbind(0)) if isinstance(column, torch.Tensor) else column.tolist()


def check(found: TensorDict, wanted: TensorDict, order: list[int]) -> None:
    assert sorted(found.keys()) == sorted(wanted.keys())
    for name in ("dense", "ragged", "reward", "mixed"):
        got, expected = rows(found.get(name)), [rows(wanted.get(name))[row] for row in order]
        assert len(got) == len(expected)
        assert all(map(torch.equal, got, expected))
    assert found.get("prompt").tolist() == [wanted.get("prompt").tolist()[row] for row in order]


@pytest.mark.parametrize("scale", [8, 50_000], ids=["small", "large"])
def test_from_device_to_device(uses: Uses, scale: int) -> None:
    """A block is put together there, and its tensors are received there; objects are the host's."""
    keys, values = [f"{row}" for row in range(ROWS)], batch(scale)
    tq.kv_batch_put(keys, "p", values)
    assert (uses.writes, uses.reads) == (1, 0)
    check(tq.kv_batch_get(keys, "p"), values, list(range(ROWS)))
    assert uses.reads == 0
    got = tq.kv_batch_get(keys, "p", device="cpu")
    assert (uses.writes, uses.reads) == (1, 1)
    check(got, values, list(range(ROWS)))
    assert got.get("ragged").layout == torch.jagged
    order = [4, 0, 2]
    check(tq.kv_batch_get([keys[row] for row in order], "p", device="cpu"), values, order)
    client = tq.get_client()
    some = client.kv_retrieve_meta(keys, "p").select_fields(["dense", "prompt"])
    listed = client.get_data(some, layout="list", device=torch.device("cpu"))
    assert all(map(torch.equal, listed.get("dense").tolist(), rows(values["dense"])))
    assert uses.reads == 3
    only = client.get_data(some.select_fields(["prompt"]), device="cpu")
    assert only.get("prompt").tolist() == values.get("prompt").tolist()
    assert uses.reads == 3
    tq.kv_batch_put(keys, "q", {"prompt": values.get("prompt").tolist()})
    assert uses.writes == 1


def test_what_is_cleared_meanwhile_is_told(uses: Uses) -> None:
    """As from the host."""
    client = tq.get_client()
    meta = client.put(batch(8), partition_id="p")
    client.clear_samples(meta)
    with pytest.raises(tq.StorageKeyNotFoundError):
        client.get_data(meta, device="cpu")


def test_a_claim_with_its_values(uses: Uses) -> None:
    client = tq.get_client()
    values = batch(8)
    client.put(values, partition_id="p")
    fields = list(values.keys())
    got, meta, _ = client.await_data(fields, ROWS, "p", "task", device="cpu", timeout=10.0)
    assert got is not None
    check(got.select(*fields), values, list(range(ROWS)))
    assert (len(meta), uses.reads) == (ROWS, 1)


def test_no_memory_on_the_device(uses: Uses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then all goes through the host."""
    from transfer_queue.wire.blocks import device_memory

    monkeypatch.setattr(device_memory, "allocate_on_device", lambda device, nbytes: None)
    keys, values = [f"{row}" for row in range(ROWS)], batch(8)
    tq.kv_batch_put(keys, "p", values)
    check(tq.kv_batch_get(keys, "p", device="cpu"), values, list(range(ROWS)))
    assert (uses.writes, uses.reads) == (0, 0)


def test_without_a_device_a_line_says_so(connected_anew: str, caplog: pytest.LogCaptureFixture) -> None:
    """And values go through the host."""
    said = {
        "MooncakeStore": "backend.MooncakeStore.use_gdr is set, but protocol is tcp",
        "Yuanrong": "backend.Yuanrong.enable_yr_npu_transport is set, but torch_npu is missing",
    }[connected_anew]
    keys, values = [f"{row}" for row in range(ROWS)], batch(8)
    with caplog.at_level(logging.WARNING):
        tq.kv_batch_put(keys, "p", values)
        check(tq.kv_batch_get(keys, "p", device="cpu"), values, list(range(ROWS)))
    (record,) = caplog.records
    assert record.getMessage().startswith(said)
