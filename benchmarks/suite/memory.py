"""How much memory do a payload byte, a row and an idle system take, and how fast does a system start?

Peaks are of resident memory while one process puts 288 MiB (and a mixed batch) and another one gets them, minus the
memory that each had before. The state of a row is the slope of anonymous memory between two sizes, in a separate
process.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness import payloads
from benchmarks.harness.core_driver import Core
from benchmarks.harness.machine import clocked, memory_of, reset_peak
from benchmarks.harness.payloads import Payload
from benchmarks.harness.report import Row, Scale, compared
from benchmarks.harness.systems import System, Worker, own_folder, system
from transfer_queue import interface as tq
from transfer_queue.config.environment import process_environment

QUESTION = "How much memory do a payload byte, a row and an idle system take, and how fast does a system start?"
PAYLOADS = [Payload("dense", 1024, 9, 8192), Payload("mixed", 512, 6, 1900)]
QUICK_PAYLOADS = [Payload("mixed", 64, 6, 100)]


def run(scale: Scale) -> list[Row]:
    """Run all measurements."""
    rows = []
    with system() as queue:
        rows += _idle(queue)
        for payload in scale.pick(PAYLOADS, QUICK_PAYLOADS):
            rows += _peaks(queue, payload)
    rows += _state(scale)
    rows.append(_startup(scale))
    resident, started = scale.ask_peers("memory"), scale.ask_peers("startup")
    rows[0] = replace(rows[0], peers={name: figures["resident_mb"] for name, figures in resident.items()})
    rows[-1] = replace(rows[-1], peers={name: figures["s"] for name, figures in started.items()})
    return rows


def _idle(queue: System) -> list[Row]:
    """Measure servers that have served one put and one get."""

    tq.kv_put("a", "p", {"x": torch.arange(4)})
    if tq.kv_batch_get("a", "p")["x"].values().tolist() != [0, 1, 2, 3]:
        raise AssertionError("the values of the get differ from those of the put")
    pids = {**queue.pids, "supervisor": queue.running.description.pid}
    found = {name: memory_of(pid) for name, pid in pids.items()}
    private = {name: each["resident"] - each["shared"] for name, each in found.items()}
    both = (private["controller"] + private["unit-0"]) / 1e6
    pss = sum(each["pss"] for each in found.values()) / 1e6
    words = "idle controller + unit, resident without the arena"
    rows = [Row(words, both, "MB", target=70, then=750, more={"pss_of_all_servers_mb": pss})]
    return rows + [Row(f"idle {name}, resident", each / 1e6, "MB") for name, each in private.items()]


def put(payload: Payload) -> dict[str, float]:
    """Put; return the peak bytes of this process beyond its memory with the values, and shared bytes. In a worker."""
    tq.kv_put("first", "warm", {"x": 1})
    batch = payloads.make(payload, 1)
    return _over(lambda: tq.kv_batch_put(payload.keys, "peak", batch))


def get(payload: Payload) -> dict[str, float]:
    """Get; return the same as `put`."""
    tq.kv_batch_get("first", "warm")
    got = []
    found = _over(lambda: got.append(tq.kv_batch_get(payload.keys, "peak")))
    wrong = payloads.differences(got[0], payload, 1)
    if wrong:
        raise AssertionError(f"the bytes of the get differ from those of the put in {wrong}")
    return found


def _over(act: Callable[[], object]) -> dict[str, float]:
    gc.collect()
    before = memory_of()
    reset_peak()
    act()
    after = memory_of()
    return {"peak": after["peak"] - before["resident"], "shared": after["shared"] - before["shared"]}


def _peaks(queue: System, payload: Payload) -> list[Row]:
    """Measure the memory of each process for each byte of payload. shared: Mapped pages of the arena in it."""
    nbytes = payloads.nbytes(payloads.make(payload, 1))
    before = {name: memory_of(pid) for name, pid in queue.pids.items()}
    for pid in queue.pids.values():
        reset_peak(pid)
    with Worker(queue.address) as producer, Worker(queue.address) as consumer:
        found = {"producer": producer.do(put, payload), "consumer": consumer.do(get, payload)}
    for name, pid in queue.pids.items():
        now = memory_of(pid)
        of = {"peak": now["peak"] - before[name]["resident"], "shared": now["shared"] - before[name]["shared"]}
        found[name] = of
    tq.get_client().clear_partition("peak")
    rows = []
    for name, each in found.items():
        own = max(0.0, each["peak"] - each["shared"]) / nbytes
        what = f"{name}, {payload.name}: own bytes a payload byte, peak"
        rows.append(Row(what, own, "bytes", more={"shared_bytes": each["shared"] / nbytes}))
    return rows


def grown(keyed: bool, put: int, small: int, large: int) -> float:
    """Return the bytes of anonymous memory for each row, between two sizes. Runs in a new worker."""
    core, size = Core(), 0
    sizes = []
    for goal in (small, large):
        while size < goal:
            more: dict[str, Any] = {}
            if keyed:
                numbers = range(size, size + put)
                more = {"keys": [f"sample-{n:08d}" for n in numbers], "tags": [{"n": n, "s": "fresh"} for n in numbers]}
            core.publish(put, **more)
            size += put
        gc.collect()
        sizes.append(memory_of()["anonymous"])
    return (sizes[1] - sizes[0]) / (large - small)


def _state(scale: Scale) -> list[Row]:
    rows = []
    cases = (("a row in blocks of 1000, 3 fields", False, 1000, None), ("... with key and 2 tags", True, 1000, None),
             ("a single-row block, 3 fields", False, 1, 200.0), ("... with key and 2 tags", True, 1, None))  # fmt: skip
    words = ""
    for what, keyed, put, target in cases:
        small, large = scale.pick((100_000, 1_000_000) if put > 1 else (30_000, 120_000), (1_000, 3_000))
        with Worker() as worker:
            nbytes = worker.do(grown, keyed, put, small, large)
        words = what if not keyed else words
        name = f"controller state of {words}{' with key and 2 tags' if keyed else ''}"
        rows.append(Row(name, nbytes, "bytes", target=target))
    return rows


def first_put(folder: str) -> tuple[float, float]:
    """Return the seconds of `init()`, and those until the first put has returned. Runs in a new worker."""
    process_environment()["TQ_RUNTIME_DIR"] = folder
    begin = time.perf_counter()
    tq.init()
    up = time.perf_counter()
    tq.kv_put("a", "p", {"x": torch.arange(4)})
    found = up - begin, time.perf_counter() - begin
    tq.close()
    return found


def _startup(scale: Scale) -> Row:
    """Measure from `init()` to the first put, without imports of this process; reference: the servers' imports."""
    ours, imports, ups = [], [], []
    environment = {**process_environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    bare = [sys.executable, "-c", "import transfer_queue.node.supervisor"]
    for _ in range(scale.pick(5, 1)):
        with own_folder() as folder, Worker() as worker:
            up, first = worker.do(first_put, folder)
        ups.append(up)
        ours.append(first)
        imports.append(clocked(lambda: subprocess.run(bare, env=environment, check=True)))
    return compared(
        "from init() to the first put", "s", ours, imports, "a Python that imports what servers do",
        target=0.4, then=6, more={"init_s": statistics.median(ups), "best_s": min(ours)},
    )  # fmt: skip
