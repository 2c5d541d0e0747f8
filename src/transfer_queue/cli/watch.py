"""`tq status --watch`: the table over and over, in place on a terminal, until Ctrl-C or the system's end."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import closing
from types import FrameType, TracebackType
from typing import Protocol

from transfer_queue.cli.common import find_system
from transfer_queue.cli.status_table import Rates, as_line, rates, table
from transfer_queue.client.control_client import ControlClient
from transfer_queue.errors import (
    AttachError,
    AuthenticationError,
    ConnectionLostError,
    TransferQueueError,
    WaitTimeoutError,
)
from transfer_queue.messages.system import SystemStatus
from transfer_queue.node.system.launcher import RunningSystem, find
from transfer_queue.node.system.processes import Process

ANSWER_SECONDS = 10.0  # after which a look is given up, and the next one tries again
RESTART_SECONDS = 2.0  # for a system that ended to be there again
PAUSE = 0.05  # between two looks whether it is

_LEFT = (ConnectionLostError, AttachError, AuthenticationError)  # what a call meets when the system has ended


class Display(Protocol):
    """Where looks are shown."""

    def show(self, system: RunningSystem, status: SystemStatus, speeds: Rates | None) -> None:
        """One look, with the rates since the one before."""

    def say(self, line: str) -> None:
        """What happened besides."""


def watch(name: str | None, seconds: float, as_json: bool) -> int:
    """Looks every so many seconds. 0 after Ctrl-C; 1 when the system has ended and is not started again at once."""
    try:
        system = find_system(name)
        if sys.stdout.isatty() and not as_json:
            with Screen(seconds) as screen:
                last = follow_all(name, system, seconds, screen)
        else:
            last = follow_all(name, system, seconds, Lines(as_json))
    except KeyboardInterrupt:
        return 0
    print(f"tq: the system {last.name} has ended ({last.describe()})", file=sys.stderr)
    return 1


def follow_all(name: str | None, system: RunningSystem, seconds: float, display: Display) -> RunningSystem:
    """Follows the system, and each that is started in its place; returns the last one when it has ended."""
    while True:
        follow(system, seconds, display)
        later = _restarted(name, system)
        if later is None:
            return system
        system = later
        display.say(f"the system {system.name} was restarted: {system.describe()}")


def follow(system: RunningSystem, seconds: float, display: Display) -> None:
    """Shows a system until it ends."""
    before: tuple[float, SystemStatus] | None = None
    its = system.description
    with ControlClient(system) as onlooker, closing(Process(its.pid, its.started)) as supervisor:
        while True:
            try:
                status = onlooker.status(timeout=ANSWER_SECONDS)
            except WaitTimeoutError:
                display.say(f"the controller gave no answer within {ANSWER_SECONDS:g} s; its log is in {system.logs}")
            except _LEFT:
                return
            else:
                now = time.monotonic()
                speeds = None if before is None else rates(before[1], status, max(now - before[0], 1e-3))
                display.show(system, status, speeds)
                before = now, status
            if _ended_within(system, supervisor, seconds):
                return


def _ended_within(system: RunningSystem, supervisor: Process, seconds: float) -> bool:
    """Waits so long, or less if the system ends."""
    limit = time.monotonic() + seconds
    if supervisor.wait(seconds) and system.alive():
        time.sleep(max(0.0, limit - time.monotonic()))  # its process is in a container of its own, unseen from here
    return not system.alive()


def _restarted(name: str | None, old: RunningSystem) -> RunningSystem | None:
    """The system that took its place, None if none does in time."""
    limit = time.monotonic() + RESTART_SECONDS
    while True:
        try:
            later = find(name)
        except TransferQueueError:
            later = None  # in the middle of a start
        if later is not None and later.key != old.key:
            return later
        if time.monotonic() > limit:
            return None
        time.sleep(PAUSE)


class Lines:
    """For pipes and files: a table and an empty line each time, or a line of JSON; what is said goes to stderr."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def show(self, system: RunningSystem, status: SystemStatus, speeds: Rates | None) -> None:
        """See `Display`."""
        text = as_line(system, status, speeds=speeds) if self._as_json else table(status, speeds) + "\n"
        print(text, flush=True)

    def say(self, line: str) -> None:
        """See `Display`."""
        print(f"tq: {line}", file=sys.stderr, flush=True)


class Screen:
    """For terminals: a second screen, drawn over in place; the last look stays behind on the first one."""

    _ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
    _HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._said = ""
        self._shown = ""

    def __enter__(self) -> Screen:
        # also when ended or stopped from outside, the terminal is left as it was
        self._before = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)),
            signal.SIGTSTP: signal.signal(signal.SIGTSTP, self._stop),
        }
        self._write(self._ENTER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._write(self._LEAVE)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._shown:
            print(self._shown)
        if self._said:
            print(self._said)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: the first screen until it goes on."""
        self._write(self._LEAVE)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._write(self._ENTER)

    def show(self, system: RunningSystem, status: SystemStatus, speeds: Rates | None) -> None:
        """See `Display`."""
        self._shown = f"{system.name} at {time.strftime('%H:%M:%S')}, {system.describe()}\n\n{table(status, speeds)}"
        self._draw()

    def say(self, line: str) -> None:
        """See `Display`."""
        self._said = f"{time.strftime('%H:%M:%S')} {line}"
        self._draw()

    def _draw(self) -> None:
        size = shutil.get_terminal_size()
        room = max(1, size.lines - 3)
        lines = self._shown.splitlines()
        if len(lines) > room:
            lines = [
                *lines[: room - 1],
                f"... and {len(lines) - room + 1} lines more; the terminal is too low for them",
            ]
        lines += ["", self._said, f"every {self._seconds:g} s; Ctrl-C ends"]
        drawn = (self._END_OF_LINE + "\r\n").join(line[: size.columns] for line in lines)
        self._write(self._HOME + drawn + self._END_OF_LINE + self._END_OF_SCREEN)

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
