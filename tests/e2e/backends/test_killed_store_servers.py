"""A server of an external store is killed: its end is reported, lost values are named, and the others continue."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from test_several_nodes import BACKENDS, StoreNodes

from server_processes import until
from transfer_queue.cli.status_table import format_table
from transfer_queue.client import TransferQueueClient
from transfer_queue.errors import CapacityError, ConnectionLostError, StorageKeyNotFoundError
from transfer_queue.metadata.batch_meta import BatchMeta
from transfer_queue.node.system.launcher import RunningSystem

SECONDS = 60.0
ROWS = 8


@pytest.fixture(params=list(BACKENDS))
def nodes(request: pytest.FixtureRequest) -> Iterator[StoreNodes]:
    made = StoreNodes(request.param, 3, metrics={"enabled": True, "port": 0})
    yield made
    made.stop()


@pytest.fixture
def clients(nodes: StoreNodes) -> Iterator[list[TransferQueueClient]]:
    with contextlib.ExitStack() as ending:
        yield [ending.enter_context(TransferQueueClient(system)) for system in nodes.systems]


def server_of(system: RunningSystem) -> int:
    """The process that runs the store server of a node."""
    return int(re.findall(r"up, process (\d+)", Path(system.logs, "store.log").read_text())[-1])


def rows(value: int, mib: int = 1) -> TensorDict:
    return TensorDict({"x": torch.full((ROWS, mib << 14), value, dtype=torch.int64)}, [ROWS])


def put_some(clients: list[TransferQueueClient]) -> dict[int, BatchMeta]:
    """Puts of every node, by their values."""
    return {
        100 * at + n: client.put(rows(100 * at + n), partition_id=f"p{at}")
        for at, client in enumerate(clients)
        for n in range(6)
    }


def lost(client: TransferQueueClient, metas: dict[int, BatchMeta], server: str) -> set[int]:
    """The values that are lost. Each loss names the server, and every other value is as it was put."""
    found: dict[int, str] = {}
    for value, meta in metas.items():
        try:
            got = client.get_data(meta, layout="dense")["x"]
        except StorageKeyNotFoundError as error:
            found[value] = str(error)
        else:
            assert torch.equal(got, rows(value)["x"])
    for said in found.values():
        assert "lost with storage unit 0" in said
        assert server in said
        assert "put the field again" in said
    return set(found)


def told_as_lost(client: TransferQueueClient) -> int:
    """The rows that the status names as lost, without a read."""
    return sum(field.lost for partition in client.status().partitions for field in partition.fields)


def settle(client: TransferQueueClient, pid: int, ending: int) -> str:
    """Wait until this number of servers has ended and all run again; return how messages name the killed one."""
    until(lambda: any(server.ends for server in client.status().stores), "the end of the server is not reported")
    until(
        lambda: sum(server.ends for server in client.status().stores) == ending,
        "not all servers that must end have ended",
    )
    until(lambda: all(server.up for server in client.status().stores), "the servers are not restarted")
    assert "was restarted once" in format_table(client.status())
    return f"process {pid})"


def check_metrics(client: TransferQueueClient, ending: int) -> None:
    with urllib.request.urlopen(f"http://{client.storage_manager.config['metrics_endpoint']}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    named = [line for line in lines if line.startswith("tq_store_server_ends_total{")]
    assert sum(int(line.split()[-1]) for line in named) == ending, named
    assert all(line.endswith(" 1") for line in lines if line.startswith("tq_store_server_up{"))


def try_put(client: TransferQueueClient, value: int, partition: str, mib: int = 1) -> BatchMeta | None:
    """A put while the store may be down, which succeeds or changes nothing, and does not hang."""
    begun = time.monotonic()
    try:
        return client.put(rows(value, mib), partition_id=partition)
    except (ConnectionLostError, CapacityError):
        return None
    finally:
        assert time.monotonic() - begun < SECONDS


def put_after_all(client: TransferQueueClient, value: int, partition: str, mib: int = 1) -> BatchMeta:
    """Puts when the store has recovered."""
    found: list[BatchMeta] = []

    def tried() -> bool:
        meta = try_put(client, value, partition, mib)
        found.extend([meta] if meta is not None else [])
        return bool(found)

    until(tried, "a put succeeds again")
    return found[0]


@pytest.mark.parametrize("at", [2, 0], ids=["another node", "first node"])
def test_a_killed_server_is_told_and_all_goes_on(
    nodes: StoreNodes, clients: list[TransferQueueClient], at: int
) -> None:
    """The first node's server has the master or the metastore of the store, and so ends the whole store."""
    until(lambda: sum(server.up for server in clients[0].status().stores) == 3, "all servers report themselves")
    metas = put_some(clients)
    for client in clients:
        assert lost(client, metas, "") == set()
    metas |= {1000 + value: meta for value, meta in put_unread(clients).items()}
    pid = server_of(nodes.systems[at])
    os.kill(pid, signal.SIGKILL)
    during = {5000 + n: client.put(rows(5000 + n), partition_id="during") for n, client in enumerate(clients)}
    ending = 3 if nodes.backend == "Yuanrong" and at == 0 else 1  # workers end with their metastore
    server = settle(clients[0], pid, ending)
    after = {6000 + n: put_after_all(client, 6000 + n, "after") for n, client in enumerate(clients)}
    for client in clients:
        assert lost(client, after, server) == set()
    gone = lost(clients[0], metas, server)
    lost(clients[0], during, server)
    check_metrics(clients[0], ending)
    assert lost(clients[1], metas, server) == gone
    assert told_as_lost(clients[0]) >= ROWS * len(gone)
    for value in gone:
        clients[2].put(rows(value), metadata=metas[value])
    assert lost(clients[1], metas, server) == set()
    for partition in clients[0].get_partition_list():
        clients[0].clear_partition(partition)
    big = {7000 + n: put_after_all(clients[n % 3], 7000 + n, "big", 12) for n in range(8)}  # more than one node has
    for value, meta in big.items():
        assert torch.equal(clients[0].get_data(meta, layout="dense")["x"], rows(value, 12)["x"])
    clients[0].clear_partition("big")


def test_all_values_were_on_the_server_that_is_killed(nodes: StoreNodes, clients: list[TransferQueueClient]) -> None:
    """Then no other block shows that the store can be read. The loss is reported without a read, and gets name it."""
    until(lambda: sum(server.up for server in clients[0].status().stores) == 3, "all servers report themselves")
    metas = {n: clients[2].put(rows(n), partition_id="p") for n in range(4)}
    pid = server_of(nodes.systems[2])
    on_it = nodes.backend == "Yuanrong"  # Mooncake divides the blocks among all segments
    os.kill(pid, signal.SIGKILL)
    server = settle(clients[0], pid, 1)
    if on_it:
        until(lambda: told_as_lost(clients[0]) == 4 * ROWS, "the losses are not reported without a read")
    gone = [lost(client, metas, server) for client in clients]
    assert gone[0] == gone[1] == gone[2]
    assert len(gone[0]) == 4 or not on_it


def put_unread(clients: list[TransferQueueClient]) -> dict[int, BatchMeta]:
    """Put values that no client has read, so that no other node has a copy."""
    return {at: client.put(rows(1000 + at), partition_id="unread") for at, client in enumerate(clients)}
