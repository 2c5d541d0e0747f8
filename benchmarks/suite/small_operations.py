"""How many small operations per second are possible, how long does each take, and what do gathers cost?

Clients are threads with separate clients in few processes; each puts or updates one row after the other for some
seconds. At the end, all values are read and compared.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch

from benchmarks.harness import payloads
from benchmarks.harness.machine import clocked
from benchmarks.harness.payloads import Payload
from benchmarks.harness.report import Row, Scale, against, compared, quantiles
from benchmarks.harness.systems import System, Worker, raw_socket, system, workers
from transfer_queue import interface as tq
from transfer_queue.attachment import CURRENT
from transfer_queue.client import TransferQueueClient

QUESTION = "How many small operations per second are possible, and how long does each take?"
NOTE = """Eight clients of a peer are four threads in each of two processes: this gave the same results as eight
processes, which take half a minute to start."""
PROCESSES = 8  # at most, for all clients together
WORDS = {"put": "single-row puts", "tag": "tag updates"}
WARMING = 0.3  # seconds of warm-up that are not counted; a smoke test has less
BYTES = (300, 100)  # of a small put's request and reply; the raw socket transfers the same
PUTS: dict[int, tuple[float, float | None]] = {1: (8000.0, 251.0), 8: (20_000.0, 445.0), 64: (20_000.0, None)}
"""Clients -> a second: target, and the peer's then."""
CPU = 35.0
"""The target for the processor time of the servers of a put, in microseconds."""
IN_FLIGHT = (1, 8, 64, 1000, 4000)
"""Asynchronous puts of one event loop that are in flight at once."""


class Told(NamedTuple):
    """The results of one process: counted latencies (seconds), processor seconds, and all puts of each client."""

    latencies: list[float]
    cpu: float
    puts: list[int]


def row(number: int) -> dict[str, torch.Tensor]:
    """Return a small sample with three fields."""
    return {"prompt": torch.arange(16) + number, "score": torch.tensor(number / 7), "mask": torch.ones(16)}


def work(act: str, name: str, clients: int, begin: float, seconds: float) -> Told:
    """Repeat one operation with some clients of one process. Runs in a worker; begin: A time of the monotonic clock."""
    torch.set_num_threads(1)
    tq.get_client()
    assert CURRENT.system is not None
    made = [TransferQueueClient(CURRENT.system) for _ in range(clients)]
    found: list[list[float]] = [[] for _ in range(clients)]
    puts = [0] * clients
    samples = [row(number) for number in range(64)]
    warm = begin + min(WARMING, seconds)

    def one(which: int) -> None:
        client, took = made[which], found[which]
        client.kv_put(f"{name}-{which}-0", act, samples[0], {"n": 0, "status": "running"})
        _sleep_until(begin)
        number = 1
        while True:
            now = time.monotonic()
            if now >= warm + seconds:
                break
            if act == "put":
                client.kv_put(f"{name}-{which}-{number}", act, samples[number % 64], {"n": number, "status": "running"})
            else:
                client.kv_put(f"{name}-{which}-0", act, tag={"n": number, "status": "running"})
            if now >= warm:
                took.append(time.monotonic() - now)
            number += 1
        puts[which] = number

    threads = [threading.Thread(target=one, args=(which,)) for which in range(clients)]
    for thread in threads:
        thread.start()
    _sleep_until(warm)
    cpu = time.process_time()
    for thread in threads:
        thread.join()
    cpu = time.process_time() - cpu
    for client in made:
        client.close()
    return Told([each for took in found for each in took], cpu, puts)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def check(act: str, name: str, puts: list[int]) -> None:
    """Compare the values in the system with those that clients have put."""
    for which, count in enumerate(puts):
        if act != "put":
            (tags,) = tq.kv_batch_put([f"{name}-{which}-0"], act, tags=[{}]).tags
            _same(tags["n"], count - 1)
            continue
        batch = tq.kv_batch_get([f"{name}-{which}-{number}" for number in range(count)], act)
        numbers = torch.arange(count) % 64
        _same(batch["prompt"].values().view(count, 16).tolist(), (numbers[:, None] + torch.arange(16)).tolist())
        _same(batch["score"].tolist(), torch.tensor([n / 7 for n in numbers.tolist()]).tolist())
        _same(batch["mask"].values().sum().item(), count * 16)


def _same(got: Any, wanted: Any) -> None:
    if got != wanted:
        raise AssertionError(f"a get differs from its put: {str(got)[:100]} instead of {str(wanted)[:100]}")


def run(scale: Scale) -> list[Row]:
    """Run all measurements."""
    with system() as queue, raw_socket() as bare:
        count = scale.pick(2000, 50)
        raw = [bare.seconds(*BYTES) for _ in range(count)]
        rows = [_round_trips(count, raw)]
        empty = rows[0].ours
        seconds = scale.pick(2.0, 0.1)
        with workers(scale.pick(PROCESSES, 2), queue.address) as processes:
            for act in ("put", "tag"):
                for clients in scale.pick((1, 8, 64, 512), (1, 3)):
                    rows.append(_many(act, clients, processes, seconds, queue, empty))
                    if act == "put" and clients == 1:
                        rows.append(
                            Row("servers' CPU of a single-row put", rows[-1].more["servers_cpu_us"], "us", target=CPU)
                        )
        rows += [_in_flight(tasks, seconds, empty) for tasks in scale.pick(IN_FLIGHT, (1, 8))]
        rows.append(_buffered(scale.pick(60_000, 600), empty))
        with Worker(queue.address) as reader:
            rows.append(_one_by_one(Payload("dense", scale.pick(8192, 64), 5, 128), reader))
    return [_beside_peers(scale, row, seconds) for row in rows]


