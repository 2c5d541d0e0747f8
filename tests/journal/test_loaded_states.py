"""Loaded checkpoints in the journal: the record is small, and a crash at any step leaves the old or the new state."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.controller import Controller
from transfer_queue.core.events.effects import Effect, ForgetState, ReadState, Send
from transfer_queue.core.events.records import StateLoaded
from transfer_queue.core.state import serialization
from transfer_queue.errors import JournalError
from transfer_queue.journal import state_file
from transfer_queue.journal.journal import Journal, recover, segment_path, snapshot_of, snapshot_path
from transfer_queue.journal.segment import ClockIdentity
from transfer_queue.journal.state_file import LoadedStates
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.checkpoints import LoadState
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.puts import Publish
from transfer_queue.node.controller.journal_service import Journaling
from transfer_queue.node.controller.state_files import StateFiles
from transfer_queue.sampler import SequentialSampler

CLOCK = ClockIdentity(b"b" * 16, 1000.0)
NAME = "ab" * 16
LOAD = 100  # the sequence number of the request that loads


class Server:
    """A controller process: the state that it recovers, what it writes, and the replies to its client."""

    def __init__(self, folder: Path, sync: bool = False) -> None:
        self.folder = folder / "journal"
        self.folder.mkdir(exist_ok=True)
        (folder / "states").mkdir(exist_ok=True)
        self.found = recover(self.folder, CLOCK)
        self.journal = Journal(self.folder, self.found, CLOCK, sync)
        self.controller = Controller(
            CoreConfig(SequentialSampler(), boot=os.urandom(4).hex()), restored=self.found.state
        )
        self.journaling = Journaling(self.controller, self.journal, CLOCK, sync)
        self.states = StateFiles(folder / "states", LoadedStates(self.folder, sync))
        self.controller.on_connect("c", 1)

    def ask(self, sequence: int, request: Any) -> list[Effect]:
        effects = self.controller.handle("c", 1, RequestEnvelope(sequence, 0, request), 1.0)
        assert self.journaling.commit()
        return effects

    def put(self, sequence: int, key: str) -> None:
        self.ask(sequence, Publish("p", 1, keys=[key], tags=[{"n": key}], pre_allocate=0))

    def read(self, read: ReadState) -> Any:
        return self.states.read(read.name, read.watched)

    def load(self, sequence: int = LOAD) -> Any:
        """Return the reply to the request that loads."""
        effects = self.ask(sequence, LoadState(NAME))
        if isinstance(effects[0], ReadState):
            effects = self.controller.on_outcome(effects[0].number, self.read(effects[0]), 2.0)
            assert self.journaling.commit()
        for effect in effects:
            if isinstance(effect, ForgetState):
                self.states.forget(effect.file)
        (reply,) = [effect.reply for effect in effects if isinstance(effect, Send)]
        return reply

    def snapshot(self) -> int:
        number = self.journal.rotate()
        state_file.write(snapshot_path(self.folder, number), snapshot_of(self.controller.state, CLOCK))
        return number

    @property
    def keys(self) -> list[str]:
        partition = self.controller.state.partitions.get("p")
        return [] if partition is None else list(partition.keys)

    def kept(self) -> list[str]:
        return LoadedStates(self.folder).names()


def written(server: Server) -> int:
    """The bytes of the segment in which the server writes."""
    path = segment_path(server.folder, server.journal.number)
    return path.stat().st_size if path.exists() else 0


def saved_tree(rows: int) -> dict[str, Any]:
    """Return the state that a client wants to load: a partition of this many rows."""
    controller = Controller(CoreConfig(SequentialSampler()))
    controller.on_connect("w", 1)
    keys = [f"saved-{n}" for n in range(rows)]
    request = Publish("p", rows, keys=keys, tags=[{"of": key} for key in keys], pre_allocate=0)
    controller.handle("w", 1, RequestEnvelope(1, 0, request), 0.0)
    return {
        "format": 1,
        "time": 0.0,
        "sampler": None,
        "origin": "elsewhere-0",
        "state": serialization.save_state(controller.state),
    }


def offered(folder: Path, rows: int = 3) -> Server:
    """Return a server with one row, and a file with a state of other rows to load."""
    server = Server(folder)
    server.put(1, "old")
    state_file.write(server.states.path(NAME), saved_tree(rows), sync=False)
    return server


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return offered(tmp_path)


# ---------------------------------------------------------------- what the loop writes


def test_the_record_is_as_small_for_many_rows_as_for_few(tmp_path: Path) -> None:
    """So the bytes that the loop writes, checksums and copies do not grow with the state."""
    sizes = []
    for rows in (1, 5000):
        folder = tmp_path / str(rows)
        folder.mkdir()
        server = offered(folder, rows)
        before = written(server)
        assert isinstance(server.load(), Done)
        assert len(server.keys) == rows
        sizes.append(written(server) - before)
    assert max(sizes) < 256
    assert max(sizes) - min(sizes) <= 16


def test_the_turn_that_loads_takes_no_snapshot_and_the_next_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork in the same turn would delay other clients twice as long."""

    begun: list[Path] = []

    class Writer:
        is_busy = False

        def begin(self, path: Path, *_: object) -> None:
            begun.append(path)

    monkeypatch.setattr("transfer_queue.node.controller.journal_service.SNAPSHOT_BYTES", 5000)
    server = offered(tmp_path, 1000)
    server.journaling.attach(Writer())
    assert isinstance(server.load(), Done)
    assert begun == []
    server.put(LOAD + 1, "later")
    assert begun == [snapshot_path(server.folder, 2)]


