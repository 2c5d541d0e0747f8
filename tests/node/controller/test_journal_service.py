"""The journal of a running controller: snapshots by a forked child, and a full disk."""

from __future__ import annotations

import logging
import os
import queue
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.controller import Controller
from transfer_queue.journal import state_file
from transfer_queue.journal.journal import Journal, list_numbers, recover
from transfer_queue.journal.segment import ClockIdentity
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.puts import Publish
from transfer_queue.net.handshake import Hello
from transfer_queue.node.controller import journal_service, state_files
from transfer_queue.node.controller.controller_service import ControllerService
from transfer_queue.node.controller.journal_service import Journaling
from transfer_queue.node.controller.state_files import StateFiles, StateWriter
from transfer_queue.sampler import SequentialSampler

CLOCK = ClockIdentity(b"b" * 16, 0.0)


class Loop:
    """`call_soon` of a server; `turn` runs one of the functions."""

    def __init__(self) -> None:
        self.functions: queue.Queue[Callable[[], None]] = queue.Queue()

    def call_soon(self, function: Callable[[], None]) -> None:
        self.functions.put(function)

    def turn(self) -> None:
        """Wait for one function and run it."""
        self.functions.get(timeout=60)()


class Served:
    """A controller with its journaling in a folder."""

    def __init__(self, folder: Path, sync: bool = False) -> None:
        self.loop = Loop()
        found = recover(folder, CLOCK)
        self.controller = Controller(CoreConfig(SequentialSampler()), restored=found.state)
        self.controller.on_connect("c", 1)
        self.journal = Journal(folder, found, CLOCK, sync)
        self.journaling = Journaling(self.controller, self.journal, CLOCK, sync)
        self.journaling.attach(StateWriter(self.loop.call_soon))
        self.sequence = 0

    def put(self, count: int = 1) -> bool:
        """Put a row in each of this many turns. Returns whether the last one was committed."""
        committed = False
        for _ in range(count):
            self.sequence += 1
            request = Publish("p", 1, tags=[{"n": self.sequence}], pre_allocate=0)
            self.controller.handle("c", 1, RequestEnvelope(self.sequence, self.sequence - 1, request), 0.0)
            committed = self.journaling.commit()
        return committed

    @property
    def rows(self) -> int:
        return self.controller.state.row_count


# ---------------------------------------------------------------- a state written by a child


def written(tmp_path: Path, tree: Callable[[], Any], path: Path | None = None) -> tuple[str | None, Path]:
    loop, found = Loop(), []
    writer = StateWriter(loop.call_soon)
    path = path or tmp_path / "state"
    writer.begin(path, tree, found.append, sync=False)
    assert writer.is_busy
    loop.turn()
    assert not writer.is_busy
    return found[0], path


def test_the_child_writes_the_state_of_the_moment_of_the_fork(tmp_path: Path) -> None:
    column = np.arange(5)
    loop, found = Loop(), []
    writer = StateWriter(loop.call_soon)
    writer.begin(tmp_path / "state", lambda: {"column": column}, found.append, sync=True)
    column[:] = 0
    loop.turn()
    assert found == [None]
    assert state_file.read(tmp_path / "state")["column"].tolist() == [0, 1, 2, 3, 4]


def test_the_child_keeps_no_connection_lock_or_pipe_of_its_parent_open(tmp_path: Path) -> None:
    """A peer sees that the parent closes a connection while the child writes; the same holds for locks and pipes."""
    ours, theirs = socket.socketpair()
    go, wait = os.pipe()[::-1]
    loop, found = Loop(), []

    def tree() -> Any:
        try:
            os.read(wait, 1)
        except OSError:
            return {"closed": True}
        return {"closed": False}

    StateWriter(loop.call_soon).begin(tmp_path / "state", tree, found.append, sync=False)
    ours.close()
    theirs.settimeout(10)
    assert theirs.recv(1) == b""
    theirs.close()
    loop.turn()
    os.close(go)
    os.close(wait)
    assert found == [None]
    assert state_file.read(tmp_path / "state") == {"closed": True}


def test_a_child_that_fails_reports_the_error(tmp_path: Path) -> None:
    def tree() -> Any:
        raise ValueError("no tree today")

    assert written(tmp_path, tree)[0] == "ValueError: no tree today"
    words, path = written(tmp_path, dict, tmp_path / "nowhere" / "state")
    assert "No such file" in words
    assert not path.exists()


def test_a_child_that_is_killed_leaves_no_state(tmp_path: Path) -> None:
    words, path = written(tmp_path, lambda: os.kill(os.getpid(), 9))
    assert words == "the process that writes the state ended with status -9"
    assert not path.exists()


