"""What stores do with the memory of devices. The host's stands for it, and stand-ins for the libraries."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.metadata
import logging
import sys
import types
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from device_libraries import DsTensorClient, MooncakeDistributedStore, ReplicateConfig

from transfer_queue.storage.protocols import Bytes
from transfer_queue.storage.stores import mooncake, yuanrong_npu
from transfer_queue.storage.stores.base import DevicePath, Piece
from transfer_queue.storage.stores.mooncake import GpuDirect, MooncakeStore
from transfer_queue.storage.stores.yuanrong import YuanrongStore
from transfer_queue.storage.stores.yuanrong_npu import NpuTransport

CPU = torch.device("cpu")
MIB = 1 << 20


def content(nbytes: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8))


def put(path: DevicePath, key: str, values: torch.Tensor) -> None:
    with path.buffer(CPU, len(values)) as memory:
        assert memory.shape == values.shape
        memory.copy_(values)
        path.write(key, memory, 5.0)


def get(path: DevicePath, pieces: list[Piece], nbytes: int) -> tuple[torch.Tensor, list[str]]:
    with path.buffer(CPU, nbytes) as memory:
        missing = path.read(pieces, memory, 5.0)
        return memory.clone(), missing


# ---------------------------------------------------------------- Mooncake


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> MooncakeDistributedStore:
    made = MooncakeDistributedStore()
    module = types.SimpleNamespace(MooncakeDistributedStore=lambda: made, ReplicateConfig=ReplicateConfig)
    monkeypatch.setattr(mooncake, "load", lambda: module)
    monkeypatch.setattr(mooncake, "obstacle", lambda protocol: None)
    return made


@pytest.fixture
def gdr(library: MooncakeDistributedStore) -> Iterator[GpuDirect]:
    store = MooncakeStore("127.0.0.1:1", protocol="rdma", local_buffer_size=4 * MIB, use_gdr=True)
    path = store.device_path()
    assert isinstance(path, GpuDirect)
    assert path.kind == "cuda"
    assert store.device_path() is path
    yield path
    store.close()
    assert store.device_path() is None


def test_blocks_are_written_and_read_where_they_lie(gdr: GpuDirect) -> None:
    one, two = content(3 * MIB, 1), content(1000, 2)
    put(gdr, "s/1", one)
    put(gdr, "s/2", two)
    pieces = [Piece("s/1", MIB, 64, 128), Piece("s/1", 0, 10, 0), Piece("s/2", 990, 10, 64), Piece("no/1", 0, 5, 256)]
    found, missing = get(gdr, pieces, 4096)
    assert missing == ["no/1"]
    assert torch.equal(found[128:192], one[MIB : MIB + 64])
    assert torch.equal(found[:10], one[:10])
    assert torch.equal(found[64:74], two[990:])


def test_registered_memory_is_used_again(gdr: GpuDirect, library: MooncakeDistributedStore) -> None:
    """Up to `local_buffer_size`; more memory is registered for one use only."""
    for turn in range(5):
        put(gdr, f"s/{turn}", content(MIB + 1 + turn, turn))
    assert library.registrations == 1
    put(gdr, "s/9", content(5 * MIB, 9))
    assert len(library.registered) == 1
    with gdr.buffer(CPU, 1) as one, gdr.buffer(CPU, 1) as other:
        assert one.data_ptr() != other.data_ptr()
    assert sum(library.registered.values()) <= 4 * MIB


def test_memory_that_is_refused_is_told_once(
    gdr: GpuDirect, library: MooncakeDistributedStore, caplog: pytest.LogCaptureFixture
) -> None:
    library.refuses = True
    for _ in range(3):
        with gdr.buffer(CPU, 100) as memory:
            assert memory is None
    (record,) = caplog.records
    assert record.getMessage() == (
        "backend.MooncakeStore.use_gdr is set, but 1048576 bytes of cpu cannot be registered (code -1): values are "
        "copied through the memory of the host; load nvidia-peermem, or check that the driver exports memory by dma-buf"
    )


def test_a_full_device_is_no_error(gdr: GpuDirect) -> None:
    with gdr.buffer(CPU, 1 << 60) as memory:
        assert memory is None


def test_a_buffer_that_is_left_after_the_end(library: MooncakeDistributedStore) -> None:
    store = MooncakeStore("127.0.0.1:1", protocol="rdma", use_gdr=True)
    path = store.device_path()
    with path.buffer(CPU, 10):
        store.close()


@pytest.mark.parametrize(("protocol", "build", "said"), [
    ("tcp", True, "protocol is tcp: values are copied through the memory of the host; set backend.MooncakeStore."),
    ("rdma", False, "the library is its build without CUDA (mooncake-transfer-engine-non-cuda): values are copied"),
    ("rdma", True, "this process has no GPU (torch.cuda.is_available() is false): values are copied"),
])  # fmt: skip
def test_what_is_in_the_way_of_gpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, protocol: str, build: bool, said: str
) -> None:
    """Each process logs one line, and uses the memory of the host."""

    def version(name: str) -> str:
        if build:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    store = MooncakeStore("127.0.0.1:1", protocol=protocol, use_gdr=True)
    with caplog.at_level(logging.WARNING):
        assert store.device_path() is None
        assert store.device_path() is None
    (record,) = caplog.records
    assert record.getMessage().startswith(f"backend.MooncakeStore.use_gdr is set, but {said}")


def test_a_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert mooncake.obstacle("rdma") is None


def test_nothing_is_said_where_nothing_is_wanted(caplog: pytest.LogCaptureFixture) -> None:
    assert MooncakeStore("127.0.0.1:1").device_path() is None
    assert YuanrongStore("127.0.0.1", 1).device_path() is None
    assert not caplog.records


# ---------------------------------------------------------------- Yuanrong


class Worker:
    """The part of the store that the path of NPUs uses: blocks on the host."""

    def __init__(self, blocks: dict[str, Bytes]) -> None:
        self.blocks = blocks
        self.read_keys: list[str] = []

    @contextlib.contextmanager
    def buffer(self, key: str, nbytes: int) -> Iterator[Bytes]:
        yield np.zeros(nbytes, np.uint8)

    def write(self, key: str, data: Bytes, within: float) -> None:
        self.blocks[key] = data.copy()

    def read(self, pieces: Sequence[Piece], into: Bytes, within: float) -> list[str]:
        self.read_keys += [piece.key for piece in pieces]
        for key, start, length, at in pieces:
            if key in self.blocks:
                into[at : at + length] = self.blocks[key][start : start + length]
        return [key for key in dict.fromkeys(piece.key for piece in pieces) if key not in self.blocks]

    def missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if key not in self.blocks]


class Rank:
    """A process with an NPU."""

    def __init__(self, blocks: dict[str, Bytes]) -> None:
        self.worker = Worker(blocks)
        self.path = NpuTransport(self.worker, ("127.0.0.1", 1))  # type: ignore[arg-type]

    @property
    def client(self) -> DsTensorClient:
        (client,) = self.path._clients.values()
        return client


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[Rank, Rank]:
    """Two processes, each with an NPU of its own."""
    module = types.ModuleType("yr.datasystem.ds_tensor_client")
    module.DsTensorClient = DsTensorClient  # type: ignore[attr-defined]
    module.CopyRange = lambda src, dst, length: types.SimpleNamespace(src_offset=src, dst_offset=dst, length=length)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "yr", types.ModuleType("yr"))
    monkeypatch.setitem(sys.modules, "yr.datasystem", types.ModuleType("yr.datasystem"))
    monkeypatch.setitem(sys.modules, "yr.datasystem.ds_tensor_client", module)
    monkeypatch.setattr(DsTensorClient, "copies", {}, raising=False)
    monkeypatch.setattr(DsTensorClient, "failure", "")
    blocks: dict[str, Bytes] = {}
    return Rank(blocks), Rank(blocks)


def test_npus_read_from_each_other(ranks: tuple[Rank, Rank]) -> None:
    """Several pieces of a block are read by several requests, because a request can contain a block only once."""
    writer, reader = ranks
    one, two = content(MIB, 1), content(70_000, 2)
    put(writer.path, "s/1", one)
    put(writer.path, "s/2", two)
    pieces = [Piece("s/1", 10, 50, 0), Piece("s/1", 5000, 50, 64), Piece("s/2", 0, 70_000, 128)]
    found, missing = get(reader.path, pieces, 71_000)
    assert missing == reader.worker.read_keys == []
    assert torch.equal(found[:50], one[10:60])
    assert torch.equal(found[64:114], one[5000:5050])
    assert torch.equal(found[128:70_128], two)
    assert [sorted(keys) for keys in reader.client.asked] == [["s:1:npu", "s:2:npu"], ["s:1:npu"]]


def test_the_worker_has_every_block(ranks: tuple[Rank, Rank]) -> None:
    """For processes without an NPU, on the same NPU, and after the writer's end. Small blocks have no copy."""
    writer, reader = ranks
    small, large = content(100, 3), content(MIB, 4)
    put(writer.path, "s/1", small)
    put(writer.path, "s/2", large)
    assert list(DsTensorClient.copies) == ["s:2:npu"]
    assert np.array_equal(writer.worker.blocks["s/2"], large.numpy())
    writer.path.close()
    assert not DsTensorClient.copies
    found, missing = get(
        reader.path, [Piece("s/1", 0, 100, 0), Piece("s/2", 7, 1000, 128), Piece("n/1", 0, 1, 2000)], 3000
    )
    assert missing == ["n/1"]
    assert reader.worker.read_keys == ["n/1", "s/1", "s/2"]
    assert torch.equal(found[:100], small)
    assert torch.equal(found[128:1128], large[7:1007])


