"""Writes the controller's state to a file while service goes on.

The process forks. The child has the state as it was at that moment, writes it and ends; what the parent changes
meanwhile it does not see. A thread of the parent waits for it and tells the loop.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transfer_queue.journal import state_file

CHILD_SECONDS = 600.0  # after which a child that still writes is ended
_WORDS = 4096  # bytes of an error's words
_FIRST = 3  # the first descriptor that is not a standard one
_PR_SET_PDEATHSIG = 1

Done = Callable[[str | None], Any]


class StateWriter:
    """Writes one state file at a time, in a forked child.

    call_soon: runs a function in the loop's thread, from any thread, and sends what it returns. busy: a child is
    writing.
    """

    def __init__(self, call_soon: Callable[[Callable[[], Any]], object]) -> None:
        self.busy = False
        self._call_soon = call_soon

    def begin(self, path: Path, tree: Callable[[], Any], done: Done, sync: bool) -> None:
        """Begins to write `tree()`, called in the child, to `path`: whole, or not at all.

        done: called in the loop's thread at the end, with None or with what went wrong in words. sync: see
        `state_file.write`. OSError if the system cannot fork.
        """
        assert not self.busy
        said, say = os.pipe()
        die_with_parent = _death_signal()
        try:
            pid = os.fork()
        except OSError:
            os.close(said)
            os.close(say)
            raise
        if not pid:
            _write(path, tree, sync, say, die_with_parent)
        os.close(say)
        self.busy = True
        threading.Thread(target=self._wait, args=(pid, said, done), name="state writer", daemon=True).start()

    def _wait(self, pid: int, said: int, done: Done) -> None:
        words = _words_of(pid, said)

        def ended() -> Any:
            self.busy = False
            return done(words)

        self._call_soon(ended)


def _words_of(pid: int, said: int) -> str | None:
    """Waits for the end of a child; what went wrong, None if nothing did."""
    poll = select.poll()
    poll.register(said, select.POLLIN)
    heard = b""
    if poll.poll(CHILD_SECONDS * 1000):
        heard = os.read(said, _WORDS)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        heard = f"it took longer than {CHILD_SECONDS:g} s".encode()
    os.close(said)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if not code:
        return None
    return heard.decode("utf-8", "replace") or f"its process ended with status {code}"


def _write(path: Path, tree: Callable[[], Any], sync: bool, say: int, die_with_parent: Callable[[], object]) -> None:
    """The child's way; never returns. Other threads of the parent may have held any lock: nothing is logged here."""
    code = 1
    try:
        parent = os.getppid()
        # our sockets, locks and pipes are the parent's: its peers must see its end, not ours
        os.closerange(_FIRST, say)
        os.closerange(say + 1, os.sysconf("SC_OPEN_MAX"))
        gc.disable()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent()
        if os.getppid() == parent:
            state_file.write(path, tree(), sync)
            code = 0
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(say, f"{type(error).__name__}: {error}".encode()[:_WORDS])
    finally:
        os._exit(code)


def _death_signal() -> Callable[[], object]:
    """What a child calls to be ended with its parent, where the system can do that; made before the fork."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        return lambda: prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return lambda: None
