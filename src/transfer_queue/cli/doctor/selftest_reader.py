"""The second process of the self-test, which gets what the first process has put, and the payloads that both make.

Both processes make a payload from the same seed, so the reader can compare every byte. The reader is started with the
folder of the system. It reads jobs from stdin, one JSON line each ({"kind", "partition", "nbytes", "seed"}), and
answers each on stdout ({"seconds", "wrong": fields}). It ends when its stdin is closed, and so with the first process.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
from tensordict import TensorDict

ROW = 1 << 20  # bytes of a dense row
SMALL_ROWS = 4096
SMALL = 16  # numbers of a small row
TEXT = 24  # letters of its text


def dense(nbytes: int, seed: int) -> TensorDict:
    """Rows of 1 MiB, int64 [rows, 131072]."""
    rows = max(1, nbytes // ROW)
    numbers = np.random.default_rng(seed).integers(-(2**62), 2**62, (rows, ROW // 8), "i8")
    return TensorDict({"values": torch.from_numpy(numbers)}, batch_size=[rows])


def small(seed: int) -> TensorDict:
    """4096 rows of a tensor (int64 [16]) and a text of 24 letters each."""
    random = np.random.default_rng(seed)
    numbers = random.integers(-(2**62), 2**62, (SMALL_ROWS, SMALL), "i8")
    letters = random.integers(97, 123, (SMALL_ROWS, TEXT), "u1").tobytes().decode()
    texts = [letters[i * TEXT : (i + 1) * TEXT] for i in range(SMALL_ROWS)]
    return TensorDict({"numbers": torch.from_numpy(numbers), "text": texts}, batch_size=[SMALL_ROWS])


def make(kind: str, nbytes: int, seed: int) -> TensorDict:
    """The payload "dense" or "small"."""
    return dense(nbytes, seed) if kind == "dense" else small(seed)


def keys_of(payload: TensorDict) -> list[str]:
    """The keys of its rows."""
    return [f"k{i}" for i in range(payload.batch_size[0])]


def differences(got: TensorDict, wanted: TensorDict) -> list[str]:
    """The fields that are not the same to the byte."""
    return [name for name in map(str, wanted.keys()) if not _same(got, wanted, name)]


def _same(got: TensorDict, wanted: TensorDict, name: str) -> bool:
    if name not in got.keys():  # noqa: SIM118
        return False
    if name == "text":
        return bool(got.get(name).tolist() == wanted.get(name).tolist())
    one, other = got[name], wanted[name]
    return one.dtype == other.dtype and torch.equal(one, other)


def main() -> None:
    """Works until there are no more jobs."""
    from transfer_queue.client import TransferQueueClient
    from transfer_queue.node.launcher import find

    system = find(sys.argv[1])
    if system is None:
        sys.exit(f"no system runs in {sys.argv[1]}")
    with TransferQueueClient(system) as client:
        for line in sys.stdin:
            job = json.loads(line)
            wanted = make(job["kind"], job["nbytes"], job["seed"])
            keys = keys_of(wanted)
            start = time.perf_counter()
            got = client.kv_batch_get(keys, job["partition"], layout="dense")
            seconds = time.perf_counter() - start
            print(json.dumps({"seconds": seconds, "wrong": differences(got, wanted)}), flush=True)
            del got


if __name__ == "__main__":
    main()
