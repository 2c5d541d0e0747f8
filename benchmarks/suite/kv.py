"""How fast are puts with keys and tags, gets in another process, and clears of batches?

Each round puts here, gets in a process that has made gets before, in some rounds also in a new process, compares every
byte, and clears. Each is compared with a memcpy of the same number of bytes in one thread, or, for small payloads, with
a bare socket that transfers them. Large ones are also compared with copies by several plain threads into shared memory.
One batch is also read without a copy, beside NumPy arrays in Ray's store.
"""

from __future__ import annotations

import mmap
import statistics
import time
from dataclasses import asdict, replace
from typing import NamedTuple

import torch

from benchmarks.harness import payloads
from benchmarks.harness.machine import Memcpy, RawSocket, ThreadedMemcpy, clocked
from benchmarks.harness.payloads import Payload
from benchmarks.harness.report import SHARE, Row, Scale, against, compared
from benchmarks.harness.systems import System, Worker, raw_socket, system
from transfer_queue import interface as tq
from transfer_queue.config.environment import usable_cores
from transfer_queue.storage.arena.arena_views import is_view

QUESTION = "How fast are puts with keys and tags, gets in another process, and clears of batches?"
NOTE = """Rows are put with two tags; those of peers without tags. Peers run at most three rounds, and not with 2 GiB,
which takes them half a minute and costs as much for each byte as 288 MiB (measured before: put and get took Ray 4.6 and
4.3 s, TransferQueue 0.1.11 2.5 and 3.7 s). "Ray" puts the TensorDict, and reads a byte of every page after its get.
"Ray, NumPy arrays" puts a dict of arrays, of which `ray.get` returns views that cannot be written to."""
PEER_ROUNDS = 3
LARGE = 1 << 20  # from this number of bytes on, the reference is a memcpy and not a socket
SHARED = 32 << 20  # from this number of bytes on, copies by several threads are measured, too
THREADS = (1, 2, 4, 8, 16)
COPIES = 5
VIEW_TARGET = 0.5  # milliseconds of a get without a copy
MANY_CORES = 16  # the goals for copies by threads are for machines of this size


class Case(NamedTuple):
    """A batch, how often it goes round, in fresh processes too, what its put and get should take (ms), and whether
    peers are asked."""

    payload: Payload
    rounds: int
    fresh: int
    targets: tuple[float, float] | None = None
    then: tuple[float, float] | None = None
    peers: bool = True
    first: float | None = None
    """What the first get of a process should take, in milliseconds."""
    share: float | None = None
    """The part of the rate of the fastest memcpy by threads that puts and gets should reach on 16 cores."""
    views: bool = False
    """Whether the batch is also read without a copy."""


CASES = [
    Case(Payload("dense", 1, 3, 64), 50, 2),
    Case(Payload("dense", 64, 3, 64), 50, 2, (0.25, 0.25), (6.6, 8.5), first=2.0),
    Case(Payload("dense", 8192, 5, 128), 15, 2, (8, 8), (93, 1037)),
    Case(Payload("dense", 1024, 9, 8192), 7, 2, (25, 25), (229, 518), share=0.5, views=True),
    Case(Payload("dense", 1024, 16, 32768), 3, 1, peers=False, share=0.8),
    Case(Payload("jagged", 1024, 4, 1500), 10, 1),
    Case(Payload("objects", 1024, 4, 0), 10, 1),
    Case(Payload("mixed", 512, 6, 1900), 15, 1, (8, 8), (60, 75)),
]
QUICK = [
    Case(Payload("dense", 8, 2, 16), 2, 1, views=True),
    Case(Payload("jagged", 16, 2, 10), 2, 1),
    Case(Payload("objects", 8, 2, 0), 2, 1),
    Case(Payload("mixed", 16, 6, 40), 2, 1),
]


class Got(NamedTuple):
    """The result of a get: seconds, processor seconds of the process, and the names of wrong fields."""

    seconds: float
    cpu: float
    wrong: list[str]


