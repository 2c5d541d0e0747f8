"""Large values of units on other nodes, which several connections carry at once, with threads at both ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from local_nodes import Nodes
from server_processes import until
from simulated import same
from transfer_queue.client import TransferQueueClient
from transfer_queue.client.data import remote_io
from transfer_queue.client.data.remote_io import Streams
from transfer_queue.config import environment
from transfer_queue.messages.storage import ReadPieces, WriteBytes
from transfer_queue.net.drivers import blocking_driver
from transfer_queue.net.drivers.connection import Connection, Pool, ReplyReader
from transfer_queue.net.session import Session

PEM = Path(__file__).parent.parent / "net" / "certificates"
TLS = {"certificate": "member.crt", "private_key": "member.key", "authority": "authority.crt"}
MIB = 1 << 20


@pytest.fixture(scope="module")
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A node with the controller and without units, one with a unit, and one for clients. Each has 32 cores.

    The unit has space for one of the large values.
    """
    folder = tmp_path_factory.mktemp("cores")
    (folder / "sitecustomize.py").write_text("import os\nos.sched_getaffinity = lambda pid: set(range(32))\n")
    tls = {name: str(PEM / file) for name, file in TLS.items()} if getattr(request, "param", False) else None
    storage = {"num_data_storage_units": 1, "arena_bytes": 80 * MIB}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        nodes = Nodes({"backend": {"SimpleStorage": storage}, "security": {"tls": tls}}, [0, 1, 0])
    with nodes:
        yield nodes


@pytest.fixture(params=[1, 4, 8])
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of streams of each transfer."""
    count = int(request.param)
    monkeypatch.setattr(environment, "usable_cores", lambda: 4 * count)
    monkeypatch.setattr(remote_io, "FIRST_STREAMS", count)
    monkeypatch.setattr(remote_io, "TRANSFERS", 1 << 30)
    monkeypatch.setattr(remote_io, "MIN_STREAM", 1 << 16)
    return count


def mixed(seed: int) -> TensorDict:
    """Rows of many dtypes, of odd sizes, and 60 MiB in all."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(0, 255, shape, generator=generator, dtype=torch.uint8)

    rows = 37
    columns = {
        "bytes": some(rows, 1_500_001),
        "half": some(rows, 3, 6002).view(torch.bfloat16),
        "flag": some(rows, 7) > 99,
        "ids": torch.nested.as_nested_tensor(
            [torch.randint(0, 1 << 40, (1 + 331 * row,), generator=generator) for row in range(rows)],
            layout=torch.jagged,
        ),
        "text": NonTensorStack(*[f"row {row}" * row for row in range(rows)]),
    }
    return TensorDict(columns, [rows])


def check(got: TensorDict, data: TensorDict, rows: Sequence[int] = range(37)) -> None:
    for name in data.keys():  # noqa: SIM118
        left, right = ([*getattr(each[name], "tolist" if name == "text" else "unbind")()] for each in (got, data))
        assert same(left, [right[row] for row in rows]), name


