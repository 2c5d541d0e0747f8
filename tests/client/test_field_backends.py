"""Fields in several backends: one put, one publication, and gets, clears, losses and checkpoints of each backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from test_checkpoints import load, save

from simulated import Start, rows_of, same, table
from store_in_memory import KIND, MemoryStore
from transfer_queue.client.space import BackendRoutes
from transfer_queue.core.events.records import SamplesPut
from transfer_queue.errors import (
    CapacityError,
    ConnectionLostError,
    FieldTypeError,
    InvalidArgumentError,
    StorageKeyNotFoundError,
)
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.reports.store_reports import ReportStoreServer
from transfer_queue.testing import Client, Cluster

MIB = 1 << 20
SERVER = -50  # the connection of a store server, which is not simulated
VALUES = {
    "x": torch.arange(6, dtype=torch.float64),
    "pixels": torch.arange(6 * 500).reshape(6, 500),
    "text": ["a", "", "ä" * 9, "d", "e", "f"],
    "stored_text": ["1", "22", "333", "", "5", "6"],
}


def conf(**fields: str) -> dict[str, Any]:
    return {"backend": {"fields": fields or {"pixels": KIND, "stored_*": KIND}}}


@pytest.fixture(autouse=True)
def empty_store() -> Iterator[None]:
    MemoryStore.objects.clear()
    yield
    MemoryStore.failure = MemoryStore.unreachable = None
    MemoryStore.objects.clear()


@pytest.fixture
def cluster(start: Start) -> Cluster:
    return start(seed=1, conf=conf())


def settled(cluster: Cluster) -> Cluster:
    """Let the store remove what is freed."""
    cluster.advance(1.0)
    return cluster


def fields_of_unit(cluster: Cluster) -> dict[int, set[str]]:
    """Unit -> the fields of the needed blocks there."""
    state, found = cluster.controller.state, {}
    for number, _, places, _ in state.blocks.live_blocks():
        for place in places:
            schema = state.blocks.shape_source(number)[0]
            found.setdefault(place.unit, set()).update(spec.name for spec in schema)
    return found


def test_values_are_in_the_backend_of_their_field(a: Client, b: Client, cluster: Cluster) -> None:
    meta = a.put(table(**VALUES), partition_id="p")
    assert fields_of_unit(cluster) == {0: {"x", "text"}, 1: {"pixels", "stored_text"}}
    assert len(MemoryStore.objects) == 1
    MemoryStore.reads.clear()
    found = b.get_data(meta)
    for name, column in VALUES.items():
        assert same(rows_of(found[name]), rows_of(column)), name
    assert len(MemoryStore.reads) == 1
    assert b.get_data(meta.select_fields(["x"]))["x"].tolist() == VALUES["x"].tolist()
    assert len(MemoryStore.reads) == 1, "a get of fields in memory does not ask the store"


def test_a_put_is_one_record(a: Client, cluster: Cluster) -> None:
    a.put(table(x=torch.zeros(1)), partition_id="p")
    before = len(cluster.records)
    a.put(table(**VALUES), partition_id="p")
    puts = [record for record in cluster.records[before:] if isinstance(record, SamplesPut)]
    assert [len(part.blocks) for record in puts for part in record.puts] == [2]


def test_what_is_cleared_is_free_in_both(a: Client, cluster: Cluster) -> None:
    meta = a.put(table(**VALUES), partition_id="p")
    a.clear_samples(meta.select_samples([0, 1, 2]))
    assert len(settled(cluster).units[1].table.leased_extents()) == len(MemoryStore.objects) == 1
    a.clear_samples(meta)
    assert settled(cluster).units[1].table.leased == 0
    assert MemoryStore.objects == {}
    a.close()
    assert settled(cluster).units[0].table.leased == 0


@pytest.mark.parametrize("failure", [CapacityError("the store is full"), RuntimeError("the store is broken")])
def test_a_store_that_fails_in_the_middle_leaves_nothing(a: Client, cluster: Cluster, failure: Exception) -> None:
    a.put(table(**VALUES), partition_id="p")
    blocks, keys = list(cluster.controller.state.blocks.live_blocks()), set(MemoryStore.objects)
    MemoryStore.failure = failure
    with pytest.raises(type(failure)):
        a.put(table(x=torch.zeros(2, MIB), pixels=torch.zeros(2, 3)), partition_id="p")
    MemoryStore.failure = None
    settled(cluster)
    assert list(cluster.controller.state.blocks.live_blocks()) == blocks
    assert set(MemoryStore.objects) == keys
    assert cluster.units[0].table.leased < MIB
    assert a.get_meta(["x"], None, "p", mode="force_fetch").size == 6
    a.put(table(**VALUES), partition_id="p")


def test_a_refused_put_leaves_nothing_in_the_store(a: Client, cluster: Cluster) -> None:
    a.put(table(x=["an object"]), partition_id="p")
    with pytest.raises(FieldTypeError):
        a.put(table(x=torch.zeros(2), pixels=torch.zeros(2, 3)), partition_id="p")
    settled(cluster)
    assert MemoryStore.objects == {}


def test_a_full_arena_leaves_nothing_in_the_store(start: Start) -> None:
    cluster = start(conf=conf(), arena_bytes=2 * MIB)
    a = cluster.client("a")
    with pytest.raises(CapacityError):
        a.put(table(x=torch.zeros(2, MIB), pixels=torch.zeros(2, 3)), partition_id="p")
    assert settled(cluster).units[1].table.leased == 0
    assert MemoryStore.objects == {}


def test_a_full_store_leaves_nothing_in_the_arena(start: Start) -> None:
    settings = conf()
    settings["backend"]["options"] = {"most": MIB}
    cluster = start(conf=settings)
    a = cluster.client("a")
    for timeout in (None, 1.0):
        with pytest.raises(CapacityError):
            a.put(table(x=torch.zeros(2, MIB), pixels=torch.zeros(2, MIB)), partition_id="p", timeout=timeout)
        settled(cluster)
        assert [unit.table.leased for unit in cluster.units] == [0, 0]
    a.put(table(x=torch.zeros(2, MIB), pixels=torch.zeros(2, 3)), partition_id="p")


def test_two_puts_that_wait_for_both_backends_do_not_block_each_other(start: Start) -> None:
    """Each waits without holding what the other waits for."""
    settings = conf()
    settings["backend"]["options"] = {"most": MIB}
    cluster = start(conf=settings, arena_bytes=4 * MIB)
    a, b, c = (cluster.client(name) for name in "abc")
    held = a.put(table(x=torch.zeros(1, 3 * MIB // 4), pixels=torch.zeros(1, MIB // 8)), partition_id="p")
    values = table(x=torch.zeros(1, MIB // 2), pixels=torch.zeros(1, MIB // 5))
    tasks = [each.start(each.operations.put(values, partition_id="p", timeout=30.0)) for each in (b, c)]
    cluster.advance(3.0)
    assert not any(task.done for task in tasks)
    a.clear_samples(held)
    cluster.wait(lambda: any(task.done for task in tasks))
    first = next(task for task in tasks if task.done)
    a.clear_samples(first.result())
    cluster.wait(lambda: all(task.done for task in tasks))
    for task in tasks:
        assert task.result().size == 1


def test_lost_values_are_those_of_the_store(a: Client, cluster: Cluster) -> None:
    meta = a.put(table(**VALUES), partition_id="p")
    MemoryStore.objects.clear()
    with pytest.raises(StorageKeyNotFoundError, match="lost with storage unit 1"):
        a.get_data(meta)
    assert a.get_data(meta.select_fields(["x"]))["x"].tolist() == VALUES["x"].tolist()


def test_a_get_from_a_store_that_cannot_say_what_is_lost(a: Client, cluster: Cluster) -> None:
    """The get fails, and says so; nothing is reported as lost that may be there."""
    meta = a.put(table(**VALUES), partition_id="p")
    there = dict(MemoryStore.objects)
    MemoryStore.objects.clear()
    MemoryStore.unreachable = ConnectionLostError("the master does not respond")
    with pytest.raises(ConnectionLostError, match="not known whether they are lost: the master does not respond"):
        a.get_data(meta)
    MemoryStore.objects.update(there)
    MemoryStore.unreachable = None
    cluster.advance(5.0)
    found = a.get_data(meta)
    assert all(same(rows_of(found[name]), rows_of(column)) for name, column in table(**VALUES).items())


def test_the_error_of_a_store_names_its_servers_that_are_down(a: Client, cluster: Cluster) -> None:
    a.put(table(**VALUES), partition_id="p")
    cluster.controller.on_connect("store", SERVER)
    report = RequestEnvelope(1, 0, ReportStoreServer(KIND, "n2", "10.0.0.2", "first life", 71))
    cluster._deliver_to_controller("store", SERVER, report)
    cluster._run_core_effects(cluster.controller.on_disconnect("store", SERVER, cluster.clock.now))
    MemoryStore.failure = ConnectionLostError("no answer")
    before = len(MemoryStore.objects)
    with pytest.raises(
        ConnectionLostError, match=r"no answer; the .* server on node 10\.0\.0\.2 \(n2, process 71\) has been down"
    ):
        a.put(table(**VALUES), partition_id="q")
    assert "q" not in a.get_partition_list()
    MemoryStore.failure = None
    cluster.advance(5.0)
    assert len(MemoryStore.objects) == before  # what the failed put had written is removed


@pytest.mark.parametrize("then", [conf(), conf(x=KIND), {}])
def test_a_checkpoint_returns_values_to_the_backend_they_were_in(start: Start, tmp_path: Path, then: Any) -> None:
    """If the system does not have that backend any more, they come to the system's backend."""
    first = start(conf=conf())
    a = first.client("a")
    a.put(table(**VALUES), partition_id="p")
    folder = tmp_path / "saved"
    for _ in range(2):  # the second save links to the files of the first one
        save(a, folder)
    cluster = start(conf=then)
    b = cluster.client("b")
    load(b, folder)
    both = {0: {"x", "text"}, 1: {"pixels", "stored_text"}}
    assert fields_of_unit(cluster) == (both if then else {0: {"x", "text", "pixels", "stored_text"}})
    found = b.get_data(b.get_meta(list(VALUES), 6, "p", task_name="t"))
    for name, column in VALUES.items():
        assert same(rows_of(found[name]), rows_of(column)), name


