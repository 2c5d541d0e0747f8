"""`replicas: 2`: a put writes into two units, and counts, fails and ends in both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from simulated import Start, numbers, ragged, table
from transfer_queue.errors import CapacityError
from transfer_queue.testing import Client, Cluster

MIB = 1 << 20


def conf(units: int) -> dict[str, Any]:
    return {"backend": {"SimpleStorage": {"replicas": 2, "num_data_storage_units": units}}}


@pytest.fixture(params=[2, 3])
def cluster(start: Start, request: pytest.FixtureRequest) -> Cluster:
    return start(seed=request.param, conf=conf(request.param), arena_bytes=8 * MIB)


def bytes_at(cluster: Cluster, number: int) -> list[bytes]:
    """What a block's places hold."""
    blocks = cluster.controller.state.blocks
    nbytes = int(blocks.column("nbytes", np.array([number]))[0])
    return [cluster.units[p.unit].pool.arena.view(p.offset, nbytes).tobytes() for p in blocks.places(number)]


def test_every_block_lies_in_two_units(a: Client, b: Client, cluster: Cluster) -> None:
    for client in (a, b):
        for size in (1, 300, 2 * MIB // 8):
            client.put(numbers(size), partition_id="p")
    client.put(table(x=torch.arange(2), y=ragged(3, 5), z=["a", {"b": 1}]), partition_id="q")
    state = cluster.controller.state
    found = list(state.blocks.live_blocks())
    assert len(found) == 7
    for number, _, places, _ in found:
        assert len({place.unit for place in places}) == 2
        one, other = bytes_at(cluster, number)
        assert one == other
    assert sum(unit.table.leased for unit in cluster.units) == state.blocks.leased


def test_what_is_cleared_is_free_in_both(a: Client, cluster: Cluster) -> None:
    meta = a.put(numbers(MIB // 8), partition_id="p")
    assert sum(unit.table.leased for unit in cluster.units) == 2 * MIB
    a.clear_samples(meta)
    cluster.run()
    assert sum(unit.table.leased for unit in cluster.units) == 0


def test_a_put_without_space_for_both_leaves_nothing(start: Start) -> None:
    cluster = start(conf=conf(2), arena_bytes=4 * MIB)
    a = cluster.client("a")
    held = cluster.units[1].table.lease(99, 4 * MIB) if cluster.units[1].pool.grow(4 * MIB) else None
    assert held is not None
    with pytest.raises(CapacityError):
        a.put(numbers(MIB // 8), partition_id="p")
    cluster.run()
    assert cluster.units[0].table.leased == 0
    cluster.units[1].table.free(held.number)
    a.put(numbers(MIB // 8), partition_id="p")
    assert [unit.table.leased for unit in cluster.units] == [MIB, MIB]


def test_a_client_that_leaves_hands_back_in_both(a: Client, cluster: Cluster) -> None:
    meta = a.put(numbers(3), partition_id="p")
    a.clear_samples(meta)
    a.close()
    cluster.run()
    assert sum(unit.table.leased for unit in cluster.units) == 0
