"""Processors, memory, shared memory, limits: what the machine has, and what its container lets this process use."""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from transfer_queue.cli.doctor.report import OK, PROBLEM, WARNING, Finding
from transfer_queue.cli.options import read_conf
from transfer_queue.config.environment import cgroup_quota, cgroup_values
from transfer_queue.config.settings import Settings
from transfer_queue.display import size_text
from transfer_queue.storage.arena.arena import MIN_SHARED_MEMORY, FolderChoice, choose_folder
from transfer_queue.system_folder.paths import ARENA_PREFIX, DURABLE_PREFIX, allocated_bytes, mount_of

FEW_CPUS = 2.0  # below this servers and tasks take turns
LITTLE_MEMORY = 2 << 30
UNLIMITED = 1 << 60  # larger values mean "no limit" in version 1 of control groups


def cpus_allowed() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_quota() -> float | None:
    """Return the processor time that the control groups allow, in processors; None if there is no limit."""
    quota = cgroup_quota()
    return None if math.isinf(quota) else quota


def memory() -> tuple[int, int]:
    """Return the bytes of memory of the machine, and those that are available now."""
    sizes = {}
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    return sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"])


def memory_limit() -> int | None:
    """Return the bytes that the control groups allow, including shared memory; None if there is no limit."""
    texts = cgroup_values("memory.max", "memory", "memory.limit_in_bytes")
    limits = [int(text) for text in texts if text.isdecimal() and int(text) < UNLIMITED]
    return min(limits, default=None)


def check_machine() -> Iterator[Finding]:
    """Check the processors, then the memory."""
    yield _processors(cpus_allowed(), cpu_quota())
    yield _memory(*memory(), memory_limit())


def _processors(allowed: int, quota: float | None) -> Finding:
    usable = allowed if quota is None else min(allowed, quota)
    text = f"{allowed} allowed" + ("" if quota is None else f", a quota of {quota:g} processors' time")
    values = {"allowed": allowed, "quota": quota, "usable": usable}
    if usable < FEW_CPUS:
        advice = "controller, storage and every task take turns; allow 2 or more (docker run --cpus, taskset)"
        return Finding("processors", WARNING, text, advice, values)
    return Finding("processors", OK, text, values=values)


def _memory(total: int, available: int, limit: int | None) -> Finding:
    text = f"{size_text(total)}, {size_text(available)} available"
    text += "" if limit is None else f", limited to {size_text(limit)} here"
    values = {"total": total, "available": available, "limit": limit}
    if min(available, limit or available) < LITTLE_MEMORY:
        advice = "samples and tasks share this memory; end other programs, or allow more (docker run --memory)"
        return Finding("memory", WARNING, text, advice, values)
    return Finding("memory", OK, text, values=values)


# ---------------------------------------------------------------- the folder of samples

_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
SHARED_MEMORY = Path("/dev/shm")
_PROBE = 64 * 1024  # bytes that are allocated to see whether that works


def choice() -> FolderChoice:
    """Return the folder that a system of this user would choose, by the system's own rule."""
    return choose_folder()


def file_system_space(folder: Path) -> tuple[int, int]:
    """Return the total and the free bytes of the file system for this user. A tmpfs without a size has all memory."""
    space = os.statvfs(folder)
    if space.f_blocks == 0:
        return memory()
    return space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize


def held(folder: Path) -> int:
    """Return the bytes that arenas of this user hold in a folder."""
    nbytes = 0
    for pattern in (f"{ARENA_PREFIX}{os.geteuid()}-*", f"{DURABLE_PREFIX}*"):
        for arenas in folder.glob(pattern):
            with contextlib.suppress(OSError):  # removed in the meantime
                nbytes += allocated_bytes(arenas) if arenas.lstat().st_uid == os.geteuid() else 0
    return nbytes


def allocation_error(folder: Path) -> OSError | None:
    """Return the error of allocating space ahead in this folder; None if it works. No file is left."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, _PROBE)
    except OSError as error:
        return error
    return None


def huge_pages() -> str:
    """Return the kernel's setting of huge pages in shared memory: "never", "advise", ..., or "unknown"."""
    try:
        chosen = re.search(r"\[(\w+)\]", _HUGE.read_text("ascii"))
    except OSError:
        return "unknown"
    return chosen[1] if chosen else "unknown"


