"""Views between real processes: killed holders, a unit and a controller that restart, forks, worker processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
import warm
from server_processes import restart, started, until
from transfer_queue.errors import CapacityError

MIB = 1 << 20
CAPACITY = 16 * MIB


def hold(pipe: Connection[Any, Any]) -> None:
    """Hold a view until the process is killed."""
    tq.init()
    view = tq.kv_batch_get(["a"], "p", layout="dense", copy=False)["x"]
    assert tq.is_view(view)
    pipe.send("held")
    pipe.recv()
    assert view.eq(1).all()
    pipe.send("same")
    pipe.recv()


@pytest.fixture(scope="module")
def client() -> Iterator[tq.TransferQueueClient]:
    with started("views", backend={"SimpleStorage": {"arena_bytes": CAPACITY, "num_data_storage_units": 1}}):
        yield tq.get_client()


def put(fill: int, rows: int = 1, key: str = "a") -> None:
    keys = [key] if rows == 1 else [f"{key}{row}" for row in range(rows)]
    tq.kv_batch_put(keys, "p", TensorDict({"x": torch.full((rows, 4 * MIB), fill, dtype=torch.uint8)}, batch_size=rows))


def holds(client: tq.TransferQueueClient) -> list[tuple[int, int]]:
    """(process, bytes) of all holders."""
    return [(hold.pid, hold.nbytes) for unit in client.status().units for hold in unit.views]


def everything_fits() -> bool:
    try:
        put(5, rows=3, key="b")
    except CapacityError:
        return False
    tq.kv_clear([f"b{row}" for row in range(3)], "p")
    return True


def test_holders(client: tq.TransferQueueClient) -> None:
    """One lives on over clears and restarts; its space comes back when it is killed."""
    put(1)
    assert holds(client) == []
    holder, ours = warm.reporting(hold, duplex=True)
    try:
        assert ours.recv() == "held"
        assert holds(client) == [(holder.pid, 4 * MIB)]
        tq.kv_clear(["a"], "p")
        until(lambda: sum(unit.viewed for unit in client.status().units) == 4 * MIB)
        for server in ("unit-0", "controller"):
            restart(server)
            until(lambda: client.status().units[0].views != [])
            put(2)  # elsewhere
            tq.kv_clear(["a"], "p")
        ours.send("look")
        assert ours.recv() == "same"
    finally:
        holder.kill()
        holder.join()
        ours.close()
    until(lambda: holds(client) == [])
    until(everything_fits)


def test_a_forked_child_keeps_its_own_hold(client: tq.TransferQueueClient) -> None:
    put(1)
    view = tq.kv_batch_get(["a"], "p", layout="dense", copy=False)["x"]
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0 if view.numpy().min() == view.numpy().max() == 1 else 1)
    os.close(reading)
    tq.kv_clear(["a"], "p")
    del view
    until(lambda: holds(client) == [(child, 4 * MIB)])
    with pytest.raises(CapacityError):
        put(2, rows=4)
    os.write(writing, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(writing)
    until(lambda: holds(client) == [])
    until(everything_fits)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_views(client: tq.TransferQueueClient, workers: int) -> None:
    """What a worker reads is shared with the loader, so that its views end in the worker."""
    rows = torch.arange(32)
    partition = f"of {workers} workers"
    client.kv_batch_put([str(row) for row in range(32)], partition, {"x": rows[:, None].expand(32, 5000).contiguous()})
    client.seal(partition)
    dataset = tq.StreamingDataset(None, 8, 4, ["x"], partition, "t", 0, copy=False, keep_batches=0)
    loader = tq.StreamingDataLoader(dataset, num_workers=workers)
    seen = []
    for data, _ in loader:
        assert tq.is_view(data["x"]) == (workers == 0)
        seen += [int(row[0]) for row in data["x"].unbind()]
        assert all(int(row.min()) == int(row.max()) for row in data["x"].unbind())
    assert seen == list(range(32))
    del data, loader, dataset
    until(lambda: holds(client) == [])


# The last one: it ends the system.
def test_a_view_outlives_its_system(client: tq.TransferQueueClient) -> None:
    put(3)
    view = tq.kv_batch_get(["a"], "p", layout="dense", copy=False)["x"]
    tq.close()
    assert view.eq(3).all()
    assert tq.is_view(view)
