"""Other processes: their identity in spite of reused ids, waiting for their end, and signals to them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import select
import signal
import sys
from pathlib import Path

from transfer_queue.system_folder.liveness import wait_until

PAUSE = 0.02  # seconds between two checks where the operating system cannot wait for a process
SHOWN = 200  # characters of a command line
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


def _status(pid: int) -> list[bytes]:
    """Return what the kernel says of a process, from its state on; nothing if this cannot be read."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()  # the name, in parentheses, may contain any characters
    return []


def start_time(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot; None if this cannot be determined."""
    status = _status(pid)
    return int(status[19]) if len(status) > 19 else None


def pid_namespace() -> int:
    """Return what identifies this process's PID namespace on this machine; 0 if this cannot be determined."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def command() -> str:
    """Return the command line of this process, truncated."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            arguments = file.read().decode("utf-8", "replace").split("\0")
    except OSError:
        arguments = [sys.executable or "python", *sys.argv]
    return " ".join(arguments).strip()[:SHOWN]


def user() -> str:
    """Return the name of this process's user, or the user id if it has no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def die_with_parent() -> None:
    """Let the kernel kill this process with the thread that has started it, if the kernel supports this.

    A child may call it after a fork.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def stopped_holders(path: Path) -> list[int]:
    """Return the processes that have a file open and are stopped (SIGSTOP), as far as this user may see them."""
    try:
        wanted = os.stat(path)
    except OSError:
        return []
    pids = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or _status(int(folder.name))[:1] not in ([b"T"], [b"t"]):
            continue
        try:
            if any(os.path.samestat(each.stat(), wanted) for each in (folder / "fd").iterdir() if each.exists()):
                pids.append(int(folder.name))
        except OSError:  # it has ended, or is of another user
            continue
    return sorted(pids)


class Process:
    """A process, identified by id and start time. `has_ended` and `wait` also work without a pidfd."""

    def __init__(self, pid: int, started: int | None) -> None:
        self.pid = pid
        self._started = started
        self.descriptor: int | None = None
        """A pidfd, which becomes readable when the process ends; None if there is none."""
        # a kernel, or a container, may refuse a pidfd; Python lacks the function if it was built with old headers
        with contextlib.suppress(OSError, AttributeError):
            self.descriptor = os.pidfd_open(pid)
        if self.descriptor is not None and not self._is_it():
            self.close()

    def _is_it(self) -> bool:
        """Whether the process that has the id now is the right one."""
        now = start_time(self.pid)
        return self._started is None or now is None or now == self._started

    def has_ended(self) -> bool:
        """Whether the process has ended. A process that its parent has not reaped yet counts as ended."""
        if self.descriptor is not None:
            return self.wait(0)
        try:
            os.kill(self.pid, 0)
        except OSError:
            return True
        return _status(self.pid)[:1] == [b"Z"] or not self._is_it()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process. Returns False if that takes longer."""
        if self.descriptor is not None:
            poll = select.poll()
            poll.register(self.descriptor, select.POLLIN)
            return bool(poll.poll(max(0.0, seconds) * 1000))
        return wait_until(self.has_ended, seconds, PAUSE)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process, never to a later one of its id; do nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.descriptor is not None:
                signal.pidfd_send_signal(self.descriptor, number)
            elif not self.has_ended():
                os.kill(self.pid, number)

    def reap(self) -> None:
        """Collect the exit status, if the process is our child and has ended."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
