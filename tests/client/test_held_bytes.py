"""What an arena has of its file system stays near to what lives in it: within twice that and 64 MiB."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_capacity import MIB, mib

from transfer_queue.storage.arena.arena import choose_folder
from transfer_queue.storage.arena.free_space_reclaim import PERIOD
from transfer_queue.testing import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(dir=choose_folder().folder, prefix="tq-test-"))
    try:
        with Cluster(folder / "system", seed=2, arena_bytes=256 * MIB) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder)


def held(cluster: Cluster) -> int:
    return (cluster.unit.pool.arena.folder / "arena").stat().st_blocks * 512


def test_after_a_burst(cluster: Cluster) -> None:
    clients = [cluster.client(f"c{number}") for number in range(10)]
    metas = [client.put(mib(2, number), partition_id="p") for number, client in enumerate(clients * 9)]
    for client in clients:  # each holds an open extent
        client.put(mib(0.01), partition_id="small")
    assert held(cluster) > 180 * MIB
    for number, meta in enumerate(metas):
        if number % 45:
            clients[0].clear_samples(meta)
    for _ in range(8):
        cluster.advance(PERIOD)
        while cluster.unit.work_ahead():
            pass
    live = cluster.controller.state.blocks.live_bytes
    assert 4 * MIB < live < 5 * MIB
    assert held(cluster) <= 2 * live + 64 * MIB
    cluster.unit.check()
    for number in (0, 45):
        assert clients[1].get_data(metas[number])["x"].eq(number).all()
