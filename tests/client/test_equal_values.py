"""Fields of `dedup.fields`: equal values of a partition are stored once, and every row behaves as if it had its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoints import load, save

from differential import differential
from simulated import Start, rows_of, table
from tests.simulation.faulty_cluster import FaultyCluster
from transfer_queue.client.operations.operations import Operations
from transfer_queue.client.writer import Writer
from transfer_queue.core.units import migration_planner
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.net.calls import CONTROLLER
from transfer_queue.testing import Client, Cluster

CONF = {"dedup": {"fields": ["x", "image_*"]}}
SIZE = 2048
"""The number of float32 elements of a value, which is hashed."""


@pytest.fixture
def cluster(start: Start) -> Cluster:
    return start(seed=1, conf=CONF)


def image(number: int, size: int = SIZE) -> torch.Tensor:
    return torch.full((size,), float(number))


def images(*chosen: int) -> list[torch.Tensor]:
    """Tensors with memory of their own, so that only their bytes say which ones are equal."""
    return [image(number) for number in chosen]


def live_bytes(cluster: Cluster) -> int:
    return cluster.controller.state.blocks.live_bytes


def known(cluster: Cluster) -> int:
    """The number of digests that the controller has."""
    return sum(map(len, cluster.controller.state.blocks.equal.fields.values()))


def values_of(client: Client, meta: Any) -> list[int]:
    return [int(row[0]) for row in rows_of(client.get_data(meta.select_fields(["x"]))["x"])]


def test_other_partitions_fields_and_short_values_have_their_own(a: Client, cluster: Cluster) -> None:
    for name, columns in (("p", {"x": images(1)}), ("q", {"x": images(1)}), ("p", {"image_2": images(1)}),
                          ("p", {"y": images(1)}), ("p", {"x": [torch.zeros(4)] * 2})):  # fmt: skip
        held = live_bytes(cluster)
        a.put(table(**columns), partition_id=name)
        assert live_bytes(cluster) > held
    assert known(cluster) == 3


def before_publication(client: Client, action: Callable[[], object]) -> None:
    """Let something happen before the client's next publication."""
    actions = iter([action])

    class Interrupted(Writer):
        def _write(self, *given: Any) -> Any:
            next(actions, lambda: None)()
            return (yield from super()._write(*given))

    client.operations = Operations(client.state, Interrupted(client.state))


def test_values_that_are_freed_before_the_publication_are_written(a: Client, b: Client, cluster: Cluster) -> None:
    a.kv_put("k", "p", {"x": image(1)})
    a.kv_put("l", "p", {"x": image(2)})
    before_publication(a, lambda: b.kv_clear("k", "p"))
    meta = a.put(table(x=images(1, 2, 1, 3)), partition_id="p")
    assert values_of(a, meta) == [1, 2, 1, 3]
    assert known(cluster) == 3


def test_a_digest_that_two_clients_write_at_once_is_listed_once(a: Client, b: Client, cluster: Cluster) -> None:
    before_publication(a, lambda: b.put(table(x=images(1)), partition_id="p"))
    meta = a.put(table(x=images(1, 1)), partition_id="p")
    assert live_bytes(cluster) == 2 * 4 * SIZE
    assert known(cluster) == 1
    b.clear_partition("p")
    assert known(cluster) == live_bytes(cluster) == 0
    assert len(meta) == 2


def test_objects_and_tensors_with_equal_bytes_differ(a: Client, cluster: Cluster) -> None:
    document = {"text": "a" * 8192}
    metas = [a.put(table(image_1=[{"text": "a" * 8192}, dict(document)]), partition_id="p") for _ in range(2)]
    assert known(cluster) == 1
    for meta in metas:
        assert a.get_data(meta)["image_1"].tolist() == [document] * 2
    zeros = torch.zeros(SIZE)
    rows = [a.kv_put(f"k{n}", "q", {"x": value}) for n, value in enumerate((zeros, zeros.view(2, -1), zeros.clone()))]
    assert len(rows) == 3
    assert [tuple(row.shape) for row in a.kv_batch_get(["k0", "k1", "k2"], "q", layout="list")["x"].tolist()] == [
        (SIZE,), (2, SIZE // 2), (SIZE,),
    ]  # fmt: skip
    assert known(cluster) == 3


def test_numbers_that_are_put_as_tensors_are_hashed_as_tensors(a: Client, cluster: Cluster) -> None:
    a.put(table(x=torch.zeros(2, SIZE)), partition_id="p")
    held = live_bytes(cluster)
    a.put(table(x=[np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)]), partition_id="p")
    assert live_bytes(cluster) == held


def test_shared_rows_are_one_tensor_in_the_result(a: Client) -> None:
    meta = a.put(table(x=images(1, 2, 1), n=torch.arange(3)), partition_id="p")
    first, second, third = a.get_data(meta, shared=True)["x"].tolist()
    assert first is third
    assert second is not first
    keys = a.kv_batch_put(["k", "l"], "p", {"x": images(1, 1)})
    one, other = a.kv_batch_get(["k", "l"], "p", shared=True)["x"].tolist()
    assert one is other
    assert a.kv_batch_get_by_meta(keys, shared=True)["x"].tolist()[0][0] == 1
    own = a.get_data(meta, layout="list")["x"].tolist()
    assert own[0].data_ptr() != own[2].data_ptr()


def test_a_change_of_a_shared_row_changes_the_result_and_not_the_store(a: Client) -> None:
    meta = a.put(table(x=images(1, 1)), partition_id="p")
    first, second = a.get_data(meta, shared=True)["x"].tolist()
    first.fill_(7)
    assert second[0] == 7
    assert values_of(a, meta) == [1, 1]


