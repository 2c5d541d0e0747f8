"""Space that an idle client has leased and does not use goes to another that waits for it."""

from __future__ import annotations

import pytest
from test_capacity import MIB, mib

from simulated import Start, numbers
from transfer_queue.errors import CapacityError
from transfer_queue.messages.puts import Publish
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.testing import Client, Cluster


@pytest.fixture
def cluster(start: Start) -> Cluster:
    return start(seed=3, arena_bytes=4 * MIB)


def spread(client: Client, cluster: Cluster) -> int:
    """Small puts until the client has leased much that it does not use; how many puts."""
    for row in range(100):
        if unused(cluster) > MIB:
            return row
        client.put(mib(0.03, row), partition_id="a")
    raise AssertionError("nothing is unused")


def unused(cluster: Cluster) -> int:
    """Bytes leased beyond what blocks take."""
    return cluster.unit.table.leased - cluster.controller.state.blocks.live_bytes


def test_the_rest_of_an_open_extent(a: Client, b: Client, cluster: Cluster) -> None:
    puts = spread(a, cluster)
    space = cluster.unit.pool.arena.capacity - cluster.unit.table.leased
    wanted = (space + MIB // 2) / MIB
    assert wanted < 4
    meta = b.put(mib(wanted, 9), partition_id="b")
    assert b.get_data(meta)["x"].eq(9).all()
    assert unused(cluster) < 4 * GRANULE
    cluster.run()
    assert cluster.controller.state.blocks.leased == cluster.unit.table.leased
    mine = a.get_meta(["x"], None, "a", mode="force_fetch")
    assert [int(row[0]) for row in a.get_data(mine)["x"].unbind()] == list(range(puts))


def test_its_owner_goes_on_in_another_extent(a: Client, b: Client, cluster: Cluster) -> None:
    before = a.put(numbers(2), partition_id="a")
    space = cluster.unit.pool.arena.capacity - cluster.unit.table.leased
    b.clear_samples(b.put(mib(space / MIB), partition_id="b"))
    held = b.put(mib((cluster.unit.pool.arena.capacity - GRANULE) / MIB, 7), partition_id="b")
    assert b.get_data(held)["x"].eq(7).all()
    with pytest.raises(CapacityError):
        a.put(mib(0.1), partition_id="a")
    b.clear_samples(held)
    cluster.run()
    after = a.put(numbers(2, 10), partition_id="a")
    cluster.run()
    assert a.get_data(before)["x"].tolist() == [0, 1]
    assert a.get_data(after)["x"].tolist() == [10, 11]
    assert b.get_data(before)["x"].tolist() == [0, 1]


def test_one_who_waits_gets_it_when_the_other_is_through(a: Client, b: Client, cluster: Cluster) -> None:
    """A put whose Publish is under way keeps its extent whole, however long that takes."""
    spread(a, cluster)
    a.hold()
    slow = a.start(a.operations.put(mib(0.03, 5), partition_id="a"))
    cluster.run()
    space = cluster.unit.pool.arena.capacity - cluster.unit.table.leased
    waits = b.start(b.operations.put(mib(space / MIB + 0.5, 9), partition_id="b", timeout=30))
    cluster.advance(10)
    assert not waits.done
    a.release()
    cluster.run()
    assert slow.done
    cluster.advance(1)
    assert b.get_data(waits.result())["x"].eq(9).all()
    assert a.get_data(slow.result())["x"].eq(5).all()


def test_an_extent_of_which_nobody_knows_what_becomes_is_not_recalled(a: Client, b: Client, cluster: Cluster) -> None:
    """Its Publish may still arrive, long after its caller gave it up."""
    a.put(numbers(1), partition_id="a")
    operation = a.operations.put(numbers(1, 10), partition_id="a")
    call = next(operation)
    assert isinstance(call.body, Publish)
    with pytest.raises(KeyboardInterrupt):
        operation.throw(KeyboardInterrupt())
    leased = cluster.unit.table.leased
    assert leased
    with pytest.raises(CapacityError):
        b.put(mib((4 * MIB - leased + GRANULE // 2) / MIB), partition_id="b")
    assert cluster.unit.table.leased == leased
