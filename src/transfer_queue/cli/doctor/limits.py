"""Resource limits of this process, which the servers that it starts inherit."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from transfer_queue.cli.doctor import shared_memory
from transfer_queue.cli.doctor.report import OK, PROBLEM, WARNING, Finding
from transfer_queue.display import size_text

MANY_CLIENTS = 4096  # connections that a large training opens: clients times their threads
CLIENT_FILES = 256  # for a client with 64 idle connections to each of two servers, and for the files of the program

INFINITE = resource.RLIM_INFINITY


def limit(number: int) -> tuple[int, int]:
    """Return the soft and the hard limit."""
    return resource.getrlimit(number)


def check() -> Iterator[Finding]:
    """Check the limits on open files, address space and sizes of files; report locked memory for completeness."""
    yield _files(*limit(resource.RLIMIT_NOFILE))
    folder = shared_memory.choice().folder
    size = shared_memory.file_system_space(folder)[0] if folder.is_dir() else 0
    yield _address_space(limit(resource.RLIMIT_AS)[0], size)
    yield _file_size(limit(resource.RLIMIT_FSIZE)[0], size)
    locked = limit(resource.RLIMIT_MEMLOCK)[0]
    words = "unlimited" if locked == INFINITE else size_text(locked)
    yield Finding(
        "locked memory", OK, f"{words} (not needed: the system locks no memory)", values={"limit": _known(locked)}
    )


def _known(value: int) -> int | None:
    return None if value == INFINITE else value


def _files(soft: int, hard: int) -> Finding:
    words = " and ".join("unlimited" if n == INFINITE else str(n) for n in (soft, hard)) + " (soft and hard)"
    values = {"soft": _known(soft), "hard": _known(hard)}
    if hard != INFINITE and hard < MANY_CLIENTS:
        advice = (
            f"the servers raise theirs to the hard limit and serve fewer than {hard} connections; raise it for many "
            f"clients (ulimit -Hn, docker run --ulimit nofile=65536)"
        )
        return Finding("open files", WARNING, words, advice, values)
    if soft != INFINITE and soft < CLIENT_FILES:
        advice = f"a client with many threads may run out of files: ulimit -n {CLIENT_FILES * 4}"
        return Finding("open files", WARNING, words, advice, values)
    return Finding("open files", OK, words, values=values)


def _address_space(soft: int, size: int) -> Finding:
    values = {"limit": _known(soft), "arena": size}
    if soft == INFINITE:
        return Finding("address space", OK, "unlimited", values=values)
    words = f"limited to {size_text(soft)}; every process maps a complete arena of up to {size_text(size)}"
    advice = "ulimit -v unlimited, or set backend.SimpleStorage.arena_bytes well below the limit"
    return Finding("address space", PROBLEM if soft <= size else WARNING, words, advice, values)


def _file_size(soft: int, size: int) -> Finding:
    values = {"limit": _known(soft)}
    if soft == INFINITE or soft >= size:
        return Finding("file size", OK, "unlimited" if soft == INFINITE else size_text(soft), values=values)
    words = f"limited to {size_text(soft)}, so that no arena grows beyond it"
    return Finding("file size", WARNING, words, "ulimit -f unlimited", values)
