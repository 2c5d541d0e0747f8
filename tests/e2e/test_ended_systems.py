"""What a worker sees of a system that has ended: every call fails at once, and none waits for `timeouts.call`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from server_processes import kill_together
from transfer_queue.config.settings import Settings
from transfer_queue.node.system.launcher import RunningSystem, start_local

NAME = "ended"
CONF = {"system": {"name": NAME}, "timeouts": {"call": 3600.0}}


def stop(system: RunningSystem) -> None:
    system.stop()


def kill(system: RunningSystem) -> None:
    """Kill all processes of a system at once, so that its files stay."""
    supervisor = psutil.Process(system.description.pid)
    children = supervisor.children(recursive=True)
    kill_together([supervisor, *children])
    psutil.wait_procs(children)
    system.stop()
    assert not system.is_alive()


def large() -> TensorDict:
    """Values that do not fit into space that a client has leased."""
    return TensorDict({"x": torch.zeros(1, 2 << 20, dtype=torch.uint8)}, batch_size=[1])


@pytest.mark.parametrize("end", [stop, kill])
def test_every_call_to_a_system_that_has_ended_fails(end: Callable[[RunningSystem], None]) -> None:
    system = start_local(NAME, {"settings": Settings.from_config(CONF).to_json(), "conf": CONF})
    try:
        tq.init(CONF)
        client = tq.get_client()
        queue = tq.Queue("q")
        tq.kv_put("k", "p", {"x": torch.arange(3)})
        queue.put(1)
    finally:
        end(system)
    item: Any = torch.zeros(2 << 20, dtype=torch.uint8)
    calls: list[Callable[[], Any]] = [
        lambda: client.put(large(), partition_id="p"),
        lambda: client.put(large(), partition_id="p", timeout=3600.0),
        lambda: asyncio.run(client.async_put(large(), partition_id="p")),
        lambda: tq.kv_batch_put(["l"], "p", large()),
        lambda: asyncio.run(tq.async_kv_batch_put(["l"], "p", large())),
        lambda: tq.kv_put("k", "p", {"x": torch.arange(3)}),
        lambda: queue.put(item),
        lambda: asyncio.run(queue.put_async(item)),
        lambda: queue.get(),
        lambda: tq.kv_batch_get(["k"], "p"),
        lambda: tq.kv_clear(["k"], "p"),
        lambda: client.get_meta(["x"], 1, "p", task_name="t", timeout=3600.0),
    ]
    for call in calls:
        with pytest.raises(tq.ConnectionLostError, match="its system was closed or has crashed"):
            call()
    with pytest.raises(tq.AttachError, match="no system is running"):
        tq.init(CONF, attach="require")
    tq.close()