def check_shared_memory() -> Iterator[Finding]:
    """Check the folder, its size against the memory that may be used, allocation, and huge pages."""
    chosen = choice()
    folder = chosen.folder
    if not folder.is_dir():
        yield Finding(
            "folder", PROBLEM, f"{folder} does not exist", "set TMPDIR, or backend.SimpleStorage.arena_folder"
        )
        return
    full = _full_of_samples()
    if full is not None:
        yield full
        return
    kind, options = mount_of(folder)
    size, free = file_system_space(folder)
    yield _folder(chosen, kind, size, free)
    limit = memory_limit()
    if chosen.warning is None and limit is not None and limit < size:
        yield Finding(
            "folder against memory", WARNING,
            f"samples may grow to {size_text(size)}, but this control group may only use {size_text(limit)}",
            "a system that grows beyond that is killed: set backend.SimpleStorage.arena_bytes to less",
            {"size": size, "limit": limit},
        )  # fmt: skip
    yield _allocation(folder)
    mounted = next((option[5:] for option in options if option.startswith("huge=")), "never")
    text = f"the mount says {mounted}, the kernel {huge_pages()}"
    yield Finding("huge pages", OK, f"{text} (not needed)", values={"mount": mounted, "kernel": huge_pages()})


def _full_of_samples() -> Finding | None:
    """Return a warning if shared memory has little space only because running systems use it; None if not.

    That is no problem of this machine: a container that is restarted for it loses the samples.
    """
    if not SHARED_MEMORY.is_dir():
        return None
    (size, free), samples = file_system_space(SHARED_MEMORY), held(SHARED_MEMORY)
    if free >= MIN_SHARED_MEMORY or free + samples < MIN_SHARED_MEMORY:
        return None
    text = f"{SHARED_MEMORY}, {size_text(size)}, {size_text(free)} free, {size_text(samples)} used by systems"
    values = {"folder": str(SHARED_MEMORY), "size": size, "free": free, "held": samples}
    return Finding("folder", WARNING, text, "tq status shows which samples could be cleared", values)


def _folder(chosen: FolderChoice, kind: str, size: int, free: int) -> Finding:
    text = f"{chosen.folder} ({kind}), {size_text(size)}, {size_text(free)} free"
    values = {"folder": str(chosen.folder), "type": kind, "size": size, "free": free, "fallback": bool(chosen.warning)}
    if free < MIN_SHARED_MEMORY:
        little = f"samples need at least {size_text(MIN_SHARED_MEMORY)}: free some, or set TMPDIR"
        advice = "; ".join(filter(None, (chosen.warning, little)))
        return Finding("folder", PROBLEM, text, advice, values)
    if chosen.warning is not None:
        return Finding("folder", WARNING, text, chosen.warning, values)
    return Finding("folder", OK, text, values=values)


def _allocation(folder: Path) -> Finding:
    error = allocation_error(folder)
    if error is None:
        return Finding("allocation ahead", OK, "posix_fallocate works there", values={"works": True})
    advice = "if it is not supported, zeros are written instead, which is slower; otherwise follow the error"
    return Finding("allocation ahead", WARNING, f"posix_fallocate fails there: {error}", advice, {"works": False})


# ---------------------------------------------------------------- limits
# Resource limits of this process, which the servers that it starts inherit.

MANY_CLIENTS = 4096  # connections that a large training opens: clients times their threads
CLIENT_FILES = 256  # for a client with 64 idle connections to each of two servers, and for the files of the program

INFINITE = resource.RLIM_INFINITY


def limit(number: int) -> tuple[int, int]:
    """Return the soft and the hard limit."""
    return resource.getrlimit(number)


