"""The second process of the self-test, which gets and claims what the first process puts, and their payloads.

Both processes make a payload from the same seed, so the reader can compare every byte. The reader is started with the
folder of the system. It reads jobs from stdin, one JSON line each, and answers each with a JSON line on stdout:

    {"job": "get", "kind", "partition", "nbytes", "seed"}   {"seconds", "wrong": names of fields that differ}
    {"job": "wait", "partition", "seconds"}                 {"woken": time.monotonic(), "global_indexes"}

It ends when its stdin is closed, and so with the first process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from transfer_queue.client import TransferQueueClient
from transfer_queue.node.system.launcher import find

ROW = 1 << 20  # bytes of a dense row
SMALL_ROWS = 4096
SMALL = 16  # numbers of a small row
TEXT = 24  # letters of its text


def dense(nbytes: int, seed: int) -> TensorDict:
    """Return rows of 1 MiB, int64 [rows, 131072]."""
    rows = max(1, nbytes // ROW)
    numbers = np.random.default_rng(seed).integers(-(2**62), 2**62, (rows, ROW // 8), "i8")
    return TensorDict({"values": torch.from_numpy(numbers)}, batch_size=[rows])


def small(seed: int) -> TensorDict:
    """Return 4096 rows, each with a tensor (int64 [16]) and a text of 24 letters."""
    random = np.random.default_rng(seed)
    numbers = random.integers(-(2**62), 2**62, (SMALL_ROWS, SMALL), "i8")
    letters = random.integers(97, 123, (SMALL_ROWS, TEXT), "u1").tobytes().decode()
    texts = [letters[i * TEXT : (i + 1) * TEXT] for i in range(SMALL_ROWS)]
    return TensorDict({"numbers": torch.from_numpy(numbers), "text": texts}, batch_size=[SMALL_ROWS])


def make(kind: str, nbytes: int, seed: int) -> TensorDict:
    """Return the payload "dense" or "small"."""
    return dense(nbytes, seed) if kind == "dense" else small(seed)


def keys_of(payload: TensorDict) -> list[str]:
    """Return the keys of the rows."""
    return [f"k{i}" for i in range(payload.batch_size[0])]


def differences(got: TensorDict, wanted: TensorDict) -> list[str]:
    """Return the names of the fields whose bytes differ."""
    return [name for name in map(str, wanted.keys()) if not _same(got, wanted, name)]


def _same(got: TensorDict, wanted: TensorDict, name: str) -> bool:
    if name not in got.keys():  # noqa: SIM118
        return False
    if name == "text":
        return bool(got.get(name).tolist() == wanted.get(name).tolist())
    one, other = got[name], wanted[name]
    return one.dtype == other.dtype and torch.equal(one, other)


def _get(client: TransferQueueClient, job: dict[str, Any]) -> dict[str, Any]:
    """Get a payload and compare it."""
    wanted = make(job["kind"], job["nbytes"], job["seed"])
    keys = keys_of(wanted)
    start = time.perf_counter()
    got = client.kv_batch_get(keys, job["partition"], layout="dense")
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "wrong": differences(got, wanted)}


def _wait(client: TransferQueueClient, job: dict[str, Any]) -> dict[str, Any]:
    """Claim one row, which the first process puts while this one waits."""
    meta = client.get_meta(["number"], 1, job["partition"], task_name="wake-ups", timeout=job["seconds"])
    return {"woken": time.monotonic(), "global_indexes": meta.global_indexes}


JOBS: dict[str, Callable[[TransferQueueClient, dict[str, Any]], dict[str, Any]]] = {"get": _get, "wait": _wait}


def main() -> None:
    """Execute jobs until stdin is closed."""
    system = find(sys.argv[1])
    if system is None:
        sys.exit(f"no system is running in {sys.argv[1]}")
    with TransferQueueClient(system) as client:
        for line in sys.stdin:
            job = json.loads(line)
            print(json.dumps(JOBS[job["job"]](client, job)), flush=True)


if __name__ == "__main__":
    main()
