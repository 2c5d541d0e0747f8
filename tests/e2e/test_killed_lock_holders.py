"""Processes with locks and updates that are killed: others go on at once, and no increment is lost or comes twice."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import transfer_queue as tq
import warm
from server_processes import server_process
from transfer_queue.errors import LockLostError

LEASE = 600.0
"""Seconds of a lease that does not end within a test."""
LONG = 100.0


@pytest.fixture(scope="module")
def config() -> Iterator[Any]:
    tq.close()
    yield tq.init()
    tq.close()


def kill_controller() -> None:
    server_process("controller").kill()


def hold(config: Any, told: Connection) -> None:
    """Hold a lock until the process is killed."""
    tq.init(config, task="holder", rank=1)
    with tq.kv_lock(["x", "y"], "p", lease=LEASE) as lock:
        tq.kv_put("x", "p", {"n": 1}, fence=lock)
        told.send(lock.token)
        signal.pause()


def count(config: Any, times: int | None, told: Connection) -> None:
    """Increment a counter, and report each increment; `times` None: until the process is killed."""
    tq.init(config)
    done = 0
    while times is None or done < times:
        done += 1
        told.send(("begin", done))
        tq.kv_update("counter", "counts", "n", lambda old: {"n": old["n"] + 1}, empty={"n": torch.tensor(0)})
        told.send(("end", done))
    os._exit(0)


def received(connection: Connection) -> Iterator[Any]:
    """What a process sends, until it has ended."""
    while True:
        try:
            yield connection.recv()
        except EOFError:
            return


def test_the_lock_of_a_killed_process_is_free_long_before_its_lease_ends(config: Any) -> None:
    holder, here = warm.reporting(hold, config)
    token = here.recv()
    (entry,) = tq.kv_lock_list("p")
    assert (entry.keys, entry.token, entry.task, entry.rank, entry.pid) == (["x", "y"], token, "holder", 1, holder.pid)
    client = tq.get_client()
    assert re.search(rf"Key 'x' is locked for .* s by holder rank 1, pid {holder.pid}, ", client.explain("p", key="x"))
    with pytest.raises(tq.WaitTimeoutError, match=f"'y' is locked for .* s by holder rank 1, pid {holder.pid}, "):
        tq.kv_lock("y", "p", timeout=0).__enter__()
    holder.kill()
    holder.join()
    with tq.kv_lock("y", "p", timeout=LONG) as lock:
        assert lock.token > token
        with pytest.raises(LockLostError, match=f"token {token} is not in force"):
            tq.kv_put("x", "p", {"n": 2}, fence=token)
        tq.kv_put("x", "p", {"n": 3}, fence=lock)
    assert tq.kv_batch_get("x", "p")["n"][0] == 3


def test_a_lock_survives_the_death_of_the_controller(config: Any) -> None:
    with tq.kv_lock("x", "p", lease=LEASE) as lock:
        kill_controller()
        tq.kv_put("x", "p", {"n": 1}, fence=lock)
        (entry,) = tq.kv_lock_list()
        assert entry.token == lock.token

        async def wait() -> int:
            async with tq.async_kv_lock("x", "p", timeout=LONG) as second:
                return second.token

        async def release_meanwhile() -> int:
            waiting = asyncio.create_task(wait())
            while not any(not entry.held for entry in await tq.async_kv_lock_list()):
                await asyncio.sleep(0)
            kill_controller()  # the request that waits is sent again to the next controller
            await tq.get_client().async_get_partition_list()
            assert not waiting.done()
            lock.__exit__(None, None, None)
            token = await waiting
            lock.__enter__()
            return token

        first = lock.token
        assert asyncio.run(release_meanwhile()) > first


def test_updates_of_one_event_loop_and_of_threads_all_count(config: Any) -> None:
    def more(old: dict[str, Any]) -> dict[str, Any]:
        return {"n": old["n"] + 1}

    async def run() -> list[Any]:
        together = [tq.async_kv_update("k", "p", "n", more, empty={"n": 0}) for _ in range(20)]
        in_threads = [asyncio.to_thread(tq.kv_update, "k", "p", "n", more, empty={"n": 0}) for _ in range(20)]
        return await asyncio.gather(*together, *in_threads)

    assert sorted(found["n"] for found in asyncio.run(run())) == list(range(1, 41))


def test_increments_of_killed_processes_happen_at_most_once(config: Any) -> None:
    victims = [warm.reporting(count, config, None) for _ in range(2)]
    others = [warm.reporting(count, config, 20) for _ in range(2)]
    said: list[Any] = []
    for victim, here in victims:
        for what in received(here):
            said.append(what[0])
            if what == ("end", 5):
                victim.kill()
    kill_controller()
    for other, here in others:
        said += [what[0] for what in received(here)]
        other.join()
        assert other.exitcode == 0
    begun, ended = said.count("begin"), said.count("end")
    total = int(tq.kv_batch_get("counter", "counts")["n"])
    assert ended <= total <= begun
    assert ended >= 2 * 5 + 2 * 20
