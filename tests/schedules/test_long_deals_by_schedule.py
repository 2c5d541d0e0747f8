"""Long deals of a balanced sampler among clears, resets and drops: all are answered, and no row is dealt twice."""

from __future__ import annotations

import random

import numpy as np
import pytest

from simulated import Start, numbers
from transfer_queue.core.claims import deal
from transfer_queue.core.claims.deal_jobs import LongDeals
from transfer_queue.core.events.records import ConsumptionForgotten, Dealt, PartitionDropped
from transfer_queue.errors import BatchGoneError
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler import SeqlenBalancedSampler
from transfer_queue.testing import Client, Cluster, Task

GROUP, RANKS = 2, 3


def upset(cluster: Cluster, client: Client, draw: random.Random) -> None:
    """Something happens that a deal under way may not survive."""
    kind = draw.choice(["put", "put", "put", "clear", "clear", "reset", "drop"])
    if kind == "put":
        client.start(client.operations.put(numbers(draw.randint(1, 9) * GROUP), partition_id="p"))
    elif kind == "reset":
        client.start(client.operations.reset_consumption("p", "t"))
    elif kind == "drop" and draw.random() < 0.3:
        client.start(client.operations.clear_partition("p"))
    partition = cluster.controller.state.partitions.get("p")
    if kind == "clear" and partition is not None and partition.rows.count:
        rows = partition.rows.indexes_of(partition.rows.live_positions()).tolist()
        client.start(client.operations.clear_samples(BatchMeta(draw.sample(rows, 1), ["p"])))


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_meanwhile(start: Start, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(deal, "LONG", 2)
    draw = random.Random(seed)
    cluster = start(seed=seed, sampler=SeqlenBalancedSampler(GROUP, RANKS))
    readers = [cluster.client(f"r{rank}") for rank in range(RANKS)]
    writer = cluster.client("w")
    tasks: list[Task[BatchMeta]] = []
    for number in range(12):
        for rank, reader in enumerate(readers):
            sampling = {"dp_rank": rank, "batch_index": number}
            wait = draw.choice([0.0, 0.05, 5.0])
            asked = reader.operations.await_batch(["x"], 4, "p", "t", sampling, timeout=wait)
            cluster.later(draw.uniform(0, 1), lambda r=reader, a=asked: tasks.append(r.start(a)))  # type: ignore[misc]
    for _ in range(40):
        cluster.later(draw.uniform(0, 1), lambda: upset(cluster, writer, draw))
    cluster.advance(10)
    assert len(tasks) == 12 * RANKS
    for task in tasks:
        assert task.done, "a reader was never answered"
        assert task.error is None or isinstance(task.error, BatchGoneError)
    assert (
        len(cluster.controller.context.services[LongDeals].is_stale),
        cluster.controller.context.services[LongDeals].begun > 0,
    ) == (0, True)
    dealt: set[int] = set()
    for record in cluster.records:
        if isinstance(record, (ConsumptionForgotten, PartitionDropped)):
            dealt.clear()
        elif isinstance(record, Dealt):
            rows = np.frombuffer(record.consumed, "<i8").tolist()
            assert not dealt & set(rows), "a row was dealt twice"
            dealt |= set(rows)
