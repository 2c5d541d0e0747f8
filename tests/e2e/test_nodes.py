"""A system of several nodes, which are folders of this machine here: they share nothing but connections over TCP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from local_nodes import SECONDS, Nodes, held_processes
from server_processes import server_process, until
from transfer_queue.client import TransferQueueClient
from transfer_queue.client.checkpoint.checkpoint_folder import STATE
from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.storage import ReadPieces, UnitStatus
from transfer_queue.net.calls import Call, Request
from transfer_queue.net.drivers.blocking_driver import run_blocking, run_parallel
from transfer_queue.net.drivers.connection import Pool
from transfer_queue.net.handshake import ClientHandshake
from transfer_queue.net.session import Session
from transfer_queue.system_folder.paths import host_and_port


def start(units: list[int], tls: dict[str, str] | None = None, **storage: object) -> Nodes:
    """A node for each of these numbers, with so many units."""
    conf = {"backend": {"SimpleStorage": {"num_data_storage_units": 2, **storage}}, "security": {"tls": tls}}
    return Nodes(conf, units)


@pytest.fixture(scope="module")
def three() -> Iterator[Nodes]:
    with start([1, 1, 0], arena_bytes=64 << 20) as nodes:
        yield nodes


def mixed(rows: int, seed: int = 0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 50, (rows,), generator=generator).tolist()
    return TensorDict(
        {
            "ids": torch.nested.as_nested_tensor(
                [torch.randint(0, 1000, (n,), generator=generator) for n in lengths], layout=torch.jagged
            ),
            "score": torch.rand(rows, 8, generator=generator),
            "uid": NonTensorStack(*[f"row {seed} {n}" for n in range(rows)]),
        },
        [rows],
    )


def equal(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether rows are as they were put; rows of one dimension come jagged."""
    return torch.equal(torch.stack(list(got.unbind())), wanted)


def same(left: TensorDict, right: TensorDict) -> None:
    assert sorted(left.keys()) == sorted(right.keys())
    assert equal(left["score"], right["score"])
    assert [row.tolist() for row in left["ids"].unbind()] == [row.tolist() for row in right["ids"].unbind()]
    assert left.get("uid").tolist() == right.get("uid").tolist()


@pytest.mark.parametrize(("writer", "reader"), [(0, 1), (1, 0), (1, 2), (2, 0), (2, 2)])
def test_values_go_from_any_node_to_any(three: Nodes, writer: int, reader: int) -> None:
    partition = f"p{writer}{reader}"
    data = mixed(100, seed=writer)
    with three.client(writer) as putting, three.client(reader) as getting:
        meta = putting.put(data, partition_id=partition)
        same(getting.get_data(meta), data)
        some = meta[3:40:3]
        got = getting.get_data(some)
        assert equal(got["score"], data["score"][3:40:3])
        getting.clear_partition(partition)


def test_rows_of_many_blocks_and_nodes_come_in_order(three: Nodes) -> None:
    with three.client(0) as first, three.client(1) as second, three.client(2) as third:
        metas = [client.put(TensorDict({"x": torch.arange(5 * n, 5 * n + 5)}, [5]), partition_id="many")
                 for n, client in enumerate([first, second] * 20)]  # fmt: skip
        whole = metas[0].concat(metas)
        for client in (first, second, third):
            assert torch.equal(client.get_data(whole)["x"], torch.arange(200))
        picked = third.get_data(whole[::-7], layout="list")
        assert [int(value) for value in picked["x"]] == list(range(200))[::-7]
        first.clear_partition("many")


