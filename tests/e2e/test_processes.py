"""Real processes: forked and spawned clients at once, killed writers, units that die, inputs that cannot be right."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import transfer_queue as tq
import warm
from server_processes import living_server, restart, started, unit_status, until
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


def write(who: int, count: int, partition: str, first: int = 0) -> None:
    for i in range(first, first + count):
        tq.kv_put(f"{who}-{i}", partition, {"x": content(who, i)})


def check(who: int, rows: range, partition: str) -> None:
    data = tq.kv_batch_get([f"{who}-{i}" for i in rows], partition)["x"]
    assert all(torch.equal(value, content(who, i)) for i, value in zip(rows, data, strict=True))


def log_of_the_unit(number: int = 0) -> str:
    text: str = (CURRENT.system.logs / f"unit-{number}.log").read_text()
    return text


@pytest.fixture(params=[1], ids=["one unit"])
def units(request: pytest.FixtureRequest) -> Iterator[int]:
    """A system of the test's own."""
    with started("units", backend={"SimpleStorage": {"num_data_storage_units": request.param}}):
        yield request.param


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
    for who in range(6):
        check(who, range(count), partition)
    keys = [f"{who}-{i}" for who in range(6) for i in range(count)]
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


def follow(partition: str, pipe: Any) -> None:
    """Keeps a copy of the tags; sends it when told that the last key is there."""
    tags: dict[str, Any] = {}
    for event in tq.get_client().subscribe(partition):
        if event.kind == "cleared":
            tags.pop(str(event.key), None)
        else:
            tags[str(event.key)] = event.tag
        if event.key == "last":
            pipe.send(tags)
            return


def test_many_writers_and_followers(system: Any) -> None:
    """Whoever follows has in the end what a list says."""
    partition = "followed"
    followers = [warm.reporting(follow, partition) for _ in range(3)]

    def write(who: int) -> None:
        for i in range(40):
            tq.kv_put(f"{who}-{i % 10}", partition, tag={"n": i})
            if i % 7 == 0:
                tq.kv_clear(f"{who}-{i % 10}", partition)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    tq.kv_put("last", partition, tag={})
    listed = tq.kv_list(partition)[partition]
    for follower, pipe in followers:
        assert pipe.poll(SECONDS)
        assert pipe.recv() == listed
        follower.join(SECONDS)


def write_twice(who: int, partition: str, wrote: Any, go_on: Any) -> None:
    """Put 20 rows, set `wrote`, and put 20 more when `go_on` is set. Runs in a process of its own."""
    torch.set_num_threads(1)
    write(who, 20, partition)
    wrote.set()
    go_on.wait()
    write(who, 20, partition, 20)
    os._exit(0)


@contextlib.contextmanager
def stopped_writer(who: int, partition: str) -> Iterator[tuple[Any, Any]]:
    """A forked client that has put 20 rows; and what lets it go on."""
    wrote, go_on = FORK.Event(), FORK.Event()
    made = FORK.Process(target=write_twice, args=(who, partition, wrote, go_on), daemon=True)
    made.start()
    try:
        assert wrote.wait(SECONDS)
        yield made, go_on
    finally:
        made.kill()
        made.join(SECONDS)


def test_the_space_of_a_client_that_died_with_the_unit_comes_back(units: int) -> None:
    with stopped_writer(1, "died") as (process_, _):
        victim = until(lambda: living_server("unit-0"))
        victim.suspend()  # so that it cannot notice
        process_.kill()
        process_.join(SECONDS)
        victim.kill()
    until(lambda: "is gone; it had" in log_of_the_unit())
    check(1, range(20), "died")
    assert unit_status().leased > 0
    tq.get_client().clear_partition("died")
    until(lambda: unit_status().leased == 0)


def test_the_space_of_a_stopped_client_is_left_alone(units: int) -> None:
    with stopped_writer(1, "stopped") as (process_, go_on):
        os.kill(process_.pid, signal.SIGSTOP)
        restart("unit-0")
        write(2, 20, "stopped")
        tq.kv_clear([f"1-{i}" for i in range(5)], "stopped")
        check(1, range(5, 20), "stopped")
        assert "is gone" not in log_of_the_unit()
        os.kill(process_.pid, signal.SIGCONT)
        go_on.set()
        process_.join(SECONDS)
        assert process_.exitcode == 0
    check(1, range(5, 40), "stopped")
    check(2, range(20), "stopped")