@pytest.mark.parametrize("nodes", [False, True], ids=["TCP", "TLS"], indirect=True)
def test_values_are_the_same_with_any_number_of_streams(
    nodes: Nodes, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, in many pieces, and in both drivers; the requests of each transfer are made at once, and it is timed."""
    at_once: dict[type, set[int]] = {ReadPieces: set(), WriteBytes: set()}
    real = blocking_driver.run_parallel

    def noted(session: Session, pool: Pool, calls: Sequence[Any]) -> None:
        at_once[type(calls[0].body)].add(len(calls))
        real(session, pool, calls)

    learnt: list[tuple[Streams, int, int]] = []
    monkeypatch.setattr(Streams, "note", lambda *arguments: learnt.append(arguments[:3]))
    monkeypatch.setattr(blocking_driver, "run_parallel", noted)
    with nodes.client(2) as writer, nodes.client(0) as reader:
        for seed, put in enumerate((writer.put, lambda *a, **more: asyncio.run(writer.async_put(*a, **more)))):
            data = mixed(seed)
            meta = put(data, partition_id="p", timeout=30)
            check(reader.get_data(meta), data)
            check(asyncio.run(reader.async_get_data(meta)), data)
            odd = range(1, 37, 2)
            check(reader.get_data(meta.select_samples(list(odd))), data, odd)
            reader.clear_partition("p")
    assert all(max(counts, default=1) == streams for counts in at_once.values())
    assert {number for _, unit, number in learnt if unit == 0} == {streams}
    assert len({each for each, _, _ in learnt}) == 2, "reads of one client, and writes of the other"


def large(fill: int) -> TensorDict:
    return TensorDict({"x": torch.full((1, 48 * MIB), fill, dtype=torch.uint8)}, [1])


def read(client: TransferQueueClient, key: str) -> set[int]:
    """The values of the bytes of a large value."""
    return set(client.kv_batch_get([key], "p")["x"].values().unique().tolist())


def at_request(
    monkeypatch: pytest.MonkeyPatch,
    reader: TransferQueueClient,
    is_it: Callable[[Any], bool],
    happens: Callable[[], None],
) -> None:
    """Let something happen once, right before the session of a client sends the first request of this kind."""
    begin, pending = Session.begin_request, [happens]

    def begin_request(session: Session, body: Any, *arguments: Any) -> Any:
        if pending and session is reader.storage_manager.session and is_it(body):
            pending.pop()()
        return begin(session, body, *arguments)

    monkeypatch.setattr(Session, "begin_request", begin_request)


def test_a_value_that_is_replaced_before_its_check_is_read_again(
    nodes: Nodes, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other bytes are at its place, because the unit has space for one value only."""
    with nodes.client(2) as writer, nodes.client(0) as reader:
        writer.kv_batch_put(["k"], "p", large(1), timeout=30)

        def replace() -> None:
            writer.kv_clear(["k"], "p")
            writer.kv_batch_put(["k"], "p", large(2), timeout=30)

        at_request(monkeypatch, reader, lambda body: isinstance(body, ReadPieces) and not body.lengths, replace)
        assert read(reader, "k") == {2}
        writer.clear_partition("p")


@pytest.mark.parametrize("request_type", [ReadPieces, WriteBytes])
def test_a_unit_that_is_killed_in_the_middle_is_asked_again(
    nodes: Nodes, streams: int, monkeypatch: pytest.MonkeyPatch, request_type: type
) -> None:
    """When the first bytes of a reply have arrived, or of a request were sent."""
    with nodes.client(2) as writer, nodes.client(0) as reader:
        writer.kv_batch_put(["k"], "p", large(1), timeout=30)
        assert read(reader, "k") == {1}
        supervisor = psutil.Process(nodes.systems[1].description.pid)
        (unit,) = until(lambda: supervisor.children())
        armed: list[bool] = []
        receive, send = ReplyReader.receive, Connection.send

        def kill() -> None:
            with contextlib.suppress(IndexError):
                armed.pop()
                unit.kill()
                unit.wait()

        def received(reader: ReplyReader) -> None:
            if reader.body is not None:
                kill()
            receive(reader)

        def sent(connection: Any, frame: bytes, deadline: float, payload: memoryview | None = None) -> None:
            if payload is not None and armed:
                connection.sock.send(frame[:5])
                kill()
            send(connection, frame, deadline, payload)

        monkeypatch.setattr(ReplyReader, "receive", received)
        monkeypatch.setattr(Connection, "send", sent)
        armed.append(True)
        if request_type is ReadPieces:
            assert read(reader, "k") == {1}
        else:
            writer.kv_clear(["k"], "p")
            writer.kv_batch_put(["k"], "p", large(2), timeout=30)
            assert read(reader, "k") == {2}
        assert not armed
        writer.clear_partition("p")
