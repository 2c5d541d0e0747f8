"""A producer that is killed between its reservation and its put does not keep the others from putting."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest

import transfer_queue as tq
import warm
from simulated import numbers


def reserve(config: Any, told: Connection[Any, Any]) -> None:
    """Reserve all samples that the partition accepts, and hang before the put."""
    tq.init(config)
    meta = tq.get_client().get_meta([], 4, "p", mode="insert")
    told.send(meta.global_indexes)
    signal.pause()


@pytest.mark.parametrize("options", [{"max_staleness": 0, "rows_per_version": 4}, {"max_rows": 4}], ids=str)
def test_the_reservation_of_a_killed_producer_makes_space(options: dict[str, int]) -> None:
    config = tq.init()
    client = tq.get_client()
    client.create_partition("p", **options)
    producer, here = warm.reporting(reserve, config)
    try:
        assert here.recv() == [0, 1, 2, 3]
        with pytest.raises(tq.CapacityError):
            client.put(numbers(4), partition_id="p")
        producer.kill()
        meta = client.get_meta([], 4, "p", mode="insert", timeout=60)
        client.put(numbers(4), metadata=meta)
        assert client.get_meta(["x"], 4, "p", task_name="train").global_indexes == [4, 5, 6, 7]
        assert client.status().partitions[0].dropped == {"reserved by a client that is gone": 4}
    finally:
        producer.kill()
        producer.join()
        tq.close()
