"""What a system takes of its machine, process by process and as time passes, and what of it has grown."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

MIB = 2**20
Sizes = dict[str, float]  # "controller memory", "unit-0 descriptors", "arena bytes": MiB or a number

BOUNDS = {"memory": 16.0, "shared": 64.0, "arena": 64.0, "descriptors": 8.0, "threads": 2.0, "files": 8.0}
"""How much more than before each may be, by the last word of its name."""


def own_memory(pid: int) -> float:
    """MiB of a process's own pages, and its share of files that it has mapped, without the shared memory of arenas."""
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        return sum(int(lines[name].split()[0]) for name in ("Pss_Anon", "Pss_File")) / 1024
    except (OSError, KeyError, ValueError):
        raise psutil.NoSuchProcess(pid) from None


def servers() -> dict[str, psutil.Process]:
    """Supervisor, controller and units among this process's children, by the logs that they write."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError, psutil.Error):
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
            if log.suffix == ".log":
                found[log.stem] = process
    return found


def measure(processes: Mapping[str, psutil.Process], folders: Iterable[Path]) -> Sizes:
    """Memory, descriptors and threads of each process; files in these folders, and what they take, together."""
    sizes: Sizes = {}
    for name, process in processes.items():
        with contextlib.suppress(psutil.Error):  # it has just ended
            found = {
                f"{name} memory": own_memory(process.pid),
                f"{name} descriptors": float(process.num_fds()),
                f"{name} threads": float(process.num_threads()),
            }
            sizes.update(found)
    count = nbytes = 0
    for folder in folders:
        for path in folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                found_ = path.lstat()
                count += 1
                nbytes += found_.st_blocks * 512
    sizes["files"] = float(count)
    sizes["shared"] = nbytes / MIB
    return sizes


def table(samples: list[Sizes]) -> list[str]:
    """A line for each name: what it was in the second quarter, and at most in the last."""
    lines = []
    for name, (before, after) in sorted(_compared(samples).items()):
        lines.append(f"{name}: {before:.1f} -> {after:.1f}")
    return lines


def grown(samples: list[Sizes], bounds: Mapping[str, float] = BOUNDS) -> list[str]:
    """Names of which the least of the last quarter is more than what was the most in the second, and a bound."""
    out = []
    for name, (before, after) in _compared(samples).items():
        if after - before > bounds[name.split()[-1]]:
            out.append(f"{name} ({before:.1f} -> {after:.1f})")
    return out


def _compared(samples: list[Sizes]) -> dict[str, tuple[float, float]]:
    """The most in the second quarter of the samples, the least in the last: faults and bursts are no growth."""
    quarter = max(1, len(samples) // 4)
    found = {}
    for name in sorted({name for sizes in samples for name in sizes}):
        early = [sizes[name] for sizes in samples[quarter : 2 * quarter] if name in sizes]
        late = [sizes[name] for sizes in samples[-quarter:] if name in sizes]
        if early and late:
            found[name] = (max(early), min(late))
    return found
