"""Real processes: forked and spawned clients at once, killed writers, servers that die, inputs that cannot be right."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
import warm
from leftovers import arenas
from server_processes import started, unit_status, until
from transfer_queue.interface import CURRENT
from transfer_queue.messages.storage import LeaseExtent

SECONDS = 120


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


def child(target: Callable[..., None], *arguments: Any, method: str) -> Any:
    if method == "fork":
        process = multiprocessing.get_context(method).Process(target=target, args=arguments, daemon=True)
    else:
        process = warm.process(target, *arguments)
    process.start()
    return process


def heard_from(target: Callable[..., None], method: str = "fresh") -> tuple[Any, Any]:
    """A child that runs a function with the end of a pipe, and what it sends first."""
    ours, theirs = multiprocessing.Pipe()
    process = child(target, theirs, method=method)
    assert ours.poll(SECONDS)
    return process, ours.recv()


@pytest.mark.parametrize("method", ["fork", "fresh"])
def test_parent_threads_and_children_put_at_once(system: Any, method: str) -> None:
    """Nobody shares an id or an extent: every row holds what its own writer put."""
    partition, count = f"at-once-{method}", 60
    write(9, 3, partition)  # the parent has an open extent and connections when it forks
    children = [child(write, who, count, partition, method=method) for who in range(3)]
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
    process, (its, pid) = heard_from(_fork_ids, "fork")
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
    process, _ = heard_from(_write_big)
    os.kill(process.pid, signal.SIGKILL)
    process.join(SECONDS)
    row = tq.kv_batch_get("kept", "killed")["x"].unbind(0)[0]
    assert torch.equal(row, torch.ones(1 << 20))
    tq.get_client().clear_partition("killed")
    until(lambda: unit_status().leased == before)


def _wait_for_ever(pipe: Any) -> None:
    tq.init()
    pipe.send("waits")
    tq.get_client().get_meta(["x"], 1, "parked", task_name="t", timeout=600)


def test_a_killed_waiter_takes_no_row_with_it(system: Any) -> None:
    """A parked claim whose process died is cancelled before it can be met."""
    process, _ = heard_from(_wait_for_ever)
    client = tq.get_client()
    waiting = lambda: sum(w.waiting for p in client.status().partitions for w in p.tasks if p.name == "parked")  # noqa: E731
    client.get_meta(["x"], 1, "parked", mode="insert")
    until(lambda: waiting() == 1)
    os.kill(process.pid, signal.SIGKILL)
    process.join(SECONDS)
    until(lambda: waiting() == 0)
    client.put(TensorDict({"x": torch.arange(1)}, batch_size=[1]), partition_id="parked")
    assert client.get_meta(["x"], 1, "parked", task_name="t").size == 1


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


SCRIPT = """
import os, sys, transfer_queue as tq, torch
tq.init({"system": {"name": "dying"}})
tq.kv_put("a", "p", {"x": torch.arange(3)})
print("up", flush=True)
%s
"""


def ended(runtime_dir: Path) -> None:
    """Waits until the system of the starter has gone."""
    until(lambda: not (runtime_dir / "dying").exists())
    until(lambda: not arenas(runtime_dir / "dying"))


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise KeyError('mine')"], ids=["exit", "exception"])
def test_the_end_of_a_script_ends_its_system(end: str, runtime_dir: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TQ_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT % end], capture_output=True, text=True, env=environment, timeout=SECONDS
    )
    assert (done.returncode, done.stdout) == (3 if "exit" in end else 1, "up\n"), done.stderr
    ended(runtime_dir)


def _start(pipe: Any) -> None:
    tq.init({"system": {"name": "dying"}})
    tq.kv_put("a", "p", {"x": torch.arange(3)})
    pipe.send("up")
    signal.pause()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_that_ends_the_starter_ends_its_system(
    number: signal.Signals, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    starter, _ = heard_from(_start)
    assert (runtime_dir / "dying" / "system.json").exists()
    assert len(arenas(runtime_dir / "dying")) == 1
    os.kill(starter.pid, number)
    starter.join(SECONDS)
    ended(runtime_dir)


def _told(pipe: Any, configs: list[Any]) -> None:
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
        ours, theirs = multiprocessing.Pipe()
        process = child(_told, theirs, names + unbuilt, method="fresh")
        theirs.close()
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

    @pytest.mark.parametrize(
        ("put", "words"),
        [
            (lambda c: c.put(TensorDict({"x": torch.zeros(3)}, [3]), c.get_meta(["x"], 2, "bad", mode="insert")), "3"),
            (lambda c: c.put(TensorDict({"x": torch.zeros(3)}, [3])), "partition_id"),
            (lambda c: c.put([1, 2], partition_id="bad"), "TensorDict"),
            (lambda c: tq.kv_batch_put(["a", "a"], "bad", TensorDict({"x": torch.zeros(2)}, [2])), "duplicated keys"),
            (lambda c: tq.kv_batch_put(["a"], "bad", TensorDict({"x": torch.zeros(2)}, [2])), "1"),
            (lambda c: tq.kv_put("a", "bad", {"x": torch.nested.nested_tensor([torch.zeros(1)])}), "nested"),
            (lambda c: tq.kv_put(5, "bad", {"x": 1}), "key must be a str"),
            (lambda c: tq.kv_put("a", "bad"), "fields or tags"),
            (lambda c: c.get_meta([], 1, "bad", task_name="t"), "data_fields"),
            (lambda c: c.get_meta(["x"], -1, "bad", task_name="t"), "negative"),
            (lambda c: c.get_meta(["x"], 1, "bad", mode="steal"), "force_fetch"),
            (lambda c: c.get_meta(["x"], 1, "bad"), "task_name"),
            (lambda c: c.get_meta(["x"], 1, "bad", task_name="t", sampling_config={"sampler": "Mine"}), "Mine"),
        ],
    )
    def test_arguments(self, system: Any, put: Callable[[Any], Any], words: str) -> None:
        client = tq.get_client()
        client.clear_partition("bad")
        leased = unit_status().leased
        with pytest.raises(ValueError, match=words) as raised:
            put(client)
        assert isinstance(raised.value, tq.TransferQueueError)
        assert not client.check_production_status(["x"], "bad")
        assert tq.kv_list("bad").get("bad", {}) == {}
        assert unit_status().leased <= leased + 65536  # an open extent at the most

    def test_after_its_close_a_client_has_a_successor(self, system: Any) -> None:
        tq.kv_put("a", "stays", {"x": torch.ones(2)})
        closed = tq.get_client()
        closed.close()
        assert tq.init().system.folder == str(CURRENT.system.folder), "the system runs on: this attaches"
        assert tq.get_client() is not closed
        assert tq.kv_list("stays") == {"stays": {"a": {}}}
        tq.get_client().clear_partition("stays")


@pytest.mark.usefixtures("runtime_dir")
def test_init_does_not_hand_out_a_system_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    tq.close()
    monkeypatch.setenv("TQ_SYSTEM", "ends")
    tq.init()
    try:
        first = CURRENT.system
        os.kill(first.description.pid, signal.SIGKILL)
        until(lambda: not first.is_alive())
        tq.init()
        assert first.is_alive() is False, "what runs under its name is another"
        tq.kv_put("key", "p", {"x": torch.ones(2)})
    finally:
        tq.close()


def test_a_full_arena_is_an_error_that_leaves_nothing() -> None:
    with started("tiny", backend={"SimpleStorage": {"arena_bytes": 4 * 2**20}}):
        tq.kv_put("a", "p", {"x": torch.zeros(1 << 18)})  # 1 MiB
        free = unit_status()
        with pytest.raises(tq.CapacityError, match=r"(?i)capacity"):
            tq.kv_put("b", "p", {"x": torch.zeros(1 << 20)})  # 4 MiB
        assert unit_status().leased == free.leased
        assert tq.kv_list("p") == {"p": {"a": {}}}
        tq.kv_clear("a", "p")
        tq.kv_put("b", "p", {"x": torch.ones(700_000)})  # 2.7 MiB: only where the first one lay
        assert tq.kv_batch_get("b", "p")["x"].values().sum().item() == 700_000


def test_init_for_another_system_while_attached() -> None:
    with started("first"):
        with pytest.raises(tq.InvalidArgumentError, match=r"'second'.*'first'"):
            tq.init({"system": {"name": "second"}})
        assert tq.init({"system": {"name": "first"}}).system.name == "first"


def test_a_put_after_a_clear_finds_the_space() -> None:
    """What was cleared is on its way to be free."""
    with started("turning", backend={"SimpleStorage": {"arena_bytes": 2 * 2**20}}):
        client = tq.get_client()
        for i in range(40):
            tq.kv_put("a", f"p{i}", {"x": torch.full((300_000,), float(i))})  # 1.15 MiB
            client.clear_partition(f"p{i}")
