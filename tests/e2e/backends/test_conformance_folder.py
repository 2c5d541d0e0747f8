"""The conformance suite on the example of a store of one's own; and a system that has it as its backend."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.attachment import CURRENT
from transfer_queue.client.control_client import ControlClient
from transfer_queue.errors import StartError, StorageKeyNotFoundError
from transfer_queue.storage.stores.base import StoreAddress
from transfer_queue.testing.conformance import StoreConformance

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "stores"
KIND = "folder_store:FolderStore"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blocks")
    TestFolderStore.where = StoreAddress(KIND, {"folder": str(folder)})
    return folder


@pytest.fixture(autouse=True)
def found_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=":")


class TestFolderStore(StoreConformance):
    where: ClassVar[StoreAddress]

    def address(self) -> StoreAddress:
        return self.where


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    """A folder of its own: killed writers of the suite leave drafts in the other."""
    folder = tmp_path / "blocks"
    folder.mkdir()
    return folder


@contextlib.contextmanager
def system(**backend: Any) -> Iterator[tq.TransferQueueClient]:
    tq.init({"runtime": "local", "backend": backend})
    try:
        yield tq.get_client()
    finally:
        tq.close()


def check_stored(tiers: list[str], blocks: Path) -> None:
    """One block is in the folder, and the units and the values are in these tiers."""
    assert len(list(blocks.iterdir())) == 1
    with ControlClient(CURRENT.system) as onlooker:
        status = onlooker.status()
    assert [unit.tier for unit in status.units] == tiers
    assert set(status.partitions[0].stored) == set(tiers)
    assert sum(status.partitions[0].stored.values()) == status.partitions[0].nbytes


def remove_all(blocks: Path) -> None:
    for path in blocks.iterdir():
        path.unlink()


def test_a_system_over_it(blocks: Path, tmp_path: Path) -> None:
    with system(storage_backend=KIND, options={"folder": str(blocks)}) as client:
        data = TensorDict({"x": torch.rand(8, 1000)}, batch_size=8)
        meta = client.put(data, partition_id="p")
        check_stored(["store"], blocks)
        assert torch.equal(client.get_data(meta, layout="dense")["x"], data["x"])
        tq.save_checkpoint(tmp_path / "saved")
        remove_all(blocks)
        with pytest.raises(StorageKeyNotFoundError, match="lost with storage unit 0"):
            client.get_data(meta)
        tq.load_checkpoint(tmp_path / "saved")
        found = client.get_meta(["x"], None, "p", mode="force_fetch")
        assert torch.equal(client.get_data(found, layout="dense")["x"], data["x"])


def test_a_system_with_some_fields_in_it(blocks: Path) -> None:
    with system(fields={"pixels": KIND}, options={"folder": str(blocks)}) as client:
        data = TensorDict({"pixels": torch.rand(8, 1000), "reward": torch.rand(8)}, batch_size=8)
        meta = client.put(data, partition_id="p")
        check_stored(["memory", "store"], blocks)
        found = client.get_data(meta, layout="dense")
        assert all(torch.equal(found[name], data[name]) for name in data.keys())  # noqa: SIM118
        remove_all(blocks)
        with pytest.raises(StorageKeyNotFoundError, match="lost with storage unit 1"):
            client.get_data(meta)
        assert torch.equal(client.get_data(meta.select_fields(["reward"]))["reward"], data["reward"])


def test_a_store_that_is_not_there() -> None:
    conf = {"runtime": "local", "backend": {"storage_backend": "no_such_module:Store"}}
    with pytest.raises(StartError, match=r"no_such_module:Store .*cannot be used"):
        tq.init(conf)
