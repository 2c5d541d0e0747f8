"""Torn reads: rows are read while others clear, replace, compact and drain. Not one byte of another sample may come.

    python tests/long/torn_reads.py [--reads 10000000] [--readers 2] [--seconds 3600]

A writer puts blocks whose values say which put they belong to, replaces some, and clears all but a few rows of each, so
that compaction never rests; a unit is drained and taken back in turn. Readers, each a process, copy 1024 rows at a time
and look at every byte: each value of a row is the row's number, which is that of the put that made it. It ends when so
many rows were read, or fails at the first foreign byte. What the writer clears is the oldest, so that most reads are in
time for it, and some are not.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time

import numpy as np
import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.errors import StorageKeyNotFoundError, WaitTimeoutError

ROWS, WIDTH = 256, 64
PARTITION = "torn"
FIELDS = ["number", "again"]
LIVE = 384  # puts of which rows live
KEPT = 8  # rows of a put that live on
READ = 1024  # rows of one read
PAUSE = 0.002  # of the writer, seconds between two puts: readers on two cores are to be quicker than it


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


def main() -> None:
    """Starts a system with two units, the writer and the readers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--reads", type=int, default=10_000_000)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--role", choices=["write", "read"])
    arguments = parser.parse_args()
    if arguments.role is not None:
        torch.set_num_threads(1)
        tq.init()
        write(arguments.seconds) if arguments.role == "write" else read(arguments.reads)
        return
    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 2}}})
    try:
        tq.get_client().create_partition(PARTITION)
        command = [sys.executable, __file__, "--seconds", str(arguments.seconds), "--role"]
        writer = subprocess.Popen([*command, "write"])
        share = str(-(-arguments.reads // arguments.readers))
        readers = [subprocess.Popen([*command, "read", "--reads", share]) for _ in range(arguments.readers)]
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


if __name__ == "__main__":
    main()
