"""Real processes: forked and spawned clients at once, killed writers, servers that die, inputs that cannot be right."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import transfer_queue as tq
import warm
from server_processes import started, unit_status, until
from transfer_queue.interface import CURRENT
from transfer_queue.messages.storage import LeaseExtent

SECONDS = 120
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def system() -> Iterator[Any]:
    tq.init({"system": {"name": "processes"}, "controller": {"polling_mode": True}})
    yield tq
    tq.close()


def content(who: int, i: int) -> torch.Tensor:
    """What writer `who` puts as its row `i`: told from every other by any of its elements."""
    return torch.full((50 + i % 7,), who * 100_000 + i)


def write(who: int, count: int, partition: str) -> None:
    for i in range(count):
        tq.kv_put(f"{who}-{i}", partition, {"x": content(who, i)})


def child(method: str, target: Callable[..., None], *arguments: Any) -> Any:
    process = warm.process(target, *arguments) if method == "fresh" else FORK.Process(target=target, args=arguments)
    process.start()
    return process


@pytest.mark.parametrize("method", ["fork", "fresh"])
def test_parent_threads_and_children_put_at_once(system: Any, method: str) -> None:
    """Nobody shares an id or an extent: every row holds what its own writer put."""
    partition, count = f"at-once-{method}", 60
    write(9, 3, partition)  # the parent has an open extent and connections when it forks
    children = [child(method, write, who, count, partition) for who in range(3)]
    threads = [threading.Thread(target=write, args=(who, count, partition)) for who in range(3, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in children:
        process.join(SECONDS)
        assert process.exitcode == 0
    keys = [f"{who}-{i}" for who in range(6) for i in range(count)]
    rows = tq.kv_batch_get(keys, partition)["x"].unbind(0)
    assert all(
        torch.equal(row, content(who, i))
        for row, (who, i) in zip(rows, ((w, i) for w in range(6) for i in range(count)))
    )
    indexes = tq.get_client().kv_retrieve_meta(keys, partition).global_indexes
    assert len(set(indexes)) == len(keys)


def _fork_ids(pipe: Any) -> None:
    pipe.send((tq.get_client().client_id, os.getpid()))
    tq.kv_put("child", "fork-id", {"x": torch.tensor(1)})
    tq.close()


def test_a_forked_child_is_another_client_and_owns_nothing(system: Any) -> None:
    tq.kv_put("parent", "fork-id", {"x": torch.tensor(0)})
    mine = tq.get_client().client_id
    ours, theirs = FORK.Pipe()
    process = child("fork", _fork_ids, theirs)
    its, pid = ours.recv()
    process.join(SECONDS)
    assert (its != mine, pid) == (True, process.pid)
    assert tq.kv_batch_get(["parent", "child"], "fork-id")["x"].tolist() == [0, 1]  # its close was a detach


def _write_big(pipe: Any) -> None:
    tq.init()
    tq.kv_put("kept", "killed", {"x": torch.ones(1 << 20)})
    pipe.send("written")
    while True:
        tq.kv_put("again", "killed", {"x": torch.ones(1 << 18)})


def test_space_of_a_killed_writer_comes_back_and_what_it_published_stays(system: Any) -> None:
    before = unit_status().leased
    process, written = warm.reporting(_write_big)
    written.recv()
    os.kill(process.pid, signal.SIGKILL)
    process.join(SECONDS)
    row = tq.kv_batch_get("kept", "killed")["x"].unbind(0)[0]
    assert torch.equal(row, torch.ones(1 << 20))
    tq.get_client().clear_partition("killed")
    until(lambda: unit_status().leased == before)


def test_puts_in_flight_share_the_space_that_one_of_them_leases(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a thousand tasks find the open extent full, one of them leases another one for all."""
    session, leased = tq.get_client().storage_manager.session, 0
    begin = session.begin_request

    def counted(request: Any, *more: Any) -> tuple[int, bytes]:
        nonlocal leased
        leased += isinstance(request, LeaseExtent)
        return begin(request, *more)

    monkeypatch.setattr(session, "begin_request", counted)

    async def puts() -> None:
        numbers = iter(range(4000))

        async def one() -> None:
            for i in numbers:
                await tq.async_kv_put(f"k{i}", "in flight", {"x": content(7, i)})

        await asyncio.gather(*(one() for _ in range(1000)))

    asyncio.run(puts())
    got = tq.kv_batch_get([f"k{i}" for i in range(4000)], "in flight")["x"]
    assert all(torch.equal(row, content(7, i)) for i, row in enumerate(got.unbind()))
    assert leased <= 20


def _told(configs: list[Any], pipe: Any) -> None:
    """What is raised before there is a system, of which each refusal must leave the process as it was."""
    for call, *arguments in [(tq.kv_list,), *((tq.init, conf) for conf in configs), (tq.kv_list,)]:
        try:
            call(*arguments)
        except Exception as error:
            pipe.send((type(error).__name__, isinstance(error, ValueError), str(error)))
    pipe.send(None)


class TestBadInput:
    """Errors of the tree that say what to do; nothing is changed."""

    def test_before_there_is_a_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All in one process, which each refusal has left as it was."""
        names = [{"system": {"name": name}} for name in ("a/b", "..", "", "x" * 100)]
        unbuilt = [{"backend": {"storage_backend": "RayStore"}}]
        monkeypatch.delenv("TQ_ADDRESS", raising=False)
        monkeypatch.setenv("TQ_SYSTEM", "nobody")
        process, ours = warm.reporting(_told, names + unbuilt)
        first, *refused, last = iter(ours.recv, None)
        process.join(SECONDS)
        for kind, _, words in (first, last):
            assert kind == "NotInitializedError"
            assert "tq.init()" in words
        assert len(refused) == len(names + unbuilt)
        for _, of_value, words in refused[: len(names)]:
            assert of_value
            assert "system.name" in words
        for kind, _, words in refused[len(names) :]:
            assert kind == "StartError"
            assert "needs runtime: ray" in words

    def test_after_its_close_a_client_has_a_successor(self, system: Any) -> None:
        tq.kv_put("a", "stays", {"x": torch.ones(2)})
        closed = tq.get_client()
        closed.close()
        assert tq.init().system.folder == str(CURRENT.system.folder), "the system runs on: this attaches"
        assert tq.get_client() is not closed
        assert tq.kv_list("stays") == {"stays": {"a": {}}}
        tq.get_client().clear_partition("stays")


def test_init_for_another_system_while_attached(system: Any) -> None:
    name = tq.init().system.name
    with pytest.raises(tq.InvalidArgumentError, match=rf"'second'.*'{name}'"):
        tq.init({"system": {"name": "second"}})
    assert tq.init({"system": {"name": name}}).system.name == name


def test_a_put_after_a_clear_finds_the_space() -> None:
    """What was cleared is on its way to be free."""
    with started("turning", backend={"SimpleStorage": {"arena_bytes": 2 * 2**20}}):
        client = tq.get_client()
        for i in range(40):
            tq.kv_put("a", f"p{i}", {"x": torch.full((300_000,), float(i))})  # 1.15 MiB
            client.clear_partition(f"p{i}")
