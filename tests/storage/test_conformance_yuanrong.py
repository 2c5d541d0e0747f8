"""The conformance suite on an openYuanrong worker of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from kept import Kept

from transfer_queue.config import merge
from transfer_queue.storage.stores.base import StoreAddress
from transfer_queue.testing.conformance import StoreConformance

ROOM = 256 << 20


def options(**changes: Any) -> dict[str, Any]:
    section = dict(merge(None).backend.Yuanrong)
    size = f"--shared_memory_size_mb {ROOM >> 20}"
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
    capacity: ClassVar[int | None] = ROOM
    where: ClassVar[StoreAddress]

    def address(self) -> StoreAddress:
        return self.where


def test_a_port_in_use_is_told(kept: Kept, tmp_path: Path) -> None:
    taken = kept.address.options["port"]
    failure = Kept("Yuanrong", options(worker_port=taken), tmp_path).failure
    assert failure is not None
    assert failure.startswith(f"StartError: port {taken} of 127.0.0.1 cannot be used")


@pytest.mark.parametrize("arguments", ["--a", "a b", "--no_such_flag 1"])
def test_arguments_that_make_no_sense(tmp_path: Path, arguments: str) -> None:
    failure = Kept("Yuanrong", options(worker_args=arguments), tmp_path).failure
    assert failure is not None
    assert failure.startswith("StartError: ")


def test_no_worker_is_told(tmp_path: Path) -> None:
    failure = Kept("Yuanrong", options(auto_init=False, worker_port=9), tmp_path).failure
    assert failure is not None
    assert failure.startswith("StartError: no Yuanrong worker answers at 127.0.0.1:9: start it")
