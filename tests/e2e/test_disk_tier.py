"""Systems that keep more than fits into their memory: what is cold lies on disk, and reads as before."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import transfer_queue as tq
from batches import Batches
from server_processes import restart, started, until
from transfer_queue.client.control_client import ControlClient
from transfer_queue.errors import CapacityError, StartError, StorageKeyNotFoundError
from transfer_queue.interface import CURRENT
from transfer_queue.messages.reports.progress import UnitProgress
from transfer_queue.system_folder.liveness import hold_liveness
from transfer_queue.system_folder.paths import DISK_PREFIX

SECONDS = 60
MIB = 1 << 20
BATCHES = Batches(1 << 16)  # of a MiB each
put, check = partial(BATCHES.put, tq), partial(BATCHES.check, tq)
PREFIX = f"{DISK_PREFIX}{os.geteuid()}-"


@pytest.fixture(scope="module")
def ssd() -> Iterator[Path]:
    """A folder that systems move to, empty once they are gone."""
    folder = Path(tempfile.mkdtemp(prefix="tq-disk-"))
    yield folder
    left = sorted(folder.iterdir())
    shutil.rmtree(folder)
    assert left == []


def conf(ssd: Path, name: str, **more: Any) -> dict[str, Any]:
    offload = {"enabled": True, "path": str(ssd), **more.pop("offload", {})}
    storage = {"arena_bytes": 8 * MIB, "offload": offload, **more}
    return {"name": name, "backend": {"SimpleStorage": storage}}


def units() -> list[UnitProgress]:
    with ControlClient(CURRENT.system) as onlooker:
        return onlooker.status().units


def test_eight_times_the_memory_while_servers_are_killed(ssd: Path) -> None:
    """64 MiB through an arena of 8, by writers and readers at once; disk unit and controller are killed meanwhile."""
    with started(**conf(ssd, "eightfold")), ThreadPoolExecutor(3) as pool:
        done: list[int] = []

        def write(numbers: range) -> None:
            for number in numbers:
                put(number)
                done.append(number)

        def read() -> None:
            while not all(writer.done() for writer in writers):
                check(done[:: max(1, len(done) // 4)])
                threading.Event().wait(0.02)

        writers = [pool.submit(write, range(n, 64, 2)) for n in range(2)]
        reader = pool.submit(read)
        for server, when in (("unit-1", 16), ("controller", 28), ("unit-1", 40), ("unit-0", 50)):
            until(lambda when=when: len(done) >= when or writers[0].done())  # type: ignore[misc]
            restart(server)
        for each in (*writers, reader):
            each.result(SECONDS)
        check(range(64))
        memory, disk = units()
        assert (memory.tier, disk.tier) == ("memory", "disk")
        assert memory.leased <= 8 * MIB
        assert disk.leased >= 56 * MIB
        tq.kv_put("large", "q", {"x": torch.arange(3 * MIB)})
        assert torch.equal(tq.kv_batch_get(["large"], "q")["x"][0], torch.arange(3 * MIB)), (
            "of 24 MiB, larger than memory"
        )
        for log in CURRENT.system.logs.iterdir():
            assert "Traceback" not in log.read_text(), f"{log}: a unit may be told something the moment it is there"
        folders = [path.name for path in ssd.iterdir()]
        assert len(folders) == 1
        assert folders[0].startswith(f"{PREFIX}eightfold-")
        assert (ssd / folders[0]).stat().st_mode & 0o777 == 0o700


def test_a_full_disk_is_told_and_loses_nothing(ssd: Path) -> None:
    with started(**conf(ssd, "full", offload={"capacity": 8 * MIB})):
        count, told = 0, ""
        while not told:
            try:
                put(count)
                count += 1
            except CapacityError as error:
                told = str(error)
        assert f"the disk at {ssd}/{PREFIX}full-" in told
        assert 12 <= count <= 16
        check(range(count))
        tq.kv_clear([key for number in range(8) for key in BATCHES.keys(number)], "p")
        for number in range(40, 46):
            put(number, timeout=SECONDS)
        check([*range(8, count), *range(40, 46)])


def test_leftovers_are_swept_by_their_locks(ssd: Path) -> None:
    """Of killed systems whatever their names were; not of such as live, nor other folders."""
    others = [ssd / f"{PREFIX}dead-00000000", ssd / f"{PREFIX}alive-00000000", ssd / "a users own"]
    for folder in others:
        (folder / "unit-1").mkdir(parents=True)
    lock = hold_liveness(others[1] / "alive")
    (others[0] / "alive").touch()
    try:
        with started(**conf(ssd, "sweeps")):
            found = {path.name for path in ssd.iterdir()}
            assert {other.name for other in others} & found == {other.name for other in others[1:]}
            assert len(found) == 3
    finally:
        os.close(lock)
    with started(**conf(ssd, "sweeps")):
        assert not others[1].exists()
    others[2].joinpath("unit-1").rmdir()
    others[2].rmdir()


def test_a_later_system_with_the_same_journal(ssd: Path, tmp_path: Path) -> None:
    """The values went with the first one, on disk as in memory, and are told as lost; new ones are stored."""
    settings = conf(ssd, "resumed") | {"controller": {"journal": {"folder": str(tmp_path / "journal")}}}
    with started(**settings):
        for number in range(12):
            put(number)
        assert units()[1].leased > 0
    with started(**settings):
        for number in (0, 11):
            with pytest.raises(StorageKeyNotFoundError, match="lost with storage unit"):
                check([number])
        for number in range(12):
            put(number)
        check(range(12))
        assert [unit.tier for unit in units()] == ["memory", "disk"]


def test_where_nothing_can_be_moved_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    missing = tmp_path / "missing"
    for prepare in (lambda: None, missing.touch):
        prepare()
        with (
            pytest.raises(StartError, match=f"offload.path is {missing}, which is not a folder"),
            started(**conf(missing, "nowhere")),
        ):
            pass
    assert CURRENT.system is None
    with tempfile.TemporaryDirectory(prefix="tq-disk-", dir="/dev/shm") as shared, caplog.at_level(logging.WARNING):
        with started(**conf(Path(shared), "warned")):
            put(1)
            check([1])
        assert f"offload.path is {shared}, which is a tmpfs: offloaded blocks stay in memory" in caplog.text