def _beside_peers(scale: Scale, row: Row, seconds: float) -> Row:
    for act, clients in product(WORDS, (1, 8)):
        if row.what == _what(act, clients):
            peers = scale.ask_peers("small", act=act, clients=clients, seconds=seconds)
            return replace(row, peers={name: figures["a_second"] for name, figures in peers.items()})
    return row


def _what(act: str, clients: int) -> str:
    return f"{WORDS[act]}, {clients} client{'s' if clients > 1 else ''}"


def _round_trips(count: int, raw: list[float]) -> Row:
    """Measure an empty call, which is a lower bound for all calls."""
    client = tq.get_client()
    times = [clocked(client.get_partition_list) for _ in range(count)]
    ours, bare = (statistics.median(each) * 1e6 for each in (times, raw))
    return against("empty round trip", "us", ours, bare, "raw socket", more=quantiles(times, 1e6), target=40.0)


def _many(act: str, clients: int, processes: list[Worker], seconds: float, queue: System, empty: float) -> Row:
    used = processes[: min(clients, len(processes))]
    shares = [clients // len(used) + (i < clients % len(used)) for i in range(len(used))]
    begin = time.monotonic() + 0.5 + clients / 400
    for i, (worker, share) in enumerate(zip(used, shares, strict=True)):
        worker.begin(work, act, f"{clients}-{i}", share, begin, seconds)
    warm = begin + min(WARMING, seconds)
    _sleep_until(warm)
    served = queue.cpu()
    _sleep_until(warm + seconds)
    served = queue.cpu() - served
    told: list[Told] = [worker.result() for worker in used]
    for i, each in enumerate(told):
        check(act, f"{clients}-{i}", each.puts)
    tq.get_client().clear_partition(act)
    latencies = [one for each in told for one in each.latencies]
    done = len(latencies)
    cpu = sum(each.cpu for each in told)
    more = quantiles(latencies, 1e6) | {"cpu_us": cpu / done * 1e6, "servers_cpu_us": served / done * 1e6}
    target, then = PUTS.get(clients, (None, None)) if act == "put" else (None, None)
    return against(
        _what(act, clients), "a second", done / seconds, 1e6 / empty, "empty trips of one", more=more, target=target,
        then=then,
    )  # fmt: skip


def _in_flight(tasks: int, seconds: float, empty: float) -> Row:
    """Measure one client and one event loop with `tasks` puts in flight at any time."""
    samples = [row(number) for number in range(64)]

    async def repeat(which: int, until: float) -> int:
        number = 0
        while time.monotonic() < until:
            tag = {"n": number, "status": "running"}
            await tq.async_kv_put(f"{which}-{number}", "async", samples[number % 64], tag)
            number += 1
        return number

    async def all_of_them(seconds: float) -> list[int]:
        until = time.monotonic() + seconds
        return await asyncio.gather(*(repeat(which, until) for which in range(tasks)))

    asyncio.run(all_of_them(min(WARMING, seconds)))
    tq.get_client().clear_partition("async")
    cpu = time.process_time()
    counts = asyncio.run(all_of_them(seconds))
    cpu = time.process_time() - cpu
    got = tq.kv_batch_get([f"{w}-{n}" for w in range(tasks) for n in range(counts[w])], "async")
    _same(got["score"].tolist(), torch.tensor([n % 64 / 7 for count in counts for n in range(count)]).tolist())
    tq.get_client().clear_partition("async")
    done, target = sum(counts), 30_000.0 if tasks >= 64 else None
    return against(
        f"async puts of one client, {tasks} in flight", "a second", done / seconds, 1e6 / empty, "empty trips of one",
        more={"cpu_us": cpu / max(1, done) * 1e6}, target=target,
    )  # fmt: skip


def _buffered(rows: int, empty: float) -> Row:
    """Measure `buffered`, with which one thread puts row by row."""
    samples, client = [row(number) for number in range(64)], tq.get_client()

    def put_all(partition: str) -> None:
        with client.buffered() as puts:
            for number in range(rows):
                puts.kv_put(f"k{number}", partition, samples[number % 64], {"n": number})

    times = []
    for _ in range(3):
        times.append(clocked(lambda: put_all("buffered")))
        got = tq.kv_batch_get([f"k{number}" for number in range(rows)], "buffered")
        _same(got["score"].tolist(), torch.tensor([n % 64 / 7 for n in range(rows)]).tolist())
        client.clear_partition("buffered")
    rate = rows / statistics.median(times)
    return against("buffered puts of one thread", "a second", rate, 1e6 / empty, "empty trips of one", target=50_000.0)


def get(partition: str, payload: Payload) -> tuple[float, list[str]]:
    """Return the seconds of a get, and the names of wrong fields. Runs in the reader."""
    keys, client = payload.keys, tq.get_client()
    start = time.perf_counter()
    batch = client.kv_batch_get(keys, partition)
    return time.perf_counter() - start, payloads.differences(batch, payload, 1)


def _one_by_one(payload: Payload, reader: Worker) -> Row:
    """Measure a get of rows that were put one by one; reference: the same rows put at once."""
    batch = payloads.make(payload, 1)
    tq.kv_batch_put(payload.keys, "at once", batch)
    for i, key in enumerate(payload.keys):
        tq.kv_put(key, "one by one", batch[i : i + 1])
    times: dict[str, list[float]] = {"one by one": [], "at once": []}
    for _ in range(6):
        for partition, took in times.items():
            seconds, wrong = reader.do(get, partition, payload)
            _same(wrong, [])
            took.append(seconds * 1e3)
    ours, other = times["one by one"][1:], times["at once"][1:]
    what = f"get of {payload.name} put one by one"
    target = 2 * statistics.median(other)
    return compared(what, "ms", ours, other, "put at once", target=target, more={"best_ms": min(ours)})
