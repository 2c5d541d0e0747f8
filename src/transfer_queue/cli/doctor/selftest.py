"""The self-test: a system of its own, data between two processes, every byte compared, rates against memcpy."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from transfer_queue.cli.doctor import machine, selftest_reader
from transfer_queue.cli.doctor.report import OK, PROBLEM, Finding, mebibytes
from transfer_queue.client import TransferQueueClient
from transfer_queue.config.environment import process_environment
from transfer_queue.config.settings import Settings
from transfer_queue.errors import TransferQueueError
from transfer_queue.net.connection import MAX_PATH
from transfer_queue.node.launcher import RunningSystem, start_local

ROUNDS = 3  # that are counted, after one that warms up
ROUND_TRIPS = 200
COPIES = 6  # of the payload that exist at once, at most
READER_SECONDS = 10.0  # for the reader to end
NAME = "doctor"


def selftest(nbytes: int) -> Iterator[Finding]:
    """Starts, measures and stops; what does not work is a problem. nbytes: of the dense payload."""
    fits = min(machine.memory()[1], machine.memory_limit() or 1 << 62) // (2 * COPIES)
    nbytes = max(1 << 20, min(nbytes, fits) >> 20 << 20)
    with _own_system() as (system, seconds):
        yield Finding("start", OK, f"a system was up within {seconds:.2f} s", values={"seconds": seconds})
        with TransferQueueClient(system) as client, _Reader(system) as reader:
            copied = memcpy_rate(nbytes)
            words = f"{copied / 1e9:.1f} GB/s, one thread, {mebibytes(nbytes)}"
            yield Finding("memcpy", OK, words, values={"bytes_per_second": copied, "nbytes": nbytes})
            yield _moved(client, reader, "dense", nbytes, copied)
            yield _moved(client, reader, "small", nbytes, copied)
            yield _round_trip(client)
    yield Finding("end", OK, "the system was stopped; nothing is left of it")


@contextlib.contextmanager
def _own_system() -> Iterator[tuple[RunningSystem, float]]:
    """A system in a runtime folder of its own, which is removed with it; and the seconds it took to start."""
    environment = process_environment()
    parent = tempfile.gettempdir()
    if len(parent) + 50 > MAX_PATH:
        parent = "/tmp"  # the paths of sockets must be short
    with tempfile.TemporaryDirectory(prefix="tqd-", dir=parent, ignore_cleanup_errors=True) as folder:
        before = environment.get("TQ_RUNTIME_DIR")
        environment["TQ_RUNTIME_DIR"] = folder
        start = time.perf_counter()
        try:
            system = start_local(NAME, {"settings": Settings.from_config(None).to_json()})
        finally:
            if before is None:
                del environment["TQ_RUNTIME_DIR"]
            else:
                environment["TQ_RUNTIME_DIR"] = before
        try:
            yield system, time.perf_counter() - start
        finally:
            system.stop()


class _Reader:
    """The second process. It does not hear of Ctrl-C, and ends when we do."""

    def __init__(self, system: RunningSystem) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "transfer_queue.cli.doctor.selftest_reader", str(system.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**process_environment(), "PYTHONPATH": path},
            start_new_session=True,
        )

    def ask(self, **job: Any) -> dict[str, Any]:
        """Has it get and compare; TransferQueueError with its words if it cannot."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(READER_SECONDS)
            self._errors.seek(0)
            words = self._errors.read()[-2000:].decode("utf-8", "replace").strip()
            raise TransferQueueError(f"the reading process ended with status {self._process.returncode}: {words}")
        return json.loads(line)  # type: ignore[no-any-return]

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(READER_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            self._errors.close()


def _moved(client: TransferQueueClient, reader: _Reader, kind: str, nbytes: int, copied: float) -> Finding:
    """Puts here and gets there, a few rounds of other contents each; medians."""
    puts, gets = [], []
    wrong: set[str] = set()
    for seed in range(ROUNDS + 1):
        values, partition = selftest_reader.make(kind, nbytes, seed), f"{kind}-{seed}"
        keys = selftest_reader.keys_of(values)
        start = time.perf_counter()
        client.kv_batch_put(keys, partition, values)
        puts.append(time.perf_counter() - start)
        reply = reader.ask(kind=kind, partition=partition, nbytes=nbytes, seed=seed)
        gets.append(float(reply["seconds"]))
        wrong.update(reply["wrong"])
        client.clear_partition(partition)
    put, get = statistics.median(puts[1:]), statistics.median(gets[1:])
    rows = len(keys)
    size = nbytes if kind == "dense" else rows * (selftest_reader.SMALL * 8 + selftest_reader.TEXT)
    found: dict[str, Any] = {
        "verified": not wrong,
        "rows": rows,
        "nbytes": size,
        "put_seconds": put,
        "get_seconds": get,
    }
    for name, seconds in (("put", put), ("get", get)):
        found[f"{name}_bytes_per_second"] = size / seconds
        found[f"{name}_of_memcpy"] = size / seconds / copied
    name = f"{rows} rows of {'1 MiB' if kind == 'dense' else f'{size // rows} bytes'}"
    if wrong:
        advice = "report this as a bug with the machine's kernel and file system; do not trust data on this machine"
        return Finding(name, PROBLEM, f"other bytes came than were put, in {sorted(wrong)}", advice, found)
    words = "; ".join(_rate(name, found, rows) for name in ("put", "get")) + "; every byte compared"
    return Finding(name, OK, words, values=found)


def _rate(name: str, found: dict[str, Any], rows: int) -> str:
    speed, share = found[f"{name}_bytes_per_second"], found[f"{name}_of_memcpy"]
    a_second = rows / found[f"{name}_seconds"]
    return f"{name} {speed / 1e9:.2f} GB/s ({share:.2f} of memcpy, {a_second:,.0f} rows/s)"


def _round_trip(client: TransferQueueClient) -> Finding:
    times = []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        client.get_partition_list()
        times.append(time.perf_counter() - start)
    microseconds = statistics.median(times) * 1e6
    words = f"{microseconds:.0f} µs to the controller and back (median of {ROUND_TRIPS})"
    return Finding("round trip", OK, words, values={"microseconds": microseconds})


def memcpy_rate(nbytes: int) -> float:
    """Bytes a second of one thread copying between warm arrays; the median."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return nbytes / statistics.median(times[1:])
