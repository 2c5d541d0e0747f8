"""A put that is written as several blocks: one reservation, one publication, and nothing is left if it fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from simulated import Start, table
from transfer_queue.client.operations.operations import Operations
from transfer_queue.client.space import BlockGroup
from transfer_queue.client.writer import Writer
from transfer_queue.core.units import migration_planner
from transfer_queue.errors import CapacityError, FieldTypeError
from transfer_queue.testing import Client, Cluster
from transfer_queue.wire.blocks.column_sources import MIN_SAVED
from transfer_queue.wire.blocks.encode import EncodedBlock

MIB = 1 << 20


def live_blocks(cluster: Cluster) -> list[Any]:
    return list(cluster.controller.state.blocks.live_blocks())


def test_the_blocks_of_a_put_are_in_one_extent(a: Client, cluster: Cluster) -> None:
    a.put({"x": [torch.zeros(MIB)] * 2, "y": torch.zeros(2, MIB)}, partition_id="p")
    assert len(live_blocks(cluster)) == 2
    assert len({(place.unit, place.extent) for _, _, (place,), _ in live_blocks(cluster)}) == 1
    cluster.run()
    state = cluster.controller.state
    assert all(extent.closed for extent in state.blocks.extents.values())


def test_a_refused_put_returns_its_space(a: Client, cluster: Cluster) -> None:
    a.put(table(y=["an object"]), partition_id="p")
    blocks = live_blocks(cluster)
    with pytest.raises(FieldTypeError):
        a.put({"x": [torch.zeros(MIB)] * 2, "y": torch.zeros(2, 3)}, partition_id="p")
    cluster.run()
    assert live_blocks(cluster) == blocks
    assert cluster.unit.table.leased < MIB


def test_a_put_without_space_for_all_its_blocks_leaves_nothing(start: Start) -> None:
    cluster = start(arena_bytes=4 * MIB)
    a = cluster.client("a")
    with pytest.raises(CapacityError):
        a.put({"x": [torch.zeros(3 * MIB // 4)] * 2, "y": torch.zeros(2, 3 * MIB // 8)}, partition_id="p")
    cluster.run()
    assert cluster.unit.table.leased == 0
    a.put({"x": [torch.zeros(MIB // 4)] * 2, "y": torch.zeros(2, MIB // 8)}, partition_id="p")


def test_sparse_blocks_are_compacted_and_shared_values_stay_shared(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration_planner, "SPARE", 0)
    cluster = start(arena_bytes=64 * MIB)
    a = cluster.client("a")
    images = [torch.full((MIN_SAVED // 4,), float(n)) for n in range(16)]
    metas = [
        a.put({"image": [images[n // 4] for n in range(64)], "x": torch.arange(64)}, partition_id="p")
        for _ in range(100)
    ]
    full = cluster.controller.state.blocks.leased
    for meta in metas:
        a.clear_samples(meta.select_samples(list(range(4, 64))))
    a.close()  # closes its open extent
    for _ in range(40):
        cluster.advance(1.0)
    assert cluster.controller.state.blocks.leased < full / 8
    b = cluster.client("b")
    for meta in metas:
        found = b.get_data(meta.select_samples([0, 1, 2, 3]), layout="dense")
        assert found["image"].eq(0).all()
        assert found["x"].tolist() == [0, 1, 2, 3]


def test_a_wide_put_of_several_blocks(cluster: Cluster) -> None:
    class Halves(Writer):
        def group(self, encoded: EncodedBlock) -> list[BlockGroup]:
            half = len(encoded.schema) // 2
            first, second = range(half), range(half, len(encoded.schema))
            return [BlockGroup("SimpleStorage", [encoded.with_columns(first), encoded.with_columns(second)])]

    a = cluster.client("a")
    a.operations = Operations(a.state, Halves(a.state))
    columns = {f"f{number}": torch.tensor([number, -number]) for number in range(256)}
    meta = a.put(table(**columns), partition_id="p")
    assert len(live_blocks(cluster)) == 2
    found = a.get_data(meta.select_fields(["f0", "f127", "f128", "f255"]))
    assert {name: column.tolist() for name, column in found.items()} == {
        name: columns[name].tolist() for name in ("f0", "f127", "f128", "f255")
    }
