"""On what a folder lies."""

from __future__ import annotations

import os
import re
from pathlib import Path


def mount_of(folder: Path) -> tuple[str, list[str]]:
    """Type and options of the file system that a folder lies on."""
    best, found = "", ("unknown", [""])
    real = os.path.realpath(folder)
    mounts = Path("/proc/self/mounts")
    for line in mounts.read_text("utf-8", "replace").splitlines() if mounts.exists() else ():
        _, at, kind, options = line.split(" ")[:4]
        at = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), at)
        if (real == at or real.startswith(at.rstrip("/") + "/")) and len(at) >= len(best):
            best, found = at, (kind, options.split(","))
    return found
