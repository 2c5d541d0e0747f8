"""Clients of a system whose memory is small and whose disk is not; in the simulation."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from test_checkpoints import load, save

from simulated import Start, rows_of, table
from transfer_queue.errors import CapacityError
from transfer_queue.messages.descriptors import DISK
from transfer_queue.testing import Client, Cluster
from transfer_queue.testing.cluster import arena_of

MIB = 1 << 20
KIB = 1 << 10


def conf(units: int = 1, replicas: int = 1, **offload: Any) -> dict[str, Any]:
    offload = {"enabled": True, "path": "/disk", **offload}
    return {
        "backend": {
            "SimpleStorage": {"replicas": replicas, "num_data_storage_units": units, "offload": offload},
        }
    }


def block(number: int, nbytes: int = 256 * KIB) -> Any:
    """Four rows, each to be told by its number."""
    return table(x=torch.arange(4 * number, 4 * number + 4)[:, None].expand(4, nbytes // 32).contiguous())


def check(client: Client, meta: Any, number: int) -> None:
    rows = rows_of(client.get_data(meta)["x"])
    assert [set(row.tolist()) for row in rows] == [{4 * number + at} for at in range(4)]


def places(cluster: Cluster) -> list[set[int]]:
    """The units of each block, the oldest first."""
    return [{place.unit for place in places} for _, _, places, _ in cluster.controller.state.blocks.live_blocks()]


@pytest.mark.parametrize(("units", "replicas", "size"), [(1, 1, 16 * KIB), (2, 2, 256 * KIB), (1, 1, 1536 * KIB)])
def test_eight_times_the_memory(start: Start, units: int, replicas: int, size: int) -> None:
    """Puts without a timeout never fail; all reads as it was put, while more is put and some is cleared."""
    cluster = start(conf=conf(units, replicas), arena_bytes=2 * MIB, seed=size)
    a, b, random = cluster.client("a"), cluster.client("b"), Random(size)
    metas: dict[int, Any] = {}
    for number in range(16 * MIB // size if size > 16 * KIB else 200):
        writer = random.choice([a, b])
        metas[number] = writer.put(block(number, size), partition_id="p")
        for seen in random.sample(sorted(metas), min(2, len(metas))):
            check(random.choice([a, b]), metas[seen], seen)
        if number % 5 == 4:
            cleared = random.choice(sorted(metas))
            a.clear_samples(metas.pop(cleared))
    for number, meta in metas.items():
        check(b, meta, number)
    on_disk = cluster.controller.state.units_of(DISK)
    assert any(units <= on_disk for units in places(cluster))
    assert all(len(units) == replicas for units in places(cluster))
    for client in (a, b):
        client.close()
    cluster.advance(5.0)
    memory = [unit for unit in cluster.units if unit.number not in on_disk]
    assert all(unit.table.leased <= 0.8 * 2 * MIB for unit in memory), "more would be above the high watermark"
    held = cluster.controller.state.blocks.leased_in
    assert all(unit.table.leased == held.get(unit.number, 0) for unit in cluster.units)


def test_a_block_larger_than_memory_is_written_to_disk(start: Start) -> None:
    cluster = start(conf=conf(), arena_bytes=2 * MIB)
    a = cluster.client("a")
    before = cluster.clock.now
    meta = a.put(block(7, 4 * MIB), partition_id="p")
    assert cluster.clock.now - before < 1.0, "no wait frees space for it"
    check(a, meta, 7)
    assert places(cluster) == [{1}]
    a.put(block(8, 64 * KIB), partition_id="p")
    assert places(cluster) == [{1}, {0}], "what fits goes to memory"


def test_a_full_disk_is_told_by_its_path(start: Start) -> None:
    """Nothing is lost by it; cleared samples are free space again."""
    cluster = start(conf=conf(capacity=4 * MIB), arena_bytes=2 * MIB)
    a = cluster.client("a")
    metas = []
    told = ""
    while not told:
        try:
            metas.append(a.put(block(len(metas)), partition_id="p"))
        except CapacityError as error:
            told = str(error)
    assert f"storage unit 1, the disk at {arena_of(cluster.units[1]).folder}" in told
    assert "storage unit 0" in told
    with pytest.raises(CapacityError, match="the disk at"):
        a.put(block(0), partition_id="p", timeout=5.0)
    assert len(metas) >= 20, "24 fill both"
    for number, meta in enumerate(metas):
        check(a, meta, number)
    task = a.start(a.operations.put(block(100), partition_id="p", timeout=60.0))
    cluster.advance(10.0)
    assert not task.done
    for meta in metas[:8]:
        a.clear_samples(meta)
    cluster.wait(lambda: task.done)
    check(a, task.result(), 100)
    for number, meta in enumerate(metas[8:], 8):
        check(a, meta, number)


def test_checkpoints_hold_what_is_on_disk(start: Start, tmp_path: Path) -> None:
    """Saved out of both tiers, and loaded into a system that has as little memory, without a wait for each piece."""
    cluster = start(conf=conf(), arena_bytes=2 * MIB)
    a = cluster.client("a")
    keys = [[f"{number}.{at}" for at in range(4)] for number in range(64)]
    for number, some in enumerate(keys):
        a.kv_batch_put(some, "p", block(number))
    assert {1} in places(cluster)
    save(a, tmp_path / "saved")
    later = start(conf=conf(), arena_bytes=2 * MIB, seed=3)
    b = later.client("b")
    began = later.clock.now
    load(b, tmp_path / "saved")
    assert later.clock.now - began < 1.0
    assert {1} in places(later)
    for number, some in enumerate(keys):
        rows = rows_of(b.kv_batch_get(some, "p")["x"])
        assert [set(row.tolist()) for row in rows] == [{4 * number + at} for at in range(4)]
