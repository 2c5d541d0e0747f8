"""Soak: many batches through one endless partition, whose rows are cleared as they go. No process may grow.

    python tests/long/soak.py [--batches 100000] [--workers 1] [--bound 8]

A producer puts rows, a loader in another process takes batches of them and clears each. This process looks at all of
them from outside, at each hundredth of the way: the resident memory of every process, without the pages of the arena,
which all of them share, its descriptors and threads; the space of the arena, and of all files of the system. It prints
a table of tenths, and fails where one of them is by more than `bound` (MiB, or how many) larger at the end than it was
after the first tenth. The journal is on, as it is by default.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import growth
import psutil
import torch
from tensordict import TensorDict

import transfer_queue as tq

ROWS = 4  # a batch
CAPACITY = 64 * ROWS  # rows that may wait; the producer waits for space
FIELDS = ["tokens", "reward"]
PARTITION, TASK = "soak", "train"
MIB = 2**20
Sizes = growth.Sizes  # name of a process, "arena" or "system": MiB; "<name>'s descriptors": how many


def produce(batches: int) -> None:
    """Rows of changing lengths, then the seal."""
    client = tq.get_client()
    for number in range(batches):
        rows = [torch.full((16 + (7 * number + row) % 48,), number) for row in range(ROWS)]
        data = {"tokens": torch.nested.as_nested_tensor(rows, layout=torch.jagged), "reward": torch.full((ROWS,), 0.5)}
        client.put(TensorDict(data, batch_size=[ROWS]), partition_id=PARTITION, timeout=60)
    client.seal(PARTITION)


def consume(batches: int, workers: int, pipe: Connection[Any, Any]) -> None:
    """Says how many batches it had, a hundred times on the way, and waits for an answer each time."""
    client = tq.get_client()
    dataset = tq.StreamingDataset(None, ROWS, ROWS, FIELDS, PARTITION, TASK, 0, keep_batches=0)
    count = 0
    for data, meta in tq.StreamingDataLoader(dataset, num_workers=workers):
        assert (data["tokens"].values() == count).all()
        client.clear_samples(meta)
        count += 1
        if count % max(1, batches // 100) == 0:
            pipe.send(count)
            pipe.recv()
    assert count == batches, f"{count} batches of {batches} came"


def processes(supervisor: list[psutil.Process], started: dict[str, int]) -> Iterator[tuple[str, psutil.Process]]:
    """Every process of the run by its name; servers are known by the log that they write."""
    for server in supervisor:
        yield Path(os.readlink(f"/proc/{server.pid}/fd/1")).stem, server
    for name, pid in started.items():
        process = psutil.Process(pid)
        yield name, process
        for number, child in enumerate(process.children(recursive=True)):
            yield f"{name}'s worker {number}", child


def resident(pid: int) -> int:
    """Bytes of a process's own pages in memory, and of the files that it has mapped."""
    try:
        lines = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssFile")) * 1024
    except (OSError, KeyError):
        raise psutil.NoSuchProcess(pid) from None


def measure(servers: list[psutil.Process], started: dict[str, int], arenas: list[Path], folder: Path) -> Sizes:
    """What each process has resident, and open, and what arenas and journal have of the file system."""
    sizes = {}
    for name, process in processes(servers, started):
        with contextlib.suppress(psutil.NoSuchProcess):  # it is through
            sizes[name] = resident(process.pid) / MIB
            sizes[f"{name}'s descriptors"] = float(process.num_fds())
            sizes[f"{name}'s threads"] = float(process.num_threads())
    sizes["arena"] = sum(arena.stat().st_blocks * 512 for arena in arenas) / MIB
    found = growth.measure({}, [folder])
    sizes["system"], sizes["system's files"] = found["shared"], found["files"]
    return sizes


def run(batches: int, workers: int) -> list[tuple[int, float, Sizes]]:
    """(batches so far, seconds, sizes), a hundred times on the way."""
    before = set(psutil.Process().children(recursive=True))
    conf = tq.init({"controller": {"sampler": "RankAwareSampler"}, "backend": {"SimpleStorage": {
        "total_storage_size": CAPACITY}}})  # fmt: skip
    servers = [child for child in psutil.Process().children(recursive=True) if child not in before]
    folder = Path(conf["system"]["folder"])
    arenas = sorted(Path(os.path.realpath(folder / "arena")).rglob("arena"))
    context = multiprocessing.get_context("fork")
    producer = context.Process(target=produce, args=(batches,))
    producer.start()
    counts, theirs = context.Pipe()
    consumer = context.Process(target=consume, args=(batches, workers, theirs))
    consumer.start()
    theirs.close()  # so that its end is one of the pipe
    assert producer.pid is not None
    assert consumer.pid is not None
    samples, start = [], time.monotonic()
    try:
        with contextlib.suppress(EOFError):
            while True:
                count = counts.recv()
                sizes = measure(servers, {"producer": producer.pid, "consumer": consumer.pid}, arenas, folder)
                samples.append((count, time.monotonic() - start, sizes))
                if len(samples) % 10 == 1:
                    show(*samples[-1])
                counts.send(None)
        consumer.join()
        producer.join()
        if consumer.exitcode or producer.exitcode:
            raise SystemExit("the producer or the consumer failed")
    finally:
        for process in (producer, consumer):
            process.kill()
            process.join()
        tq.close()
    return samples


def show(count: int, seconds: float, sizes: Sizes) -> None:
    """Prints a line of the table."""
    names = sorted(name for name in sizes if "'s " not in name or "worker" in name.split("'s ")[1])
    print(f"{count:>8} {seconds:>6.0f} s" + "".join(f"  {name} {sizes[name]:.1f}" for name in names), flush=True)


def grown(samples: list[tuple[int, float, Sizes]], bound: float) -> list[str]:
    """What has grown by more than the bound since the first tenth."""
    names = []
    for name in sorted({name for _, _, sizes in samples for name in sizes}):
        # some end a moment before the others: they count as long as they were there
        there = [sizes[name] for _, _, sizes in samples[len(samples) // 10 :] if name in sizes]
        more = there[-1] - there[0]
        print(f"{name}: {more:+.1f} after the first tenth, at most {max(there) - there[0]:+.1f}")
        if more > bound:
            names.append(name)
    return names


def main() -> int:
    """The exit code: 1 where something has grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=1, help="of the loader")
    parser.add_argument("--bound", type=float, default=8.0, help="MiB, or number, that each may grow")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(" batches   time  MiB")
    names = grown(run(given.batches, given.workers), given.bound)
    print(f"grew by more than {given.bound:g}: {', '.join(names)}" if names else "nothing grew")
    return int(bool(names))


if __name__ == "__main__":
    sys.exit(main())
