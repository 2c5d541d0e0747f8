"""Processors and memory: what the machine has, and what the container or control group lets this process use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from transfer_queue.cli.doctor.report import OK, WARNING, Finding
from transfer_queue.display import size_text

FEW_CPUS = 2.0  # below this servers and tasks take turns
LITTLE_MEMORY = 2 << 30
GROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # larger values mean "no limit" in version 1 of control groups


def group_values(name: str, controller: str = "", name_1: str = "") -> list[str]:
    """Return the contents of a file of this process's control group and of those above it, innermost first.

    Files that cannot be read are left out.

    Args:
        name: The file in version 2 of control groups.
        controller: The controller in version 1.
        name_1: The file in version 1.
    """
    found = []
    for folder, file in _groups(name, controller, name_1):
        try:
            found.append((folder / file).read_text("ascii").strip())
        except (OSError, UnicodeDecodeError):
            continue
    return found


def _groups(name: str, controller: str, name_1: str) -> Iterator[tuple[Path, str]]:
    try:
        lines = Path("/proc/self/cgroup").read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, file = GROUPS, name
        elif controller and controller in controllers.split(","):
            top, file = GROUPS / controller, name_1
        else:
            continue
        inside = Path(path.lstrip("/"))
        for folder in (
            inside,
            *inside.parents,
        ):  # in a container the path may be the host's: then only the top exists
            yield top / folder, file


def cpus_allowed() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_quota() -> float | None:
    """Return the processor time that the control groups allow, in processors; None if there is no limit."""
    quotas = []
    for text in group_values("cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdecimal() and period.isdecimal():
            quotas.append(int(quota) / int(period))
    quota_1, period_1 = group_values("", "cpu", "cpu.cfs_quota_us"), group_values("", "cpu", "cpu.cfs_period_us")
    for quota, period in zip(quota_1, period_1, strict=False):
        if quota.isdecimal() and int(quota) > 0 and period.isdecimal():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory() -> tuple[int, int]:
    """Return the bytes of memory of the machine, and those that are available now."""
    found = {}
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        name, _, rest = line.partition(":")
        found[name] = int(rest.split()[0]) * 1024
    return found["MemTotal"], found.get("MemAvailable", found["MemFree"])


def memory_limit() -> int | None:
    """Return the bytes that the control groups allow, including shared memory; None if there is no limit."""
    texts = group_values("memory.max", "memory", "memory.limit_in_bytes")
    limits = [int(text) for text in texts if text.isdecimal() and int(text) < UNLIMITED]
    return min(limits, default=None)


def check() -> Iterator[Finding]:
    """Check the processors, then the memory."""
    yield _processors(cpus_allowed(), cpu_quota())
    yield _memory(*memory(), memory_limit())


def _processors(allowed: int, quota: float | None) -> Finding:
    usable = allowed if quota is None else min(allowed, quota)
    words = f"{allowed} allowed" + ("" if quota is None else f", a quota of {quota:g} processors' time")
    values = {"allowed": allowed, "quota": quota, "usable": usable}
    if usable < FEW_CPUS:
        advice = "controller, storage and every task take turns; allow 2 or more (docker run --cpus, taskset)"
        return Finding("processors", WARNING, words, advice, values)
    return Finding("processors", OK, words, values=values)


def _memory(total: int, available: int, limit: int | None) -> Finding:
    words = f"{size_text(total)}, {size_text(available)} available"
    words += "" if limit is None else f", limited to {size_text(limit)} here"
    values = {"total": total, "available": available, "limit": limit}
    if min(available, limit or available) < LITTLE_MEMORY:
        advice = "samples and tasks share this memory; end other programs, or allow more (docker run --memory)"
        return Finding("memory", WARNING, words, advice, values)
    return Finding("memory", OK, words, values=values)
