"""Storage units that are killed, alone or with others, and what then becomes of what they held."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import transfer_queue as tq
from server_processes import living_server, restart, started, unit_status, until
from transfer_queue.interface import CURRENT

SECONDS = 60


def log(number: int) -> str:
    return (CURRENT.system.logs / f"unit-{number}.log").read_text()


def leased(number: int) -> int:
    """Bytes leased from a unit."""
    return unit_status(number).leased


def content(who: int, i: int) -> torch.Tensor:
    """What writer `who` puts as its row `i`: told from every other by any of its elements."""
    return torch.full((50 + i % 7,), who * 100_000 + i)


def check(who: int, rows: range, partition: str) -> None:
    data = tq.kv_batch_get([f"{who}-{i}" for i in rows], partition)["x"]
    for i, value in zip(rows, data, strict=True):
        assert torch.equal(value, content(who, i))


def write(who: int, rows: range, partition: str) -> None:
    for i in rows:
        tq.kv_put(f"{who}-{i}", partition, {"x": content(who, i)})


def writer(who: int, partition: str, wrote: Any, go_on: Any) -> None:
    """A process that puts, says so, and puts more when it is told to."""
    torch.set_num_threads(1)
    write(who, range(20), partition)
    wrote.set()
    go_on.wait()
    write(who, range(20, 40), partition)
    os._exit(0)


@pytest.fixture(params=[1], ids=["one unit"])
def units(request: pytest.FixtureRequest) -> Iterator[int]:
    with started("units", backend={"SimpleStorage": {"num_data_storage_units": request.param}}):
        yield request.param


@contextlib.contextmanager
def child(who: int, partition: str) -> Iterator[tuple[Any, Any]]:
    """A forked client that has put 20 rows; and what lets it go on."""
    fork = multiprocessing.get_context("fork")
    wrote, go_on = fork.Event(), fork.Event()
    made = fork.Process(target=writer, args=(who, partition, wrote, go_on), daemon=True)
    made.start()
    try:
        assert wrote.wait(SECONDS)
        yield made, go_on
    finally:
        made.kill()
        made.join(SECONDS)


def test_the_space_of_a_client_that_died_with_the_unit_comes_back(units: int) -> None:
    with child(1, "p") as (process_, _):
        victim = until(lambda: living_server("unit-0"))
        victim.suspend()  # so that it cannot notice
        process_.kill()
        process_.join(SECONDS)
        victim.kill()
    until(lambda: "is gone; it had" in log(0))
    check(1, range(20), "p")
    assert leased(0) > 0
    tq.kv_clear(list(tq.kv_list("p")["p"]), "p")
    until(lambda: leased(0) == 0)


def test_the_space_of_a_stopped_client_is_left_alone(units: int) -> None:
    with child(1, "p") as (process_, go_on):
        os.kill(process_.pid, signal.SIGSTOP)
        restart("unit-0")
        write(2, range(20), "p")
        tq.kv_clear([f"1-{i}" for i in range(5)], "p")
        check(1, range(5, 20), "p")
        assert "is gone" not in log(0)
        os.kill(process_.pid, signal.SIGCONT)
        go_on.set()
        process_.join(SECONDS)
        assert process_.exitcode == 0
    check(1, range(5, 40), "p")
    check(2, range(20), "p")


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
    lost = next(unit for unit in places if leased(unit))
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
    assert "are lost" in log(lost)
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