def test_replicas_and_compaction_concern_the_arenas_only(start: Start) -> None:
    settings = conf()
    settings["backend"]["SimpleStorage"] = {"replicas": 2, "num_data_storage_units": 2}
    cluster = start(conf=settings)
    a = cluster.client("a")
    metas = [a.put(table(x=torch.zeros(4, 9), pixels=torch.ones(4, 7)), partition_id="p") for _ in range(20)]
    for meta in metas:
        a.clear_samples(meta.select_samples([0, 1, 2]))
    for _ in range(20):
        cluster.advance(1.0)
    places = {
        tuple(place.unit for place in places) for _, _, places, _ in cluster.controller.state.blocks.live_blocks()
    }
    assert all(units == (2,) or set(units) == {0, 1} for units in places)
    assert a.get_data(metas[3].select_samples([3]), layout="dense")["pixels"].tolist() == [[1.0] * 7]
    with pytest.raises(InvalidArgumentError, match="external store"):
        a.drain_unit(2)


def test_a_column_without_bytes_is_in_no_object_of_its_own(start: Start) -> None:
    cluster = start(conf=conf(**{"n::y": "SimpleStorage", "n": KIND}))
    a = cluster.client("a")
    inner = TensorDict({"y": torch.arange(6)}, batch_size=[6])
    meta = a.put(TensorDict({"n": inner}, batch_size=[6]), partition_id="p")
    assert MemoryStore.objects == {}
    assert a.get_data(meta)["n", "y"].tolist() == list(range(6))


