"""`tq status --watch`: show the table repeatedly, in place on a terminal, until Ctrl-C or the system's end."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import closing
from types import FrameType

from transfer_queue.cli.options import find_system_that_replies
from transfer_queue.cli.shell.terminal import wrap
from transfer_queue.cli.status_table import Layout, Rates, TimelineFacts, format_table, json_line, rates
from transfer_queue.client.control_client import ENDED_ERRORS, ControlClient
from transfer_queue.errors import WaitTimeoutError
from transfer_queue.messages.reports.timeline import Verdict
from transfer_queue.messages.system import SystemStatus
from transfer_queue.node.system.launcher import RunningSystem, find_successor
from transfer_queue.node.system.processes import Process
from transfer_queue.timeline.recording import Recording
from transfer_queue.timeline.verdict import judge_with_account

ANSWER_SECONDS = 10.0  # timeout of one query; the next one tries again
RESTART_SECONDS = 2.0  # how long to wait for another system to start after the system has ended
PAUSE = 0.05  # seconds between two checks for the other system


def watch(name: str | None, seconds: float, as_json: bool) -> int:
    """Show the status every `seconds`. Return 0 after Ctrl-C, 1 if the system has ended and was not started again."""
    try:
        system = find_system_that_replies(name)
        if sys.stdout.isatty() and not as_json:
            with Screen(seconds) as screen:
                last = follow_all(name, system, seconds, screen)
        else:
            last = follow_all(name, system, seconds, Lines(as_json))
    except KeyboardInterrupt:
        return 0
    print(f"tq: the system {last.name} has ended ({last.describe()})", file=sys.stderr)
    return 1


def follow_all(name: str | None, system: RunningSystem, seconds: float, display: Lines | Screen) -> RunningSystem:
    """Show the system, and each one that is started in its place. Return the last one when it has ended."""
    while True:
        follow(system, seconds, display)
        later = _wait_for_restart(name, system)
        if later is None:
            return system
        system = later
        display.say(f"the system {system.name} was restarted: {system.describe()}")


def follow(system: RunningSystem, seconds: float, display: Lines | Screen) -> None:
    """Show a system until it ends."""
    before: tuple[float, SystemStatus] | None = None
    recording = Recording()
    description = system.description
    with ControlClient(system) as onlooker, closing(Process(description.pid, description.started)) as supervisor:
        while True:
            status = read_status(system, onlooker, recording)
            if status is None:
                return
            if isinstance(status, str):
                display.say(f"{status}; its log is in {system.logs}")
            else:
                now = time.monotonic()
                speeds = None if before is None else rates(before[1], status, max(now - before[0], 1e-3))
                verdict, account = judge_with_account(recording, status)
                display.show(system, status, speeds, verdict, TimelineFacts.of(account))
                before = now, status
            if _wait_for_end(system, supervisor, seconds):
                return


def read_status(system: RunningSystem, client: ControlClient, recording: Recording) -> SystemStatus | str | None:
    """Read what has happened since the last time, and return the status.

    If the controller does not reply, return the reason and what to do in a clause; None if the system has ended.
    """
    try:
        client.read_timeline(recording, timeout=ANSWER_SECONDS)
        return client.status(timeout=ANSWER_SECONDS)
    except WaitTimeoutError:
        stopped = system.describe_stopped()
        return f"the controller did not reply within {ANSWER_SECONDS:g} s" + (f"; {stopped}" if stopped else "")
    except ENDED_ERRORS as error:
        return f"the controller cannot be reached: {error}" if system.is_alive() else None


def _wait_for_end(system: RunningSystem, supervisor: Process, seconds: float) -> bool:
    """Wait for `seconds`, or less if the system ends; return whether it has ended."""
    limit = time.monotonic() + seconds
    if supervisor.wait(seconds) and system.is_alive():
        time.sleep(max(0.0, limit - time.monotonic()))  # the supervisor is in another container
    return not system.is_alive()


def _wait_for_restart(name: str | None, old: RunningSystem) -> RunningSystem | None:
    """Return the system that was started in its place; None if none is in time."""
    limit = time.monotonic() + RESTART_SECONDS
    while True:
        later = find_successor(name, old)
        if later is not None or time.monotonic() > limit:
            return later
        time.sleep(PAUSE)


class Lines:
    """The display for pipes and files: a table and an empty line, or a line of JSON; messages go to stderr."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def show(
        self, system: RunningSystem, status: SystemStatus, speeds: Rates | None, verdict: Verdict, facts: TimelineFacts
    ) -> None:
        """Show a status with its verdict, with the rates since the previous one, and with what the timeline says."""
        table = f"{verdict.text}\n\n{format_table(status, speeds, facts)}\n"
        print(json_line(system, status, verdict, speeds, facts) if self._as_json else table, flush=True)

    def say(self, line: str) -> None:
        """Show a message about an event."""
        print(f"tq: {line}", file=sys.stderr, flush=True)


class Screen:
    """The display for terminals: the alternate screen, drawn in place. The last status stays on the normal screen."""

    _ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
    _HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._message = ""
        self._shown = ""

    def __enter__(self) -> Screen:
        # the terminal is restored also if a signal ends or stops this process
        self._before = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)),
            signal.SIGTSTP: signal.signal(signal.SIGTSTP, self._stop),
        }
        self._write(self._ENTER)
        return self

    def __exit__(self, *_: object) -> None:
        self._write(self._LEAVE)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._shown:
            print(self._shown)
        if self._message:
            print(self._message)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-Z: show the normal screen until the process continues."""
        self._write(self._LEAVE)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._write(self._ENTER)

    def show(
        self, system: RunningSystem, status: SystemStatus, speeds: Rates | None, verdict: Verdict, facts: TimelineFacts
    ) -> None:
        """See `Lines`."""
        width = shutil.get_terminal_size().columns
        head = wrap(f"{system.name} at {time.strftime('%H:%M:%S')}, {system.describe()}", width, "  ")
        table = format_table(status, speeds, facts, Layout(width))
        self._shown = "\n".join([*head, "", *wrap(verdict.text, width), "", table])
        self._draw()

    def say(self, line: str) -> None:
        """See `Lines`."""
        self._message = f"{time.strftime('%H:%M:%S')} {line}"
        self._draw()

    def _draw(self) -> None:
        size = shutil.get_terminal_size()
        height = max(1, size.lines - 2 - max(1, len(wrap(self._message, size.columns))))
        lines = self._shown.splitlines()
        if len(lines) > height:
            lines = [
                *lines[: height - 1],
                f"... and {len(lines) - height + 1} more lines, for which the terminal has no space",
            ]
        lines += ["", *wrap(self._message, size.columns), f"every {self._seconds:g} s; press Ctrl-C to end"]
        drawn = (self._END_OF_LINE + "\r\n").join(line[: size.columns] for line in lines)
        self._write(self._HOME + drawn + self._END_OF_LINE + self._END_OF_SCREEN)

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
