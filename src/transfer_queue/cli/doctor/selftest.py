"""The self-test: starts a system, moves data between processes, compares every byte, and measures the rates.

Every figure comes from real processes: this one, the reader (`selftest_reader`), and the servers of the system.
"""

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
import torch
from tensordict import TensorDict

from transfer_queue.cli.doctor import machine, selftest_reader
from transfer_queue.cli.doctor.report import OK, PROBLEM, Finding
from transfer_queue.client import TransferQueueClient
from transfer_queue.config.environment import process_environment
from transfer_queue.config.settings import Settings
from transfer_queue.display import size_text
from transfer_queue.errors import TransferQueueError
from transfer_queue.net.drivers.connection import MAX_PATH
from transfer_queue.node.system.launcher import RunningSystem, start_local

ROUNDS = 3  # counted rounds of puts and gets, after one that is not counted
CLAIM_ROWS = 4096  # rows that the measured claims consume
CLAIM_SIZE = 32  # rows of one claim
WAKEUPS = 50  # counted wake-ups, after WARM_UPS that are not counted
WARM_UPS = 5
ROUND_TRIPS = 200
COPIES = 6  # copies of the payload that exist at the same time, at most
READER_SECONDS = 10.0  # for the reader to end
WAIT_SECONDS = 60.0  # for its claim to arrive, and then to be answered
NAME = "doctor"


def selftest(nbytes: int) -> Iterator[Finding]:
    """Start a system, measure it and stop it; each failure is reported as a problem.

    Args:
        nbytes: The size of the payload with large rows, in bytes. Less is used if the memory is small.

    Yields:
        The result of each part.
    """
    fits = min(machine.memory()[1], machine.memory_limit() or 1 << 62) // (2 * COPIES)
    nbytes = max(1 << 20, min(nbytes, fits) >> 20 << 20)
    with _own_system() as (system, seconds):
        yield Finding("start", OK, f"a system started in {seconds:.2f} s", values={"seconds": seconds})
        with TransferQueueClient(system) as client, _Reader(system) as reader:
            copied = memcpy_rate(nbytes)
            text = f"{_speed(copied)} (one thread, {size_text(nbytes)}, median of {ROUNDS})"
            yield Finding("memcpy", OK, text, values={"bytes_per_second": copied, "nbytes": nbytes})
            yield _put_and_get(client, reader, "dense", nbytes, copied)
            yield _put_and_get(client, reader, "small", nbytes, copied)
            yield _claims(client)
            yield _wake_ups(client, reader)
            yield _round_trip(client)
    yield Finding("end", OK, "the system was stopped and left no files")


