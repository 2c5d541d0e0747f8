"""Storage units that are drained: what is moved, what is left, and which ones cannot be drained."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from simulated import Start, rows_of, table
from transfer_queue.errors import InvalidArgumentError, WaitTimeoutError
from transfer_queue.testing import Client

MIB = 1 << 20
KIB = 1 << 10


def conf(units: int, replicas: int = 1) -> dict[str, Any]:
    return {"backend": {"SimpleStorage": {"replicas": replicas, "num_data_storage_units": units}}}


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
