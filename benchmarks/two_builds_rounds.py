"""The process of one build in `benchmarks.two_builds`: measures a round for each line that it reads."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import transfer_queue
from benchmarks.harness import payloads
from benchmarks.harness.machine import RawSocket, clocked, cpu_seconds
from benchmarks.harness.payloads import Payload
from benchmarks.harness.systems import System, Worker, raw_socket, system
from transfer_queue import interface as tq

BATCH = Payload("dense", 64, 3, 64)
KEYS = BATCH.keys
PUT, PUTS = 8192, 16
"""Rows of a put, and the number of such puts, of which claims take 32."""
BYTES = (300, 100)
"""Bytes of a request and a reply of the bare socket, as in a put of a row."""
MEASURES = {"empty round trip": 400, "put of a row": 200, "put of 64 rows x 3 fields": 60,
            "get of 64 rows x 3 fields": 100, "claim of 32": 100}  # fmt: skip
"""The operations, and how often a round makes each."""


def first_get(partition: str) -> float:
    """Return the seconds of a get of 64 rows in a new client. Runs in a worker."""
    client = tq.get_client()
    return clocked(client.kv_batch_get, KEYS, partition)


class Rounds:
    """Measures small operations of one client of one system."""

    def __init__(self, queue: System, bare: RawSocket, quick: bool) -> None:
        self._queue, self._bare, self._quick = queue, bare, quick
        self._batch = payloads.make(BATCH, 1)
        self._row = {"prompt": torch.arange(16), "score": torch.tensor(0.5), "mask": torch.ones(16)}
        self._tags = [{"n": number, "status": "ready"} for number in range(64)]
        self._number = count()
        self._act: dict[str, Callable[[], Any]] = {
            "empty round trip": tq.get_client().get_partition_list,
            "put of a row": self._put_row,
            "put of 64 rows x 3 fields": self._put_batch,
            "get of 64 rows x 3 fields": self._get_batch,
            "claim of 32": self._claim,
        }
        tq.kv_batch_put(KEYS, "kept", self._batch, self._tags)
        for number in range(1 if quick else PUTS):
            numbers = torch.arange(number * PUT, (number + 1) * PUT, dtype=torch.int32)
            tq.get_client().put(TensorDict(dict.fromkeys(("x", "y"), numbers), [PUT]), partition_id="claimed")
        self._claim()

    def _put_row(self) -> None:
        tq.kv_put(f"row-{next(self._number)}", "rows", self._row, {"n": 1, "status": "ready"})

    def _put_batch(self) -> None:
        number = next(self._number)
        tq.kv_batch_put([f"{key}-{number}" for key in KEYS], "batches", self._batch, self._tags)

    def _get_batch(self) -> None:
        tq.kv_batch_get(KEYS, "kept")

    def _claim(self) -> None:
        tq.get_client().get_meta(["x", "y"], 32, "claimed", task_name="train")

    def measure(self) -> dict[str, float]:
        """Return the medians of one round, in microseconds."""
        found = {"bare socket": statistics.median(self._bare.seconds(*BYTES) for _ in range(400)) * 1e6}
        controller = [self._queue.pids["controller"]]
        for what, usual in MEASURES.items():
            act, times = self._act[what], 3 if self._quick else usual
            act()
            gc.collect()
            served, cpu = cpu_seconds(controller), time.process_time()
            found[what] = statistics.median(clocked(act) for _ in range(times)) * 1e6
            cpu, served = time.process_time() - cpu, cpu_seconds(controller) - served
            found |= {
                f"client CPU, {what}": cpu / times * 1e6, f"controller CPU, {what}": served / times * 1e6
            }  # fmt: skip
        for partition in ("rows", "batches"):
            tq.get_client().clear_partition(partition)
        with Worker(self._queue.address) as reader:
            found["first get of a client"] = reader.do(first_get, "kept") * 1e6
        return found


def serve() -> None:
    """Write the name of the build, then the figures of a round for each line that is read."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with contextlib.ExitStack() as stack:
        queue, bare = stack.enter_context(system()), stack.enter_context(raw_socket())
        rounds = Rounds(queue, bare, "--quick" in sys.argv)
        print(json.dumps(str(Path(transfer_queue.__file__).parent.parent)), file=out, flush=True)
        for _ in sys.stdin:
            print(json.dumps(rounds.measure()), file=out, flush=True)


if __name__ == "__main__":
    serve()
