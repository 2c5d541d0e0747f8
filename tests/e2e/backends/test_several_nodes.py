"""External stores over several nodes, which are folders of this machine here, each with a keeper of its own."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

import msgspec
import pytest
import torch
from tensordict import TensorDict

from local_nodes import LOOPBACK, Nodes
from transfer_queue.client import TransferQueueClient
from transfer_queue.config.settings import Settings
from transfer_queue.errors import StartError, StorageKeyNotFoundError
from transfer_queue.metadata.batch_meta import BatchMeta
from transfer_queue.node.system.launcher import start_local
from transfer_queue.node.system.launcher_protocol import NodeRole
from transfer_queue.node.system.store_process import check_all_objects
from transfer_queue.system_folder.paths import SystemFolder

MIB = 1 << 20
MOONCAKE = {"master_server_address": "127.0.0.1:0", "global_segment_size": 64 * MIB}
YUANRONG = {
    "worker_port": 0,
    "metastore_port": 0,
    "worker_args": "--shared_memory_size_mb 192 --node_timeout_s 2 --node_dead_timeout_s 4",
}
BACKENDS = {"MooncakeStore": MOONCAKE, "Yuanrong": YUANRONG}


class StoreNodes(Nodes):
    """A system over this number of nodes; the first has controller and unit."""

    def __init__(self, backend: str, count: int, **more: object) -> None:
        self.backend = backend
        conf = {"backend": {"storage_backend": backend, backend: BACKENDS[backend]}, **more}
        super().__init__(conf, [1] + [0] * (count - 1))
        assert self.systems[0].stores

    def lose(self, node: int) -> None:
        super().lose(node)
        check_all_objects(SystemFolder(self.systems[0].folder))


@pytest.fixture(params=list(BACKENDS))
def nodes(request: pytest.FixtureRequest) -> Iterator[StoreNodes]:
    made = StoreNodes(request.param, 3)
    yield made
    made.stop()


def rows(value: int) -> TensorDict:
    return TensorDict({"x": torch.full((8, MIB // 8), value, dtype=torch.int64)}, [8])  # 8 MiB


def right(client: TransferQueueClient, meta: BatchMeta, value: int) -> bool:
    """Whether rows are there and as they were put; False where they are lost, and named so."""
    try:
        got = client.get_data(meta, layout="dense")["x"]
    except StorageKeyNotFoundError as error:
        if "lost with storage unit 0" not in str(error):
            raise
        return False
    assert torch.equal(got, rows(value)["x"])
    return True


def test_values_go_from_any_node_to_any_until_a_node_is_killed(nodes: StoreNodes) -> None:
    """Then what lay there alone is lost, and named so; all else is there, and what is new goes to the others."""
    clients = [TransferQueueClient(system) for system in nodes.systems]
    with contextlib.ExitStack() as ending:
        for client in clients:
            ending.callback(client.close)
        assert len({msgspec.json.encode(list(system.stores.values())) for system in nodes.systems}) == 3
        metas = {10 * at + n: client.put(rows(10 * at + n), partition_id=f"p{at}")
                 for at, client in enumerate(clients) for n in range(2)}  # fmt: skip
        for client in clients:
            assert all(right(client, meta, value) for value, meta in metas.items())
        unread = {value: clients[2].put(rows(value), partition_id="unread") for value in (30, 31)}
        names = list(unread)
        ending.pop_all()
        clients.pop().close()
        nodes.lose(2)
        for client in clients:
            ending.callback(client.close)
        for client in clients:
            there = {value for value, meta in metas.items() if right(client, meta, value)}
            assert nodes.backend == "MooncakeStore" or there == set(metas)  # which has chosen where blocks lie
        found = [right(clients[1], unread[value], value) for value in names]
        assert nodes.backend == "MooncakeStore" or found == [False, False]
        last = clients[1].put(rows(77), partition_id="after")
        assert right(clients[0], last, 77)
        for partition in clients[0].get_partition_list():
            clients[0].clear_partition(partition)


def test_a_node_that_joins_nothing_is_told() -> None:
    """A keeper whose first node is not there does not come up, in words."""
    seat = NodeRole("node-1", LOOPBACK, 0, "127.0.0.1:9", {"MooncakeStore": "127.0.0.1:9"})
    conf = {"backend": {"storage_backend": "MooncakeStore", "MooncakeStore": MOONCAKE}}
    config = {"settings": Settings.from_config(conf).to_json()}
    with pytest.raises(StartError, match=r"no Mooncake master responds at 127\.0\.0\.1:9"):
        start_local(f"alone-{uuid.uuid4().hex[:8]}", config, seat=seat, key=bytes(32))