def test_a_child_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_files, "CHILD_SECONDS", 0.05)
    words, path = written(tmp_path, lambda: time.sleep(1000))
    assert words == "the process that writes the state took longer than 0.05 s and was killed"
    assert not path.exists()


# ---------------------------------------------------------------- snapshots


def test_snapshots_are_taken_and_old_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_service, "SNAPSHOT_RECORDS", 30)
    monkeypatch.setattr(journal_service, "REST", 0.0)
    served = Served(tmp_path)
    for _ in range(6):
        while not served.journaling.snapshotting:
            served.put()
        served.put(5)  # while the child writes
        served.loop.turn()
    segments, snapshots = list_numbers(tmp_path)
    assert (segments, snapshots) == ([7], [7])
    found = recover(tmp_path, CLOCK)
    assert found.state.snapshot() == served.controller.state.snapshot()
    assert 0 < found.records < 30
    assert served.controller.context.measures.counters["journal_bytes"] == sum(
        path.stat().st_size for path in tmp_path.iterdir()
    )


def test_replayed_records_count_towards_the_next_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that is killed again and again must not let its journal grow without end."""
    served = Served(tmp_path)
    served.put(10)
    monkeypatch.setattr(journal_service, "SNAPSHOT_RECORDS", 22)
    again = Served(tmp_path)
    again.sequence = 10
    assert again.put()
    again.loop.turn()
    assert list_numbers(tmp_path)[1] == [3]
    assert recover(tmp_path, CLOCK).state.row_count == 11


def test_a_snapshot_that_fails_is_logged_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_service, "SNAPSHOT_RECORDS", 10)
    served = Served(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(state_file, "write", lambda *_: 1 / 0)
        while not served.journaling.snapshotting:
            served.put()
        served.loop.turn()
    assert "the controller cannot write a snapshot" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    served.put(20)
    assert not served.journaling.snapshotting, "not at once"
    monkeypatch.setattr(journal_service, "FAILED_SECONDS", 0.0)
    monkeypatch.setattr(served.journaling, "_next_try", 0.0)
    served.put()
    served.loop.turn()
    assert len(list_numbers(tmp_path)[1]) == 1
    assert recover(tmp_path, CLOCK).state.row_count == served.rows


def test_there_is_a_rest_after_a_snapshot_unless_too_many_records_accumulate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_service, "SNAPSHOT_RECORDS", 10)
    monkeypatch.setattr(journal_service, "MAX_RECORDS", 100)
    monkeypatch.setattr(journal_service, "REST", 1e9)
    served = Served(tmp_path)
    while not served.journaling.snapshotting:
        served.put()
    served.loop.turn()
    first = served.rows
    while not served.journaling.snapshotting:
        served.put()
    served.loop.turn()
    assert served.rows >= first + 30
    assert recover(tmp_path, CLOCK).state.row_count == served.rows


# ---------------------------------------------------------------- a full disk


def full(file: int, data: bytes, offset: int) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("sync", [False, True])
def test_mutations_wait_while_the_disk_is_full_and_this_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sync: bool
) -> None:
    caplog.set_level(logging.INFO)
    served = Served(tmp_path, sync)
    assert served.put(3)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", full)
        assert not served.put()
        assert not served.journaling.commit()
        assert not served.journaling.commit()
        assert served.controller.context.measures.counters["journal_trouble"] == 1
    assert caplog.text.count("cannot be written") == 1
    assert "No space left on device" in caplog.text
    assert recover(tmp_path, CLOCK).state.row_count == 3
    assert served.journaling.commit()
    assert served.controller.context.measures.counters["journal_trouble"] == 0
    assert "can be written again" in caplog.text
    assert recover(tmp_path, CLOCK).state.row_count == 4


def test_a_request_that_was_refused_while_the_disk_was_full_is_not_carried_out_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrives once more on a connection that its client has abandoned, when there is space again."""
    served = Served(tmp_path)
    service = ControllerService(served.controller, StateFiles(tmp_path / "states"), served.journaling)
    for peer in (2, 3):
        service.on_connect(peer, Hello("client", "late"))
    request = msgspec.msgpack.encode(RequestEnvelope(1, 0, Publish("p", 1, tags=[{}], pre_allocate=0), within=0.0))
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", full)
        assert not served.put()
        broken.setattr(served.journaling, "reserve_space", lambda: False)
        assert not service.on_message(3, request, None, 0.0)
        (refused,) = service.on_deadline(time.monotonic())
        assert b"has changed nothing" in bytes(refused.body)
    assert served.journaling.commit()
    (again,) = service.on_message(2, request, None, 0.0)
    assert again == refused._replace(peer=2)
    assert served.rows == 1
