"""How many requests, clients, waiting ranks and samples does one controller carry? What would 1,000 nodes ask of it?

The controller handles requests in one thread, so the processor time of that thread for a request is the limit on a
machine with many cores. It is read from /proc while eight clients in two processes make requests as fast as they can.
The demand of 1,000 nodes is computed from published trainings (`harness/trainings.py`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tensordict import TensorDict

from benchmarks.harness.machine import memory_of
from benchmarks.harness.report import Row, Scale, against
from benchmarks.harness.systems import System, Worker, system, waiting_claims, workers
from benchmarks.harness.trainings import STYLES, TRAININGS
from transfer_queue import interface as tq
from transfer_queue.attachment import CURRENT
from transfer_queue.client import TransferQueueClient

QUESTION = "How much does one controller carry, and what would 1,000 nodes ask of it?"
NOTE = """The share of a training is the part of the time of the controller's thread that it would need on 1,000 nodes,
if its producers put in batches, answer by answer, or also every 1,024 tokens of an answer. Decision 0033 says what
follows."""
NODES = 1000
BATCH = 64
FIELDS = ["prompt", "score", "mask"]
PROCESSES, THREADS = 2, 4


def sample(rows: int) -> TensorDict:
    """Return the values of some samples with three fields."""
    return TensorDict(
        {"prompt": torch.ones(rows, 16), "score": torch.ones(rows), "mask": torch.ones(rows, 16)}, batch_size=[rows]
    )


# ---------------------------------------------------------------- in the clients' processes

Act = Callable[[], object]
"""Makes one request."""

_clients: list[TransferQueueClient] = []
_acts: dict[tuple[str, str, int], Act] = {}  # what was made for (kind, name, client)


def connect(count: int) -> None:
    """Make clients, each with its own connection. Runs in a worker."""
    torch.set_num_threads(1)
    tq.get_client()
    assert CURRENT.system is not None
    while len(_clients) < count:
        client = TransferQueueClient(CURRENT.system)
        client.get_partition_list()
        _clients.append(client)


def disconnect() -> None:
    """Close these clients."""
    while _clients:
        _clients.pop().close()
    _acts.clear()


def repeat(kind: str, name: str, until: float) -> int:
    """Make requests of a kind from all clients, each in a thread; return their number. Runs in a worker."""
    counts = [0] * len(_clients)

    def one(which: int) -> None:
        act = _acts.get((kind, name, which))
        if act is None:
            act = _acts[kind, name, which] = ACTS[kind](_clients[which], f"{name}-{which}")
        while time.monotonic() < until:
            act()
            counts[which] += 1

    threads = [threading.Thread(target=one, args=(which,)) for which in range(len(_clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


def _put_one(client: TransferQueueClient, name: str) -> Act:
    row, numbers = dict(sample(1)[0].items()), iter(range(1 << 40))

    def act() -> None:
        number = next(numbers)
        client.kv_put(f"{name}-{number}", "one", row, {"n": number, "status": "fresh"})

    return act


def _put_batch(client: TransferQueueClient, name: str) -> Act:
    rows, numbers = sample(BATCH), iter(range(1 << 40))
    tags = [{"n": n, "status": "fresh"} for n in range(BATCH)]

    def act() -> None:
        first = next(numbers) * BATCH
        client.kv_batch_put([f"{name}-{first + n}" for n in range(BATCH)], "many", rows, tags=tags)

    return act


def _get(client: TransferQueueClient, name: str) -> Act:
    keys = [f"{name}-{n}" for n in range(BATCH)]
    client.kv_batch_put(keys, "read", sample(BATCH))
    return lambda: client.kv_batch_get(keys, "read")


def _tag(client: TransferQueueClient, name: str) -> Act:
    client.kv_put(name, "tags", dict(sample(1)[0].items()), {"n": 0})
    numbers = iter(range(1 << 40))
    return lambda: client.kv_put(name, "tags", tag={"n": next(numbers), "status": "running"})


def _claim(client: TransferQueueClient, name: str) -> Act:
    client.get_meta(FIELDS, 1, "claimed", task_name=name)

    def act() -> None:
        meta = client.get_meta(FIELDS, BATCH, "claimed", task_name=name)
        assert len(meta) == BATCH

    return act


def _claim_and_ack(client: TransferQueueClient, name: str) -> Act:
    client.get_meta(FIELDS, 1, "claimed", task_name=f"leased-{name}", lease=600.0)

    def act() -> None:
        meta = client.get_meta(FIELDS, BATCH, "claimed", task_name=f"leased-{name}", lease=600.0)
        assert client.ack(meta)

    return act


ACTS: dict[str, Callable[[TransferQueueClient, str], Act]] = {
    "put of a row": _put_one, "put of 64 rows": _put_batch, "get of 64 rows": _get, "tag update": _tag,
    "claim": _claim, "claim and ack": _claim_and_ack,
}  # fmt: skip


def wait_for_rows() -> None:
    """Let every client of this process wait for a row of its own. Runs in a worker."""

    async def one(client: TransferQueueClient) -> None:
        await client.async_get_meta(["x"], 1, "awaited", task_name="train", timeout=60.0)

    async def all_of_them() -> None:
        await asyncio.gather(*(one(client) for client in _clients))

    asyncio.run(all_of_them())


# ---------------------------------------------------------------- measurements


def run(scale: Scale) -> list[Row]:
    """Run all measurements."""
    found = []
    with system() as queue, workers(PROCESSES, queue.address) as processes:
        costs, rows = _costs(scale, queue, processes)
        found += rows
        found += _clients_and_ranks(scale, queue, processes)
    found += _demand(costs)
    return found


def _thread_seconds(queue: System) -> float:
    """Return the processor seconds of the controller's main thread."""
    pid = queue.pids["controller"]
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def _written(queue: System, kind: str, worker: Worker, seconds: float) -> float:
    """Return the bytes of the journal for each request of a kind, between two snapshots."""
    worker.do(repeat, kind, f"{kind}-journal", 0.0)
    while True:
        before = _journal(queue)
        done: int = worker.do(repeat, kind, f"{kind}-journal", time.monotonic() + min(0.1, seconds / 5))
        time.sleep(0.05)
        after = _journal(queue)
        if done and before.keys() == after.keys():
            return (sum(after.values()) - sum(before.values())) / done


