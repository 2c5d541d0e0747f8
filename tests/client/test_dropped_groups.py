"""Groups that are dropped and made again, by every kind of put of a client."""

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