@pytest.mark.parametrize("layout", ["jagged", "dense", "list"])
def test_a_claim_that_reads_returns_shared_rows(a: Client, layout: str) -> None:
    a.put(table(x=images(1, 2, 1), n=torch.arange(3)), partition_id="p")
    data, meta, _ = a.await_data(["x", "n"], 3, "p", "t", layout=layout, shared=True)
    first, second, third = data["x"].tolist()
    assert first is third
    assert [int(row[0]) for row in (first, second, third)] == [1, 2, 1]
    assert data["n"].tolist() == [0, 1, 2]
    assert len(meta) == 3
    with pytest.raises(InvalidArgumentError, match="shared must be"):
        a.await_data(["x"], 3, "p", "u", shared=1)


def test_a_value_that_two_units_keep_is_found_after_one_is_lost(start: Start) -> None:
    storage = {"replicas": 2, "num_data_storage_units": 2}
    cluster = start(conf={"backend": {"SimpleStorage": storage}, **CONF}, arena_bytes=8 << 20)
    a = cluster.client("a")
    meta = a.put(table(x=images(1, 2, 1)), partition_id="p")
    a.put(table(x=images(1)), partition_id="p")
    for _, _, places, _ in cluster.controller.state.blocks.live_blocks():
        assert len(places) == 2
    assert values_of(a, meta) == [1, 2, 1]


class Model:
    """A partition under keys, as it would be without shared values, and the same operations on a simulated system."""

    def __init__(self, folder: Path) -> None:
        self.cluster = FaultyCluster(folder / "arena", seed=1, conf=CONF, snapshot_every=5)
        self.clients = [self.cluster.client(name) for name in "ab"]
        self.folder = folder
        self.values: dict[str, int] = {}
        self.saves = 0

    def put(self, client: int, keys: list[str], chosen: list[int], one: bool) -> None:
        kept = {number: image(number) for number in chosen}
        rows = [kept[number] if one else image(number) for number in chosen]
        self.clients[client].kv_batch_put(keys, "p", {"x": rows, "n": torch.tensor(chosen)})
        self.values.update(zip(keys, chosen, strict=True))

    def clear(self, client: int, keys: list[str]) -> None:
        self.clients[client].kv_clear(keys, "p")
        for key in keys:
            self.values.pop(key, None)

    def compact(self) -> None:
        self.cluster.advance(5.0)

    def restart(self) -> None:
        """Kill the controller. It continues with its journal, or with a snapshot if there is one."""
        before = self.digests()
        self.cluster.crash(CONTROLLER, 0.1)
        self.cluster.advance(1.0)
        assert self.digests() <= before

    def digests(self) -> set[bytes]:
        """The known digests. They become fewer when live values are moved out of a block that is mostly dead."""
        return {digest for known in self.cluster.controller.state.blocks.equal.fields.values() for digest in known}

    def reload(self) -> None:
        """Saves the system, changes it, and loads what was saved."""
        a, self.saves = self.clients[0], self.saves + 1
        folder = save(a, self.folder / f"saved{self.saves}")
        a.kv_batch_put(["other"], "p", {"x": images(9)})
        load(a, folder)

    def check(self) -> None:
        keys = list(self.values)
        for client in self.clients if keys else ():
            got = client.kv_batch_get(keys, "p", layout="dense")
            assert (got["x"] == torch.tensor(list(self.values.values()))[:, None]).all()
            assert got["n"].tolist() == list(self.values.values())
            shared = client.kv_batch_get(keys, "p", "x", shared=True)["x"]
            assert [int(row[0]) for row in rows_of(shared)] == list(self.values.values())
        self.cluster.check()


keys_of_puts = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6, unique=True)
steps = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 1), keys_of_puts, st.lists(st.integers(0, 3), min_size=6, max_size=6),
              st.booleans()),
    st.tuples(st.just("clear"), st.integers(0, 1), keys_of_puts),
    st.tuples(st.just("compact")),
    st.tuples(st.just("restart")),
    st.tuples(st.just("reload")),
)  # fmt: skip


@differential(15)
@given(st.lists(steps, max_size=14))
def test_any_sequence_of_operations_leaves_the_values_of_a_system_without_dedup(todo: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder, patch.object(migration_planner, "SPARE", 0):
        model = Model(Path(folder))
        try:
            for name, *arguments in todo:
                if name == "put":
                    arguments[2] = arguments[2][: len(arguments[1])]
                getattr(model, name)(*arguments)
                model.check()
            model.clear(0, list("abcdefgh"))
            model.clear(0, ["other"])
            assert known(model.cluster) == live_bytes(model.cluster) == 0
        finally:
            model.cluster.close()


def test_the_status_says_how_many_bytes_are_saved(a: Client, cluster: Cluster) -> None:
    def saved() -> int:
        return a.status().partitions[0].saved

    meta = a.put(table(x=images(1, 2, 1, 1)), partition_id="p")
    assert saved() == 2 * 4 * SIZE
    a.put({"y": [image(1)] * 3, "z": torch.arange(3)}, partition_id="p")
    assert saved() == 4 * 4 * SIZE
    more = a.put(table(x=images(2)), partition_id="p")
    assert saved() == 5 * 4 * SIZE
    assert "saved by storing equal values once" in a.status()._repr_html_()
    a.clear_samples(meta)
    assert saved() == 2 * 4 * SIZE
    a.clear_samples(more)
    a.clear_partition("p")
    assert +cluster.controller.state.blocks.saved == {}
