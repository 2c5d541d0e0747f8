"""`kv_lock`: blocks of several clients exclude each other, and a lost lock is reported and fenced."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoints import load, save

from transfer_queue.errors import InvalidArgumentError, LockLostError, WaitTimeoutError
from transfer_queue.messages.locks import LockReply, TakeLock
from transfer_queue.testing import Client, Cluster


def held(client: Client) -> list[list[str]]:
    return [entry.keys for entry in client.kv_lock_list() if entry.held]


def test_a_block_holds_its_keys_and_no_others(a: Client, b: Client) -> None:
    with a.kv_lock(["x", "y", "x"], "p") as lock:
        assert lock.held
        assert lock.keys == ["x", "y"]
        assert lock.partition_id == "p"
        assert held(b) == [["x", "y"]]
        with b.kv_lock("z", "p"), b.kv_lock("x", "q"):
            pass
        with pytest.raises(WaitTimeoutError, match="'y' is locked for 0 s by pid"), b.kv_lock("y", "p", timeout=0):
            pass
    assert not lock.held
    assert held(b) == []


def test_a_message_names_the_process_of_the_holder_also_without_a_task(a: Client, b: Client) -> None:
    holder = rf"'x' is locked for 1 s by pid {os.getpid()}, {re.escape(socket.gethostname())} "
    with a.kv_lock("x", "p"):
        (entry,) = b.kv_lock_list("p")
        assert (entry.task, entry.pid, entry.host) == ("", os.getpid(), socket.gethostname())
        with pytest.raises(WaitTimeoutError, match=holder) as raised, b.kv_lock("x", "p", timeout=1):
            pass
    assert "or end the block that holds it" in str(raised.value)
    assert "reentrant" not in str(raised.value)


def test_a_block_in_a_block_of_the_same_key_is_named_as_the_cause(a: Client) -> None:
    for seconds in (0, 2.0):
        with (
            pytest.raises(WaitTimeoutError, match="the same client holds a lock that it waits for, and locks are not"),
            a.kv_lock("x", "p"),
            a.kv_lock(["x", "y"], "p", timeout=seconds),
        ):
            pass


def test_a_lock_is_released_only_in_its_block(a: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="this lock is not held"):
        a.kv_lock("x", "p").__exit__(None, None, None)


def test_a_waiting_block_begins_when_the_holder_is_done(cluster: Cluster, a: Client, b: Client) -> None:
    lock = a.kv_lock("x", "p").__enter__()
    cluster.later(5.0, lambda: lock.__exit__(None, None, None))
    with b.kv_lock("x", "p") as second:
        assert cluster.clock.now == 5.0
        assert second.token > lock.token


def test_the_wait_ends_with_the_timeout_of_the_setting_by_default(cluster: Cluster, a: Client, b: Client) -> None:
    with a.kv_lock("x", "p"), pytest.raises(WaitTimeoutError, match="waited 60 s"), b.kv_lock("x", "p"):
        pass
    assert cluster.clock.now == 60.0


def test_a_lock_is_renewed_while_its_block_runs(cluster: Cluster, a: Client, b: Client) -> None:
    with a.kv_lock("x", "p", lease=3.0) as lock:
        cluster.advance(100.0)
        assert lock.held
        assert held(b) == [["x"]]
        a.kv_put("x", "p", {"n": 1}, fence=lock)


def test_a_stopped_holder_loses_its_lock_and_learns_it_at_the_end(cluster: Cluster, a: Client, b: Client) -> None:
    def block() -> None:
        with a.kv_lock("x", "p", lease=3.0) as lock:
            a.pause_renewals()
            with b.kv_lock("x", "p") as other:
                assert cluster.clock.now == 3.0
                b.kv_put("x", "p", {"n": "b"}, fence=other)
            with pytest.raises(LockLostError, match="token 1 is not in force any more"):
                a.kv_put("x", "p", {"n": "a"}, fence=lock)
            with pytest.raises(LockLostError):
                a.kv_batch_put(["x", "y"], "p", tags=[{}, {}], fence=lock.token)

    with pytest.raises(LockLostError, match=r"the lock of \['x'\] of partition 'p' \(token 1\) ended before its block"):
        block()
    assert a.kv_batch_get("x", "p")["n"][0] == "b"
    assert list(a.kv_list("p")["p"]) == ["x"]


def test_a_renewal_reports_that_the_lock_is_lost(cluster: Cluster, a: Client) -> None:
    lock = a.kv_lock("x", "p", lease=3.0)
    lock.__enter__()
    a.pause_renewals()
    cluster.advance(5.0)
    a.pause_renewals(False)
    cluster.advance(5.0)
    assert not lock.held
    with pytest.raises(LockLostError):
        lock.__exit__(None, None, None)


def test_the_error_of_a_block_is_not_hidden_by_a_lost_lock(cluster: Cluster, a: Client) -> None:
    def block() -> None:
        with a.kv_lock("x", "p", lease=3.0):
            a.pause_renewals()
            cluster.advance(10.0)
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        block()
    with a.kv_lock("x", "p"):
        pass


def test_an_error_in_a_block_releases_the_lock(a: Client, b: Client) -> None:
    with pytest.raises(KeyError), a.kv_lock("x", "p"):
        raise KeyError("x")
    with b.kv_lock("x", "p", timeout=0):
        pass


def test_a_lock_that_nobody_refers_to_ends_with_its_lease(cluster: Cluster, a: Client, b: Client) -> None:
    a.kv_lock("x", "p", lease=3.0).__enter__()
    gc.collect()
    cluster.advance(2.0)
    assert held(b) == [["x"]]
    cluster.advance(1.0)
    assert held(b) == []


def test_an_object_serves_one_block_at_a_time_and_several_in_turn(a: Client) -> None:
    lock = a.kv_lock("x", "p")
    with pytest.raises(InvalidArgumentError, match="no token yet"):
        _ = lock.token
    with lock:
        first = lock.token
        with pytest.raises(InvalidArgumentError, match="not reentrant"), lock:
            pass
        assert lock.held
    with lock:
        assert lock.token > first
    assert repr(lock) == "KVLock(['x'] of 'p', not held)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": []}, "at least one key"),
        ({"keys": [3]}, "keys must be str"),
        ({"partition_id": 3}, "partition_id must be a str"),
        ({"timeout": "x"}, "timeout"),
        ({"timeout": -1}, "timeout must be a non-negative number of seconds, or None, got -1"),
        ({"lease": 0}, "lease must be a positive number of seconds, got 0"),
        ({"lease": None}, "lease must be a positive number of seconds, got None"),
    ],
)
def test_a_wrong_argument_is_named(a: Client, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        a.kv_lock(**{"keys": "x", "partition_id": "p", **arguments})


def test_a_lock_in_an_event_loop(cluster: Cluster, a: Client) -> None:
    async def run() -> None:
        async with a.async_kv_lock(["x"], "p") as lock:
            await a.async_kv_put("x", "p", {"n": torch.tensor(1)}, fence=lock)
            assert [entry.client for entry in await a.async_kv_lock_list("p")] == ["a"]
        async with a.kv_lock("x", "p") as again:
            assert again.token > lock.token
        with pytest.raises(LockLostError):
            await lose()

    async def lose() -> None:
        async with a.async_kv_lock("x", "p", lease=3.0):
            a.pause_renewals()
            cluster.advance(3.0)

    asyncio.run(run())


def test_a_loaded_checkpoint_ends_all_locks(cluster: Cluster, a: Client, b: Client, tmp_path: Path) -> None:
    a.kv_put("x", "p", {"n": 1})
    with a.kv_lock("x", "p"):
        save(a, tmp_path)

    def block() -> None:
        with a.kv_lock("x", "p") as lock:
            waiting = b.start(b.state.ask(TakeLock("p", ["x"], 30.0, 50.0), LockReply, None, 50.0))
            cluster.run()
            load(cluster.client("c"), tmp_path)
            assert waiting.result().token > lock.token
            with pytest.raises(LockLostError):
                a.kv_put("x", "p", {"n": 2}, fence=lock)

    with pytest.raises(LockLostError, match="a checkpoint was loaded"):
        block()
    assert a.kv_batch_get("x", "p")["n"][0] == 1
