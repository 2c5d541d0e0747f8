"""What the benchmarks share."""

from __future__ import annotations

import os
import time

import numpy as np


def own_runtime_dir(folder: str) -> None:
    """Systems of this run live in a folder of their own, beside any that run already."""
    os.environ["TQ_RUNTIME_DIR"] = folder
    for name in ("TQ_ADDRESS", "TQ_SYSTEM"):
        os.environ.pop(name, None)


def memcpy_rate(nbytes: int = 256 * 2**20, rounds: int = 5) -> float:
    """Bytes a second of one thread copying between warm arrays; the median."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return nbytes / sorted(times[1:])[rounds // 2]
