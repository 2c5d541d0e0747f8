"""The locks of slots, between real processes."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leftovers import descriptors, opened_for
from transfer_queue.errors import AttachError, ProtocolError
from transfer_queue.storage.arena.writer_locks import SlotFolder, hold_slot, is_dead

# The parent dies and leaves a child with the inherited descriptor behind.
ORPHANER = """
import os, sys
from pathlib import Path
from transfer_queue.storage.arena.writer_locks import hold_slot
lock = hold_slot(Path(sys.argv[1]))
child = os.fork()
if not child:
    print("orphan", os.getpid(), flush=True)
    sys.stdin.readline()
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_slot_is_private_and_new(folder: SlotFolder) -> None:
    path = Path(folder.make(1, "w"))
    assert path == Path(folder.path(1))
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(FileExistsError):
        folder.make(1, "w")


def test_the_lock_lives_as_long_as_its_process(folder: SlotFolder, holder: Any) -> None:
    for _ in range(3):  # the check does not release the lock
        assert not folder.is_dead(1)
    assert not folder.withdraw(1)
    holder.process.kill()
    holder.process.wait()
    assert folder.is_dead(1)


def test_a_released_lock_proves_the_writer_gone(folder: SlotFolder, holder: Any) -> None:
    assert holder.ask("release") == "None"
    assert holder.ask("release") == "None"
    assert folder.is_dead(1)


def test_a_stopped_writer_is_not_dead(folder: SlotFolder, holder: Any) -> None:
    holder.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, holder.process.pid, os.WSTOPPED | os.WNOWAIT)
    assert not folder.is_dead(1)
    holder.process.send_signal(signal.SIGCONT)
    assert holder.ask("begin 0") == "True"
    assert not folder.is_dead(1)


def test_a_forked_child_does_not_release_the_lock_of_its_parent(folder: SlotFolder, holder: Any) -> None:
    assert holder.ask("fork") == "done"
    assert not folder.is_dead(1)


def test_a_forked_child_does_not_keep_the_lock_of_its_parent(folder: SlotFolder, child: Callable) -> None:
    writer = child(ORPHANER, folder.make(1, "w"))
    word, orphan = writer.hear().split()
    assert word == "orphan"
    assert not folder.is_dead(1)
    writer.process.kill()
    writer.process.wait()
    os.kill(int(orphan), 0)  # it lives, and holds the descriptor
    assert folder.is_dead(1)
    writer.say("end")


def test_a_held_slot_is_refused_to_others(folder: SlotFolder, holder: Any) -> None:
    with pytest.raises(ProtocolError, match="locked by another process"):
        hold_slot(Path(folder.path(1)))
    assert not folder.is_dead(1)


def test_a_withdrawn_slot_cannot_be_held(folder: SlotFolder) -> None:
    folder.make(1, "w")
    assert folder.withdraw(1)
    with pytest.raises(ProtocolError, match="withdrawn"):
        hold_slot(Path(folder.path(1)))


def test_a_slot_withdrawn_between_opening_and_locking_is_noticed(
    folder: SlotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(folder.make(1, "w"))
    real = fcntl.lockf

    def late(descriptor: int, operation: int, length: int, start: int) -> None:
        path.unlink()
        real(descriptor, operation, length, start)

    monkeypatch.setattr(fcntl, "lockf", late)
    before = descriptors()
    with pytest.raises(ProtocolError, match="withdrawn"):
        hold_slot(path)
    assert opened_for(before) == []


def test_a_lock_that_cannot_be_checked_proves_nothing(folder: SlotFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_dead(Path(folder.path(7)))
    assert not folder.withdraw(7)
    folder.make(1, "w")

    def no_locks(*_: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    assert not folder.is_dead(1)
    with pytest.raises(AttachError, match="no locks"):
        hold_slot(Path(folder.path(1)))


# C code forks, so that no hook of Python runs, and the parent dies. The first argument chooses the kind of its lock.
C_ORPHANER = """
import ctypes, fcntl, os, struct, sys
from pathlib import Path
from transfer_queue.storage.arena.writer_locks import hold_slot
path = Path(sys.argv[2])
if sys.argv[1] == "process":
    lock = hold_slot(path)
else:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
child = ctypes.CDLL(None).fork()
if not child:
    os.read(0, 1)
    os._exit(0)
os.write(1, b"forked")
os._exit(0)
"""


@pytest.mark.parametrize(("lock", "dead"), [("process", True), ("file", False)])
def test_a_child_that_c_code_forked_keeps_a_lock_of_the_open_file_and_not_one_of_the_process(tmp_path, lock, dead):
    """Why slots are not locked with F_OFD_SETLK: docs/decisions/0014."""
    slots = SlotFolder(tmp_path / "slots")
    path = Path(slots.make(1, "w"))
    said, say = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", C_ORPHANER, lock, str(path)], stdin=subprocess.PIPE, stdout=say
    ) as one:
        os.close(say)
        assert os.read(said, 6) == b"forked"
        assert one.wait(30) == 0
        assert slots.is_dead(1) is dead
        one.stdin.close()  # ends the child
    assert os.read(said, 1) == b"", "the child has ended"
    os.close(said)


def test_a_process_that_reads_its_slot_file_loses_the_lock(folder: SlotFolder, holder: Any) -> None:
    assert not folder.is_dead(1)
    assert holder.ask("read") == "done"
    assert folder.is_dead(1)
