"""Rank-consistent fetches through a client: what is refused, what is kept, and what never happens twice."""

from __future__ import annotations

import random
from typing import Any

import pytest

from simulated import Start, numbers
from transfer_queue.sampler import GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.testing import Client

POLLING = {"controller": {"polling_mode": True}}
SAMPLERS = {
    "rank_aware": lambda: RankAwareSampler(dp_size=2),
    "grpo": lambda: GRPOGroupNSampler(2, dp_size=2),
    "balanced": lambda: SeqlenBalancedSampler(2, 2),
}


@pytest.fixture(params=sorted(SAMPLERS))
def sampler(request: pytest.FixtureRequest) -> BaseSampler:
    return SAMPLERS[request.param]()


@pytest.fixture
def client(start: Start, sampler: BaseSampler) -> Client:
    found = start(seed=3, sampler=sampler, conf=POLLING).client("a")
    found.put(numbers(40), partition_id="p")
    return found


def fetch(client: Client, count: int = 4, **sampling: Any) -> list[int]:
    return client.get_meta(["x"], count, "p", task_name="t", sampling_config=sampling).global_indexes


def test_the_same_key_with_another_batch_size(client: Client) -> None:
    first = fetch(client, dp_rank=1, batch_index=0)
    with pytest.raises(ValueError, match="was dealt with batch_size 4, but this claim has 2"):
        fetch(client, 2, dp_rank=1, batch_index=0)
    assert fetch(client, dp_rank=1, batch_index=0) == first


def test_a_rank_beyond_dp_size(client: Client) -> None:
    for sampling in ({"dp_rank": 2, "batch_index": 0}, {"dp_rank": 7, "batch_index": 3}):
        with pytest.raises(ValueError, match="must be less than dp_size"):
            fetch(client, **sampling)
    assert sorted(row for rank in (0, 1) for row in fetch(client, dp_rank=rank, batch_index=0)) == list(range(8))


def test_without_batch_index_nothing_is_kept(client: Client, sampler: BaseSampler) -> None:
    if isinstance(sampler, RankAwareSampler):
        with pytest.raises(ValueError, match="needs dp_rank and batch_index"):
            fetch(client, dp_rank=0)
        return
    got = [fetch(client, dp_rank=0) for _ in range(3)]
    assert sorted(row for rows in got for row in rows) == list(range(12))
    client.clear_samples(client.get_meta(["x"], None, "p", mode="force_fetch").select_samples(range(4)))
    assert fetch(client, dp_rank=0) == [12, 13, 14, 15]


@pytest.mark.parametrize("seed", range(5))
def test_no_row_is_dealt_to_a_task_twice(client: Client, seed: int) -> None:
    draw = random.Random(seed)
    keys = [(task, rank, number) for task in "tu" for rank in range(2) for number in range(6)]
    got: dict[tuple[str, int, int], list[int]] = {}
    for turn in range(200):
        if turn == 150:
            client.seal("p")
        task, rank, number = draw.choice(keys)
        sampling = {"dp_rank": rank, "batch_index": number}
        rows = client.get_meta(["x"], 4, "p", task_name=task, sampling_config=sampling).global_indexes
        assert got.setdefault((task, rank, number), rows) == rows or not got[task, rank, number]
        got[task, rank, number] = rows
    for task in "tu":
        rows = [row for key, batch in got.items() if key[0] == task for row in batch]
        assert len(rows) == len(set(rows)) == 40