def test_a_process_reads_its_own_copies(ranks: tuple[Rank, Rank]) -> None:
    """The library does not send from an NPU to itself."""
    writer, _ = ranks
    values = content(MIB, 5)
    put(writer.path, "s/1", values)
    found, missing = get(writer.path, [Piece("s/1", 100, 1000, 8)], 2000)
    assert missing == writer.worker.read_keys == []
    assert torch.equal(found[8:1008], values[100:1100])


def test_copies_take_no_more_than_they_may(monkeypatch: pytest.MonkeyPatch, ranks: tuple[Rank, Rank]) -> None:
    """Copies of removed blocks are dropped first, then the oldest ones."""
    monkeypatch.setattr(yuanrong_npu, "MOST", 4 * MIB)
    writer, _ = ranks
    for number in range(4):
        put(writer.path, f"s/{number}", content(MIB, number))
    for number in (1, 2, 3):
        del writer.worker.blocks[f"s/{number}"]
    put(writer.path, "s/4", content(MIB, 4))
    assert sorted(DsTensorClient.copies) == ["s:0:npu", "s:4:npu"]
    for number in range(5, 8):
        put(writer.path, f"s/{number}", content(MIB, number))
    assert sorted(DsTensorClient.copies) == ["s:6:npu", "s:7:npu"]
    put(writer.path, "s/8", content(5 * MIB, 8))
    assert sorted(DsTensorClient.copies) == ["s:6:npu", "s:7:npu"]


