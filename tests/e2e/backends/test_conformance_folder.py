"""The conformance suite on the example of a store of one's own; and a system that has it as its backend."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

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


def test_a_system_over_it(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"  # of its own: killed writers of the suite leave drafts in the other
    folder.mkdir()
    tq.init({"runtime": "local", "backend": {"storage_backend": KIND, "options": {"folder": str(folder)}}})
    try:
        client = tq.get_client()
        data = TensorDict({"x": torch.rand(8, 1000)}, batch_size=8)
        meta = client.put(data, partition_id="p")
        assert len(list(folder.iterdir())) == 1
        assert CURRENT.system is not None
        with ControlClient(CURRENT.system) as onlooker:
            status = onlooker.status()
        assert [unit.tier for unit in status.units] == ["store"]
        assert status.partitions[0].stored == {"store": status.partitions[0].nbytes}
        assert torch.equal(client.get_data(meta, layout="dense")["x"], data["x"])
        tq.save_checkpoint(tmp_path / "saved")
        for path in folder.iterdir():
            path.unlink()
        with pytest.raises(StorageKeyNotFoundError, match="lost with storage unit 0"):
            client.get_data(meta)
        tq.load_checkpoint(tmp_path / "saved")
        found = client.get_meta(["x"], None, "p", mode="force_fetch")
        assert torch.equal(client.get_data(found, layout="dense")["x"], data["x"])
    finally:
        tq.close()


def test_a_system_with_some_fields_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    folder.mkdir()
    tq.init({"runtime": "local", "backend": {"fields": {"pixels": KIND}, "options": {"folder": str(folder)}}})
    try:
        client = tq.get_client()
        data = TensorDict({"pixels": torch.rand(8, 1000), "reward": torch.rand(8)}, batch_size=8)
        meta = client.put(data, partition_id="p")
        assert len(list(folder.iterdir())) == 1
        assert CURRENT.system is not None
        with ControlClient(CURRENT.system) as onlooker:
            status = onlooker.status()
        assert [unit.tier for unit in status.units] == ["memory", "store"]
        assert set(status.partitions[0].stored) == {"memory", "store"}
        found = client.get_data(meta, layout="dense")
        assert all(torch.equal(found[name], data[name]) for name in data.keys())  # noqa: SIM118
        for path in folder.iterdir():
            path.unlink()
        with pytest.raises(StorageKeyNotFoundError, match="lost with storage unit 1"):
            client.get_data(meta)
        assert torch.equal(client.get_data(meta.select_fields(["reward"]))["reward"], data["reward"])
    finally:
        tq.close()


def test_a_store_that_is_not_there() -> None:
    conf = {"runtime": "local", "backend": {"storage_backend": "no_such_module:Store"}}
    with pytest.raises(StartError, match=r"no_such_module:Store .*cannot be used"):
        tq.init(conf)
