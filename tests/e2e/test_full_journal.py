"""The disk of the journal is full: what changes anything waits, all else goes on, and then everything does."""

from __future__ import annotations

import asyncio
import contextlib
import io
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tensordict import TensorDict
from test_restarts import in_thread, kill

import transfer_queue as tq
from server_processes import living_server, started, until
from transfer_queue.cli import main
from transfer_queue.journal import segment
from transfer_queue.system_folder import paths

SECONDS = 60
PUTS = 16


def put(number: int) -> None:
    """With a tag that the journal feels."""
    tq.kv_put(f"k{number}", "p", {"x": torch.tensor(number)}, tag={"note": "x" * (segment.RESERVED_BYTES // 8)})


def hard_of(process: psutil.Process) -> int:
    return resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]


def limit(process: psutil.Process, most: int) -> None:
    """From now on no file of the process may grow beyond so many bytes: as on a disk with a quota."""
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, hard))


def status() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["status", "--name", "full-journal"]) == 0
    return said.getvalue()


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    folder = tmp_path / "journal"
    folder.mkdir(mode=0o700)
    return folder


@pytest.mark.parametrize("killed", [False, True])
def test_what_changes_anything_waits_and_all_else_goes_on(journal: Path, killed: bool) -> None:
    with started("full-journal", controller={"journal": {"folder": str(journal)}}):
        client = tq.get_client()
        rows = client.put(TensorDict({"x": torch.arange(4)}, batch_size=[4]), partition_id="p")
        process = until(lambda: living_server("controller"))
        limit(process, 2 * segment.RESERVED_BYTES)
        thread, found = in_thread(lambda: [put(number) for number in range(PUTS)])
        until(lambda: bool(client.status().trouble))
        there = list(tq.kv_list("p")["p"])
        assert there == [f"k{number}" for number in range(len(there))]
        assert len(there) < PUTS
        assert client.get_data(rows)["x"].tolist() == [0, 1, 2, 3]
        told = status()
        assert f"TROUBLE: the journal in {journal} cannot be written" in told
        assert f"{4 + len(there)} samples" in told
        assert list(tq.kv_list("p")["p"]) == there
        assert not found
        if killed:
            kill()  # the next one has no such limit
        else:
            limit(process, hard_of(process))
        thread.join(SECONDS)
        assert found == [[None] * PUTS]
        assert list(tq.kv_list("p")["p"]) == [f"k{number}" for number in range(PUTS)]
        assert "TROUBLE" not in status()


def test_a_call_that_can_wait_no_longer_names_the_journal_and_changes_nothing(journal: Path) -> None:
    """Each within its own timeout, or within `timeouts.call` if it has none: also a claim that waited before."""
    conf = {"controller": {"journal": {"folder": str(journal)}}, "timeouts": {"call": 5.0}}
    with started("full-journal", **conf):
        client, queue = tq.get_client(), tq.Queue("q")
        queue.put(1)
        rows = client.put(TensorDict({"x": torch.arange(4)}, batch_size=[4]), partition_id="p")
        tq.kv_put("k", "keys", {"x": torch.tensor(1)})
        process = until(lambda: living_server("controller"))
        missing, outcome = in_thread(lambda: client.get_meta(["y"], 1, "p", task_name="early", timeout=12))
        until(lambda: any(task.waiting for name in client.status().partitions for task in name.tasks))
        limit(process, 2 * segment.RESERVED_BYTES)
        with pytest.raises(tq.CapacityError, match=f"free some space there .it needs {segment.RESERVED_BYTES} bytes"):
            [put(number) for number in range(PUTS)]
        new = TensorDict({"x": torch.arange(1)}, batch_size=[1])
        calls: list[Callable[[], Any]] = [
            lambda: client.put(new, partition_id="p", timeout=5),
            lambda: asyncio.run(client.async_put(new, partition_id="p", timeout=5)),
            lambda: tq.kv_put("k", "keys", {"x": torch.tensor(2)}, timeout=5),
            lambda: client.get_meta(["x"], 1, "new", mode="insert", timeout=5),
            lambda: queue.put(2, timeout=5),
            lambda: queue.get(timeout=5),
            lambda: client.get_meta(["x"], 1, "p", task_name="t", timeout=5),
            lambda: asyncio.run(client.async_get_meta(["x"], 1, "p", task_name="t", timeout=5)),
            lambda: tq.kv_clear(["k"], "keys", timeout=5),
            lambda: client.clear_samples(rows),
            lambda: client.seal("p", timeout=5),
        ]
        for thread, refused in [in_thread(call) for call in calls]:
            thread.join(SECONDS)
            assert isinstance(refused[0], (tq.CapacityError, tq.WaitTimeoutError))
            assert f"the journal in {journal} cannot be written" in str(refused[0])
            assert "has changed nothing" in str(refused[0])
        missing.join(SECONDS)
        assert isinstance(outcome[0], tq.WaitTimeoutError)
        assert f"the journal in {journal} cannot be written" in str(outcome[0])
        limit(process, hard_of(process))
        until(lambda: not client.status().trouble)
        assert client.get_data(rows)["x"].tolist() == [0, 1, 2, 3]
        assert tq.kv_batch_get(["k"], "keys")["x"].tolist() == [1]
        assert queue.get(timeout=SECONDS) == 1
        assert queue.empty()


