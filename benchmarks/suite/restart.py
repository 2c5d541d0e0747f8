"""How long do clients wait if the controller of a large system is killed, and what do its snapshots cost?

Every row has a key and three tags; a tenth of the rows is consumed. The journal is a snapshot and the records of small
puts after it. Each step of writing and reading the state is compared with a memcpy of the bytes of its file.
"""

from __future__ import annotations

import gc
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.core_driver import Core, claim
from benchmarks.harness.machine import Memcpy, clocked, memory_of
from benchmarks.harness.report import Row, Scale, against
from benchmarks.harness.systems import Worker, own_folder, start_system
from transfer_queue.client import TransferQueueClient
from transfer_queue.core.state import serialization
from transfer_queue.journal import state_file
from transfer_queue.journal.journal import Journal, recover, segment_path, snapshot_of, snapshot_path
from transfer_queue.journal.segment import ClockIdentity
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.puts import Publish
from transfer_queue.messages.queries import ListKeys, Lookup, RetrieveMeta
from transfer_queue.node.system.launcher import RunningSystem

QUESTION = "How long do clients wait if the controller of a large system is killed, and what do its snapshots cost?"
BLOCK = 1000


def filled(rows: int, fields: int) -> Core:
    """Return a core with `rows` rows, put in blocks; a tenth of them is consumed."""
    core = Core(fields=fields)
    for first in range(0, rows, BLOCK):
        numbers = range(first, first + BLOCK)
        tags = [{"prompt": row, "score": row / 3, "state": "fresh"} for row in numbers]
        core.publish(BLOCK, keys=[f"sample-{row:08d}" for row in numbers], tags=tags)
    for _ in range(rows // BLOCK // 10):
        core.send(claim(fields=core.fields, batch=BLOCK))
    return core


def timed(act: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Return the result, and the milliseconds."""
    began = time.perf_counter()
    result = act(*arguments)
    return result, (time.perf_counter() - began) * 1e3


def written(folder: str, rows: int, fields: int, puts: int) -> dict[str, float]:
    """Make the journal of a system with `rows` rows and `puts` puts after its snapshot. Runs in a new worker."""
    path = Path(folder)
    path.mkdir()
    before = memory_of()["anonymous"]
    core = filled(rows, fields)
    controller = core.controller
    gc.collect()
    found = {"state_bytes": float(memory_of()["anonymous"] - before)}
    clock = ClockIdentity.now()
    journal = Journal(path, recover(path, clock), clock, durable=False)
    start = time.perf_counter()
    child = os.fork()
    if not child:
        os._exit(0)
    found["fork_ms"] = (time.perf_counter() - start) * 1e3
    os.waitpid(child, 0)
    tree, found["save_ms"] = timed(serialization.save_state, controller.state)
    del tree
    snapshot, _ = timed(snapshot_of, controller.state, clock)
    _, found["write_ms"] = timed(state_file.write, snapshot_path(path, 1), snapshot)
    for number in range(puts):
        put = Publish("p", 1, keys=[f"small-{number}"], tags=[{"n": number, "s": "fresh", "p": 0.5}], pre_allocate=0)
        controller.handle("writer", 1, RequestEnvelope(number + 1, number, put), 0.0)
        journal.append(controller.take_records())
        journal.commit()
    journal.close()
    found["segment_bytes"] = float(segment_path(path, 1).stat().st_size)
    found["snapshot_bytes"] = float(snapshot_path(path, 1).stat().st_size)
    state_file.write(path.parent / "state", serialization.save_state(controller.state))
    return found


def restored(path: str) -> dict[str, float]:
    """Measure each step from the file to the first replies, in the order of a start. Runs in a new worker."""
    took: dict[str, float] = {}
    tree, took["read the file"] = timed(state_file.read, Path(path))
    state, took["make the state of it"] = timed(serialization.load_state, tree)
    core = Core(units=0, restored=state)
    fields = list(state.partitions["p"].fields)
    _, took["first claim"] = timed(core.reply, claim(fields=tuple(fields)))
    reply, took["first lookup of a key"] = timed(core.reply, RetrieveMeta("p", ["sample-00000007"]))
    if len(reply.rows) != 8 or not reply.tags:
        raise AssertionError("a key is not in the restored state")
    lookup = Lookup("p", reply.rows, fields=fields)
    _, took["first lookup of its values"] = timed(core.reply, lookup)
    listed, took["first page of a list of keys and tags"] = timed(core.reply, ListKeys())
    if listed.value["p"]["sample-00000007"]["prompt"] != 7:
        raise AssertionError("a tag is another one in the restored state")
    return took


def run(scale: Scale) -> list[Row]:
    """Measure writing and reading a snapshot, and a kill of the controller."""
    rows, fields, puts, kills = scale.pick((1_000_000, 20, 16_000, 3), (2000, 3, 50, 1))
    with own_folder() as base, tempfile.TemporaryDirectory(prefix="tqb-") as kept:
        folder = f"{kept}/journal"
        with Worker() as worker:
            found = worker.do(written, folder, rows, fields, puts)
        with Worker() as worker:
            steps = worker.do(restored, f"{kept}/state")
        copy = Memcpy(int(found["snapshot_bytes"]))
        memcpy = statistics.median(copy.seconds() for _ in range(5)) * 1e3
        system = start_system("restart", {"controller": {"journal": {"folder": folder}}})
        try:
            waits = [_killed(system) * 1e3 for _ in range(kills)]
        finally:
            system.stop()
        del base
    name = f"{rows:,} rows x {fields} fields with key and 3 tags"
    more = {
        "max": max(waits),
        "snapshot_mib": found["snapshot_bytes"] / 2**20,
        "records_mib": found["segment_bytes"] / 2**20,
    }
    what = f"from the kill of the controller to the first answer, {name}, {puts:,} puts since the snapshot"
    told = [against(what, "ms", statistics.median(waits), memcpy, "memcpy of the snapshot", more=more)]
    for words in ("fork", "save", "write"):
        what = f"snapshot of {name}: {words}"
        told.append(against(what, "ms", found[f"{words}_ms"], memcpy, "memcpy of the snapshot"))
    for words, ms in steps.items():
        told.append(Row(f"restored state of {name}: {words}", ms, "ms"))
    told.append(Row(f"state of {name}", found["state_bytes"] / rows, "bytes a row"))
    return told


def _killed(system: RunningSystem) -> float:
    """Kills the controller; seconds until a client that was there has its first answer."""
    with TransferQueueClient(system) as client:
        if "p" not in client.get_partition_list():
            raise AssertionError("the partition is not there")
        log = (system.logs / "controller.log").read_text()
        os.kill(int(re.findall(r"up, process (\d+)", log)[-1]), 9)
        found = []
        seconds = clocked(lambda: found.append(client.kv_retrieve_meta(["sample-00000007"], "p").global_indexes))
    if found != [[7]]:
        raise AssertionError(f"the sample has other indexes after the restart: {found}")
    return seconds
