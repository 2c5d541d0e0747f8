"""Determines how many cores a process may use for its copies: by its affinity, its cgroups and the ranks beside it."""

from __future__ import annotations

import math
import os
from functools import lru_cache
from pathlib import Path

from transfer_queue.config.environment import RANKS_OF_NODE

MOST = 16
"""The largest number of threads of a copy: more do not copy faster than the memory of a node allows."""


def usable_cores() -> int:
    """Return the number of cores that this process may use, at least 1."""
    has = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(has, cgroup_quota())))


def copy_threads() -> int:
    """Return how many threads a copy of this process may use.

    The ranks of a training on this node share the cores. Each has two threads, if there are two cores.
    """
    cores = usable_cores()
    ranks = max([1, *(variable() for variable in RANKS_OF_NODE)])
    return min(MOST, max(min(2, cores), cores // ranks))


@lru_cache
def cgroup_quota(root: Path = Path("/sys/fs/cgroup"), of_process: Path = Path("/proc/self/cgroup")) -> float:
    """Return the cores that the cgroups of this process allow it to use on average; infinity without a limit."""
    found = [math.inf]
    try:
        lines = of_process.read_text().splitlines()
    except OSError:  # not Linux
        return math.inf
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root  # version 1, or 2
        folder = top / name.lstrip("/")
        # in a container, the name may be that of the host, and the container's own cgroup is the root
        for each in [*(path for path in (folder, *folder.parents) if path.is_relative_to(top)), top]:
            found.append(_limit(each))
    return min(found)


def _limit(folder: Path) -> float:
    """Return the limit of one cgroup in cores; infinity if it has none."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError):  # no such cgroup, or no limit ("max")
        return math.inf