def test_units_of_several_nodes_are_asked_at_once(three: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two rounds, however many units there are: for the values, and whether these still were what was wanted."""
    rounds: list[list[tuple[str, int]]] = []

    def noted(session: Session, pool: Pool, calls: Sequence[Call]) -> None:
        rounds.append([call.target for call in calls])
        run_parallel(session, pool, calls)

    monkeypatch.setattr("transfer_queue.net.drivers.blocking_driver.run_parallel", noted)
    units = {("unit", unit) for unit in three.units().values()}
    with three.client(0) as first, three.client(1) as second, three.client(2) as third:
        data = TensorDict({"x": torch.arange(3 << 18).view(6, -1)}, [6])
        metas = [client.put(data[at : at + 3], partition_id="at once") for at, client in ((0, first), (3, second))]
        whole = metas[0].concat(metas)
        for get in (third.get_data, lambda meta: asyncio.run(third.async_get_data(meta))):
            assert equal(get(whole)["x"], data["x"])
        assert [set(asked) for asked in rounds] == [units] * 4
        first.clear_partition("at once")


@pytest.mark.parametrize("layout", ["jagged", "dense", "list"])
def test_a_value_that_rows_share_comes_once_from_another_node(
    three: Nodes, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """From each node that has some of the values, in both drivers, whether rows of the result share memory or not."""
    received: list[int] = []

    def noted(session: Session, pool: Pool, calls: Sequence[Call]) -> None:
        for call in calls:
            if isinstance(call.body, ReadPieces):
                received.append(int(np.frombuffer(call.body.lengths, "<i8").sum()))
        run_parallel(session, pool, calls)

    monkeypatch.setattr("transfer_queue.net.drivers.blocking_driver.run_parallel", noted)
    images = torch.arange(6 << 16, dtype=torch.float32).view(6, -1)
    rows = [images[row // 8] for row in range(48)]
    with three.client(0) as first, three.client(1) as second, three.client(2) as third:
        metas = [
            client.put(TensorDict({"x": NonTensorStack(*rows[at : at + 24])}, [24]), partition_id="shared")
            for at, client in ((0, first), (24, second))
        ]
        whole = metas[0].concat(metas)
        for shared in (False, True):
            for get in (third.get_data, lambda meta, **more: asyncio.run(third.async_get_data(meta, **more))):
                received.clear()
                got = list(get(whole, layout=layout, shared=shared)["x"])
                assert sum(received) == images.nbytes
                assert all(torch.equal(row, wanted) for row, wanted in zip(got, rows, strict=True))
                assert len({row.data_ptr() for row in got}) == (6 if shared else 48)
        first.clear_partition("shared")


def test_large_values_arrive_whole_in_both_drivers(three: Nodes) -> None:
    data = TensorDict({"x": torch.arange(4 << 20).view(1024, 4096), "y": torch.rand(1024, 128)}, [1024])
    with three.client(2) as far, three.client(1) as near:
        meta = far.put(data, partition_id="large")
        for got in (near.get_data(meta), asyncio.run(near.async_get_data(meta)), far.get_data(meta)):
            assert equal(got["x"], data["x"])
            assert equal(got["y"], data["y"])
            got["x"].values().zero_()  # it is the reader's own
        assert equal(far.get_data(meta[5:9])["x"], data["x"][5:9])
        far.clear_partition("large")


def test_a_block_is_fetched_once_for_all_readers_of_a_node(three: Nodes) -> None:
    """The first reader of a node reads by itself, as it is alone; then the node's unit has copies for all of them."""
    data = TensorDict({"x": torch.arange(1 << 18).view(64, -1)}, [64])
    here = three.units()["node-0"]
    with three.client(1) as writer, three.client(0) as one, three.client(0) as other:
        meta = writer.put(data, partition_id="kept")
        before = leased(writer, [here])
        assert equal(one.get_data(meta)["x"], data["x"])
        assert leased(writer, [here]) == before
        for _ in range(3):
            assert equal(other.get_data(meta)["x"], data["x"])
            assert equal(asyncio.run(one.async_get_data(meta))["x"], data["x"])
        assert leased(writer, [here]) - before >= 2 << 20 == data["x"].nbytes
        assert leased(writer, [here]) - before < 4 << 20
        writer.clear_partition("kept")
        with pytest.raises(StorageKeyNotFoundError):
            other.get_data(meta)
        # copies give way to who writes
        full = TensorDict({"x": torch.zeros(16, (60 << 20) // 16, dtype=torch.uint8)}, [16])
        one.put(full, partition_id="full")
        assert leased(writer, [here]) - before >= 60 << 20
        one.clear_partition("full")


def test_a_put_spills_to_another_node_where_its_own_is_full(three: Nodes) -> None:
    block = torch.zeros(20 << 20, dtype=torch.uint8).view(16, -1)
    with three.client(0) as client:
        metas = [client.put(TensorDict({"x": block + n}, [16]), partition_id="full") for n in range(5)]
        for n, meta in enumerate(metas):
            assert equal(client.get_data(meta)["x"], block + n)
        client.clear_partition("full")


def numbers(client: TransferQueueClient, partition: str, count: int = 100) -> torch.Tensor:
    got: torch.Tensor = client.kv_batch_get([f"k{n}" for n in range(count)], partition)["x"]
    return got


def put_numbers(client: TransferQueueClient, partition: str, count: int = 100) -> None:
    keys = [f"k{n}" for n in range(count)]
    client.kv_batch_put(keys, partition, fields=TensorDict({"x": torch.arange(count)}, [count]))


def leased(client: TransferQueueClient, units: Iterable[int]) -> int:
    """Bytes leased from all these units together."""

    def ask() -> Generator[Call, AnyReply, int]:
        total = 0
        for unit in units:
            status = yield Request(("unit", unit), UnitStatus())
            total += status.leased
        return total

    return run_blocking(client.storage_manager.session, ask())


def test_a_unit_of_another_node_may_be_killed_while_it_starts(three: Nodes) -> None:
    with three.client(1) as client, three.client(0) as other:
        meta = client.put(mixed(20), partition_id="killed")
        supervisor = psutil.Process(three.systems[1].description.pid)
        killed: set[int] = set()
        for _ in range(3):
            (child,) = until(lambda: [child for child in supervisor.children() if child.pid not in killed])
            child.kill()
            killed.add(child.pid)
        same(other.get_data(meta), mixed(20))
        client.put(mixed(20), partition_id="killed")
        client.clear_partition("killed")


def test_a_drained_node_holds_nothing_any_more(three: Nodes) -> None:
    with three.client(1) as writer, three.client(0) as reader:
        put_numbers(writer, "drained")
        unit = three.units()["node-1"]
        reader.drain_unit(unit, timeout=60)
        assert torch.equal(numbers(reader, "drained"), torch.arange(100))
        put_numbers(writer, "written meanwhile")
        assert torch.equal(numbers(reader, "written meanwhile"), torch.arange(100))
        reader.drain_unit(unit, undo=True)
        reader.clear_partition("drained")
        reader.clear_partition("written meanwhile")


def test_one_node_after_the_other_fails_and_nothing_is_lost_with_two_replicas() -> None:
    with start([1, 1, 1, 1], replicas=2) as nodes, nodes.client(1) as writer, nodes.client(0) as reader:
        data = TensorDict({"x": torch.arange(1 << 20).view(64, -1)}, [64])
        meta = writer.put(data, partition_id="p")
        nodes.lose(1)
        assert equal(reader.get_data(meta)["x"], data["x"])
        until(lambda: reader.status().partitions[0].stored["memory"] >= 2 * (8 << 20))  # every copy counts
        nodes.lose(2)
        assert equal(reader.get_data(meta)["x"], data["x"])
        put_numbers(reader, "after")
        assert torch.equal(numbers(reader, "after"), torch.arange(100))


PEM = Path(__file__).parent.parent / "net" / "certificates"


def test_a_node_that_dies_while_several_are_read_is_waited_for_until_it_is_known_to_be_gone() -> None:
    """Then its rows are named, because there is one replica, and can be put again."""
    with (
        start([1, 1, 0], arena_bytes=16 << 20) as nodes,
        nodes.client(0) as first,
        nodes.client(1) as second,
        nodes.client(2) as third,
    ):
        metas = [client.put(TensorDict({"x": torch.arange(5) + n}, [5]), partition_id="p")
                 for n, client in enumerate((first, second))]  # fmt: skip
        whole = metas[0].concat(metas)
        assert third.get_data(whole)["x"].tolist() == [0, 1, 2, 3, 4, 1, 2, 3, 4, 5]
        put_numbers(first, "here")
        put_numbers(second, "there")
        dead = nodes.units()["node-1"]
        nodes.kill(1)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(third.get_data, whole)
            until(lambda: dead in third.storage_manager.units.unreachable)
            nodes.report_gone(1)
            with pytest.raises(StorageKeyNotFoundError, match=f"lost with storage unit {dead}"):
                reading.result(SECONDS)
        assert third.get_data(metas[0])["x"].tolist() == [0, 1, 2, 3, 4]
        assert torch.equal(numbers(first, "here"), torch.arange(100))
        with pytest.raises(StorageKeyNotFoundError, match="lost"):
            numbers(first, "there")
        put_numbers(first, "there")
        assert torch.equal(numbers(first, "there"), torch.arange(100))


def test_what_crosses_the_network_is_encrypted_where_that_is_asked_for() -> None:
    """Also what the controller sends to the units of other nodes unasked: to free memory, before and after it died."""
    files = {"certificate": "member.crt", "private_key": "member.key", "authority": "authority.crt"}
    tls = {name: str(PEM / file) for name, file in files.items()}
    with start([1, 1], tls=tls, arena_bytes=16 << 20) as nodes:
        with nodes.client(0) as first, nodes.client(1) as second:
            data = mixed(500)
            meta = first.put(data, partition_id="p")
            same(second.get_data(meta), data)
            same(asyncio.run(second.async_get_data(meta)), data)
            for _ in range(2):
                for _ in range(4):  # each time, the unit has space for one
                    second.put(TensorDict({"x": torch.zeros(1, 12 << 20, dtype=torch.uint8)}, [1]), partition_id="full")
                    second.clear_partition("full")
                server_process("controller", nodes.systems[0]).kill()
            put_numbers(second, "q")
            first.drain_unit(nodes.units()["node-1"], timeout=SECONDS)
            assert torch.equal(numbers(first, "q"), torch.arange(100))
        with socket.create_connection(host_and_port(nodes.systems[0].description.remote), SECONDS) as plain:
            plain.sendall(ClientHandshake("client", "c", nodes.systems[0].key).start())
            assert b"TLS" in plain.recv(4096)


def test_a_checkpoint_is_saved_and_loaded_from_any_node(three: Nodes, tmp_path: Path) -> None:
    with three.client(0) as first, three.client(1) as second, three.client(2) as third:
        data = [mixed(60, seed) for seed in range(3)]
        for client, its in zip((first, second, third), data, strict=True):
            client.kv_batch_put([f"{its['uid'][0]}-{n}" for n in range(60)], "saved", fields=its)
        cut = third.begin_checkpoint()
        third.save_storage_checkpoint(tmp_path / "c", cut=cut)
        third.save_controller_checkpoint(tmp_path / "c" / STATE, cut=cut)
        assert third.end_checkpoint(cut)
        first.clear_partition("saved")
        for client in (third, second):
            client.load_storage_checkpoint(tmp_path / "c")
            client.load_controller_checkpoint(tmp_path / "c" / STATE)
            for reader in (first, second, third):
                for its in data:
                    same(reader.kv_batch_get([f"{its['uid'][0]}-{n}" for n in range(60)], "saved"), its)
        first.clear_partition("saved")
        assert not [file for system in three.systems for file in system.states.iterdir()]


def test_a_put_that_is_cancelled_while_it_is_sent_writes_into_nobody_elses_block(three: Nodes) -> None:
    large = TensorDict({"x": torch.full((64, 1 << 16), 7, dtype=torch.uint8)}, [64])

    async def cancelled(client: TransferQueueClient, turns: int) -> None:
        task = asyncio.ensure_future(client.async_put(large, partition_id="cancelled"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with three.client(2) as far, three.client(0) as near:
        for turns in range(8):
            asyncio.run(cancelled(far, turns))
            data = TensorDict({"x": torch.full((64, 1 << 16), turns, dtype=torch.uint8)}, [64])
            meta = far.put(data, partition_id="after")
            assert equal(near.get_data(meta)["x"], data["x"])
        for partition in ("cancelled", "after"):
            near.clear_partition(partition)


def test_a_node_that_is_stopped_delays_no_put_for_long_while_another_node_has_space() -> None:
    """Whether it is stopped before its unit leases space, or between two puts into the same space."""
    small, large = torch.arange(3), torch.arange(1 << 18)
    with start([1, 1, 1], replicas=2, arena_bytes=64 << 20) as nodes:
        for stopped in (1, 2):
            with contextlib.closing(nodes.client(0)) as client, contextlib.closing(nodes.client(0)) as fresh:
                client.kv_put("before", "p", {"x": small})
                processes = held_processes(nodes.systems[stopped])
                for process in processes:
                    process.suspend()
                try:
                    for writer in (client, fresh):
                        for key, values in (("small", small), ("large", large), ("again", small)):
                            writer.kv_put(key, "p", {"x": values})
                            assert torch.equal(writer.kv_batch_get([key], "p")["x"][0], values)
                    asyncio.run(client.async_kv_put("small", "p", {"x": large}))
                finally:
                    for process in processes:
                        process.resume()
                client.kv_put("after", "p", {"x": large})
                assert torch.equal(fresh.kv_batch_get(["after"], "p")["x"][0], large)
                fresh.kv_clear(["small", "large", "again", "before", "after"], "p")
