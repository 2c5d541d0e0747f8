"""What it costs to save the controller's state and to go on from it: one file, written by a forked child or at once.

    python benchmarks/saved_state.py [--rows 1000000] [--fields 20] [--block 1000] [--folder /tmp] [--sync]

Every row has a key and three tags. Prints a table and one line of JSON. Memory is what no file can give back.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from transfer_queue.core import saving
from transfer_queue.core.controller import Controller
from transfer_queue.core.effects import Send
from transfer_queue.core.state import State
from transfer_queue.journal import state_file
from transfer_queue.messages import (
    AnyRequest,
    Claim,
    Envelope,
    FieldSpec,
    ListKeys,
    Lookup,
    NewBlock,
    Publish,
    RegisterUnit,
    RetrieveMeta,
)
from transfer_queue.sampler import SequentialSampler

LATER = 10**9  # sequences after those that filled the controller


def ask(controller: Controller, sequence: int, request: AnyRequest) -> Any:
    """The reply to a request."""
    (effect,) = controller.handle("client", 1, Envelope(sequence, sequence - 1, request), 0.0)
    controller.take_records()
    assert isinstance(effect, Send)
    return effect.reply


def filled(rows: int, fields: int, block: int) -> Controller:
    """A controller with so many rows, put in blocks of this size; a tenth of them is consumed."""
    controller = Controller(SequentialSampler())
    schema = [FieldSpec(f"field_{number}", "tensor", "float32", 1, False) for number in range(fields)]
    dims = np.full(fields, 128, "<i8").tobytes()
    ask(controller, 1, RegisterUnit("unit.sock", "/arena"))
    for number in range(rows // block):
        first = number * block
        lies = NewBlock(0, 1 + number // 16, 512 * first, 1, 512 * block, block, schema, dims)
        tags = [{"prompt": row, "score": row / 3, "state": "fresh"} for row in range(first, first + block)]
        keys = [f"sample-{row:08d}" for row in range(first, first + block)]
        ask(controller, 2 + number, Publish("p", block, None, block=lies, keys=keys, tags=tags, pre_allocate=0))
    fields_asked = [spec.name for spec in schema]
    for number in range(rows // block // 10):
        ask(controller, 10**6 + number, Claim("p", "train", fields_asked, block))
    return controller


def timed(act: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What it gives, and milliseconds."""
    began = time.perf_counter()
    result = act(*arguments)
    return result, (time.perf_counter() - began) * 1e3


def memory(of: str = "Anonymous") -> float:
    """MiB of this process. Anonymous: that no file can give back; Private_Dirty: that it shares with nobody."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{of}:")) / 1024


def in_child(act: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The figures of a forked child, and what the fork took this process."""
    reader, writer = os.pipe()
    began = time.perf_counter()
    child = os.fork()
    fork = (time.perf_counter() - began) * 1e3
    if child == 0:
        os.write(writer, json.dumps(act()).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        found: dict[str, float] = json.loads(pipe.read())
    os.waitpid(child, 0)
    return {"fork": fork, **found}


def filled_and_written(path: Path, options: argparse.Namespace) -> dict[str, float]:
    """What the state is, and what another forked child needs to write it."""
    before = memory()
    state = filled(options.rows, options.fields, options.block).state
    gc.collect()
    figures = {"memory of the state (MiB)": memory() - before}
    return figures | in_child(lambda: written(path, state, options.sync))


def written(path: Path, state: State, sync: bool) -> dict[str, float]:
    """What it takes to write the state. The tree is in memory until the end."""
    tree, save = timed(saving.saved, state)
    _, write = timed(state_file.write, path, tree, sync)
    return {"saved": save, "write": write, "memory of the writing child (MiB)": memory("Private_Dirty")}


def restored(path: Path) -> dict[str, float]:
    """Each step from the file to the first answers, in the order of a start."""
    before = memory()
    took: dict[str, float] = {}
    tree, took["read"] = timed(state_file.read, path)
    state, took["restored"] = timed(saving.restored, tree)
    grown = memory() - before
    controller = Controller(SequentialSampler())
    controller.state = state
    fields = list(state.partitions["p"].fields)
    claim = Claim("p", "train", fields, 32)
    _, took["first claim"] = timed(ask, controller, LATER, claim)
    key = next(reversed(state.partitions["p"].keys))
    reply, took["first lookup of a key"] = timed(ask, controller, LATER + 1, RetrieveMeta("p", [key]))
    assert reply.tags
    lookup = Lookup("p", reply.rows, fields=fields)
    _, took["first lookup of its values"] = timed(ask, controller, LATER + 2, lookup)
    took["from the file to these answers"] = sum(took.values())
    listed, took["first page of a list of keys and tags"] = timed(ask, controller, LATER + 3, ListKeys())
    assert listed.value["p"]
    return {**took, "memory of the restored state (MiB)": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--fields", type=int, default=20)
    parser.add_argument("--block", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--sync", action="store_true", help="wait until the file is on the disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "state"
        figures = in_child(lambda: filled_and_written(path, options))
        figures["file (MiB)"] = path.stat().st_size / 2**20
        figures |= restored(path)
    title = f"{options.rows} rows x {options.fields} fields in blocks of {options.block}"
    print(f"{title:46}{'ms':>10}")
    for name, value in figures.items():
        print(f"{name:46}{value:>10.1f}")
    shape = {"rows": options.rows, "fields": options.fields, "block": options.block, "sync": options.sync}
    print(json.dumps({"benchmark": "saved_state", "unit": "ms", **shape, **figures}))


if __name__ == "__main__":
    main()
