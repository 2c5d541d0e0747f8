"""`tq top` in a terminal, against a real system: it follows restarts of the controller and of the system."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator

import psutil
import pytest
import torch

from server_processes import server_process
from transfer_queue.cli import main
from transfer_queue.client import TransferQueueClient
from transfer_queue.config.settings import Settings
from transfer_queue.node.system.launcher import RunningSystem, start_local

NAME = "t"
LIMIT = 120.0  # seconds until something is on the screen, at most
_CONTROL = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")


class Terminal:
    """`tq` with these words in a terminal of 80 columns and 24 lines."""

    def __init__(self, *words: str, **more: str) -> None:
        self._terminal, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        environment = {**inherited, "TERM": "xterm-256color", "COLUMNS": "", "LINES": "", **more}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "transfer_queue.cli", *words], stdin=its, stdout=its, stderr=its, env=environment
        )
        os.close(its)
        self.raw = b""
        self._from = 0

    def press(self, keys: str) -> None:
        """Press keys. Earlier contents of the screen do not count for the next `wait`."""
        self._from = len(self.raw)
        os.write(self._terminal, keys.encode())

    def wait(self, words: str) -> None:
        """Wait until the command has written these words."""
        limit = time.monotonic() + LIMIT
        while words not in self.text():
            assert time.monotonic() < limit, f"{words!r} is not in {self.text()!r}"
            assert self._read(), f"the command ended without {words!r}: {self.text()!r}"

    def text(self) -> str:
        """What was written since the last key, with single spaces, because words wrap at the end of a line."""
        return " ".join(_CONTROL.sub("", self.raw[self._from :].decode(errors="replace")).split())

    def _read(self) -> bool:
        if select.select([self._terminal], [], [], 1.0)[0]:
            try:
                self.raw += os.read(self._terminal, 1 << 16)
            except OSError:  # EIO: the other end is closed
                return False
        return True

    def end(self) -> int:
        """Read until the command has ended. Returns its exit code."""
        while self._read():
            pass
        return self.process.wait(LIMIT)

    def hang_up(self) -> None:
        """Close the terminal, as the end of an ssh connection does."""
        os.close(self._terminal)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._terminal)


@pytest.fixture(scope="module")
def folder() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="tqt-") as path, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TQ_RUNTIME_DIR", path)
        yield


def start(name: str) -> RunningSystem:
    return start_local(name, {"settings": Settings.from_config(None).to_json()})


@pytest.fixture(scope="module")
def shared(folder: None) -> Iterator[RunningSystem]:
    """A system for several tests, which leave it as it is."""
    system = start("shared")
    yield system
    system.stop()


def put(system: RunningSystem, key: str) -> None:
    with TransferQueueClient(system, task="rollout", rank=0) as client:
        client.kv_put(key, "p", {"x": torch.arange(3)})


def test_top_follows_restarts_of_the_controller_and_of_the_system(folder: None) -> None:
    system = start(NAME)
    put(system, "a")
    terminal = Terminal("top", "--name", NAME, "--every", "0.5")
    try:
        terminal.wait("rollout")
        terminal.wait("Partitions")
        terminal.press("3\r")
        terminal.wait("samples that have it")
        terminal.wait("complete")
        terminal.press("3\r")
        terminal.wait("Sample 0 of partition 'p' has the field 'x'")
        terminal.press("\x1b\x1b")
        server_process("controller", system).kill()
        put(system, "b")
        terminal.wait("The controller restarted: no events between")
        terminal.press("p")
        system.stop()
        terminal.wait(f"The system {NAME} was stopped at ")
        terminal.press("p")
        system = start(NAME)
        terminal.wait(f"The system {NAME} is a new one, started by pid {os.getpid()}")
        terminal.press("q")
        assert terminal.end() == 0
        assert b"\x1b[?1049l" in terminal.raw, "the normal screen is back"
    finally:
        terminal.close()
        system.stop()


def test_keys_work_while_the_controller_is_stopped_and_a_signal_leaves_the_terminal_in_order(
    shared: RunningSystem,
) -> None:
    terminal = Terminal("top", "--name", "shared", "--every", "0.5", NO_COLOR="1")
    controller = server_process("controller", shared)
    try:
        terminal.wait("Idle")
        controller.suspend()
        terminal.wait("! The controller does not reply. The newest data is")
        terminal.press("4")
        terminal.wait("in memory")
        terminal.press("?")
        terminal.wait("the slowest stage, according to the verdict")
        controller.resume()
        terminal.press("?")
        terminal.wait("live")
        assert not re.search(rb"\x1b\[[0-9;]*[34][0-8][;m]", terminal.raw), "NO_COLOR: no colors"
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == 128 + signal.SIGTERM
        assert b"\x1b[?1049l" in terminal.raw
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            controller.resume()
        terminal.close()


def test_without_a_system_it_says_what_to_do(folder: None) -> None:
    with contextlib.closing(Terminal("top", "--name", "nobody")) as terminal:
        assert terminal.end() == 1
        assert "tq: no system is running under the name 'nobody'" in terminal.text()
        assert "start one with `tq start`, or name another one with `--name`" in terminal.text()
        assert b"\x1b[?1049h" not in terminal.raw


def test_without_a_terminal_it_names_another_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 1
    assert capsys.readouterr().err == "tq: tq top needs a terminal; for a pipe or a file use `tq status --watch`\n"


def test_without_textual_it_says_in_one_line_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["top"]) == 1
    words = "tq: tq top needs Textual, which is not installed; run: pip install 'transfer_queue[top]'\n"
    assert capsys.readouterr().err == words


@pytest.mark.parametrize("seconds", ["0", "0.1", "nan", "soon"])
def test_an_impossible_interval_is_a_usage_error(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["top", "--every", seconds])
    assert ended.value.code == 2
    assert "must be a number of seconds >= 0.2" in capsys.readouterr().err


@pytest.mark.parametrize("signalled", [False, True])
def test_a_terminal_that_closes_ends_the_command(shared: RunningSystem, signalled: bool) -> None:
    terminal = Terminal("top", "--name", "shared")
    try:
        terminal.wait("Idle")
        terminal.hang_up()
        if signalled:
            terminal.process.send_signal(signal.SIGHUP)
        assert terminal.process.wait(LIMIT) == 128 + signal.SIGHUP
    finally:
        terminal.process.kill()
        terminal.process.wait()