def test_a_full_npu_gives_up_its_copies(monkeypatch: pytest.MonkeyPatch, ranks: tuple[Rank, Rank]) -> None:
    writer, _ = ranks
    put(writer.path, "s/1", content(MIB, 1))
    with writer.path.buffer(CPU, 1 << 60) as memory:
        assert memory is None
    assert not DsTensorClient.copies


def test_a_library_that_fails_is_left_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch, ranks: tuple[Rank, Rank], caplog: pytest.LogCaptureFixture
) -> None:
    writer, reader = ranks
    monkeypatch.setattr(DsTensorClient, "failure", "code: [Runtime error], msg: [No device manager available.")
    values = content(MIB, 6)
    for number in range(3):
        put(writer.path, f"s/{number}", values)
    assert len(writer.client.asked) == 1
    (record,) = caplog.records
    assert "No device manager available" in record.getMessage()
    monkeypatch.setattr(DsTensorClient, "failure", "")
    put(writer.path, "s/3", values)
    assert not DsTensorClient.copies
    monkeypatch.setattr(yuanrong_npu, "REST_SECONDS", 0.0)
    writer.path._rests_until = 0.0
    put(writer.path, "s/4", values)
    assert list(DsTensorClient.copies) == ["s:4:npu"]
    pieces = [Piece(f"s/{number}", 0, 500, 512 * number) for number in range(5)]
    found, missing = get(reader.path, pieces, 4096)
    assert missing == []
    assert all(torch.equal(found[512 * number : 512 * number + 500], values[:500]) for number in range(5))
    assert reader.worker.read_keys == ["s/0", "s/1", "s/2", "s/3"]


def test_pieces_that_are_many_or_far_come_from_the_worker(
    monkeypatch: pytest.MonkeyPatch, ranks: tuple[Rank, Rank]
) -> None:
    monkeypatch.setattr(yuanrong_npu, "MAX_OFFSET", 99_999)
    writer, reader = ranks
    values = content(MIB, 7)
    put(writer.path, "s/1", values)
    put(writer.path, "s/2", values)
    many = [Piece("s/1", 1000 * number, 10, 16 * number) for number in range(20)]
    found, missing = get(reader.path, [*many, Piece("s/2", 100_000, 10, 512)], 1024)
    assert missing == []
    assert set(reader.worker.read_keys) == {"s/1", "s/2"}
    assert torch.equal(found[16:26], values[1000:1010])
    assert torch.equal(found[512:522], values[100_000:100_010])


@pytest.mark.parametrize(("found", "said"), [
    (None, "torch_npu is missing: values are copied through the memory of the host; install it if this"),
    (False, "this process has no NPU (torch.npu.is_available() is false): values are copied"),
    (True, None),
])  # fmt: skip
def test_what_is_in_the_way_of_npus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: bool | None, said: str | None
) -> None:
    if found is not None:
        module = types.ModuleType("torch_npu")
        module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
        module.npu = types.SimpleNamespace(is_available=lambda: found)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch_npu", module)
    store = YuanrongStore("127.0.0.1", 1, npu_transport=True)
    path = store.device_path()
    assert store.device_path() is path
    if said is None:
        assert isinstance(path, NpuTransport)
        assert path.kind == "npu"
        assert not caplog.records
    else:
        assert path is None
        (record,) = caplog.records
        assert record.getMessage().startswith(f"backend.Yuanrong.enable_yr_npu_transport is set, but {said}")
    store.close()
