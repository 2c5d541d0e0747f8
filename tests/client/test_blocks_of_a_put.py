"""A put that is written as several blocks: one reservation, one publication, and nothing is left if it fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_checkpoints import load, save

from simulated import Start, numbers, rows_of, same, table
from transfer_queue.client.attachment import Attachment
from transfer_queue.client.data.block_groups import BlockGroup
from transfer_queue.client.operations.operations import Operations
from transfer_queue.client.writer import Writer
from transfer_queue.core.units import migration_planner
from transfer_queue.errors import CapacityError, FieldTypeError
from transfer_queue.testing import Client, Cluster
from transfer_queue.wire.blocks.encode import EncodedBlock, encode_columns

MIB = 1 << 20
VALUES = {
    "x": torch.arange(6, dtype=torch.float64),
    "text": ["a", "", "ä" * 9, "d", "e", "f"],
    "image": torch.arange(6 * 500).reshape(6, 500),
}


class SplitWriter(Writer):
    """A writer that writes each field of a put as a block of its own.

    shared: A field -> for each row of a put the row of this field that is stored for it.
    """

    def __init__(self, state: Attachment, shared: dict[str, Sequence[int]] | None = None) -> None:
        super().__init__(state)
        self.shared = shared or {}

    def group(self, encoded: EncodedBlock) -> list[BlockGroup]:
        blocks = [self._block(encoded, at, spec.name) for at, spec in enumerate(encoded.schema)]
        return [BlockGroup("SimpleStorage", blocks)]

    def _block(self, encoded: EncodedBlock, at: int, name: str) -> EncodedBlock:
        slots = self.shared.get(name)
        if slots is None:
            return encoded.with_columns([at])
        stored = torch.arange(max(slots) + 1).reshape(-1, 1).repeat(1, 300)
        block = encode_columns({name: stored}, len(stored))
        block.slots = np.array(slots, "<i4").tobytes()
        return block


def split(client: Client, **shared: Sequence[int]) -> Client:
    client.operations = Operations(client.state, SplitWriter(client.state, shared))
    return client


@pytest.fixture
def a(cluster: Cluster) -> Client:
    return split(cluster.client("a"))


def live_blocks(cluster: Cluster) -> list[Any]:
    return list(cluster.controller.state.blocks.live_blocks())


def test_all_values_are_read_back(a: Client, b: Client, cluster: Cluster) -> None:
    meta = a.put(table(**VALUES), partition_id="p")
    assert len(live_blocks(cluster)) == 3
    found = b.get_data(meta)
    for name, column in VALUES.items():
        assert same(rows_of(found[name]), rows_of(column)), name
    keys = [f"k{n}" for n in range(6)]
    a.kv_batch_put(keys, "p", table(**VALUES))
    assert same(b.kv_batch_get(keys[::-1], "p")["text"].tolist(), VALUES["text"][::-1])


def test_the_blocks_of_a_put_are_in_one_extent(a: Client, cluster: Cluster) -> None:
    a.put(table(x=torch.zeros(2, MIB), y=torch.zeros(2, MIB)), partition_id="p")
    assert len({(place.unit, place.extent) for _, _, (place,), _ in live_blocks(cluster)}) == 1
    cluster.run()
    state = cluster.controller.state
    assert all(extent.closed for extent in state.blocks.extents.values())


def test_a_refused_put_returns_its_space(a: Client, cluster: Cluster) -> None:
    a.put(table(y=["an object"]), partition_id="p")
    blocks = live_blocks(cluster)
    with pytest.raises(FieldTypeError):
        a.put(table(x=torch.zeros(2, MIB), y=torch.zeros(2, 3)), partition_id="p")
    cluster.run()
    assert live_blocks(cluster) == blocks
    assert cluster.unit.table.leased < MIB


def test_a_put_without_space_for_all_its_blocks_leaves_nothing(start: Start) -> None:
    cluster = start(arena_bytes=4 * MIB)
    a = split(cluster.client("a"))
    with pytest.raises(CapacityError):
        a.put(table(x=torch.zeros(2, 3 * MIB // 8), y=torch.zeros(2, 3 * MIB // 8)), partition_id="p")
    cluster.run()
    assert cluster.unit.table.leased == 0
    a.put(table(x=torch.zeros(2, MIB // 8), y=torch.zeros(2, MIB // 8)), partition_id="p")


def test_two_copies_of_each_block(start: Start) -> None:
    conf = {"backend": {"SimpleStorage": {"replicas": 2, "num_data_storage_units": 3}}}
    cluster = start(conf=conf, arena_bytes=8 * MIB)
    a = split(cluster.client("a"))
    meta = a.put(table(**VALUES), partition_id="p")
    for number, nbytes, places, _ in live_blocks(cluster):
        assert len({place.unit for place in places}) == 2, number
        assert nbytes
    assert same(rows_of(a.get_data(meta)["image"]), rows_of(VALUES["image"]))


def test_sparse_blocks_are_compacted_and_shared_values_stay_shared(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration_planner, "SPARE", 0)
    cluster = start(arena_bytes=64 * MIB)
    slots = [n // 4 for n in range(64)]
    a = split(cluster.client("a"), image=slots)
    metas = [
        a.put(table(image=torch.zeros(64, 300, dtype=torch.int64), x=torch.arange(64)), partition_id="p")
        for _ in range(200)
    ]
    full = cluster.controller.state.blocks.leased
    for meta in metas:
        a.clear_samples(meta.select_samples(list(range(4, 64))))
    a.close()  # closes its open extent
    for _ in range(40):
        cluster.advance(1.0)
    assert cluster.controller.state.blocks.leased < full / 4
    b = cluster.client("b")
    for meta in metas:
        found = b.get_data(meta.select_samples([0, 1, 2, 3]), layout="dense")
        assert found["image"].tolist() == [[0] * 300] * 4
        assert found["x"].tolist() == [0, 1, 2, 3]


def test_a_checkpoint_keeps_what_is_shared(cluster: Cluster, tmp_path: Path) -> None:
    a = split(cluster.client("a"), image=[0, 0, 1])
    meta = a.put(table(image=torch.zeros(3, 300, dtype=torch.int64)), partition_id="p")
    (block,) = live_blocks(cluster)
    folder = save(a, tmp_path / "saved")
    a.clear_samples(meta)
    load(a, folder)
    found = a.get_meta(["image"], 3, "p", task_name="t")
    assert a.get_data(found, layout="dense")["image"][:, 0].tolist() == [0, 0, 1]
    (again,) = live_blocks(cluster)
    assert again[1] == block[1] == 3
    assert again[3] == block[3]


def test_the_report_of_a_sample_names_the_writer_of_each_field(a: Client) -> None:
    meta = a.put(table(**VALUES), partition_id="p")
    report = a.describe_sample("p", meta.global_indexes[2])
    assert {field.name: field.client for field in report.fields} == {"x": "a", "text": "a", "image": "a"}
    (event,) = report.history
    assert sorted(event.fields) == ["image", "text", "x"]


def test_a_wide_put_of_several_blocks(cluster: Cluster) -> None:
    class Halves(Writer):
        def group(self, encoded: EncodedBlock) -> list[BlockGroup]:
            half = len(encoded.schema) // 2
            first, second = range(half), range(half, len(encoded.schema))
            return [BlockGroup("SimpleStorage", [encoded.with_columns(first), encoded.with_columns(second)])]

    a = cluster.client("a")
    a.operations = Operations(a.state, Halves(a.state))
    columns = {f"f{number}": torch.tensor([number, -number]) for number in range(4096)}
    meta = a.put(table(**columns), partition_id="p")
    assert len(live_blocks(cluster)) == 2
    found = a.get_data(meta.select_fields(["f0", "f2047", "f2048", "f4095"]))
    assert {name: column.tolist() for name, column in found.items()} == {
        name: columns[name].tolist() for name in ("f0", "f2047", "f2048", "f4095")
    }


def test_numbers_that_join_a_field_of_tensors_are_put_as_tensors(a: Client) -> None:
    a.put(numbers(2), partition_id="p")
    a.kv_batch_put(["k"], "p", table(x=[3], y=["text"]))
    assert a.kv_batch_get(["k"], "p")["x"].tolist() == [3]