@pytest.mark.parametrize("units", [2], indirect=True, ids=["two units"])
def test_a_lost_arena_is_told_and_all_else_goes_on(units: int) -> None:
    system = CURRENT.system
    clients = [tq.get_client(), tq.TransferQueueClient(system), tq.TransferQueueClient(system)]
    for number, client in enumerate(clients):
        client.kv_put(f"k{number}", "p", {"x": torch.arange(number + 3)})
    places = dict(enumerate(sorted(Path(os.readlink(Path(system.folder) / "arena")).glob("unit-*"))))
    told: list[Any] = []
    events = clients[0].subscribe("p", on_lost=told.append)
    seen = [next(events).key for _ in clients]
    lost = next(unit for unit in places if unit_status(unit).leased)
    shutil.rmtree(places[lost])
    restart(f"unit-{lost}")
    seen.append(next(events).key)
    names = {loss.key for loss in told}
    assert names
    for number, client in enumerate(clients):
        key = f"k{number}"
        if key in names:
            with pytest.raises(tq.errors.StorageKeyNotFoundError, match=f"lost with storage unit {lost}"):
                client.kv_batch_get([key], "p")
        else:
            assert client.kv_batch_get([key], "p")["x"][0].tolist() == list(range(number + 3))
        client.kv_put(key, "p", {"x": torch.arange(number + 9)})
    for client in clients:
        got = client.kv_batch_get(["k0", "k1", "k2"], "p")["x"]
        assert [len(value) for value in got] == [9, 10, 11]
    assert "are lost" in log_of_the_unit(lost)
    for client in clients[1:]:
        client.close()


def test_two_copies_outlive_the_loss_of_either_unit() -> None:
    with started("copies", backend={"SimpleStorage": {"num_data_storage_units": 2, "replicas": 2}}):
        keys = [f"k{i}" for i in range(4)]
        rows = torch.arange(4 << 18, dtype=torch.int32).reshape(4, -1)
        tq.kv_batch_put(keys, "p", {"x": rows})
        arenas = Path(os.readlink(Path(CURRENT.system.folder) / "arena"))
        for place, made_up in ((0, 2), (1, 3)):
            shutil.rmtree(arenas / f"unit-{place}")
            restart(f"unit-{place}")
            assert torch.equal(torch.stack(tq.kv_batch_get(keys, "p")["x"].unbind()), rows)
            until(lambda new=made_up: unit_leases(new) >= rows.nbytes)  # where a copy is made up for
        assert torch.equal(torch.stack(tq.kv_batch_get(keys, "p")["x"].unbind()), rows)


def unit_leases(number: int) -> int:
    """Bytes leased from a unit; 0 while its number is not known to this client."""
    client = tq.TransferQueueClient(CURRENT.system)
    try:
        client.get_partition_list()
        return unit_status(number, client).leased if number in client.storage_manager.units.known else 0
    finally:
        client.close()


def write_equal(name: str) -> None:
    """Put values of which many are equal, and read them. Runs in a process of its own."""
    tq.init()
    client = tq.get_client()
    for turn in range(4):
        numbers = [(turn + at // 16) % 8 for at in range(128)]
        pixels = [torch.full((1 << 14,), float(number)) for number in numbers]
        keys = [f"{name}-{at}" for at in range(128)]
        client.kv_batch_put(keys, "images", {"pixels": pixels, "number": torch.tensor(numbers)})
        data = client.kv_batch_get(keys, "images", shared=bool(turn % 2), layout="dense")
        rows = data["pixels"].tolist() if turn % 2 else data["pixels"].unbind(0)
        assert [int(row[0]) for row in rows] == [int(row[-1]) for row in rows] == numbers == data["number"].tolist()
        client.kv_clear(keys[: 32 * turn], "images")
    tq.close()


def test_processes_that_put_equal_values_at_once() -> None:
    """Every reader gets its own bytes, and the bytes are freed."""
    with started("equal", dedup={"fields": ["pixels"]}):
        client = tq.get_client()
        writers = [warm.process(write_equal, name) for name in "ab"]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(120)
        assert [writer.exitcode for writer in writers] == [0, 0]
        (partition,) = client.status().partitions
        assert partition.rows == 2 * 32
        # 8 values of 64 KiB; a value may be written twice, by each process that did not know of the other
        assert partition.nbytes <= (2 * 8 + 1) << 16
        keys = list(client.kv_list("images")["images"])
        got = client.kv_batch_get(keys, "images", layout="dense")
        assert (got["pixels"] == got["number"][:, None]).all()
        client.kv_clear(keys, "images")
        assert client.status().partitions[0].nbytes == 0


def test_a_put_after_a_clear_finds_the_space() -> None:
    """What was cleared is on its way to be free."""
    with started("turning", backend={"SimpleStorage": {"arena_bytes": 2 * 2**20}}):
        client = tq.get_client()
        for i in range(40):
            tq.kv_put("a", f"p{i}", {"x": torch.full((300_000,), float(i))})  # 1.15 MiB
            client.clear_partition(f"p{i}")
