"""The conformance suite on an openYuanrong worker of this machine."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import device_libraries
import msgspec
import pytest
import torch
from kept import Kept

from transfer_queue.config.loading import merge
from transfer_queue.storage.stores.base import StoreAddress
from transfer_queue.testing.conformance import StoreConformance

STORE_BYTES = 256 << 20


def options(**changes: Any) -> dict[str, Any]:
    section = dict(merge(None).backend.Yuanrong)
    size = f"--shared_memory_size_mb {STORE_BYTES >> 20}"
    return {**section, "worker_port": 0, "metastore_port": 0, "worker_args": size, **changes}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    keeper = Kept("Yuanrong", options(), tmp_path_factory.mktemp("yuanrong"))
    assert keeper.failure is None
    TestYuanrong.where = keeper.address
    yield keeper
    assert keeper.close() is None


@pytest.mark.usefixtures("kept")
class TestYuanrong(StoreConformance):
    capacity: ClassVar[int | None] = STORE_BYTES
    where: ClassVar[StoreAddress]

    def address(self) -> StoreAddress:
        return self.where


def test_a_port_in_use_is_an_error(kept: Kept, tmp_path: Path) -> None:
    taken = kept.address.options["port"]
    failure = Kept("Yuanrong", options(worker_port=taken), tmp_path).failure
    assert failure.startswith(f"StartError: port {taken} of 127.0.0.1 cannot be used")


@pytest.mark.parametrize("arguments", ["--a", "a b", "--no_such_flag 1"])
def test_invalid_arguments_are_an_error(tmp_path: Path, arguments: str) -> None:
    failure = Kept("Yuanrong", options(worker_args=arguments), tmp_path).failure
    assert failure.startswith("StartError: ")


def test_a_missing_worker_is_an_error(tmp_path: Path) -> None:
    failure = Kept("Yuanrong", options(auto_init=False, worker_port=9), tmp_path).failure
    assert failure.startswith("StartError: no Yuanrong worker responds at 127.0.0.1:9: start it")


WRITE_AND_READ = """
import sys
import msgspec, numpy as np
from transfer_queue.storage.stores.base import Piece, StoreAddress, connect
for address in map(msgspec.json.Decoder(StoreAddress).decode, sys.argv[1:]):
    store, into = connect(address), np.zeros(100, np.uint8)
    with store.buffer("one/1", 100) as memory:
        memory[:] = 3
        store.write("one/1", memory, 5.0)
    assert store.read([Piece("one/1", 0, 100, 0)], into, 5.0) == []
    assert (into == 3).all()
    store.remove(["one/1"])
    store.close()
"""


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    section = {**dict(merge(None).backend.MooncakeStore), "master_server_address": "127.0.0.1:0"}
    keeper = Kept("MooncakeStore", {**section, "global_segment_size": STORE_BYTES}, tmp_path_factory.mktemp("mooncake"))
    assert keeper.failure is None
    yield keeper
    assert keeper.close() is None


@pytest.mark.parametrize("is_first", [True, False], ids=["Yuanrong first", "Mooncake first"])
def test_one_process_uses_yuanrong_and_mooncake(kept: Kept, mooncake: Kept, is_first: bool) -> None:
    """Their libraries can be loaded in one order only."""
    addresses = [msgspec.json.encode(each.address).decode() for each in (kept, mooncake)]
    command = [sys.executable, "-c", WRITE_AND_READ, *(addresses if is_first else addresses[::-1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["__init__", "init", "dev_mset", "dev_mget_into_tensor", "dev_local_delete"])
def test_the_stand_in_accepts_the_arguments_of_the_library(name: str) -> None:
    """The path of NPUs is tested with this stand-in if the machine has no NPU."""
    from yr.datasystem.ds_tensor_client import CopyRange, DsTensorClient

    real = inspect.signature(getattr(DsTensorClient, name)).parameters
    stand_in = inspect.signature(getattr(device_libraries.DsTensorClient, name)).parameters
    assert list(real) == list(stand_in)
    assert [each.default for each in real.values()] == [each.default for each in stand_in.values()]
    assert [each.name for each in dataclasses.fields(CopyRange)] == ["src_offset", "dst_offset", "length"]


def test_tensors_of_the_host_are_refused_by_the_library(kept: Kept) -> None:
    """Such an error makes the path of NPUs pause; dropping copies needs no tensor."""
    from yr.datasystem.ds_tensor_client import DsTensorClient

    where = kept.address.options["host"], kept.address.options["port"]
    client = DsTensorClient(*where, 0, connect_timeout_ms=2000, req_timeout_ms=2000)
    client.init()
    with pytest.raises(ValueError, match="not a npu"):
        client.dev_mset(["s:1:npu"], [torch.zeros(1024, dtype=torch.uint8)])
    assert client.dev_local_delete(["s:1:npu"]) == []
