"""Torn reads: rows are read while others clear, replace, compact and drain. Not one byte of another sample may come.

    python tests/long/torn_reads.py [--mode reads|views|rows] [--reads 10000000] [--readers 2] [--seconds 3600]
                                    [--row-seconds 60] [--backends NAME ...]

Three modes, one after the other unless one is named.

`reads`: a writer puts blocks whose values say which put they belong to, replaces some, and clears all but a few rows of
each, so that compaction never rests; a unit is drained and taken back in turn. Readers, each a process, copy 1024 rows
at a time and look at every byte: each value of a row is the row's number, which is that of the put that made it. It
ends when so many rows were read, or fails at the first foreign byte. What the writer clears is the oldest, so that most
reads are in time for it, and some are not.

`views`: the same, with readers that read whole puts with copy=False, keep some of the views for a while, write to
others, and look at every byte again before they let go of them. One reader is killed and started again in turn.

`rows`: on every backend that is installed, for `--row-seconds` each, processes put, replace, clear and read ragged rows
of a few elements (and some large ones) in every container and layout, each value with a checksum in a field beside it
(`checked_rows`). Processes that only read look at the rows of all writers. It fails at the first value that is not what
its checksum says, or that came for another row. `tests/client/test_checked_rows.py` is a short version of it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).parent.parent))
import transfer_queue as tq
from checked_rows import Reader, Writer
from transfer_queue.errors import StartError, StorageKeyNotFoundError, WaitTimeoutError

ROWS, WIDTH = 256, 64
PARTITION = "torn"
FIELDS = ["number", "again"]
LIVE = 384  # puts of which rows live
KEPT = 8  # rows of a put that live on
READ = 1024  # rows of one read
PAUSE = 0.002  # of the writer, seconds between two puts: readers on two cores are to be quicker than it

MIB = 1 << 20
STORE_BYTES = 192 * MIB  # of an external store
WRITERS = 2  # processes of the mode `rows` that put, and as many that only read
LISTED = 20  # reads between two listings of the rows
BACKENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "SimpleStorage": ("", {"SimpleStorage": {"arena_bytes": 64 * MIB, "num_data_storage_units": 2}}),
    "disk": ("", {"SimpleStorage": {"arena_bytes": 8 * MIB, "offload": {"enabled": True}}}),
    "MooncakeStore": (
        "mooncake",
        {
            "storage_backend": "MooncakeStore",
            "MooncakeStore": {"master_server_address": "127.0.0.1:0", "global_segment_size": STORE_BYTES},
        },
    ),
    "Yuanrong": (
        "yr",
        {
            "storage_backend": "Yuanrong",
            "Yuanrong": {
                "worker_port": 0, "metastore_port": 0, "worker_args": f"--shared_memory_size_mb {STORE_BYTES // MIB}",
            },
        },
    ),
    "RayStore": ("ray", {"storage_backend": "RayStore", "RayStore": {"capacity": STORE_BYTES}}),
}  # fmt: skip
"""By name: the module that a backend needs, and its settings. `disk`: SimpleStorage with more than fits in memory."""


def write(seconds: float) -> None:
    """Puts, replaces, clears, drains; until its time is over or its input ends."""
    client = tq.get_client()
    live: list[tuple[int, tq.BatchMeta]] = []
    end, number, drained = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        number += 1
        value = torch.full((ROWS, WIDTH), number)
        data = TensorDict({"number": value, "again": value.clone()}, batch_size=[ROWS])
        meta = client.put(data, partition_id=PARTITION, timeout=60)
        keep = {(7 * number + k * 31) % ROWS for k in range(KEPT)}
        client.clear_samples(meta.select_samples([row for row in range(ROWS) if row not in keep]))
        kept = meta.select_samples(sorted(keep))
        live.append((number, kept))
        if number % 3 == 0:  # the same number again: a replacement is no foreign value
            chosen, some = live[number % len(live)]
            again = torch.full((some.size, WIDTH), chosen)
            client.put(TensorDict({"again": again}, batch_size=[some.size]), some)
        if len(live) > LIVE:
            client.clear_samples(live.pop(0)[1])
        if number % 500 == 0:
            with contextlib.suppress(WaitTimeoutError):
                client.drain_unit(drained, timeout=5)
            client.drain_unit(drained, undo=True)
            drained = 1 - drained
        if number % 5000 == 0:
            print(f"{number} puts", flush=True)
        time.sleep(PAUSE)


def read(rows: int) -> None:
    """Reads so many rows and says how many it had."""
    client = tq.get_client()
    draw = np.random.default_rng()
    done = gone = told = 0
    every = tq.BatchMeta([], [])
    while done < rows:
        if len(every) < READ:
            every = client.get_meta(FIELDS, None, PARTITION, mode="force_fetch")
            continue
        meta = every.select_samples(np.sort(draw.choice(len(every), READ, replace=False)).tolist())
        try:
            got = client.get_data(meta.select_fields(FIELDS), layout="dense")
        except StorageKeyNotFoundError:
            gone += 1
            every = tq.BatchMeta([], [])
            continue
        one, other = got["number"].numpy(), got["again"].numpy()
        foreign = (one != one[:, :1]).any(1) | (other != one[:, :1]).any(1)
        # rows of one put have neighbouring indexes: puts ascend with them
        foreign |= np.diff(one[np.argsort(meta.global_indexes), 0], prepend=1) < 0
        assert not foreign.any(), f"foreign bytes: {one[foreign]}, {other[foreign]}"
        done += len(one)
        if done // 500_000 != told:
            told = done // 500_000
            print(f"{done} rows read, {gone} reads of rows that were gone", flush=True)
    print(f"{done} rows read, {gone} reads of rows that were gone", flush=True)


def view(rows: int, seconds: float = 3600.0) -> None:
    """Read this number of rows as views, and keep some views while their values are cleared, replaced and moved."""
    client = tq.get_client()
    draw = np.random.default_rng()
    held: list[tuple[Any, int]] = []
    done = gone = kept = copies = 0
    end = time.monotonic() + seconds
    while done < rows and time.monotonic() < end:
        every = client.get_meta(FIELDS, None, PARTITION, mode="force_fetch")
        if len(every) < KEPT:
            continue
        # rows of one put have neighbouring indexes; until they are cleared they are a run
        first = max(0, len(every) - KEPT - int(draw.integers(0, 64)))
        newest = every.select_samples(list(range(first, len(every))))
        for meta in (newest, every.select_samples([int(draw.integers(0, len(every)))])):
            try:
                got = client.get_data(meta.select_fields(FIELDS), layout="dense", copy=False)
            except StorageKeyNotFoundError:
                gone += 1
                continue
            for name in FIELDS:
                tensor = got[name]
                copies += not tq.is_view(tensor)
                check_rows(tensor)
                held.append((tensor, int(tensor.sum())))
            done += 2 * len(got)
        while len(held) > 32:
            tensor, total = held.pop(int(draw.integers(0, len(held))))
            check_rows(tensor)
            assert int(tensor.sum()) == total, "a view has changed"
            kept += 1
            if draw.integers(0, 2):
                tensor.fill_(-1)  # a page of its own, which no later view may show
    assert kept, "no view was kept"
    print(
        f"{done} rows read, {gone} reads of rows that were gone, {kept} views looked at again, {copies} copies",
        flush=True,
    )


def check_rows(tensor: torch.Tensor) -> None:
    """Fail if a row has values of several puts."""
    rows = tensor.numpy()
    foreign = (rows != rows[:, :1]).any(1) | (rows[:, 0] < 1)
    assert not foreign.any(), f"foreign bytes: {rows[foreign]}"


def write_rows(seconds: float, place: int) -> None:
    """Puts, replaces, clears and reads rows of its own until its time is over."""
    writer = Writer(tq.get_client(), PARTITION, seed=time.time_ns(), place=place + 1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        writer.step()
    print(f"writer {place}: {writer.rows} rows read", flush=True)


def read_rows(seconds: float, place: int) -> None:
    """Reads the rows of all writers until its time is over."""
    client = tq.get_client()
    reader = Reader(client, PARTITION, seed=time.time_ns())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        numbers = [int(key) for key in client.kv_list(PARTITION).get(PARTITION, {})]
        if not numbers:
            time.sleep(PAUSE)
            continue
        for _ in range(LISTED):
            reader.read(reader.selection(numbers))
    print(f"reader {place}: {reader.rows} rows read", flush=True)


@contextlib.contextmanager
def system(name: str) -> Iterator[None]:
    """A system with this backend."""
    module, conf = BACKENDS[name]
    with tempfile.TemporaryDirectory(prefix="tq-torn-") as folder, contextlib.ExitStack() as stack:
        if name == "disk":
            conf["SimpleStorage"]["offload"]["path"] = folder
        if module == "ray":
            import ray

            ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
            stack.callback(ray.shutdown)
        tq.init({"backend": conf, "runtime": "ray" if module == "ray" else "local"})
        stack.callback(tq.close)
        yield


def rows(name: str, seconds: float) -> None:
    """The mode `rows` on one backend."""
    module, _ = BACKENDS[name]
    if module and importlib.util.find_spec(module) is None:
        print(f"{name}: left out, as {module} is not installed", flush=True)
        return
    print(f"{name}:", flush=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(system(name))
        except StartError as error:
            reason = str(error).strip().rpartition("\n")[2]
            print(f"{name}: left out, as it cannot be started: {reason}", flush=True)
            return
        tq.get_client().create_partition(PARTITION)
        roles = [(role, str(place)) for role in ("write-rows", "read-rows") for place in range(WRITERS)]
        command = [sys.executable, "-W", "ignore", __file__, "--row-seconds", str(seconds)]
        processes = [subprocess.Popen([*command, "--role", role, "--place", place]) for role, place in roles]
        try:
            codes = [process.wait(seconds + 120) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if any(codes):
        raise SystemExit(f"{name}: a process failed; its words are above")


def reads(arguments: argparse.Namespace, role: str = "read") -> None:
    """The modes `reads` and `views`: starts a system with two units, the writer and the readers."""
    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 2}}})
    try:
        tq.get_client().create_partition(PARTITION)
        command = [sys.executable, __file__, "--seconds", str(arguments.seconds), "--role"]
        writer = subprocess.Popen([*command, "write"])
        share = str(-(-arguments.reads // arguments.readers))
        readers = [subprocess.Popen([*command, role, "--reads", share]) for _ in range(arguments.readers)]
        if role == "view":
            for _ in range(3):  # what a killed reader holds is free again, or the writer would find no space
                doomed = subprocess.Popen([*command, role, "--reads", share])
                time.sleep(5)
                doomed.kill()
                doomed.wait()
        try:
            codes = [reader.wait(arguments.seconds) for reader in readers]
        finally:
            for process in (writer, *readers):
                process.kill()
                process.wait()
    finally:
        tq.close()
    if any(codes):
        raise SystemExit("a reader failed; its words are above")
    print(f"{arguments.reads} rows were read, without a foreign byte")


def work(arguments: argparse.Namespace) -> None:
    """Run one of the processes."""
    torch.set_num_threads(1)
    logging.getLogger("transfer_queue").setLevel(logging.ERROR)  # a warning for each read of rows that were cleared
    tq.init()
    if arguments.role == "write":
        write(arguments.seconds)
    elif arguments.role == "read":
        read(arguments.reads)
    elif arguments.role == "view":
        view(arguments.reads, arguments.seconds)
    elif arguments.role == "write-rows":
        write_rows(arguments.row_seconds, arguments.place)
    else:
        read_rows(arguments.row_seconds, arguments.place)


def main() -> None:
    """Run the modes of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mode", choices=["reads", "views", "rows"], help="default: all")
    parser.add_argument("--reads", type=int, default=10_000_000, help="rows that the modes `reads` and `views` read")
    parser.add_argument("--readers", type=int, default=2, help="processes that read in the mode `reads`")
    parser.add_argument("--seconds", type=float, default=3600.0, help="most seconds of the mode `reads`")
    parser.add_argument("--row-seconds", type=float, default=60.0, help="seconds of the mode `rows` on each backend")
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--role", choices=["write", "read", "view", "write-rows", "read-rows"], help=argparse.SUPPRESS)
    parser.add_argument("--place", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role is not None:
        work(arguments)
        return
    if arguments.mode in (None, "reads"):
        reads(arguments)
    if arguments.mode in (None, "views"):
        reads(arguments, "view")
    if arguments.mode in (None, "rows"):
        for name in arguments.backends:
            rows(name, arguments.row_seconds)
        print("every row was what was put")


if __name__ == "__main__":
    main()
