from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.writer_locks import SlotFolder
from transfer_queue.testing.simulated_locks import HeldSlots, SimulatedSlots


@pytest.fixture(autouse=True)
def opened_arenas(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Arena]]:
    """The arenas of the test. Those that it leaves open are closed, so that their descriptors do not add up."""
    opened: list[Arena] = []
    begin = Arena.__init__

    def begin_and_remember(arena: Arena, *arguments: Any, **more: Any) -> None:
        begin(arena, *arguments, **more)
        opened.append(arena)

    monkeypatch.setattr(Arena, "__init__", begin_and_remember)
    yield opened
    for arena in opened:
        if len(arena.memory):  # it is not closed
            arena.close()


@pytest.fixture
def slots() -> SimulatedSlots:
    return SimulatedSlots(0, HeldSlots())


class Child:
    """A child process that runs a piece of Python. `say` sends it a line, and `hear` waits for one."""

    def __init__(self, code: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hear(self) -> str:
        return self.process.stdout.readline().strip()

    def say(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str) -> str:
        """Say a line, and return the answer."""
        self.say(line)
        return self.hear()

    def end(self) -> None:
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()


HOLDER = """
import os, sys
from pathlib import Path
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.writer_locks import hold_slot
path = Path(sys.argv[1])
arena = Arena.open(Path(sys.argv[2])) if sys.argv[2:] else None
lock = hold_slot(path)
print("held", flush=True)
for line in sys.stdin:
    what, *numbers = line.split()
    if what == "read":
        path.read_bytes()
    elif what == "fill":
        offset, length, value = map(int, numbers)
        arena.view(offset, length)[:] = value
    elif what == "fork":
        child = os.fork()
        if not child:
            lock.release()
            os._exit(0)
        os.waitpid(child, 0)
    else:
        print(getattr(lock, what)(*map(int, numbers)), flush=True)
        continue
    print("done", flush=True)
"""
"""Holds the slot of its first argument, and does what each line says: a method of the lock, `read` the file, `fork` a
child, or `fill OFFSET LENGTH VALUE` in the arena of the second argument."""


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(code: str, *arguments: str) -> Child:
        children.append(Child(code, *arguments))
        return children[-1]

    yield start
    for one in children:
        one.end()


@pytest.fixture
def folder(tmp_path: Path) -> SlotFolder:
    return SlotFolder(tmp_path / "slots")


@pytest.fixture
def hold(child: Callable[..., Child]) -> Callable[..., Child]:
    """Starts a process that holds a slot; its arguments are the slot's file and, to fill parts of it, an arena."""

    def start(*arguments: str) -> Child:
        made = child(HOLDER, *arguments)
        assert made.hear() == "held"
        return made

    return start


@pytest.fixture
def holder(folder: SlotFolder, hold: Callable[..., Child]) -> Child:
    """A process that holds slot 1."""
    return hold(folder.make(1, "w"))


@pytest.fixture
def small_tmpfs() -> Iterator[Path]:
    """A separate memory file system of 16 MiB."""
    folder = Path(tempfile.mkdtemp(prefix="tq-test-"))
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True, text=True
        )
    except FileNotFoundError:
        done = subprocess.CompletedProcess([], 127, "", "there is no mount command")
    if done.returncode:
        shutil.rmtree(folder)
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()
