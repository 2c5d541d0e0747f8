"""Groups that are dropped and made again, by every kind of put of a client, and the refill loop of a producer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulated import Start, numbers
from transfer_queue.sampler import GRPOGroupNSampler
from transfer_queue.testing import Client, Cluster

CONF = {"controller": {"polling_mode": True}}
SIZE = 4

Put = Callable[[Client, int, int], object]


def by_order(client: Client, count: int, start: int) -> object:
    return client.put(numbers(count, start), partition_id="p", group_ids=["g"] * count)


def by_key(client: Client, count: int, start: int) -> object:
    keys = [f"k{number}" for number in range(start, start + count)]
    return client.kv_batch_put(keys, "p", numbers(count, start), group_ids=["g"] * count)


PUTS = [by_order, by_key]


@pytest.fixture
def cluster(start: Start) -> Cluster:
    """A cluster with a partition in which an incomplete group "g" was dropped."""
    made = start(seed=1, sampler=GRPOGroupNSampler(SIZE), conf=CONF)
    client = made.client("a")
    client.create_partition("p", group_size=SIZE)
    client.put(numbers(SIZE - 1, 100), partition_id="p", group_ids=["g"] * (SIZE - 1))
    assert client.drop("p", "g", reason="all alike") == SIZE - 1
    return made


def values(client: Client) -> list[int]:
    meta = client.get_meta("x", SIZE, "p", task_name="train", sampling_config={"dp_rank": 0, "batch_index": 0})
    return [] if not meta.size else client.get_data(meta)["x"].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("put", PUTS)
@pytest.mark.parametrize("late_first", [True, False])
def test_the_whole_group_is_made_again(cluster: Cluster, put: Put, late_first: bool, caplog) -> None:
    client = cluster.client("b")
    for late in (late_first, not late_first):
        if late:
            put(client, 1, 50)
            assert "1 samples of partition 'p' were dropped when they were put" in caplog.text
        else:
            put(client, SIZE, 10)
    assert values(client) == [10, 11, 12, 13]
    (progress,) = client.status().partitions
    assert progress.dropped == {"all alike": SIZE - 1, "of a dropped group": 1}


def test_a_refill_loop_makes_dropped_groups_again(start: Start) -> None:
    """A worker ends before its last samples; the prompts are made again until the task has its groups."""
    made = start(seed=1, sampler=GRPOGroupNSampler(SIZE), conf=CONF)
    client = made.client("a")
    client.create_partition("p", group_size=SIZE, max_staleness=0, rows_per_version=2 * SIZE)
    client.want("p", 2, "train")
    for attempt in range(4):
        worker = made.client(f"w{attempt}")
        for prompt in range(worker.wanted("p", "train", most=8)):
            count = SIZE if attempt else SIZE - 1
            worker.put(numbers(count, 10 * attempt), partition_id="p", group_ids=[prompt] * count)
        if attempt < 3:
            worker.close()
            client.drop("p", [0, 1], reason="incomplete")
            assert client.wanted("p", "train") == 2
    assert client.wanted("p", "train") == 0
    for batch_index in range(2):
        config = {"dp_rank": 0, "batch_index": batch_index}
        meta = client.get_meta("x", SIZE, "p", task_name="train", sampling_config=config)
        assert client.get_data(meta)["x"].tolist() == [30, 31, 32, 33]