def test_the_system_may_be_an_external_store_for_all_other_fields(start: Start) -> None:
    cluster = start(conf={"backend": {"storage_backend": KIND, "fields": {"x": "SimpleStorage"}}})
    a = cluster.client("a")
    meta = a.put(table(**VALUES), partition_id="p")
    assert fields_of_unit(cluster) == {0: {"x"}, 1: {"text", "pixels", "stored_text"}}
    assert same(rows_of(a.get_data(meta)["text"]), VALUES["text"])


def test_a_field_that_is_added_later_has_its_own_backend(a: Client, cluster: Cluster) -> None:
    meta = a.put(table(x=torch.arange(6)), partition_id="p")
    a.put(table(pixels=VALUES["pixels"]), metadata=meta)
    assert fields_of_unit(cluster) == {0: {"x"}, 1: {"pixels"}}
    a.kv_batch_put(["k0", "k1"], "p", table(x=torch.arange(2), pixels=torch.ones(2, 500)))
    a.kv_put("k1", "p", {"pixels": torch.zeros(500)})
    assert a.kv_batch_get(["k1"], "p")["pixels"].values().tolist() == [0.0] * 500


class TestRoutes:
    @pytest.mark.parametrize(("patterns", "backends"), [
        ({"a*": "one", "ab": "two", "[bc]?": "three"},
         {"ab": "one", "a": "one", "bx": "three", "b": "default", "A": "default"}),
        ({"t::x": "one", "t": "two", "u::*": "three"},
         {"t": "two", "t::x": "one", "t::y::z": "two", "u": "default", "u::v": "three"}),
    ], ids=["names", "a table and its fields"])  # fmt: skip
    def test_the_first_pattern_that_fits_decides(self, patterns: dict[str, str], backends: dict[str, str]) -> None:
        routes = BackendRoutes("default", patterns)
        assert {name: routes.backend_of(name) for name in backends} == backends
