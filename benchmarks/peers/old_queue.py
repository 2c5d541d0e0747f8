"""Measures the PyPI package TransferQueue 0.1.11 by its public calls, from Ray actors as its users call it."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

import transfer_queue as tq
from benchmarks.harness import payloads
from benchmarks.peers.answering import PROCESSES, serve, team, threads

TEAM: list[Any] = []


@ray.remote(num_cpus=0)
class Other:
    """Another process, attached to the same system."""

    def __init__(self) -> None:
        tq.init()

    def ready(self) -> bool:
        """Return when the actor has started."""
        return True

    def get(self, keys: list[str], partition: str, case: dict[str, Any], seed: int) -> float:
        """Return the seconds of a get, and compare every byte."""
        start = time.perf_counter()
        value = tq.kv_batch_get(keys=keys, partition_id=partition)
        seconds = time.perf_counter() - start
        wrong = payloads.differences(value, payloads.Payload(**case), seed)
        assert not wrong, wrong
        return seconds

    def puts(self, act: str, seconds: float, name: str, clients: int) -> float:
        """Return the small puts or tag updates per second of `clients` threads."""
        row = {"prompt": torch.arange(16), "score": torch.tensor(0.5), "mask": torch.ones(16)}
        until = time.monotonic() + seconds

        def one(which: int) -> float:
            count = 0
            while time.monotonic() < until:
                if act == "put" or not count:
                    tq.kv_put(key=f"{name}-{which}-{count}", partition_id=act, fields=row, tag={"n": count})
                else:
                    tq.kv_put(key=f"{name}-{which}-0", partition_id=act, tag={"n": count})
                count += 1
            return count / seconds

        return threads(one, clients)

    def yields(self, config: Any, batches: int, rows: int) -> list[float]:
        """Return the time at which each batch arrived, by the monotonic clock."""
        dataset = tq.StreamingDataset(
            config=config, batch_size=rows, micro_batch_size=rows, data_fields=["x", "y"], partition_id="wake",
            task_name="train", dp_rank=0,
        )  # fmt: skip
        found = []
        for _ in tq.StreamingDataLoader(dataset):
            found.append(time.monotonic())
            if len(found) == batches:
                return found
        return found


def kv(rounds: int, **case: Any) -> dict[str, float]:
    """Return the milliseconds of a put and a get."""
    payload = payloads.Payload(**case)
    (other,), puts, gets = team(TEAM, Other, 1), [], []
    for seed in range(rounds + 1):
        batch, partition = payloads.make(payload, seed), f"{payload.kind}-{payload.rows}-{payload.width}-{seed}"
        start = time.perf_counter()
        tq.kv_batch_put(keys=payload.keys, partition_id=partition, fields=batch)
        puts.append(time.perf_counter() - start)
        gets.append(ray.get(other.get.remote(payload.keys, partition, case, seed)))
        tq.kv_clear(keys=payload.keys, partition_id=partition)
    return {"put_ms": statistics.median(puts[1:]) * 1e3, "get_ms": statistics.median(gets[1:]) * 1e3}


def small(act: str, clients: int, seconds: float) -> dict[str, float]:
    """Return the puts of rows, or tag updates, per second of some clients."""
    others = team(TEAM, Other, min(clients, PROCESSES))
    each = clients // len(others)
    ray.get([other.puts.remote(act, 0.2, f"warm-{clients}-{i}", each) for i, other in enumerate(others)])
    rate = sum(ray.get([other.puts.remote(act, seconds, f"{clients}-{i}", each) for i, other in enumerate(others)]))
    tq.get_client().clear_partition(act)
    return {"a_second": rate}


def claims(rows: int, batch: int) -> dict[str, float] | None:
    """Return the milliseconds of a claim among `rows` rows."""
    if rows > 200_000:
        return None
    client, partition = tq.get_client(), f"claims-{rows}"
    for first in range(0, rows, 10_000):
        numbers = torch.arange(first, min(rows, first + 10_000), dtype=torch.int32)
        client.put(TensorDict(dict.fromkeys("xyz", numbers), batch_size=[len(numbers)]), partition_id=partition)
    took = []
    for _ in range(8):
        start = time.perf_counter()
        meta = client.get_meta(["x", "y", "z"], batch, partition, task_name="t")
        took.append(time.perf_counter() - start)
        assert len(meta) == batch
    client.clear_partition(partition)
    return {"ms": statistics.median(took[1:]) * 1e3}


def wakeup(rows: int, batches: int) -> dict[str, float]:
    """Return the milliseconds from the return of a put to the yield of a waiting loader, which the first put starts."""
    client, (other,) = tq.get_client(), team(TEAM, Other, 1)
    promise = other.yields.remote(CONFIG, batches, rows)
    called, returned = [], []
    for number in range(batches):
        time.sleep(1.4 + 0.13 * number % 1.0)  # its loader polls once a second: puts are spread over that second
        values = {"x": torch.zeros(rows, 64), "y": torch.full((rows,), number)}
        batch = TensorDict(values, batch_size=[rows])
        called.append(time.monotonic())
        client.put(batch, partition_id="wake")
        returned.append(time.monotonic())
    came = ray.get(promise)
    waits = [max(0.0, at - back) * 1e3 for at, back in zip(came, returned)]
    whole = [(at - begin) * 1e3 for at, begin in zip(came, called)]
    return {"median_ms": statistics.median(waits[1:]), "from_call_ms": statistics.median(whole[1:])}


def balance(lengths: list[int], k: int, equal: bool) -> dict[str, float]:
    """Return the milliseconds of a division."""
    from transfer_queue.sampler.seqlen_balanced_sampler import get_seqlen_balanced_partitions

    start = time.thread_time()
    get_seqlen_balanced_partitions(lengths, k, equal)
    return {"ms": (time.thread_time() - start) * 1e3}


def memory() -> dict[str, float]:
    """Return the MB, without shared memory, of its idle servers: the Ray actors that this program has not started."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        words = (process / "cmdline").read_bytes()
        if words.startswith(b"ray::") and not words.startswith((b"ray::IDLE", b"ray::Other")):
            lines = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
            total += (int(lines["VmRSS"].split()[0]) - int(lines["RssShmem"].split()[0])) * 1024
    return {"resident_mb": total / 1e6}


if __name__ == "__main__":
    # each of its actors reserves a core, and would wait forever on a small machine
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
    began = time.perf_counter()
    CONFIG = tq.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    tq.kv_put(key="a", partition_id="first", fields={"x": torch.arange(4)})
    STARTED = time.perf_counter() - began
    serve({
        "kv": kv, "small": small, "claims": claims, "wakeup": wakeup, "balance": balance,
        "memory": memory, "startup": lambda: {"s": STARTED},
    })  # fmt: skip
    tq.close()
    ray.shutdown()
