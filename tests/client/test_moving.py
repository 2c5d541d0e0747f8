"""Blocks that are moved while they are written, read, replaced and cleared; over two units and one."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from simulated import Start, rows_of, table
from transfer_queue.client.data.extent_allocator import LARGEST_EXTENT
from transfer_queue.core.units import migration_planner
from transfer_queue.errors import InvalidArgumentError, StorageKeyNotFoundError, WaitTimeoutError
from transfer_queue.testing import Client, Cluster

MIB = 1 << 20
KIB = 1 << 10


def conf(units: int, replicas: int = 1) -> dict[str, Any]:
    return {"backend": {"SimpleStorage": {"replicas": replicas, "num_data_storage_units": units}}}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is spared."""
    monkeypatch.setattr(migration_planner, "SPARE", 256 * KIB)
    monkeypatch.setattr(migration_planner, "ORDER_BYTES", 256 * KIB)


def leased(cluster: Cluster) -> int:
    return sum(unit.table.leased for unit in cluster.units)


def values(rows: int, first: int) -> Any:
    """Rows of all kinds, each to be told by its number."""
    return table(
        dense=torch.arange(first, first + rows)[:, None].expand(rows, 100).contiguous(),
        ragged=torch.nested.nested_tensor(
            [torch.full((n % 7 + 1,), n, dtype=torch.int32) for n in range(first, first + rows)], layout=torch.jagged
        ),
        object=[{"n": n} for n in range(first, first + rows)],
    )


def check(client: Client, meta: Any, expected: list[int]) -> None:
    got = client.get_data(meta)
    assert [row.tolist() for row in rows_of(got["dense"])] == [[n] * 100 for n in expected]
    assert [row.tolist() for row in rows_of(got["ragged"])] == [[n] * (n % 7 + 1) for n in expected]
    assert got["object"].tolist() == [{"n": n} for n in expected]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("units", "replicas"), [(1, 1), (2, 2)])
def test_an_endless_run_of_which_little_survives(start: Start, units: int, replicas: int) -> None:
    """One row of each block survives: held bytes stay within twice the live ones and a spare."""
    cluster = start(conf=conf(units, replicas), arena_bytes=64 * MIB, seed=5)
    a, b = cluster.client("a"), cluster.client("b")
    kept: list[Any] = []
    highest = 0
    for turn in range(120):
        meta = a.put(values(128, 1000 * turn), partition_id="p")
        kept.append(meta.select_samples([turn % 128]))
        a.clear_samples(meta.select_samples([row for row in range(128) if row != turn % 128]))
        cluster.advance(0.5)
        highest = max(highest, leased(cluster))
    live = 120 * (800 + 64 + 64) * replicas
    open_extents = 2 * LARGEST_EXTENT * replicas  # one that is written, one that was full just now
    assert highest <= 2 * live + open_extents + MIB, "of 15 MiB written into each unit"
    for turn, meta in enumerate(kept):
        check(b, meta, [1000 * turn + turn % 128])


