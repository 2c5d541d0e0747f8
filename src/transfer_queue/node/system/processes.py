"""Other processes: telling one from a later one with its number, waiting for its end, signalling it."""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import signal
import sys
import time

PAUSE = 0.02  # seconds between two looks where the system cannot wait for a process
SHOWN = 200  # characters of a command line


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None where that cannot be known."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # the name, in parentheses, may hold anything
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def command() -> str:
    """The command line of this process, cut."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            words = file.read().decode("utf-8", "replace").split("\0")
    except OSError:
        words = [sys.executable or "python", *sys.argv]
    return " ".join(words).strip()[:SHOWN]


def user() -> str:
    """The name of this process's user, or its number."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


class Process:
    """A process by number and start time. `gone` and `wait` also serve where there is no pidfd."""

    def __init__(self, pid: int, started: int | None) -> None:
        self.pid = pid
        self._started = started
        self.descriptor: int | None = None  # becomes readable when the process ends
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self.descriptor = os.pidfd_open(pid)
        if self.descriptor is not None and not self._is_it():
            self.close()

    def _is_it(self) -> bool:
        """Whether the process that has the number now is the one meant."""
        now = start_time(self.pid)
        return self._started is None or now is None or now == self._started

    def gone(self) -> bool:
        """Whether it has ended; one that waits for its parent to ask has."""
        if self.descriptor is not None:
            return self.wait(0)
        try:
            os.kill(self.pid, 0)
        except OSError:
            return True
        return hasattr(os, "pidfd_open") or not self._is_it()

    def wait(self, seconds: float) -> bool:
        """Waits for its end; False if that took longer."""
        if self.descriptor is not None:
            poll = select.poll()
            poll.register(self.descriptor, select.POLLIN)
            return bool(poll.poll(max(0.0, seconds) * 1000))
        limit = time.monotonic() + seconds
        while not self.gone():
            if time.monotonic() > limit:
                return False
            time.sleep(PAUSE)
        return True

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, to this process and no later one; none if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.descriptor is not None:
                signal.pidfd_send_signal(self.descriptor, number)
            elif not self.gone():
                os.kill(self.pid, number)

    def reap(self) -> None:
        """Asks for its exit status, if it is our child and has ended."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)

    def close(self) -> None:
        """Lets go of the descriptor."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
