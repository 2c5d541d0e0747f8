"""A client whose extent or close the controller has refused goes on with other extents."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from transfer_queue.client.data.extent_allocator import ExtentAllocator
from transfer_queue.errors import ProtocolError
from transfer_queue.messages.reports.unit_reports import ExtentsRecalledReport
from transfer_queue.testing import Client, Cluster

LARGE = 1 << 20


def put(client: Client, key: str, length: int = 4) -> None:
    client.kv_put(key, "p", {"x": torch.arange(length)})


def value(client: Client, key: str) -> torch.Tensor:
    return client.kv_batch_get([key], "p")["x"][0]


def space_of(client: Client) -> ExtentAllocator:
    (allocator,) = client.state.space.allocators
    return allocator


def leased(cluster: Cluster) -> list[int]:
    return [extent.number for extent in cluster.unit.table.leased_extents()]


def test_a_put_uses_another_extent_after_one_was_refused(cluster: Cluster, a: Client) -> None:
    """The unit has reported that the extent is closed, and the client does not know it."""
    put(a, "first")
    (extent,) = leased(cluster)
    report = ExtentsRecalledReport(0, np.array([extent], "<i8").tobytes(), np.array([64], "<i8").tobytes())
    cluster._deliver_from_unit(cluster.unit, report)
    with pytest.raises(ProtocolError, match=f"extent {extent} of unit 0 is closed"):
        put(a, "refused")
    for length in (4, LARGE):
        put(a, f"next {length}", length)
        assert torch.equal(value(a, f"next {length}"), torch.arange(length))
    assert a.kv_list("p")["p"].keys() == {"first", "next 4", f"next {LARGE}"}


def test_a_close_that_is_refused_is_not_sent_with_every_put(cluster: Cluster, a: Client, b: Client) -> None:
    put(a, "of a")
    put(b, "of b")
    first, second = leased(cluster)
    space_of(b).restore_closes([(0, first)])
    with pytest.raises(ProtocolError, match=f"extent {first} of unit 0 belongs to another writer"):
        put(b, "refused")
    for length in (4, LARGE):
        put(b, "next", length)
        put(a, "of a", length)
        assert torch.equal(value(b, "next"), value(a, "of a"))
    assert {first, second} <= {extent for _, extent in cluster.controller.state.blocks.extents}


def test_space_of_a_put_that_never_arrived_is_returned_with_the_next_lease(cluster: Cluster, a: Client) -> None:
    """The client does not know whether its put was carried out, and only the unit knows whose the extent is."""
    put(a, "before")
    space = space_of(a)
    reserved = a.call(space.reserve(LARGE))
    space.mark_published(reserved, certain=False)
    put(a, "small")
    assert reserved.extent in leased(cluster)
    put(a, "next", LARGE)
    assert reserved.extent not in leased(cluster)
    assert set(leased(cluster)) == {extent for _, extent in cluster.controller.state.blocks.extents}
