"""Supervisors that are forked from a process which has made their imports, which is most of what a start costs.

Run as a program, this file is that process. It imports what the supervisor imports and nothing else, and has no
threads. A fork of it gets the environment, the current folder and the descriptors that a spawned supervisor would get,
runs the module of the supervisor as its main module, and is a child of the process that asked for it.

`install` does this in the processes of pytest (`tests/conftest.py`). Systems are still spawned, as those of users are,
if the interpreter, a variable that counts when it starts, or the TQ_RUNTIME_DIR is another one, as in
`tests/e2e/test_node.py`; by the processes that tests start; and by the command line.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

MODULE = "transfer_queue.node.supervisor"
_CHANNEL = 3
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_AT_START = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OPENBLAS_", "OMP_", "LC_", "LANG", "TZ")

_SECONDS = 120.0  # within which a fork is there
_posix_spawn = os.posix_spawn
_lock = threading.Lock()


class _Template:
    """The process to fork from, seen from the one that has started it."""

    def __init__(
        self, ends: tuple[socket.socket, socket.socket], python: str, environment: Mapping[str, str], mask: Any,
        defaults: Any,
    ) -> None:  # fmt: skip
        self.conditions = _conditions(python, environment)
        self._socket, theirs = ends
        source = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, _CHANNEL + 1)  # a copy to the same number would be closed
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, source, _CHANNEL),
        ]
        self.pid = _posix_spawn(
            python, [python, __file__], environment, file_actions=actions, setsigmask=mask, setsigdef=defaults
        )
        os.close(source)

    def fork(self, environment: Mapping[str, str], descriptors: Sequence[int]) -> int:
        """The id of a new child of this process, which has these descriptors as 1, 2 and 3."""
        order = json.dumps([dict(environment), os.getcwd()]).encode()
        libc = ctypes.CDLL(None)
        # the fork's own parent ends at once, so that it becomes a child of this process
        libc.prctl(_SUBREAPER, 1)
        try:
            socket.send_fds(self._socket, [order], descriptors)
            return int(self._socket.recv(64))
        finally:
            libc.prctl(_SUBREAPER, 0)

    def close(self) -> None:
        """End it. Only the process that has started it may do so."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


_template: _Template | None = None
_folder: str | None = None
_ends: tuple[socket.socket, socket.socket]


def install(folder: str | None) -> None:
    """Take the place of `os.posix_spawn` in this process.

    folder: The TQ_RUNTIME_DIR of the systems whose supervisors are forked; None for all.
    """
    global _folder, _ends
    _folder = folder
    # made now, and both ends stay open: tests count the descriptors of this process
    _ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _ends[0].settimeout(_SECONDS)
    os.posix_spawn = _spawn


def _conditions(python: str, environment: Mapping[str, str]) -> tuple[int, str, dict[str, str]]:
    """What all forks have in common, and that the same process asks for them."""
    return os.getpid(), python, {name: value for name, value in environment.items() if name.startswith(_AT_START)}


def _is_usual(environment: Mapping[str, str]) -> bool:
    """Whether a process may be forked: leftovers are found by the folder, and limits of processes are inherited."""
    return _limits() == _LIMITS and (_folder is None or environment.get("TQ_RUNTIME_DIR") == _folder)


def _limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(kind) for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)]


_LIMITS = _limits()


def _spawn(path: str, arguments: Sequence[str], environment: Mapping[str, str], **options: Any) -> int:
    """`os.posix_spawn`, which forks supervisors."""
    global _template
    if list(arguments[1:]) == ["-m", MODULE] and _is_usual(environment):
        with _lock:
            if _template is None and os.access(path, os.X_OK):
                _template = _Template(_ends, path, environment, options["setsigmask"], options["setsigdef"])
            if _template is not None and _template.conditions == _conditions(path, environment):
                numbers = {act[2]: act[1] for act in options["file_actions"] if act[0] == os.POSIX_SPAWN_DUP2}
                return _template.fork(environment, [numbers[target] for target in (1, 2, _CHANNEL)])
    return _posix_spawn(path, arguments, environment, **options)


def pid() -> int | None:
    """Of the process to fork from; None if there is none."""
    return None if _template is None else _template.pid


def close() -> None:
    """Undo `install`, and end the process to fork from."""
    global _template
    os.posix_spawn = _posix_spawn
    for end in _ends:
        end.close()
    if _template is not None:
        _template.close()
    _template = None


def _serve(requests: socket.socket) -> bool:
    """Fork for each request. True in a fork; False when nobody can ask any more."""
    while True:
        order, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not order:
            return False
        said, say = os.pipe()
        between = os.fork()
        if not between:
            child = os.fork()
            if child:
                os.write(say, str(child).encode())
                os._exit(0)
            _become(order, descriptors)
            return True
        for descriptor in (say, *descriptors):
            os.close(descriptor)
        os.waitpid(between, 0)
        requests.send(os.read(said, 64))
        os.close(said)


def _become(order: bytes, descriptors: Sequence[int]) -> None:
    """Take over what a spawned process would be started with. The supervisor closes all other descriptors."""
    environment, folder = json.loads(order)
    os.environ.clear()
    os.environ.update(environment)
    with contextlib.suppress(OSError):
        os.chdir(folder)
    for number, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, number)


def main() -> None:
    """Run the process to fork from, and in a fork the supervisor."""
    importlib.import_module(MODULE)
    del sys.modules[MODULE]  # it will be the main module
    requests = socket.socket(fileno=_CHANNEL)
    forked = _serve(requests)
    requests.detach()
    if forked:
        sys.argv = [MODULE]
        runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
