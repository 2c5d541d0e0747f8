"""What clients do when a storage unit restarts, or is lost and another comes in its place."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence

import pytest
import torch

import transfer_queue as tq
from simulated import Start, numbers
from transfer_queue.client.conversion.change_events import SampleLoss
from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.messages.reports.unit_reports import RegisterUnit
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler import RankAwareSampler
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.unit.extent_pool import ArenaPool
from transfer_queue.storage.unit.storage_unit import StorageUnit
from transfer_queue.testing import Client, Cluster
from transfer_queue.testing.cluster import UNIT_PEER
from transfer_queue.testing.simulated_locks import SimulatedSlots


def restart(cluster: Cluster) -> None:
    """The first unit is killed, and goes on with its arena."""
    old = cluster.units[0]
    cluster.units[0] = StorageUnit(old.number, ArenaPool(Arena.reopen(old.pool.arena.folder)), old._files)
    old.pool.arena.close()
    end_connections(cluster, old.number)
    cluster._register(cluster.units[0])
    for client in cluster._clients:
        client.reconnect()


def end_connections(cluster: Cluster, number: int) -> None:
    name = f"unit-{number}"
    cluster._run_core_effects(cluster.controller.on_disconnect(name, UNIT_PEER - number, cluster.clock.now))
    cluster.controller.on_connect(name, UNIT_PEER - number)


def lose(cluster: Cluster, deleted: bool = True, kept: Sequence[Client] = ()) -> None:
    """Kill the first unit and remove its arena; another unit replaces it at its address, under a new number.

    kept: clients whose connections, which are to the controller, stay.
    """
    old, number = cluster.units[0], len(cluster.units)
    if deleted:
        shutil.rmtree(old.pool.arena.folder)
    folder = old.pool.arena.folder.with_name(f"unit-0.{number}")
    unit = StorageUnit(
        number, ArenaPool(Arena.create(folder, old.pool.arena.capacity)), SimulatedSlots(number, cluster.held)
    )
    cluster.units[0] = unit
    cluster.units.append(unit)
    cluster._unit_sequences.append(0)
    end_connections(cluster, old.number)
    cluster.controller.on_connect(f"unit-{number}", UNIT_PEER - number)
    extents = unit.register()
    cluster._deliver_from_unit(
        unit, RegisterUnit("unit", str(folder), unit.pool.arena.boot_id, "unit-0", "at noon", extents)
    )
    for client in cluster._clients:
        if client not in kept:
            client.reconnect()


@pytest.fixture
def cluster(start: Start) -> Cluster:
    return start(arena_bytes=8 << 20)


def test_a_restart_is_a_pause(a: Client, b: Client, cluster: Cluster) -> None:
    a.kv_put("before", "p", {"x": torch.arange(3)})
    restart(cluster)
    a.kv_put("after", "p", {"x": torch.arange(4)})
    assert b.kv_batch_get(["before", "after"], "p")["x"][0].tolist() == [0, 1, 2]
    restart(cluster)
    a.kv_clear(["before", "after"], "p")
    for client in (a, b):
        client.close()
    cluster.run()
    assert cluster.unit.table.leased == 0
    cluster.check()


def test_a_put_under_way_goes_on_after_a_restart(a: Client, cluster: Cluster) -> None:
    a.kv_put("first", "p", {"x": torch.arange(3)})
    task = a.start(a.operations.kv_put("big", "p", {"x": torch.arange(1 << 18)}))
    restart(cluster)
    cluster.run()
    task.result()
    assert len(a.kv_batch_get(["big"], "p")["x"][0]) == 1 << 18
    cluster.check()


@pytest.mark.parametrize("deleted", [False, True])
def test_a_lost_unit_is_told_and_puts_go_on(a: Client, b: Client, cluster: Cluster, deleted: bool) -> None:
    a.kv_put("lost", "p", {"x": torch.arange(3)})
    assert b.kv_batch_get(["lost"], "p")["x"][0].tolist() == [0, 1, 2]
    lose(cluster, deleted)
    fresh = cluster.client("fresh")
    for client in (a, b, fresh):
        with pytest.raises(StorageKeyNotFoundError, match=r"lost with storage unit 0 \(at noon\)"):
            client.kv_batch_get(["lost"], "p")
    a.kv_put("kept", "p", {"x": torch.arange(4)})
    b.kv_put("lost", "p", {"x": torch.arange(5)})
    for client in (a, b, fresh):
        assert client.kv_batch_get(["lost", "kept"], "p")["x"][0].tolist() == [0, 1, 2, 3, 4]
    lose(cluster, deleted)
    a.kv_put("third", "p", {"x": torch.arange(1 << 18)})
    assert len(b.kv_batch_get(["third"], "p")["x"][0]) == 1 << 18
    assert not any(unit in (0, 1) for unit, _ in cluster.controller.state.blocks.extents)


def test_a_put_caught_by_a_loss_is_written_again(a: Client, cluster: Cluster) -> None:
    a.kv_put("first", "p", {"x": torch.arange(3)})
    task = a.start(a.operations.kv_put("second", "p", {"x": torch.arange(9)}))
    while type(task.call.body).__name__ != "Publish":  # type: ignore[union-attr]
        assert cluster.network.deliver()
    lose(cluster)
    cluster.run()
    task.result()
    assert a.kv_batch_get(["second"], "p")["x"][0].tolist() == list(range(9))
    assert a.kv_list("p")["p"].keys() == {"first", "second"}


def test_a_client_that_learned_of_the_old_unit_only_never_reads_the_new_one_for_it(a: Client, cluster: Cluster) -> None:
    a.kv_put("x", "p", {"x": torch.arange(3)})
    late = cluster.client("late")
    late.kv_list("p")  # knows of unit 0, and has not opened its arena
    info = late.state.units.known[0]
    lose(cluster, deleted=False)
    late.state.units.known[0] = type(info)(0, info.address, str(cluster.units[-1].pool.folder), info.boot_id, info.name)
    with pytest.raises(tq.errors.AttachError, match="is not the arena of storage unit"):
        late.state.units.arena(0)


def test_subscribers_are_called_for_losses(a: Client, cluster: Cluster) -> None:
    a.kv_put("k", "p", {"x": torch.arange(3)}, {"step": 1})
    a.kv_put("other", "p", {"y": torch.arange(3)}, {"step": 2})
    told: list[SampleLoss] = []
    events = a.subscribe("p", {"step": 1}, on_lost=told.append)
    assert next(events).key == "k"
    assert told == []
    lose(cluster)
    assert next(events).key == "k"
    assert [(loss.key, loss.fields) for loss in told] == [("k", ["x"])]

    async def first() -> None:
        async for _ in a.async_subscribe("p", on_lost=told.append):
            return

    told.clear()
    asyncio.run(first())
    assert [(loss.key, loss.fields) for loss in told] == [("k", ["x"]), ("other", ["y"])]
    change = a.wait_for_change("p")
    assert [loss.global_index for loss in change.lost] == change.global_indexes


def test_a_rank_that_asks_for_a_batch_whose_values_are_lost_is_told(start: Start) -> None:
    """It gets the batch, under its key alone, when they are put again."""
    cluster = start(arena_bytes=8 << 20, sampler=RankAwareSampler(1))
    client = cluster.client("a")
    client.put(numbers(2), partition_id="p")

    def fetch() -> BatchMeta:
        sampling = {"dp_rank": 0, "batch_index": 0}
        return client.get_meta(["x"], 2, "p", task_name="t", sampling_config=sampling, lease=5.0, timeout=1.0)

    dealt = fetch()
    lose(cluster)
    with pytest.raises(StorageKeyNotFoundError, match=r"batch 0 of dp_rank 0 .* lost with storage unit 0"):
        fetch()
    client.put(numbers(2), dealt)
    assert fetch().global_indexes == dealt.global_indexes
    cluster.check()
