"""A big balanced deal in a real controller: others are answered while it is made, and it is right."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq

RANKS, BATCH = 64, 512
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
    answered: list[float] = []
    over = threading.Event()

    def ask_on() -> None:
        while not over.is_set():
            client.get_partition_list()
            answered.append(time.monotonic())

    onlooker = threading.Thread(target=ask_on)
    onlooker.start()
    shares: dict[int, list[int]] = {}
    spans: list[tuple[float, float]] = []

    def fetch(rank: int) -> None:
        begin = time.monotonic()
        sampling = {"dp_rank": rank, "batch_index": 0}
        shares[rank] = client.get_meta(["x"], BATCH, "p", task_name="t", sampling_config=sampling).global_indexes
        spans.append((begin, time.monotonic()))

    readers = [threading.Thread(target=fetch, args=(rank,)) for rank in range(RANKS)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    over.set()
    onlooker.join()
    begin, end = spans[0]
    assert any(begin < moment < end for moment in answered), "nobody was answered until the deal was made"
    rows = sorted(row for share in shares.values() for row in share)
    assert rows == sorted(meta.global_indexes)
    first = meta.global_indexes[0]
    sums = [int(lengths[[row - first for row in share]].sum()) for share in shares.values()]
    assert max(sums) - min(sums) <= 8000
