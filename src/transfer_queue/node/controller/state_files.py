"""Files of the controller's state: the folder that it shares with clients which save and load, and how it writes them.

Requests contain names of files, which the core has checked: 32 hex digits, no path. The folder belongs to the system.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from transfer_queue.core.checkpoints import SavedState, build_saved_state, check_file_name
from transfer_queue.journal import state_file
from transfer_queue.journal.state_file import LoadedStates
from transfer_queue.node.system.processes import die_with_parent


class StateFiles:
    """State files by name, in an existing folder. Files that killed clients leave are removed with the system.

    `loaded` has the journal's files of loaded states; None: there is no journal.
    """

    def __init__(self, folder: Path, loaded: LoadedStates | None = None) -> None:
        self.folder = folder
        self._loaded = loaded

    def path(self, name: str) -> Path:
        """Return the path of a file."""
        return self.folder / name

    def read(self, name: str, watched: Iterable[str] = ()) -> SavedState | Exception:
        """Return the state in a file, or the exception that reading it raised: CheckpointError for an invalid state.

        Any client with the key may have written the file. This thread copies it for the journal and checks it, because
        that takes seconds for a million rows. If the file cannot be read, no copy remains.
        """
        kept = ""
        try:
            path = self.folder / name
            if self._loaded is not None:
                kept = self._loaded.add(path)
                path = self._loaded.path(kept)
            return build_saved_state(state_file.read(path), kept, watched)
        except Exception as error:
            if kept:
                self.forget(kept)
            return error

    def forget(self, kept: str) -> None:
        """Remove the journal's copy of a file whose state is not loaded."""
        assert self._loaded is not None
        with suppress(OSError):  # the next start removes it
            self._loaded.remove(kept)

    def piece(self, name: str, start: int, length: int) -> tuple[int | None, bytes]:
        """Return how many bytes a file has from `start` on, None if it does not exist, and `length` of these bytes."""
        try:
            with open(self.folder / check_file_name(name), "rb") as file:
                left = os.fstat(file.fileno()).st_size - start
                return max(0, left), os.pread(file.fileno(), length, start) if length > 0 else b""
        except FileNotFoundError:
            return None, b""

    def put(self, name: str, start: int, data: memoryview | bytes) -> None:
        """Write into a file, which is created if it does not exist. Raises OSError as the file system does."""
        file = os.open(
            self.folder / check_file_name(name), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(file, data[written:], start + written)
        finally:
            os.close(file)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        (self.folder / name).unlink(missing_ok=True)


# ---------------------------------------------------------------- writing states
# The process forks. The child has the state of that moment, writes it and exits; it does not see later changes of the
# parent. A thread of the parent waits for the child and reports to the loop.


CHILD_SECONDS = 600.0  # after which a child that is still writing is killed
_MAX_MESSAGE = 4096  # bytes of an error's text
_FIRST = 3  # the first descriptor that is not a standard one

Done = Callable[[str | None], Any]


class StateWriter:
    """Writes one state file at a time, in a forked child.

    `call_soon` may be called in any thread. It runs a function in the loop's thread and sends its result.
    """

    def __init__(self, call_soon: Callable[[Callable[[], Any]], object]) -> None:
        self.is_busy = False
        """Whether a child is writing."""
        self._call_soon = call_soon

    def begin(self, path: Path, tree: Callable[[], Any], done: Done, sync: bool) -> None:
        """Begin to write `tree()`, which is called in the child, to `path`. The file is complete or does not exist.

        At the end, `done` is called in the loop's thread with None or with the text of the error. For `sync` see
        `state_file.write`. Raises OSError if the process cannot fork.
        """
        assert not self.is_busy
        read_end, write_end = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(read_end)
            os.close(write_end)
            raise
        if not pid:
            _write(path, tree, sync, write_end)
        os.close(write_end)
        self.is_busy = True
        threading.Thread(target=self._wait, args=(pid, read_end, done), name="state writer", daemon=True).start()

    def _wait(self, pid: int, read_end: int, done: Done) -> None:
        message = _wait_for_child(pid, read_end)

        def ended() -> Any:
            self.is_busy = False
            return done(message)

        self._call_soon(ended)


def _wait_for_child(pid: int, read_end: int) -> str | None:
    """Wait for the end of a child. Returns the text of its error, or None if it succeeded."""
    poll = select.poll()
    poll.register(read_end, select.POLLIN)
    message = b""
    if poll.poll(CHILD_SECONDS * 1000):
        message = os.read(read_end, _MAX_MESSAGE)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        message = f"the process that writes the state took longer than {CHILD_SECONDS:g} s and was killed".encode()
    os.close(read_end)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if not code:
        return None
    return message.decode("utf-8", "replace") or f"the process that writes the state ended with status {code}"


def _write(path: Path, tree: Callable[[], Any], sync: bool, output: int) -> None:
    """Run the child. Never returns. It must not log, because other threads of the parent may have held any lock."""
    code = 1
    try:
        parent = os.getppid()
        # sockets, locks and pipes belong to the parent: its peers must see the parent's end, not the child's
        os.closerange(_FIRST, output)
        os.closerange(output + 1, os.sysconf("SC_OPEN_MAX"))
        gc.disable()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent()
        if os.getppid() == parent:
            state_file.write(path, tree(), sync)
            code = 0
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(output, f"{type(error).__name__}: {error}".encode()[:_MAX_MESSAGE])
    finally:
        os._exit(code)