@contextlib.contextmanager
def _own_system() -> Iterator[tuple[RunningSystem, float]]:
    """Start a system in a temporary runtime folder, and yield it with the seconds that its start took."""
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
    """The second process (`selftest_reader`). Ctrl-C does not reach it; it ends with this process."""

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

    def begin(self, job: str, **parameters: Any) -> None:
        """Start a job; `result` waits for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"job": job, **parameters}).encode() + b"\n")
            self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Return the result of the job.

        Raises:
            TransferQueueError: The process ended. The message contains what it wrote to stderr.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(READER_SECONDS)
            self._errors.seek(0)
            message = self._errors.read()[-2000:].decode("utf-8", "replace").strip()
            raise TransferQueueError(f"the reading process ended with status {self._process.returncode}: {message}")
        return json.loads(line)  # type: ignore[no-any-return]

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

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


def _put_and_get(client: TransferQueueClient, reader: _Reader, kind: str, nbytes: int, copied: float) -> Finding:
    """Put in this process, get in the reader, and compare; the contents of each round differ."""
    puts, gets = [], []
    wrong: set[str] = set()
    for seed in range(ROUNDS + 1):
        values, partition = selftest_reader.make(kind, nbytes, seed), f"{kind}-{seed}"
        keys = selftest_reader.keys_of(values)
        start = time.perf_counter()
        client.kv_batch_put(keys, partition, values)
        puts.append(time.perf_counter() - start)
        reader.begin("get", kind=kind, partition=partition, nbytes=nbytes, seed=seed)
        reply = reader.result()
        gets.append(float(reply["seconds"]))
        wrong.update(reply["wrong"])
        client.clear_partition(partition)
    rows = len(keys)
    size = nbytes if kind == "dense" else rows * (selftest_reader.SMALL * 8 + selftest_reader.TEXT)
    result: dict[str, Any] = {"verified": not wrong, "rows": rows, "nbytes": size}
    for name, times in (("put", puts), ("get", gets)):
        seconds = statistics.median(times[1:])
        result[f"{name}_seconds"] = seconds
        result[f"{name}_bytes_per_second"] = size / seconds
        result[f"{name}_rows_per_second"] = rows / seconds
        result[f"{name}_of_memcpy"] = size / seconds / copied
    name = f"{rows} rows of {'1 MiB' if kind == 'dense' else f'{size // rows} bytes'}"
    if wrong:
        advice = "report this as a bug with the machine's kernel and file system; do not trust data on this machine"
        return Finding(
            name, PROBLEM, f"the bytes of the get differ from those of the put in {sorted(wrong)}", advice, result
        )
    text = "; ".join(_rate(name, result) for name in ("put", "get"))
    return Finding(name, OK, f"{text} (median of {ROUNDS}, every byte compared)", values=result)


def _rate(name: str, values: dict[str, Any]) -> str:
    speed, share = values[f"{name}_bytes_per_second"], values[f"{name}_of_memcpy"]
    return f"{name} {_speed(speed)}, {values[f'{name}_rows_per_second']:,.0f} rows/s, {share:.2f} of memcpy"


def _speed(bytes_per_second: float) -> str:
    """Return a rate in decimal units, as memory and disks are specified."""
    if bytes_per_second < 1e9:
        return f"{bytes_per_second / 1e6:.1f} MB/s"
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def _claims(client: TransferQueueClient) -> Finding:
    """Claim all rows of a partition, one claim after the other; each row must be claimed once."""
    count = CLAIM_ROWS // CLAIM_SIZE
    batch = TensorDict({"number": torch.arange(CLAIM_ROWS)}, batch_size=[CLAIM_ROWS])
    put = client.put(batch, partition_id="claims").global_indexes
    claimed: list[int] = []
    start = time.perf_counter()
    for _ in range(count):
        claimed += client.get_meta(["number"], CLAIM_SIZE, "claims", task_name="claims").global_indexes
    seconds = time.perf_counter() - start
    client.clear_partition("claims")
    values = {
        "verified": sorted(claimed) == sorted(put),
        "rows": CLAIM_ROWS,
        "batch_size": CLAIM_SIZE,
        "claims_per_second": count / seconds,
        "rows_per_second": CLAIM_ROWS / seconds,
    }
    if not values["verified"]:
        text = f"{count} claims of {CLAIM_SIZE} rows did not return each of {CLAIM_ROWS} rows once"
        return Finding("claim", PROBLEM, text, "report this as a bug", values)
    text = f"{count / seconds:,.0f} claims/s, {CLAIM_ROWS / seconds:,.0f} rows/s "
    text += f"({count} claims of {CLAIM_SIZE} rows by one client, one after the other)"
    return Finding("claim", OK, text, values=values)


def _wake_ups(client: TransferQueueClient, reader: _Reader) -> Finding:
    """Measure the time from a put until the reader, whose claim waits for it, has its row."""
    times: list[float] = []
    wrong = 0
    client.create_partition("wake-ups")  # `status` shows waiting claims only for partitions that exist
    for number in range(WARM_UPS + WAKEUPS):
        reader.begin("wait", partition="wake-ups", seconds=WAIT_SECONDS)
        _await_claim(client, "wake-ups", reader)
        start = time.monotonic()  # the same clock in all processes
        put = client.put(TensorDict({"number": torch.tensor([number])}, batch_size=[1]), partition_id="wake-ups")
        reply = reader.result()
        times.append((reply["woken"] - start) * 1e3)
        wrong += reply["global_indexes"] != put.global_indexes
    client.clear_partition("wake-ups")
    times = times[WARM_UPS:]
    milliseconds, slowest = statistics.median(times), max(times)
    values = {"verified": not wrong, "count": WAKEUPS, "milliseconds": milliseconds, "slowest_milliseconds": slowest}
    if wrong:
        text = f"{wrong} of {WARM_UPS + WAKEUPS} waiting claims returned another row than the one that was put"
        return Finding("wake-up", PROBLEM, text, "report this as a bug", values)
    text = f"{milliseconds:.2f} ms from a put of one row until a waiting consumer in another process has claimed it "
    text += f"(median of {WAKEUPS}, slowest {slowest:.2f} ms)"
    return Finding("wake-up", OK, text, values=values)


def _await_claim(client: TransferQueueClient, partition: str, reader: _Reader) -> None:
    """Return once a claim waits in the partition, so that the put wakes it up."""
    limit = time.monotonic() + WAIT_SECONDS
    while not any(task.waiting for each in client.status().partitions if each.name == partition for task in each.tasks):
        if reader.has_ended():
            reader.result()  # raises the error with what the process wrote
        if time.monotonic() > limit:
            raise TransferQueueError(f"the reading process did not start to wait within {WAIT_SECONDS:g} s")


def _round_trip(client: TransferQueueClient) -> Finding:
    """Measure an empty request to the controller."""
    times = []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        client.get_partition_list()
        times.append(time.perf_counter() - start)
    microseconds = statistics.median(times) * 1e6
    text = f"{microseconds:.0f} µs to the controller and back (median of {ROUND_TRIPS})"
    return Finding("round trip", OK, text, values={"microseconds": microseconds})


def memcpy_rate(nbytes: int) -> float:
    """Return the bytes per second that one thread copies between arrays that were used before (median)."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return nbytes / statistics.median(times[1:])