@pytest.mark.parametrize("units", [2, 3])
def test_a_drained_unit_holds_nothing(start: Start, units: int) -> None:
    cluster = start(conf=conf(units), seed=units)
    clients = [cluster.client(name) for name in "abcd"]
    metas = [client.put(values(40, 100 * n), partition_id=f"p{n}") for n, client in enumerate(clients)]
    lies_in = {place.unit for _, _, places, _ in cluster.controller.state.blocks.live_blocks() for place in places}
    (drained, *_) = lies_in
    clients[0].drain_unit(drained)
    for n, (client, meta) in enumerate(zip(clients[::-1], metas, strict=True)):
        check(client, meta, list(range(100 * n, 100 * n + 40)))
    for client in clients:
        client.put(values(3, 0), partition_id="new")
        client.put(table(x=torch.zeros(1, MIB // 4)), partition_id="new")
    clients[1].drain_unit(drained)
    blocks = cluster.controller.state.blocks
    assert drained not in {place.unit for _, _, places, _ in blocks.live_blocks() for place in places}
    for client in clients:
        client.close()
    cluster.run()
    assert cluster.units[drained].table.leased == 0
    late = cluster.client("late")
    late.drain_unit(drained, undo=True)
    cluster.advance(0.0)
    assert cluster.controller.state.draining == set()
    assert not cluster.units[drained].draining


def test_what_cannot_be_drained(start: Start) -> None:
    cluster = start(conf=conf(2, 2))
    a = cluster.client("a")
    with pytest.raises(InvalidArgumentError, match=r"storage unit 7 does not exist \(the units are: "):
        a.drain_unit(7)
    with pytest.raises(InvalidArgumentError, match="replicas"):
        a.drain_unit(0)
    one = start(conf=conf(1)).client("b")
    with pytest.raises(InvalidArgumentError, match="there would be 0"):
        one.drain_unit(0)


def test_a_unit_that_cannot_be_emptied_is_told(start: Start) -> None:
    """The other units have no space: the call that waits reports what is left, and the values stay."""
    cluster = start(conf=conf(2), arena_bytes=2 * MIB)
    a, b = cluster.client("a"), cluster.client("d")
    metas = [client.put(table(x=torch.arange(MIB // 4)[None]), partition_id="p") for client in (a, b)]
    full = cluster.units[0].table.lease(99, MIB - 64 * KIB), cluster.units[1].table.lease(99, MIB)
    with pytest.raises(WaitTimeoutError, match="still holds 1 blocks"):
        a.drain_unit(0, timeout=5.0)
    for meta in metas:
        assert rows_of(a.get_data(meta)["x"])[0].tolist() == list(range(MIB // 4))
    for unit, extent in zip(cluster.units, full, strict=True):
        assert extent is None or unit.table.free(extent.number)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(4))
def test_reads_against_clears_replaces_moves_and_drains(start: Start, seed: int) -> None:
    """Zero foreign bytes: every row that is read holds one of the values that were put for it."""
    units, replicas = [(1, 1), (2, 1), (3, 1), (2, 2)][seed]
    cluster = start(conf=conf(units, replicas), seed=seed, arena_bytes=32 * MIB)
    writer, reader, random = cluster.client("w"), cluster.client("r"), Random(seed)
    alive: dict[int, tuple[Any, int]] = {}  # first number of a put -> its rows that live, and how often replaced
    gone = reads = 0
    for turn in range(60):
        first = 1000 * turn
        alive[first] = writer.put(values(64, first), partition_id="p"), 0
        held = random.sample(sorted(alive), min(3, len(alive)))
        reader.get_partition_list()
        reader.hold()  # lookups are answered late
        tasks = [(n, reader.start(reader.operations.get_data(alive[n][0].select_fields("dense")))) for n in held]
        cluster.run()
        for n in random.sample(sorted(alive), min(4, len(alive))):
            meta, version = alive[n]
            if random.random() < 0.3 and meta.size > 1:
                writer.put(table(dense=torch.full((meta.size, 100), -n - version - 1)), meta)
                alive[n] = meta, version + 1
            elif meta.size > 2:
                keep = sorted(random.sample(range(meta.size), random.randint(1, 3)))
                writer.clear_samples(meta.select_samples([k for k in range(meta.size) if k not in keep]))
                alive[n] = meta.select_samples(keep), version
        if units > 1 and replicas == 1 and turn % 10 == 5:
            reader.release()
            writer.drain_unit(turn % units, timeout=60.0)
            writer.drain_unit(turn % units, undo=True)
        cluster.advance(random.choice([0.0, 0.3, 1.0]))
        reader.release()
        cluster.advance(0.1)
        for n, task in tasks:
            if task.error is not None:
                assert isinstance(task.error, StorageKeyNotFoundError)
                gone += 1
                continue
            for row in rows_of(task.result()["dense"]):
                (value,) = set(row.tolist())
                assert n <= value < n + 64 or -n - 60 <= value <= -n - 1, f"a foreign value {value} in put {n}"
                reads += 1
    assert reads > 1000
    cluster.check()
