"""A big balanced deal in a real controller: others are answered while it is made, and it is right."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq

RANKS, BATCH, ONLOOKERS = 64, 512, 8
ROWS = RANKS * BATCH


@pytest.fixture(scope="module")
def system() -> Iterator[Any]:
    tq.init({"system": {"name": "long-deals"}, "controller": {"sampler": tq.SeqlenBalancedSampler(1, RANKS)}})
    yield tq
    tq.close()


def test_others_are_answered_meanwhile(system: Any) -> None:
    client = tq.get_client()
    lengths = torch.randint(1, 8000, (ROWS,), generator=torch.Generator().manual_seed(1))
    meta = client.put(TensorDict({"x": lengths}, [ROWS]), partition_id="p")
    meta.update_custom_meta([{"total_lengths": length} for length in lengths.tolist()])
    client.set_custom_meta(meta)
    shares: dict[int, list[int]] = {}
    answered: list[str] = []

    async def fetch(rank: int) -> None:
        sampling = {"dp_rank": rank, "batch_index": 0}
        got = await client.async_get_meta(["x"], BATCH, "p", task_name="t", sampling_config=sampling)
        shares[rank] = got.global_indexes
        answered.append("reader")

    async def look() -> None:
        await client.async_get_partition_list()
        answered.append("onlooker")

    async def together() -> None:
        """The requests of the onlookers arrive after those of the readers."""
        await asyncio.gather(*map(fetch, range(RANKS)), *(look() for _ in range(ONLOOKERS)))

    asyncio.run(together())
    assert answered[0] == "onlooker", "nobody was answered until the deal was made"
    rows = sorted(row for share in shares.values() for row in share)
    assert rows == sorted(meta.global_indexes)
    first = meta.global_indexes[0]
    sums = [int(lengths[[row - first for row in share]].sum()) for share in shares.values()]
    assert max(sums) - min(sums) <= 8000
