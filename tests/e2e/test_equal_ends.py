"""Four dp_ranks of two replicas as real processes: every rank ends after the same number of batches."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq

RANKS, REPLICAS, SCHEDULES, BATCH = 4, 2, 20, 4
SECONDS = 120


@pytest.fixture(params=["rank_aware", "grpo", "balanced"])
def system(request: pytest.FixtureRequest) -> Iterator[str]:
    made = {
        "rank_aware": lambda: tq.RankAwareSampler(dp_size=RANKS),
        "grpo": lambda: tq.GRPOGroupNSampler(2, dp_size=RANKS),
        "balanced": lambda: tq.SeqlenBalancedSampler(2, RANKS),
    }
    tq.init({"system": {"name": "ends"}, "controller": {"polling_mode": True, "sampler": made[request.param]()}})
    yield request.param
    tq.close()


def read(rank: int, replica: int, step: Any, pipe: Any) -> None:
    """Trains on all schedules, in step with all others after every batch; gives the rows of its batches by schedule."""
    draw = random.Random(rank * REPLICAS + replica)
    out: list[list[list[int]]] = []
    for seed in range(SCHEDULES):
        dataset = tq.StreamingDataset(None, BATCH, BATCH, ["x"], f"p{seed}", "train", rank)
        batches: list[list[int]] = []
        for data, _ in dataset:
            batches.append(data["x"].tolist())
            sum(range(draw.choice([1, 1000, 100_000])))  # of no use, as torch's threads do not outlive a fork
            step.wait(SECONDS)  # broken where some rank has ended, or stays alone
        out.append(batches)
    pipe.send(out)
    tq.close()


def write(seed: int) -> int:
    """Puts an uneven number of rows, fields of some of them after the seal; how many."""
    draw = random.Random(seed)
    client = tq.get_client()
    rows = 2 * draw.randint(RANKS * 3, RANKS * 8)
    late = 2 * draw.randint(RANKS, RANKS + 3)  # enough for a rank that is a batch ahead when the seal comes
    for start in range(0, rows - late, 6):
        part = torch.arange(start, min(start + 6, rows - late))
        client.put(TensorDict({"x": part}, [len(part)]), partition_id=f"p{seed}")
    last = torch.arange(rows - late, rows)
    meta = client.put(TensorDict({"y": last}, [late]), partition_id=f"p{seed}")
    client.seal(f"p{seed}")
    for start in range(0, late, 2):
        client.put(TensorDict({"x": last[start : start + 2]}, [2]), meta[start : start + 2])
    return rows


def test_every_rank_gets_as_many_and_every_replica_the_same(system: str) -> None:
    context = multiprocessing.get_context("fork")
    step = context.Barrier(RANKS * REPLICAS)
    readers = []
    for rank in range(RANKS):
        for replica in range(REPLICAS):
            ours, theirs = context.Pipe()
            process = context.Process(target=read, args=(rank, replica, step, theirs), daemon=True)
            process.start()
            readers.append((rank, process, ours))
    rows = [write(seed) for seed in range(SCHEDULES)]
    got: dict[int, list[list[list[int]]]] = {}
    for rank, process, pipe in readers:
        assert pipe.poll(SECONDS), f"a replica of rank {rank} never ended"
        batches = pipe.recv()
        assert got.setdefault(rank, batches) == batches, "replicas of a rank got other batches"
        process.join(SECONDS)
        assert process.exitcode == 0
    status = {partition.name: partition for partition in tq.get_client().status().partitions}
    for seed in range(SCHEDULES):
        dealt = [row for rank in range(RANKS) for batch in got[rank][seed] for row in batch]
        over = status[f"p{seed}"].passed.get("train", {}).get("remainder", 0)
        assert len(dealt) == len(set(dealt)) == rows[seed] - over
        numbers = [len(got[rank][seed]) for rank in range(RANKS)]
        assert len(set(numbers)) == 1, f"schedule {seed}: {numbers}"
