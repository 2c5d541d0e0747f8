"""Systems whose values outlive all their processes (`durability.values: processes`)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import durable_kills
import psutil
import pytest
import torch
from test_cli import command

import transfer_queue as tq
import warm
from server_processes import kill_all, kill_together, until
from transfer_queue.errors import ConnectionLostError, StartError
from transfer_queue.journal.segment import MARKER
from transfer_queue.node.system.durable_folder import SHARED_MEMORY, DurableFolder, Identity

SECONDS = 60
NAME = "lasting"


class Lasting:
    """A durable folder of one test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "kept"
        self.durable = DurableFolder(self.folder)

    def conf(self, **sections: Any) -> dict[str, Any]:
        return {
            "system": {"name": NAME},
            "durability": {"values": "processes", "folder": str(self.folder)},
            "backend": {"SimpleStorage": {"arena_bytes": 64 << 20}},
            **sections,
        }

    @property
    def identity(self) -> Identity:
        return self.durable.identity()

    @property
    def arena(self) -> Path:
        return Path(self.identity.arenas) / "unit-0"

    def words(self) -> list[str]:
        """The arguments of `tq start` with the same settings."""
        return ["--set", "durability.values=processes", "--set", f"durability.folder={self.folder}",
                "--set", f"backend.SimpleStorage.arena_bytes={64 << 20}"]  # fmt: skip


@pytest.fixture
def lasting() -> Iterator[Lasting]:
    tq.close()
    root = Path(tempfile.mkdtemp(prefix="tqd-"))
    place = Lasting(root)
    try:
        yield place
        tq.close()
        if place.folder.exists():
            place.durable.discard()
        assert not place.folder.exists()
        assert [link for link in SHARED_MEMORY.glob("*/system") if str(root) in os.readlink(link)] == []
    finally:
        tq.close()
        shutil.rmtree(root)


def put(count: int = 20) -> torch.Tensor:
    values = torch.arange(count * 1000).reshape(count, 1000)
    tq.kv_batch_put([f"k{i}" for i in range(count)], "p", {"x": values})
    return values


def read(count: int = 20) -> torch.Tensor:
    found = tq.kv_batch_get([f"k{i}" for i in range(count)], "p")["x"]
    return torch.stack(list(found.unbind()))  # a batch of rows is jagged


# ---------------------------------------------------------------- kills


