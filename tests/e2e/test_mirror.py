"""Systems whose values are on disk, too (`durability.values: machine`), on real processes.

A failure of the machine is simulated: all processes are killed, and the folder of the arenas in memory is removed.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import transfer_queue as tq
from batches import ROWS, Batches
from server_processes import kill_all, server_process, until
from transfer_queue.cli.status_table import format_table
from transfer_queue.messages.reports.progress import MirrorProgress
from transfer_queue.metrics.families import FAMILIES
from transfer_queue.node.system.durable_folder import DurableFolder
from transfer_queue.node.unit.mirror_folders import mirror_bytes

MIB = 1 << 20
BATCHES = Batches(1 << 16)  # of a MiB each
put, check, clear = (partial(method, tq) for method in (BATCHES.put, BATCHES.check, BATCHES.clear))


class Mirrored:
    """A durable folder of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.durable = DurableFolder(folder)

    def start(self, mode: str, **more: Any) -> None:
        """Start or continue the system."""
        durability = {"values": "machine", "folder": str(self.folder), "mode": mode, **more.pop("durability", {})}
        tq.init({"durability": durability, "backend": {"SimpleStorage": {"arena_bytes": 64 * MIB}}, **more})

    def fail(self) -> None:
        """The machine fails: no process and nothing in memory is left."""
        identity = self.durable.identity()
        kill_all()
        shutil.rmtree(identity.arenas)


def mirror() -> MirrorProgress:
    return tq.get_client().status().mirror


@contextlib.contextmanager
def mirrored(parent: Path | None = None) -> Iterator[Mirrored]:
    tq.close()
    root = Path(tempfile.mkdtemp(prefix="tq-mirror-", dir=parent))
    made = Mirrored(root / "kept")
    try:
        yield made
    finally:
        tq.close()
        if made.folder.exists():
            made.durable.discard()
            assert not made.folder.exists(), "nothing is left behind"
        shutil.rmtree(root)


@pytest.fixture
def kept() -> Iterator[Mirrored]:
    with mirrored() as made:
        yield made


def test_every_acknowledged_put_survives_a_failure_of_the_machine_if_puts_wait_for_the_disk(kept: Mirrored) -> None:
    kept.start("sync")
    for number in range(8):
        put(number)
    clear(3)
    assert mirror().behind_bytes == 0
    kept.fail()
    kept.start("sync")
    numbers = [number for number in range(8) if number != 3]
    check(numbers)
    assert tq.get_client().status().partitions[0].fields[0].lost == 0
    assert mirror_bytes(kept.folder) >= 7 * MIB
    # everything is copied back into memory, from where it is read when the disk is gone
    until(lambda: sum(unit.leased for unit in tq.get_client().status().units if unit.tier == "memory") >= 7 * MIB)
    put(8)
    kept.fail()
    kept.start("sync")
    check([*numbers, 8])


def test_what_was_not_on_disk_yet_is_reported_as_lost(kept: Mirrored) -> None:
    kept.start("async", metrics={"enabled": True})
    for number in range(4):
        put(number)
    until(lambda: mirror().behind_bytes == 0)
    _check_what_people_see(kept)
    server_process("unit-1").suspend()  # the mirror
    put(4)
    assert mirror().behind_bytes >= MIB
    kept.fail()
    kept.start("async")
    check([0, 1, 2, 3])
    assert tq.get_client().status().partitions[0].fields[0].lost == ROWS
    with pytest.raises(Exception, match="lost with storage unit 0"):
        check([4])
    put(4)
    check([4])


def _check_what_people_see(kept: Mirrored) -> None:
    status = tq.get_client().status()
    assert "copies on disk: 4.0 MiB" in format_table(status)
    assert "at most 1.0 GiB or 10 s" in format_table(status)
    endpoint = tq.get_metrics_endpoint()
    with urllib.request.urlopen(f"http://{endpoint}/metrics") as answer:
        text = answer.read().decode()
    for name in FAMILIES:
        if name.startswith("tq_mirror_"):
            assert f"\n{name} " in text, name
    assert "tq_mirror_copied_bytes_total 4" in text


def test_a_full_disk_makes_puts_wait_and_loses_nothing() -> None:
    with _small_disk() as disk, mirrored(disk) as kept:
        kept.start("sync")
        acknowledged: list[int] = []

        def fill() -> None:
            for number in range(40):  # more than there is space for
                put(number)
                acknowledged.append(number)

        writer = threading.Thread(target=fill)
        writer.start()
        until(lambda: mirror().full and mirror().waiting > 0)
        before = list(acknowledged)
        assert len(before) < 40
        check(before)
        while writer.is_alive():
            for number in acknowledged[:-4]:
                clear(number)
            writer.join(0.1)
        assert acknowledged == list(range(40))
        kept.fail()
        kept.start("sync")
        check(acknowledged[-4:])


@contextlib.contextmanager
def _small_disk() -> Iterator[Path]:
    """A file system of 32 MiB."""
    folder = Path(tempfile.mkdtemp(prefix="tq-disk-"))
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(folder)], capture_output=True)
    if done.returncode:
        folder.rmdir()
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()