def _journal(queue: System) -> dict[str, int]:
    """Return the sizes of the files with the records of the journal."""
    return {path.name: path.stat().st_size for path in (queue.running.folder / "journal").glob("segment-*")}


def _costs(scale: Scale, queue: System, processes: list[Worker]) -> tuple[dict[str, float], list[Row]]:
    """Measure the time of the controller's thread for each kind of request."""
    seconds = scale.pick(1.5, 0.1)
    for worker in processes:
        worker.do(connect, THREADS)
    rows = scale.pick(200_000, 20_000)
    tq.get_client().put(sample(rows), partition_id="claimed")
    costs: dict[str, float] = {}
    found = []
    for kind in ACTS:
        for index, worker in enumerate(processes):
            worker.do(repeat, kind, f"{kind}-{index}", 0.0)  # makes what the requests need, and sends no request
        spent = _thread_seconds(queue)
        until = time.monotonic() + seconds
        for index, worker in enumerate(processes):
            worker.begin(repeat, kind, f"{kind}-{index}", until)
        done = sum(worker.result() for worker in processes)
        cost = (_thread_seconds(queue) - spent) / done
        costs[kind] = cost
        more = {
            "us": cost * 1e6,
            "journal_bytes": _written(queue, kind, processes[0], seconds),
            "done_a_second": done / seconds,
        }
        one = "pairs of a claim and its ack" if kind == "claim and ack" else f"requests, only of the kind {kind!r}"
        found.append(Row(f"{one}, that a full controller carries", 1 / cost, "a second", more=more))
    costs["ack"] = max(0.0, costs.pop("claim and ack") - costs["claim"])
    return costs, found


def _clients_and_ranks(scale: Scale, queue: System, processes: list[Worker]) -> list[Row]:
    """Measure what an idle connection and a waiting claim take."""
    clients = scale.pick(1000, 20)
    pid = queue.pids["controller"]
    before = memory_of(pid)["anonymous"]
    for worker in processes:
        worker.do(connect, THREADS + clients // PROCESSES)
    connected = (memory_of(pid)["anonymous"] - before) / clients
    spent, number = _thread_seconds(queue), scale.pick(2000, 50)
    client = tq.get_client()
    for _ in range(number):
        client.get_partition_list()
    among = (_thread_seconds(queue) - spent) / number
    client.create_partition("awaited")
    before = memory_of(pid)["anonymous"]
    spent = _thread_seconds(queue)
    for worker in processes:
        worker.begin(wait_for_rows)
    ranks = clients + PROCESSES * THREADS
    time.sleep(scale.pick(3.0, 0.5))  # no request for the status may be among those that are measured
    parked, waiting = (_thread_seconds(queue) - spent) / ranks, (memory_of(pid)["anonymous"] - before) / ranks
    _until_waiting(ranks)
    spent = _thread_seconds(queue)
    client.put(TensorDict({"x": torch.ones(ranks)}, batch_size=[ranks]), partition_id="awaited")
    for worker in processes:
        worker.result()
    woken = (_thread_seconds(queue) - spent) / ranks
    for worker in processes:
        worker.do(disconnect)
    spent = _thread_seconds(queue)
    for _ in range(number):
        client.get_partition_list()
    alone = (_thread_seconds(queue) - spent) / number
    found = [
        Row(f"an idle client, memory of the controller, {clients:,} clients", connected, "bytes"),
        against(f"an empty request beside {clients:,} idle clients", "us", among * 1e6, alone * 1e6, "without them"),
    ]
    return [
        *found,
        Row(f"a waiting claim, memory of the controller, {ranks:,} ranks", waiting, "bytes"),
        Row(f"a claim that begins to wait, {ranks:,} ranks", parked * 1e6, "us"),
        Row(f"a waiting claim that a put completes, {ranks:,} ranks", woken * 1e6, "us"),
    ]


def _until_waiting(ranks: int) -> None:
    """Wait until this number of claims waits at the controller."""
    until = time.monotonic() + 60
    while waiting_claims("awaited") < ranks:
        if time.monotonic() > until:
            raise AssertionError(f"{ranks} claims do not wait after 60 s")
        time.sleep(0.05)


def _demand(costs: dict[str, float]) -> list[Row]:
    """Compute which share of a controller's thread published trainings would need on many nodes."""
    found = []
    for style in STYLES:
        for training in TRAININGS:
            needs = style.requests(training.tokens)
            seconds = sum(count * costs[kind] for kind, count in needs.items())
            samples = training.samples_a_second(NODES)
            more = {
                "samples_a_second": samples, "requests_a_second": samples * sum(needs.values()),
                "full_at_nodes": NODES / (samples * seconds),
            }  # fmt: skip
            found.append(Row(f"{training.name}, {style.name}: share", 100 * samples * seconds, "%", more=more))
    return found
