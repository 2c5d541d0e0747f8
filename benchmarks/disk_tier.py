"""Measure the disk tier of SimpleStorage: `python benchmarks/disk_tier.py --path FOLDER` (20 s, writes 1 GiB there).

The script puts four times as much as fits into memory, with and without the tier, reads it from both tiers, and prints
how much of the file on disk the kernel keeps in memory meanwhile (by `fincore` of util-linux).
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import transfer_queue as tq

MIB = 1 << 20
MEMORY, VALUE = 256, 4  # MiB
COUNT = 4 * MEMORY // VALUE
SETTLED = 8.0  # seconds until all writes to the disk have ended


def begin(path: str, offload: bool) -> None:
    """Start a separate system, with or without the tier."""
    bytes_ = MEMORY * MIB if offload else 2 * COUNT * VALUE * MIB
    storage = {"arena_bytes": bytes_, "offload": {"enabled": offload, "path": path}}
    tq.init({"system": {"name": "disk-tier"}, "runtime": "local", "backend": {"SimpleStorage": storage}})


def put(value: torch.Tensor) -> float:
    """MiB/s."""
    began = time.perf_counter()
    for number in range(COUNT):
        tq.kv_put(f"{number}", "p", {"x": value + number})
    return COUNT * VALUE / (time.perf_counter() - began)


def get(numbers: Sequence[int]) -> float:
    """MiB/s."""
    began = time.perf_counter()
    for number in numbers:
        got: Any = tq.kv_batch_get([f"{number}"], "p")["x"]
        if int(got[0][0]) != number:
            raise AssertionError(f"value {number} is another")
    return len(numbers) * VALUE / (time.perf_counter() - began)


def get_rows(keys: Sequence[str]) -> float:
    """Return the median time of a get of one row, in microseconds."""
    taken = []
    for key in keys:
        began = time.perf_counter()
        tq.kv_batch_get([key], "rows")
        taken.append(time.perf_counter() - began)
    return median(taken) * 1e6


def held(path: str) -> int:
    """Return how much of the file on disk the kernel keeps in memory, in MiB."""
    files = [str(file) for file in Path(path).glob("*/unit-*/arena")]
    told = subprocess.run(["fincore", "-bno", "RES", *files], check=True, capture_output=True, text=True).stdout
    return sum(map(int, told.split())) // MIB


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", help="a folder on the disk to measure (default: the folder of temporary files)")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    value = torch.arange(VALUE * MIB // 4, dtype=torch.int32)
    for _ in range(given.turns):
        with tempfile.TemporaryDirectory(prefix="tq-", dir=given.path) as path:
            begin(path, offload=False)
            print(f"memory alone: put {put(value):.0f} MiB/s, get {get(range(64)):.0f} MiB/s")
            tq.close()
            begin(path, offload=True)
            for number in range(64):
                rows = torch.arange(1024, dtype=torch.int32).expand(256, 1024) + number
                tq.kv_batch_put([f"{number}.{row}" for row in range(256)], "rows", {"y": rows})
            print(f"with a disk: put {put(value):.0f} MiB/s; of its file in memory: {held(path)} MiB", end="")
            time.sleep(SETTLED)
            print(f", {SETTLED:g} s later {held(path)} MiB")
            first, again, hot = get(range(64)), get(range(64)), get(range(COUNT - 20, COUNT))
            print(f"get from disk {first:.0f} MiB/s, again {again:.0f} MiB/s, from memory {hot:.0f} MiB/s")
            keys = [f"{number}.{random.randrange(256)}" for number in range(64) for _ in range(3)]
            random.shuffle(keys)
            print(f"get one row of 4 KiB from disk: {get_rows(keys):.0f} us, again {get_rows(keys):.0f} us")
            tq.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
