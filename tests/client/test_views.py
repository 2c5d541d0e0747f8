"""Gets with copy=False: which fields are views, what holds their space, and who sees what is written to them."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from test_checkpoints import load, save

import transfer_queue as tq
from simulated import Start, numbers, ragged, reply_on_its_way, rows_of, same, table
from transfer_queue.errors import CapacityError, InvalidArgumentError, StorageKeyNotFoundError
from transfer_queue.storage.arena import arena_views
from transfer_queue.storage.unit.storage_unit import VIEWS_INTERVAL
from transfer_queue.testing import Client, Cluster

MIB = 1 << 20
LAYOUTS = ["jagged", "dense", "padded", "list"]


def mixed(rows: int, first: int = 0) -> TensorDict:
    """Fields of all kinds."""
    count = torch.arange(first, first + rows)
    return table(
        scalar=count.to(torch.int16),
        vector=count[:, None].expand(rows, 5).to(torch.float64).contiguous(),
        matrix=count[:, None, None].expand(rows, 3, 2).to(torch.bfloat16).contiguous(),
        object=[{"n": n} for n in range(rows)],
    )


def is_view(column: Any) -> bool:
    """Whether all rows of a column are views."""
    if isinstance(column, torch.Tensor):
        return tq.is_view(column)
    rows = rows_of(column)
    return all(isinstance(row, torch.Tensor) and tq.is_view(row) for row in rows)


def viewed(cluster: Cluster) -> int:
    return sum(unit.pool.status().viewed for unit in cluster.units)


@pytest.mark.parametrize("rows", [range(9), range(3, 7)], ids=["a block", "some rows of a block"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fields_of_one_run_are_views(a: Client, b: Client, layout: str, rows: range) -> None:
    meta = a.put(mixed(9), partition_id="p").select_samples(list(rows))
    copies, views = b.get_data(meta, layout=layout), b.get_data(meta, layout=layout, copy=False)
    assert list(views.keys()) == list(copies.keys())
    for name in ("scalar", "vector", "matrix"):
        assert is_view(views[name]), name
        assert not is_view(copies[name])
        one, other = rows_of(views[name]), rows_of(copies[name])
        assert all(map(same, one, other))
        assert type(views[name]) is type(copies[name])
    assert views["object"].tolist() == copies["object"].tolist()


def test_ragged_rows_of_one_run_are_a_view(a: Client, b: Client) -> None:
    meta = a.put(table(x=ragged(3, 1, 4)), partition_id="p")
    views = b.get_data(meta, copy=False)["x"]
    assert tq.is_view(views)
    assert all(map(same, rows_of(views), rows_of(b.get_data(meta)["x"])))
    assert not tq.is_view(b.get_data(meta, layout="padded", copy=False)["x"])
    with pytest.raises(InvalidArgumentError, match='rows of one shape for layout "dense"'):
        b.get_data(meta, layout="dense", copy=False)


@pytest.mark.parametrize("order", [[2, 1, 0], [0, 2], [1, 1]])
def test_rows_that_are_no_run_are_copied(a: Client, b: Client, order: list[int]) -> None:
    a.kv_batch_put(["0", "1", "2"], "p", numbers(3))
    got = b.kv_batch_get([str(row) for row in order], "p", copy=False)["x"]
    assert got.tolist() == order
    assert not tq.is_view(got)


def test_each_field_is_decided_alone(a: Client, b: Client) -> None:
    a.kv_batch_put(["a", "b"], "p", table(x=torch.zeros(2, 3), y=torch.zeros(2)))
    a.kv_put("b", "p", {"y": torch.tensor(7.0)})
    got = b.kv_batch_get(["a", "b"], "p", copy=False)
    assert tq.is_view(got["x"])
    assert not tq.is_view(got["y"])
    assert got["y"].tolist() == [0, 7]


def test_other_ways_to_get_views(a: Client, b: Client) -> None:
    put = a.kv_batch_put(["a", "b"], "p", numbers(2))
    assert tq.is_view(b.kv_batch_get_by_meta(put, copy=False)["x"])
    values, _, _ = b.await_data("x", 2, "p", "t", copy=False)
    assert tq.is_view(values["x"])
    assert not tq.is_view(b.kv_batch_get(["a", "b"], "p")["x"])


def test_nested_tables_and_empty_values(a: Client, b: Client) -> None:
    inner = TensorDict({"y": torch.ones(2, 3), "none": torch.zeros(2, 0)}, batch_size=2)
    meta = a.put(TensorDict({"inner": inner}, batch_size=2), partition_id="p")
    got = b.get_data(meta, layout="dense", copy=False)
    assert tq.is_view(got["inner", "y"])
    assert got["inner", "none"].shape == (2, 0)
    assert not tq.is_view(got["inner", "none"])
    assert b.get_data(tq.BatchMeta(), copy=False).batch_size[0] == 0


@pytest.mark.parametrize("value", ["no", None])
def test_arguments_are_checked(a: Client, value: Any) -> None:
    meta = a.put(numbers(2), partition_id="p")
    with pytest.raises(InvalidArgumentError, match="copy must be"):
        a.get_data(meta, copy=value)
    with pytest.raises(InvalidArgumentError, match=r"must be a torch\.Tensor, got a list"):
        tq.is_view([1])  # type: ignore[arg-type]


class TestWrites:
    """What is written to a view is not seen by any other reader."""

    def write(self, tensor: torch.Tensor, how: str) -> None:
        if how == "in place":
            tensor.add_(5)
        elif how == "numpy":
            tensor.numpy()[:] = 9
        elif how == "slice":
            tensor[1:2].fill_(8)
        elif how == "dlpack":
            torch.from_dlpack(tensor).zero_()
        else:
            torch.mul(tensor, 3, out=tensor)

    @pytest.mark.parametrize("how", ["in place", "numpy", "slice", "dlpack", "out"])
    def test_a_write_is_a_copy(self, a: Client, b: Client, how: str) -> None:
        meta = a.put(table(x=torch.full((4, 3000), 2)), partition_id="p")
        mine = b.get_data(meta, layout="dense", copy=False)["x"]
        self.write(mine, how)
        assert not mine.eq(2).all()
        for client in (a, b):
            for copied in (True, False):
                assert client.get_data(meta, layout="dense", copy=copied)["x"].eq(2).all()
        written = mine.clone()
        gc.collect()
        assert same(mine, written)
        del mine
        assert b.get_data(meta, layout="dense", copy=False)["x"].eq(2).all()

    def test_gradients(self, a: Client, b: Client) -> None:
        meta = a.put(table(x=torch.full((4, 3), 2.0)), partition_id="p")
        view = b.get_data(meta, layout="dense", copy=False)["x"].requires_grad_()
        (view * 3).sum().backward()
        assert view.grad is not None
        assert view.grad.eq(3).all()
        assert b.get_data(meta, layout="dense")["x"].eq(2).all()

    def test_copies_of_views(self, a: Client, b: Client) -> None:
        meta = a.put(table(x=torch.full((4, 3), 2.0)), partition_id="p")
        view = b.get_data(meta, layout="dense", copy=False)["x"]
        assert view.untyped_storage().nbytes() == 4 * 3 * 4, "what pickles or shares it takes no more than the field"
        for other in (view.clone(), copy.deepcopy(view), view.to(torch.float64)):
            assert not tq.is_view(other)
            assert other.eq(2).all()


class TestSpace:
    """Views hold their extents."""

    @pytest.fixture
    def cluster(self, start: Start) -> Cluster:
        return start(seed=2, arena_bytes=4 * MIB)

    def value(self, fill: int) -> TensorDict:
        return table(x=torch.full((2, MIB), fill, dtype=torch.uint8))

    @pytest.mark.parametrize("how", ["samples", "partition", "drop", "keys", "replaced"])
    def test_clear_succeeds_at_once_and_the_space_comes_back_later(
        self, a: Client, b: Client, cluster: Cluster, how: str
    ) -> None:
        put = a.kv_batch_put(["a", "b"], "p", self.value(1))
        meta = a.kv_retrieve_meta(["a", "b"], "p")
        view = b.kv_batch_get_by_meta(put, layout="dense", copy=False)["x"]
        if how == "samples":
            a.clear_samples(meta)
        elif how == "keys":
            a.kv_clear(["a", "b"], "p")
        elif how == "replaced":
            a.kv_batch_put(["a", "b"], "p", table(x=torch.zeros(2, 1, dtype=torch.uint8)))
        else:
            a.clear_partition("p")
        cluster.run()
        if how == "replaced":
            assert rows_of(b.get_data(meta)["x"])[0].tolist() == [0]
        else:
            with pytest.raises((StorageKeyNotFoundError, InvalidArgumentError)):
                b.kv_batch_get_by_meta(put)
        assert viewed(cluster) == 2 * MIB
        with pytest.raises(CapacityError, match="are free when views of readers end"):
            a.put(table(x=torch.zeros(3, MIB, dtype=torch.uint8)), partition_id="q")
        assert view.eq(1).all()
        del view
        cluster.advance(VIEWS_INTERVAL)
        assert viewed(cluster) == 0
        assert a.put(table(x=torch.zeros(2, MIB, dtype=torch.uint8)), partition_id="q").size == 2

    def test_a_view_outlives_its_client(self, a: Client, b: Client, cluster: Cluster) -> None:
        meta = a.put(self.value(7), partition_id="p")
        view = b.get_data(meta, layout="dense", copy=False)["x"]
        b.close()
        a.clear_samples(meta)
        cluster.run()
        assert viewed(cluster) == 2 * MIB
        assert view.eq(7).all()

    def test_the_same_values_several_times(
        self, a: Client, b: Client, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(arena_views, "MAPPINGS", 2)
        meta = a.put(self.value(1), partition_id="p")
        got = [b.get_data(meta, layout="dense", copy=False)["x"] for _ in range(3)]
        assert [tq.is_view(tensor) for tensor in got] == [True, True, False]
        for fill, tensor in enumerate(got):
            tensor.fill_(fill)
        assert [int(tensor.max()) for tensor in got] == [0, 1, 2]
        a.clear_samples(meta)
        got.pop(0)
        cluster.advance(1)
        assert viewed(cluster) == 2 * MIB
        got.pop(0)
        cluster.advance(1)
        assert viewed(cluster) == 0


def test_compaction_leaves_views_as_they_are(start: Start) -> None:
    cluster = start(seed=3, arena_bytes=64 * MIB)
    a, b = cluster.client("a"), cluster.client("b")
    metas = [a.put(table(x=torch.full((64, 8192), n)), partition_id="p") for n in range(12)]
    views = [b.get_data(meta, layout="dense", copy=False)["x"] for meta in metas[::2]]
    for meta in metas:
        a.clear_samples(meta.select_samples(list(range(1, 64))))
    for _ in range(20):
        cluster.advance(0.5)
    assert viewed(cluster) > 0, "blocks were moved, and their extents are freed except for the views"
    assert all(view.eq(2 * at).all() for at, view in enumerate(views))
    kept = [meta.select_samples([0]) for meta in metas]
    assert [int(a.get_data(meta)["x"].values()[0]) for meta in kept] == list(range(12))
    views.clear()
    for _ in range(4):
        cluster.advance(0.5)
    assert viewed(cluster) == 0


def test_values_that_are_moved_to_disk(start: Start) -> None:
    cluster = start(seed=4, arena_bytes=2 * MIB, conf={
        "backend": {"SimpleStorage": {"offload": {"enabled": True, "path": "/disk"}}}})  # fmt: skip
    a, b = cluster.client("a"), cluster.client("b")
    metas, views = [], []
    for n in range(12):
        metas.append(a.put(table(x=torch.full((4, 8192), n)), partition_id="p"))
        if n % 4 == 0:
            views.append(b.get_data(metas[-1], layout="dense", copy=False)["x"])
    cluster.run()
    assert [int(view.min()) for view in views] == [int(view.max()) for view in views] == [0, 4, 8]
    got = [b.get_data(meta, layout="dense", copy=False)["x"] for meta in metas]
    assert [int(tensor.min()) for tensor in got] == [int(tensor.max()) for tensor in got] == list(range(12))
    assert all(map(tq.is_view, got)), "an arena on disk has views, too"


def test_a_checkpoint_of_viewed_values(start: Start, tmp_path: Path) -> None:
    cluster = start(seed=5)
    a, b = cluster.client("a"), cluster.client("b")
    meta = a.put(table(x=torch.full((4, 8192), 3)), partition_id="p")
    view = b.get_data(meta, layout="dense", copy=False)["x"]
    view.fill_(9)
    save(a, tmp_path)
    a.clear_partition("p")
    load(a, tmp_path)
    assert view.eq(9).all()
    every = b.get_meta(["x"], None, "p", mode="force_fetch")
    assert b.get_data(every, layout="dense", copy=False)["x"].eq(3).all()


def test_values_that_are_replaced_between_lookup_and_view(a: Client, b: Client, cluster: Cluster) -> None:
    meta = a.put(table(x=torch.full((1, MIB), 1)), partition_id="p")
    with reply_on_its_way(cluster, b, b.operations.get_data(meta, layout="dense", copy=False)) as task:
        a.put(table(x=torch.full((1, MIB), 2)), meta)
        a.put(table(x=torch.full((1, MIB), 3)), partition_id="q")
    assert task.result()["x"].eq(2).all()