@pytest.mark.parametrize("sync", [False, True])
def test_a_state_is_on_the_disk_before_its_record_if_commits_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(file: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    states = LoadedStates(tmp_path, sync)
    (tmp_path / "source").write_bytes(b"state")
    monkeypatch.setattr(os, "fsync", noted)
    name = states.add(tmp_path / "source")
    assert synced == ([name, tmp_path.name] if sync else [])
    assert states.path(name).read_bytes() == b"state"


# ---------------------------------------------------------------- deaths


def steps(server: Server) -> Iterator[tuple[str, int]]:
    """Do the disk operations of a load and the snapshot after it, in steps. Yields the state and the loaded files."""
    yield "old", 0
    (read,) = server.ask(LOAD, LoadState(NAME))
    part = server.folder / ("load-" + "0" * 32)
    part.write_bytes(server.states.path(NAME).read_bytes()[:100])  # killed while it copied
    yield "old", 0
    part.unlink()
    found = server.read(read)
    assert len(server.kept()) == 1
    yield "old", 0
    server.controller.on_outcome(read.number, found, 2.0)
    yield "old", 0
    assert server.journaling.commit()
    yield "loaded", 1
    number = server.journal.rotate()
    yield "loaded", 1
    state_file.write(snapshot_path(server.folder, number), snapshot_of(server.controller.state, CLOCK))
    yield "loaded", 0
    segment_path(server.folder, number - 1).unlink()  # killed while it removed what is older
    yield "loaded", 0
    server.journal.forget_before(number)
    assert server.kept() == []
    yield "loaded", 0


@pytest.mark.parametrize("death", range(9))
@pytest.mark.parametrize("sync", [False, True])
def test_a_death_after_any_step_leaves_one_of_both_states_and_its_client_is_answered_once(
    tmp_path: Path, server: Server, death: int, sync: bool
) -> None:
    server.states = StateFiles(server.states.folder, LoadedStates(server.folder, sync))
    going = steps(server)
    for _ in range(death):
        next(going)
    state, files = next(going)
    server.journal.close()

    after = Server(tmp_path, sync)
    assert after.keys == (["old"] if state == "old" else ["saved-0", "saved-1", "saved-2"])
    assert len(after.kept()) == files
    assert after.journal.size == sum(path.stat().st_size for path in after.folder.iterdir())
    epoch = after.controller.state.epoch
    assert epoch == (0 if state == "old" else 1)
    if state == "loaded":  # the request that comes again is answered, also when its file is not there any more
        after.states.remove(NAME)
    assert after.load() == Done(1)
    assert after.controller.state.epoch == 1, "it was loaded once"
    assert after.keys == ["saved-0", "saved-1", "saved-2"]
    after.journal.close()
    assert recover(after.folder, CLOCK).state.snapshot() == after.controller.state.snapshot()


def test_a_record_that_is_torn_at_any_byte_loads_nothing(server: Server) -> None:
    before = written(server)
    assert isinstance(server.load(), Done)
    server.journal.close()
    segment = segment_path(server.folder, 1)
    (file,) = server.kept()
    whole, state = segment.read_bytes(), (server.folder / file).read_bytes()
    for size in range(len(whole) - 1, before - 1, -7):
        os.truncate(segment, size)
        (server.folder / file).write_bytes(state)
        found = recover(server.folder, CLOCK)
        assert list(found.state.partitions["p"].keys) == ["old"]
        assert (found.loaded, server.kept()) == ({}, [])


def test_files_of_loaded_states_are_removed_with_the_segments_that_name_them(tmp_path: Path, server: Server) -> None:
    """A load while a snapshot is being written stays until the next one."""
    assert isinstance(server.load(), Done)
    number = server.snapshot()
    assert isinstance(server.load(LOAD + 1), Done)
    assert len(server.kept()) == 2
    server.journal.forget_before(number)
    assert len(server.kept()) == 1
    assert server.journal.size == sum(path.stat().st_size for path in server.folder.iterdir())
    server.journal.close()
    again = Server(tmp_path)
    assert again.controller.state.snapshot() == server.controller.state.snapshot()
    assert again.journal.written >= (again.folder / again.kept()[0]).stat().st_size, "it counts as what was replayed"
    again.journal.forget_before(again.snapshot())
    assert again.kept() == []


# ---------------------------------------------------------------- what is not loaded


def fails(name: str) -> Callable[..., None]:
    def failing(*_: object) -> None:
        raise OSError(errno.ENOSPC, f"No space left on device in {name}")

    return failing


@pytest.mark.parametrize("step", ["reserve_space", "copyfileobj", "fsync", "sync_folder"])
def test_a_full_disk_refuses_the_load_and_leaves_the_old_state(
    server: Server, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    server.states = StateFiles(server.states.folder, LoadedStates(server.folder, sync=True))
    owner = {"copyfileobj": state_file.shutil, "fsync": os}.get(step, state_file)
    with monkeypatch.context() as full:
        full.setattr(owner, step, fails(step))
        answer = server.load()
    assert answer.kind == "CheckpointError"
    assert f"No space left on device in {step}" in answer.message
    assert "free some space there and load it again" in answer.message
    assert (server.keys, server.kept()) == (["old"], [])
    assert server.journaling.trouble is None, "all else goes on"
    server.put(2, "other")
    assert isinstance(server.load(LOAD + 1), Done)


@pytest.mark.parametrize("how", ["damaged", "missing", "no state", "unsound", "another format", "nobody waits"])
def test_no_copy_stays_of_a_state_that_is_not_loaded(server: Server, how: str) -> None:
    path, tree = server.states.path(NAME), saved_tree(3)
    if how == "damaged":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "missing":
        path.unlink()
    elif how == "no state":
        state_file.write(path, {"format": 1}, sync=False)
    elif how == "unsound":
        tree["state"]["next_index"] = 1
        state_file.write(path, tree, sync=False)
    elif how == "another format":
        state_file.write(path, {**tree, "format": 2}, sync=False)
    if how == "nobody waits":
        (read,) = server.ask(LOAD, LoadState(NAME))
        found = server.read(read)
        server.controller.on_disconnect("c", 1, 1.0)
        (effect,) = server.controller.on_outcome(read.number, found, 2.0)
        server.states.forget(effect.file)
    else:
        assert isinstance(server.load(), Failure)
    assert (server.keys, server.kept()) == (["old"], [])


# ---------------------------------------------------------------- journals of others


@pytest.mark.parametrize("how", ["damaged", "missing", "not a name", "in the record"])
def test_a_state_that_cannot_be_read_is_an_error_that_names_it(server: Server, how: str) -> None:
    assert isinstance(server.load(), Done)
    (file,) = server.kept()
    path = server.folder / file
    if how == "damaged":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "missing":
        path.unlink()
    else:
        file = "../states/" + NAME if how == "not a name" else ""
        server.journal.append([StateLoaded(b"", 3.0, file)])
        server.journal.commit()
    server.journal.close()
    with pytest.raises(JournalError, match="names the state of a loaded checkpoint") as error:
        recover(server.folder, CLOCK)
    assert file in str(error.value)
