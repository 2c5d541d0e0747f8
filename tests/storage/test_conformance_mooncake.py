"""The conformance suite on a Mooncake store of this machine."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import device_libraries
import numpy as np
import pytest
from kept import Kept

from transfer_queue.config.loading import merge
from transfer_queue.storage.stores.base import Piece, StoreAddress, connect
from transfer_queue.storage.stores.mooncake import NOT_WHOLE
from transfer_queue.testing.conformance import StoreConformance

STORE_BYTES = 256 << 20


def options(**changes: Any) -> dict[str, Any]:
    section = dict(merge(None).backend.MooncakeStore)
    return {**section, "master_server_address": "127.0.0.1:0", "global_segment_size": STORE_BYTES, **changes}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    keeper = Kept("MooncakeStore", options(), tmp_path_factory.mktemp("mooncake"))
    assert keeper.failure is None
    TestMooncake.where = keeper.address
    yield keeper
    assert keeper.close() is None


@pytest.mark.usefixtures("kept")
class TestMooncake(StoreConformance):
    capacity: ClassVar[int | None] = STORE_BYTES
    where: ClassVar[StoreAddress]

    def address(self) -> StoreAddress:
        return self.where


def test_the_unfinished_block_of_a_dead_writer_is_removed(kept: Kept) -> None:
    store = connect(kept.address)
    assert store.connect().batch_put_session_start(["half"], [100]) == [0]
    assert store.connect().remove("half", True) == NOT_WHOLE
    store.remove(["half", "none"])
    assert store.missing(["half"]) == ["half"]
    store.close()


def test_a_port_in_use_is_an_error(kept: Kept, tmp_path: Path) -> None:
    taken = kept.address.options["master_server_address"]
    failure = Kept("MooncakeStore", options(master_server_address=taken), tmp_path).failure
    assert failure.startswith(f"StartError: port {taken.rpartition(':')[2]} of 127.0.0.1 cannot be used")
    assert "auto_init: false" in failure


def test_a_missing_master_is_an_error(tmp_path: Path) -> None:
    nobody = options(auto_init=False, master_server_address="localhost:9")
    failure = Kept("MooncakeStore", nobody, tmp_path).failure
    assert failure.startswith("StartError: no Mooncake master responds at 127.0.0.1:9: start it")


def test_a_running_master_is_used_and_not_stopped(kept: Kept, tmp_path: Path) -> None:
    master = kept.address.options["master_server_address"]
    guest = Kept(
        "MooncakeStore", options(auto_init=False, master_server_address=master, global_segment_size=0), tmp_path
    )
    assert guest.failure is None
    store = connect(guest.address)
    with store.buffer("guest/1", 100) as memory:
        memory[:] = 3
        store.write("guest/1", memory, 5.0)
    assert guest.close() is None
    into = np.zeros(100, np.uint8)
    assert store.read([Piece("guest/1", 0, 100, 0)], into, 5.0) == []
    assert (into == 3).all()
    store.remove(["guest/1"])
    store.close()


@pytest.mark.parametrize("name", ["setup", "register_buffer", "unregister_buffer", "upsert_from", "get_into_ranges"])
def test_the_stand_in_accepts_the_arguments_of_the_library(name: str) -> None:
    """The paths of GPUs are tested with this stand-in if the machine has no GPU."""
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    said = str(getattr(MooncakeDistributedStore, name).__doc__)
    found = re.search(rf"{name}\(self: [\w.]+, (.*)\) -> ", said)
    real = re.findall(r"(\w+): ", found.group(1))
    stand_in = inspect.signature(getattr(device_libraries.MooncakeDistributedStore, name))
    wanted = list(stand_in.parameters)[1:]
    assert real[: len(wanted)] == wanted
    assert len(real) == len(wanted) or name == "setup"
    assert hasattr(ReplicateConfig(), "with_hard_pin")