def check_limits() -> Iterator[Finding]:
    """Check the limits on open files, address space and sizes of files; report locked memory for completeness."""
    yield _files(*limit(resource.RLIMIT_NOFILE))
    folder = choice().folder
    size = file_system_space(folder)[0] if folder.is_dir() else 0
    yield _address_space(limit(resource.RLIMIT_AS)[0], size)
    yield _file_size(limit(resource.RLIMIT_FSIZE)[0], size)
    locked = limit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if locked == INFINITE else size_text(locked)
    yield Finding(
        "locked memory", OK, f"{text} (not needed: the system locks no memory)", values={"limit": _known(locked)}
    )


def _known(value: int) -> int | None:
    return None if value == INFINITE else value


def _files(soft: int, hard: int) -> Finding:
    text = " and ".join("unlimited" if n == INFINITE else str(n) for n in (soft, hard)) + " (soft and hard)"
    values = {"soft": _known(soft), "hard": _known(hard)}
    if hard != INFINITE and hard < MANY_CLIENTS:
        advice = (
            f"the servers raise theirs to the hard limit and serve fewer than {hard} connections; raise it for many "
            f"clients (ulimit -Hn, docker run --ulimit nofile=65536)"
        )
        return Finding("open files", WARNING, text, advice, values)
    if soft != INFINITE and soft < CLIENT_FILES:
        advice = f"a client with many threads may run out of files: ulimit -n {CLIENT_FILES * 4}"
        return Finding("open files", WARNING, text, advice, values)
    return Finding("open files", OK, text, values=values)


def _address_space(soft: int, size: int) -> Finding:
    values = {"limit": _known(soft), "arena": size}
    if soft == INFINITE:
        return Finding("address space", OK, "unlimited", values=values)
    text = f"limited to {size_text(soft)}; every process maps a complete arena of up to {size_text(size)}"
    advice = "ulimit -v unlimited, or set backend.SimpleStorage.arena_bytes well below the limit"
    return Finding("address space", PROBLEM if soft <= size else WARNING, text, advice, values)


def _file_size(soft: int, size: int) -> Finding:
    values = {"limit": _known(soft)}
    if soft == INFINITE or soft >= size:
        return Finding("file size", OK, "unlimited" if soft == INFINITE else size_text(soft), values=values)
    text = f"limited to {size_text(soft)}, so that no arena grows beyond it"
    return Finding("file size", WARNING, text, "ulimit -f unlimited", values)


# ---------------------------------------------------------------- settings
# Checks whether the storage that a file of settings describes fits this machine or container.


def check_storage_settings(path: Path) -> Iterator[Finding]:
    """Check that the folder of the arenas exists, and that it and the memory hold one storage unit of full size."""
    settings = Settings.from_config(read_conf(path))
    chosen = choice()
    folder = chosen.folder if settings.arena_folder is None else Path(settings.arena_folder)
    if not folder.is_dir():
        advice = "create it, or set backend.SimpleStorage.arena_folder to a folder in memory"
        yield Finding("arena folder", PROBLEM, f"{folder} does not exist", advice, {"folder": str(folder)})
        return
    size, limit = file_system_space(folder)[0], memory_limit()
    values = {"folder": str(folder), "size": size, "arena_bytes": settings.arena_bytes, "limit": limit}
    if settings.arena_bytes is None:
        yield Finding(
            "arena size", WARNING, f"arena_bytes is not set, so a storage unit may fill {folder} ({size_text(size)})",
            "set backend.SimpleStorage.arena_bytes below the memory of this container", values,
        )  # fmt: skip
        return
    needs = f"a storage unit may grow to {size_text(settings.arena_bytes)} (arena_bytes)"
    if settings.arena_bytes > size:
        advice = "enlarge it (the sizeLimit of the emptyDir, docker run --shm-size), or lower arena_bytes"
        yield Finding("arena size", PROBLEM, f"{needs}, but {folder} has {size_text(size)}", advice, values)
    elif limit is not None and settings.arena_bytes >= limit:
        advice = "allow more memory, or lower arena_bytes: a container that exceeds its limit is killed"
        text = f"{needs}, but this control group may only use {size_text(limit)} for all its processes"
        yield Finding("arena size", PROBLEM, text, advice, values)
    else:
        yield Finding("arena size", OK, f"{needs}; {folder} has {size_text(size)}", values=values)