def get(partition: str, payload: Payload, seed: int) -> Got:
    """Get a batch and compare it. Runs in the reader."""
    keys, client = payload.keys, tq.get_client()
    cpu, start = time.process_time(), time.perf_counter()
    batch = client.kv_batch_get(keys, partition)
    seconds, used = time.perf_counter() - start, time.process_time() - cpu
    return Got(seconds, used, payloads.differences(batch, payload, seed))


def view(partition: str, payload: Payload, seed: int) -> tuple[float, float, float]:
    """Return the seconds of a get without a copy, of a read of a byte of every page, and of the end of the views.

    Runs in the reader. The end of a view looks for pages that were written to.
    """
    keys, client = payload.keys, tq.get_client()
    start = time.perf_counter()
    batch = client.kv_batch_get(keys, partition, copy=False)
    got = time.perf_counter()
    columns = [batch.get(name) for name in payloads.names(payload)]
    for column in columns:
        column.values().view(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()
    read = time.perf_counter()
    _check(Got(got - start, 0.0, payloads.differences(batch, payload, seed)), payload)
    if not all(map(is_view, columns)):
        raise AssertionError(f"{payload.name}: a get with copy=False has copied")
    ending = time.perf_counter()
    del batch, columns, column
    return got - start, read - got, time.perf_counter() - ending


class Round(NamedTuple):
    """The seconds of one round, and of its references."""

    put: float
    get: float
    clear: float
    beside_put: float
    beside_get: float
    cpu: dict[str, float]


def run(scale: Scale) -> list[Row]:
    """All cases."""
    cases = scale.pick(CASES, QUICK)
    with system() as queue, raw_socket() as bare, Worker(queue.address) as reader:
        measured = [_measured(case, queue, bare, reader) for case in cases]
    for case, rows in zip(cases, measured, strict=True):
        rows[:] = _beside_peers(scale, case, rows)
    return [row for rows in measured for row in rows]


def _beside_threads(case: Case, name: str, nbytes: int, put: Row, got: Row) -> list[Row]:
    """Return the rows of copies by threads, and of the parts of the rate of the fastest that puts and gets reach."""
    if nbytes < SHARED:
        return []
    copies, rows = ThreadedMemcpy(nbytes), []
    for threads in THREADS:
        copies.seconds(threads)
        best = statistics.median(copies.seconds(threads) for _ in range(COPIES)) * 1e3
        words = f"memcpy {name} by {threads} thread{'s' if threads > 1 else ''}"
        rows.append(Row(words, best, "ms", more={"GB/s": nbytes / best / 1e6}))
    fastest = min(row.ours for row in rows)
    target = case.share if usable_cores() >= MANY_CORES else None
    shares = [Row(f"{row.what}, rate", fastest / row.ours, SHARE, target=target) for row in (put, got)]
    return [*rows, *shares]


def _measured(case: Case, queue: System, bare: RawSocket, reader: Worker) -> list[Row]:
    """Return the rows of one case: its put, get, first get and clear, and for a large one copies by threads."""
    payload = case.payload
    nbytes = payloads.nbytes(payloads.make(payload, 0))
    large = nbytes >= LARGE
    copy = Memcpy(nbytes if large else 1)
    rounds = [_round(case, number, nbytes, queue, bare, reader, copy) for number in range(case.rounds + 1)][1:]
    first, beside_first = _first_gets(case, nbytes, queue, bare, copy)
    words = "memcpy" if large else "raw socket"
    name = f"{payload.name}, {nbytes / 2**20:.3g} MiB"
    targets, then = case.targets or (None, None), case.then or (None, None)
    put = _way("put", name, rounds, words, targets[0], then[0])
    got = _way("get", name, rounds, words, targets[1], then[1])
    ours, beside = ([seconds * 1e3 for seconds in each] for each in (first, beside_first))
    fresh = compared(f"first get {name}", "ms", ours, beside, words, target=case.first)
    clear = Row(f"clear {name}", statistics.median(r.clear for r in rounds) * 1e3, "ms")
    views = _views(case, name, reader, got) if case.views else []
    return [put, got, *views, fresh, clear, *_beside_threads(case, name, nbytes, put, got)]


def _views(case: Case, name: str, reader: Worker, copies: Row) -> list[Row]:
    """Return the rows of gets without a copy, of the first read of what they return, and of its end."""
    payload, seconds = case.payload, []
    for number in range(case.rounds + 1):
        tq.kv_batch_put(payload.keys, f"views-{number}", payloads.make(payload, number))
        seconds.append(reader.do(view, f"views-{number}", payload, number))
        tq.get_client().clear_partition(f"views-{number}")
    got, read, end = (statistics.median(each) * 1e3 for each in zip(*seconds[1:], strict=True))
    return [
        against(f"view {name}", "ms", got, copies.ours, "get", target=VIEW_TARGET),
        Row(f"read of a byte of every page of that view, {name}", read, "ms"),
        Row(f"end of that view, {name}", end, "ms"),
    ]


def _way(way: str, name: str, rounds: list[Round], words: str, target: float | None, then: float | None) -> Row:
    """Return the row of all puts, or of all gets."""
    ours = [getattr(each, way) * 1e3 for each in rounds]
    beside = [getattr(each, f"beside_{way}") * 1e3 for each in rounds]
    cpu = {f"{who}cpu_us": statistics.median(each.cpu[who + way] for each in rounds) * 1e6 for who in ("", "servers_")}
    more = {"best_ms": min(ours), **cpu}
    return compared(f"{way} {name}", "ms", ours, beside, words, target=target, then=then, more=more)


def _round(case: Case, number: int, nbytes: int, queue: System, bare: RawSocket, reader: Worker, copy: Memcpy) -> Round:
    payload, partition = case.payload, f"{case.payload.kind}-{case.payload.rows}-{case.payload.width}-{number}"
    batch, keys = payloads.make(payload, number), payload.keys
    large = nbytes >= LARGE
    beside_put = copy.seconds() if large else bare.seconds(nbytes, 1)
    served, cpu = queue.cpu(), time.process_time()
    put = clocked(tq.kv_batch_put, keys, partition, batch, [{"n": n, "status": "running"} for n in range(len(keys))])
    used = {"put": time.process_time() - cpu, "servers_put": queue.cpu() - served}
    beside_get = copy.seconds() if large else bare.seconds(1, nbytes)
    served = queue.cpu()
    got = reader.do(get, partition, payload, number)
    used |= {"get": got.cpu, "servers_get": queue.cpu() - served}
    _check(got, payload)
    clear = clocked(tq.kv_clear, keys, partition)
    tq.get_client().clear_partition(partition)
    return Round(put, got.seconds, clear, beside_put, beside_get, used)


def _check(got: Got, payload: Payload) -> None:
    if got.wrong:
        raise AssertionError(f"{payload.name}: the bytes of the get differ from those of the put in {got.wrong}")


def _first_gets(
    case: Case, nbytes: int, queue: System, bare: RawSocket, copy: Memcpy
) -> tuple[list[float], list[float]]:
    """Return the seconds of the first get of new processes, and of the references."""
    tq.kv_batch_put(case.payload.keys, "fresh", payloads.make(case.payload, 7))
    seconds, beside = [], []
    for _ in range(case.fresh):
        with Worker(queue.address) as reader:
            got = reader.do(get, "fresh", case.payload, 7)
        _check(got, case.payload)
        seconds.append(got.seconds)
        beside.append(copy.seconds() if nbytes >= LARGE else bare.seconds(1, nbytes))
    tq.get_client().clear_partition("fresh")
    return seconds, beside


def _beside_peers(scale: Scale, case: Case, rows: list[Row]) -> list[Row]:
    """Return the rows, with the figures of the peers for the way that the first word of a row names."""
    if not case.peers:
        return rows
    question = {**asdict(case.payload), "rounds": min(case.rounds, PEER_ROUNDS)}
    figures = scale.ask_peers("kv", **question)
    if case.views:
        figures |= {f"{name}, NumPy arrays": each for name, each in scale.ask_peers("arrays", **question).items()}
    found = []
    for row in rows:
        figure = f"{row.what.split()[0]}_{row.unit}"
        found.append(replace(row, peers={name: each[figure] for name, each in figures.items() if figure in each}))
    return found