@pytest.mark.slow
def test_every_acknowledged_put_survives_kills_of_everything() -> None:
    done = warm.run_program(durable_kills.main, "--kills", "2", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the ledger holds" in done.stdout
    assert "nothing was left behind" in done.stdout


def test_the_same_client_goes_on_after_init_has_started_the_system_again(lasting: Lasting) -> None:
    """Also if the journal is torn in its last write, which is cut off."""
    tq.init(lasting.conf())
    values, client = put(), tq.get_client()
    meta = client.get_meta(["x"], 4, "p", task_name="t", lease=SECONDS)
    kill_all()
    segment = max(lasting.folder.glob("segment-*"))
    content = segment.read_bytes()
    segment.write_bytes(content + content[content.rindex(MARKER) :][:60])
    tq.init(lasting.conf())
    assert tq.get_client() is client
    assert torch.equal(read(), values)
    assert client.ack(meta), "the lease of before is in force"
    left = client.get_meta(["x"], 16, "p", task_name="t", timeout=SECONDS)
    assert sorted([*left.global_indexes, *meta.global_indexes]) == list(range(20))
    assert client.status().partitions[0].fields[0].lost == 0


def test_a_process_that_attached_without_init_keeps_its_client_and_is_answered_by_the_system_that_another_one_starts(
    lasting: Lasting, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("start", "--name", NAME, *lasting.words())
    monkeypatch.setenv("TQ_SYSTEM", NAME)
    values, client = put(), tq.get_client()
    client.get_meta(["x"], 20, "p", task_name="t")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get_meta, ["x"], 1, "p", task_name="t", timeout=SECONDS)
        kill_all()
        done = command("start", "--name", NAME, *lasting.words())
        assert done.returncode == 0, done.stderr
        tq.kv_put("late", "p", {"x": values[0]})
        assert len(waiting.result(SECONDS)) == 1
    assert torch.equal(read(), values)
    assert tq.get_client() is client
    assert command("stop", "--name", NAME).returncode == 0


def test_the_process_that_started_it_first_does_not_stop_what_another_one_continues(lasting: Lasting) -> None:
    tq.init(lasting.conf())
    put()
    kill_all()
    assert command("start", "--name", NAME, *lasting.words()).returncode == 0
    tq.close()
    tq.init({"system": {"name": NAME}}, attach="require")
    assert len(read()) == 20
    tq.close()
    assert command("stop", "--name", NAME).returncode == 0


def test_an_orderly_stop_keeps_the_values_and_clients_do_not_wait(lasting: Lasting) -> None:
    command("start", "--name", NAME, *lasting.words())
    tq.init({"system": {"name": NAME}}, attach="require")
    values, client = put(), tq.get_client()
    assert command("stop", "--name", NAME).returncode == 0
    with pytest.raises(ConnectionLostError, match="its system was closed or has crashed"):
        client.get_partition_list()
    tq.close()
    tq.init(lasting.conf())
    assert torch.equal(read(), values)


def test_values_on_a_disk_tier_survive_too(lasting: Lasting) -> None:
    disk = lasting.root / "disk"
    disk.mkdir()
    storage = {
        "arena_bytes": 8 << 20,
        "offload": {"enabled": True, "path": str(disk), "high_watermark": 0.3, "low_watermark": 0.1},
    }
    tq.init(lasting.conf(backend={"SimpleStorage": storage}))
    values = put(800)
    until(lambda: any(unit.tier == "disk" and unit.leased for unit in tq.get_client().status().units))
    kill_all()
    tq.init(lasting.conf(backend={"SimpleStorage": storage}))
    assert torch.equal(read(800), values)
    assert any(unit.tier == "disk" and unit.leased for unit in tq.get_client().status().units)


# ---------------------------------------------------------------- what is refused, and what is gone


def begin_and_stop(lasting: Lasting) -> None:
    tq.init(lasting.conf())
    put()
    tq.close()


def refused(lasting: Lasting, **sections: Any) -> str:
    with pytest.raises(StartError) as error:
        tq.init(lasting.conf(**sections))
    return str(error.value)


def test_what_cannot_be_continued_is_refused_with_the_reason_and_continues_when_it_is_repaired(
    lasting: Lasting,
) -> None:
    begin_and_stop(lasting)
    said = refused(lasting, durability={"folder": str(lasting.folder)})
    assert f"keeps the values of the system {NAME!r}" in said
    assert "set durability.values to processes" in said
    segment = max(lasting.folder.glob("segment-*"))
    written = segment.read_bytes()
    segment.write_bytes(written[:7] + b"\x09" + written[8:])
    assert "another release wrote it, in version 9, but this release reads version 1" in refused(lasting)
    segment.write_bytes(written)
    moved = lasting.root / "moved"
    shutil.move(lasting.arena / "generations", moved)
    said = refused(lasting)
    assert f"the arena in {lasting.arena} lacks its file 'generations'" in said
    assert f"remove the folder {lasting.arena}, and its values are reported as lost" in said
    shutil.copy(moved, lasting.arena / "generations")
    os.truncate(lasting.arena / "generations", 8)
    assert f"{lasting.arena / 'generations'} has 8 bytes, but the header of its arena says 8192" in refused(lasting)
    shutil.move(moved, lasting.arena / "generations")
    tq.init(lasting.conf())
    assert len(read()) == 20


def test_arenas_that_are_gone_are_reported_in_words_and_their_values_as_lost(
    lasting: Lasting, caplog: pytest.LogCaptureFixture
) -> None:
    begin_and_stop(lasting)
    for gone in (lasting.arena, Path(lasting.identity.arenas)):
        shutil.rmtree(gone)
        tq.init(lasting.conf())
        words = f"the values that the durable folder {lasting.folder} kept in {gone} are lost"
        assert (words in caplog.text) == (gone != lasting.arena)
        field = tq.get_client().status().partitions[0].fields[0]
        assert (field.produced, field.lost) == (0, 20)
        values = put()
        assert torch.equal(read(), values)
        tq.close()


# ---------------------------------------------------------------- list, adopt, discard


def listed(durable: Path) -> dict[str, Any]:
    systems: list[dict[str, Any]] = json.loads(command("list", "--json").stdout)["systems"]
    (found,) = [system for system in systems if system["durable"] == str(durable)]
    return found


def test_a_durable_folder_is_listed_with_its_sizes_and_age_while_it_exists(lasting: Lasting) -> None:
    begun = time.time()
    tq.init(lasting.conf())
    put()
    running = listed(lasting.folder)
    assert (running["state"], running["name"]) == ("running", NAME)
    assert running["memory"] > 20_000 * 8
    kill_all()
    kept = listed(lasting.folder)
    assert (kept["state"], kept["name"], kept["units"]) == ("kept", NAME, 1)
    assert kept["memory"] > 20_000 * 8
    assert kept["journal"] > 0
    assert begun - 5 < kept["used_at"] < time.time() + 5
    findings = json.loads(command("doctor", "--no-test", "--json").stdout)["findings"]
    assert [f["values"]["folder"] for f in findings if f["name"] == f"durable {NAME}"] == [str(lasting.folder)]
    text = command("list").stdout
    assert "ago" in text
    assert f"durable folder {lasting.folder}, " in text
    tq.close()
    done = command("stop", "--discard", "--name", NAME)
    assert done.returncode == 0, done.stderr
    assert f"that {lasting.folder} kept" in done.stdout
    assert not lasting.folder.exists()
    assert str(lasting.folder) not in command("list").stdout


def test_discard_stops_a_running_system_and_removes_what_it_keeps(lasting: Lasting) -> None:
    command("start", "--name", NAME, *lasting.words())
    arenas = Path(lasting.identity.arenas)
    assert arenas.is_dir()
    other = lasting.folder / "notes.txt"
    other.write_text("not of the system")
    done = json.loads(command("stop", "--discard", "--json", "--name", NAME).stdout)
    assert done["stopped"]
    assert done["discarded"] > 0
    assert not arenas.exists()
    assert list(lasting.folder.iterdir()) == [other], "files of others stay"
    other.unlink()


def test_a_folder_that_was_moved_is_adopted_with_all_that_it_keeps(lasting: Lasting) -> None:
    begin_and_stop(lasting)
    lasting.folder.rename(lasting.root / "elsewhere")
    gone = listed(lasting.folder)
    assert "its durable folder does not exist any more" in gone["words"]
    lasting.folder = lasting.root / "elsewhere"
    lasting.durable = DurableFolder(lasting.folder)
    said = refused(lasting)
    assert f"if it was moved here, run `tq adopt {lasting.folder}`" in said
    done = command("adopt", str(lasting.folder), "--name", "renamed")
    assert done.returncode == 0, done.stderr
    assert f"adopted: {lasting.folder}, of the system renamed" in done.stdout
    assert "partition p: 20 samples" in done.stdout
    assert "start it with  tq start --name renamed --set durability.values=processes" in done.stdout
    tq.init(lasting.conf())
    assert len(read()) == 20


def test_the_arenas_of_a_folder_that_was_removed_can_be_discarded(lasting: Lasting) -> None:
    begin_and_stop(lasting)
    arenas = Path(lasting.identity.arenas)
    shutil.rmtree(lasting.folder)
    done = command("stop", "--discard", "--folder", str(lasting.folder))
    assert done.returncode == 0, done.stderr
    assert not arenas.exists()


def test_only_a_durable_folder_can_be_adopted_or_discarded(lasting: Lasting) -> None:
    other = lasting.root / "other"
    other.mkdir()
    (other / "file").touch()
    done = command("adopt", str(other))
    assert (done.returncode, done.stdout) == (1, "")
    assert "keeps no values: it has no identity.json" in done.stderr
    done = command("stop", "--discard", "--folder", str(other))
    assert (done.returncode, done.stdout) == (1, "")
    assert "is not a durable folder" in done.stderr
    assert (other / "file").exists()
    tq.init(lasting.conf())
    done = command("adopt", str(lasting.folder))
    assert f"is used by the running system {NAME!r}" in done.stderr
    done = command("stop", "--discard", "--folder", str(lasting.folder))
    assert f"is used by the running system {NAME!r}" in done.stderr


def start_and_wait(conf: dict[str, Any]) -> None:
    """Run in a process that is killed."""
    tq.init(conf)
    signal.pause()


def test_what_killed_starts_leave_does_not_prevent_the_next_one(lasting: Lasting) -> None:
    """Each gets farther than the one before."""

    def is_made(file: str) -> bool:
        if file in ("lock", "identity.json"):
            return (lasting.folder / file).exists()
        identity = lasting.durable.identity()
        return identity is not None and (Path(identity.arenas) / file.replace("arenas", "")).exists()

    for file in ("lock", "identity.json", "arenas", "unit-0/arena"):
        program = warm.process(start_and_wait, lasting.conf())
        program.start()
        starter = psutil.Process(program.pid)
        until(lambda file=file: is_made(file))
        kill_together([starter, *starter.children(recursive=True)])
        program.join()
    tq.init(lasting.conf())
    assert torch.equal(put(), read())
