"""An external store that answers differently on each node: what a reader misses is readable again, or lost by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch

from simulated import Start, numbers
from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.storage.protocols import Bytes
from transfer_queue.storage.stores.base import Piece, Store, StoreAddress
from transfer_queue.testing import Client, Cluster

FIRST, SECOND = "first node", "second node"  # the unit is on the first
GIVEN_UP_SECONDS = 12.0


class NodeStore(Store):
    """A worker on each node, and a record of which worker has a block. A worker also keeps what it has fetched."""

    held: ClassVar[dict[str, dict[str, Bytes]]] = {}
    """Node -> key -> content."""
    record: ClassVar[dict[str, str]] = {}
    """Key -> the node that others fetch it from."""
    records: ClassVar[bool] = True
    """Whether writes are recorded."""
    failure: ClassVar[Exception | None] = None
    """What writes raise."""
    writes: ClassVar[list[str]] = []

    def __init__(self, node: str) -> None:
        self._held = NodeStore.held.setdefault(node, {})
        self._node = node

    def write(self, key: str, data: Bytes, within: float) -> None:
        if NodeStore.failure is not None:
            raise NodeStore.failure
        self._held[key] = data.copy()
        NodeStore.writes.append(key)
        if NodeStore.records:
            NodeStore.record[key] = self._node

    def _find(self, key: str) -> Bytes | None:
        if key not in self._held and key in NodeStore.record:
            self._held[key] = NodeStore.held[NodeStore.record[key]][key]
        return self._held.get(key)

    def read(self, pieces: Sequence[Piece], into: Bytes, within: float) -> list[str]:
        for key, start, length, at in pieces:
            found = self._find(key)
            if found is not None:
                into[at : at + length] = found[start : start + length]
        return self.missing([piece.key for piece in pieces])

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            NodeStore.record.pop(key, None)
            for held in NodeStore.held.values():
                held.pop(key, None)

    def missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key in dict.fromkeys(keys) if self._find(key) is None]

    def rewrite(self, keys: Sequence[str]) -> None:
        for key in keys:
            found = self._find(key)
            if found is not None:
                self.write(key, np.array(found), 0.0)


KIND = f"{__name__}:NodeStore"


@pytest.fixture(autouse=True)
def empty() -> None:
    for found in (NodeStore.held, NodeStore.record, NodeStore.writes):
        found.clear()
    NodeStore.records, NodeStore.failure = True, None


@pytest.fixture
def cluster(start: Start) -> Cluster:
    return start(seed=1, conf={"backend": {"fields": {"x": KIND}}}, stores={KIND: StoreAddress(KIND, {"node": FIRST})})


@pytest.fixture
def far(cluster: Cluster) -> Client:
    """A client on the second node."""
    client = cluster.client("far")
    client.state.system.stores[KIND] = StoreAddress(KIND, {"node": SECOND})
    return client


def test_what_a_node_misses_is_written_again(a: Client, far: Client) -> None:
    """The record of a block is lost with a worker, and the first node has the block."""
    meta = a.put(numbers(6), partition_id="p")
    (key,) = NodeStore.writes
    NodeStore.record.clear()
    assert far.get_data(meta)["x"].tolist() == list(range(6))
    assert NodeStore.writes == [key, key]
    assert NodeStore.record == {key: FIRST}


def test_what_a_node_cannot_read_for_seconds_is_lost_for_all(a: Client, far: Client, cluster: Cluster) -> None:
    """Also if the unit finds it each time that it is asked. Nothing of it is left, and it can be put again."""
    meta = a.put(numbers(6), partition_id="p")
    NodeStore.record.clear()
    NodeStore.records = False
    began = cluster.clock.now
    with pytest.raises(StorageKeyNotFoundError, match="lost with storage unit 1"):
        far.get_data(meta)
    assert cluster.clock.now - began < GIVEN_UP_SECONDS
    with pytest.raises(StorageKeyNotFoundError, match="lost with storage unit 1"):
        a.get_data(meta)
    cluster.advance(1.0)
    assert not any(NodeStore.held.values())
    NodeStore.records = True
    a.put(numbers(6, 10), metadata=meta)
    assert far.get_data(meta)["x"].tolist() == list(range(10, 16))


def test_what_a_node_finds_later_is_not_lost(a: Client, far: Client, cluster: Cluster) -> None:
    meta = a.put(numbers(6), partition_id="p")
    (key,) = NodeStore.writes
    NodeStore.record.clear()
    NodeStore.failure = OSError("no space")
    cluster.later(2.0, lambda: NodeStore.record.update({key: FIRST}))
    assert far.get_data(meta)["x"].tolist() == list(range(6))
    assert cluster.clock.now >= 2.0


def test_a_reader_does_not_wait_for_what_is_cleared(a: Client, far: Client, cluster: Cluster) -> None:
    meta = a.put(numbers(6), partition_id="p")
    NodeStore.record.clear()
    NodeStore.records = False
    began = cluster.clock.now
    task = far.start(far.operations.get_data(meta))
    cluster.advance(0.5)
    assert not task.done
    a.clear_samples(meta)
    cluster.wait(lambda: task.done)
    assert cluster.clock.now - began < GIVEN_UP_SECONDS / 4
    with pytest.raises(StorageKeyNotFoundError) as raised:
        task.result()
    assert "lost" not in str(raised.value)


def test_only_some_blocks_of_a_get_are_missed(a: Client, far: Client) -> None:
    """Those that the second node finds are not written again."""
    metas = [a.put(numbers(2, 10 * n), partition_id="p") for n in range(3)]
    gone = NodeStore.writes[1]
    del NodeStore.record[gone]
    found = [far.get_data(meta)["x"] for meta in metas]
    assert torch.equal(torch.cat(found), torch.tensor([0, 1, 10, 11, 20, 21]))
    assert NodeStore.writes[3:] == [gone]