def test_a_load_without_space_for_its_state_is_refused_and_changes_nothing(journal: Path, tmp_path: Path) -> None:
    """Its client gets an error at once, and the old state goes on; with space the same checkpoint is loaded."""
    with started("full-journal"):
        tq.kv_put("saved", "p", {"x": torch.tensor(1)}, tag={"note": "x" * (4 * segment.RESERVED_BYTES)})
        tq.save_checkpoint(tmp_path / "ck")
    with started("full-journal", controller={"journal": {"folder": str(journal)}}):
        tq.kv_put("now", "p", {"x": torch.tensor(2)})
        process = until(lambda: living_server("controller"))
        limit(process, 3 * segment.RESERVED_BYTES)
        with pytest.raises(tq.CheckpointError, match="free some space there and load it again"):
            tq.load_checkpoint(tmp_path / "ck")
        assert list(journal.glob("load-*")) == []
        assert list(tq.kv_list("p")["p"]) == ["now"]
        assert "TROUBLE" not in status()
        limit(process, hard_of(process))
        tq.load_checkpoint(tmp_path / "ck")
        assert list(tq.kv_list("p")["p"]) == ["saved"]


# ---------------------------------------------------------------- when a system is started


@contextlib.contextmanager
def files_of_at_most(most: int) -> Iterator[None]:
    """Limit the size of the files that child processes of this process can write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refused(folder: Path) -> None:
    """Check that a system with its journal there fails to start because of the journal, without waiting for a unit."""
    with pytest.raises(tq.StartError) as error:
        tq.init({"system": {"name": "no-space"}, "controller": {"journal": {"folder": str(folder)}}})
    assert f"the journal in {folder} cannot be written" in str(error.value)
    assert "free some space, or choose another folder" in str(error.value)
    assert "unit-0" not in str(error.value)


def test_a_start_without_space_for_the_journal_fails_at_once(journal: Path) -> None:
    with files_of_at_most(segment.RESERVED_BYTES // 2):
        refused(journal)
    with started("no-space", controller={"journal": {"folder": str(journal)}}):
        tq.kv_put("k", "p", {"x": torch.tensor(1)})


def test_a_start_in_a_full_runtime_folder_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_RUNTIME_DIR", str(tmp_path))
    needed = shutil.disk_usage(tmp_path).total * 2
    monkeypatch.setattr(paths, "STARTING_BYTES", needed)
    with pytest.raises(tq.StartError, match=rf"the runtime folder {tmp_path} is full: .* need {needed} bytes there"):
        tq.init({"system": {"name": "no-space"}})
    assert list(tmp_path.iterdir()) == []
