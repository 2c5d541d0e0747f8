"""A wrong message of one client never keeps another client from its work, not even after both servers were killed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from request_variants import array, bodies
from server_processes import server_process
from transfer_queue.interface import CURRENT
from transfer_queue.messages.base import RequestBody
from transfer_queue.messages.claims import ReportBatches
from transfer_queue.messages.descriptors import FieldSpec, NewBlock
from transfer_queue.messages.envelopes import REQUESTS, ReplyEnvelope
from transfer_queue.messages.puts import CloseExtents, Publish
from transfer_queue.messages.storage import UnitStatus
from transfer_queue.messages.system import Drain, Status
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.net.drivers.connection import Connection
from transfer_queue.net.framing import FrameReader, pack_frame
from transfer_queue.net.session import Session
from transfer_queue.system_folder.paths import SystemFolder

SECONDS = 60.0
NEAR = (-1, 0, 1, 2, 3, 5, 17, 64, 4096, 1 << 16, 1 << 18)
"""Extents, units, rows, tokens and sequences that exist or come next, and offsets and lengths."""
LARGE = 3 << 18
"""Elements of a value that gets an extent of its own."""
SPEC = [FieldSpec("x", "tensor", "float32", 1, False)]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ReplyEnvelope).decode


class Liar:
    """A client that sends messages as they are. A connection that a server has dropped is opened again."""

    def __init__(self) -> None:
        self._name = f"liar-{uuid.uuid4().hex}"
        self._links: dict[bool, tuple[Connection, FrameReader]] = {}
        self._sequence = 1

    def send(self, to_unit: bool, body: Any) -> Any:
        """Send a request, then one that is always answered. Returns the reply to the first one, None if it has none."""
        if to_unit not in self._links:
            self._links[to_unit] = self._connect(to_unit)
        connection, reader = self._links[to_unit]
        self._sequence += 2
        frames = [[self._sequence, 0, body], [self._sequence + 1, 0, UnitStatus() if to_unit else Status()]]
        found = None
        try:
            connection.sock.sendall(b"".join(pack_frame(_encode(frame)) for frame in frames))
            while data := connection.sock.recv(1 << 20):
                for reply in (_decode(frame) for frame, _ in reader.feed(data)):
                    if reply.sequence == self._sequence + 1:
                        return found
                    found = reply.body if reply.sequence == self._sequence else found
        except ConnectionError:
            pass
        connection.close()
        del self._links[to_unit]
        return None

    def _connect(self, to_unit: bool) -> tuple[Connection, FrameReader]:
        system = CURRENT.system
        address = str(SystemFolder(system.folder).unit(0)) if to_unit else system.controller
        connection = Connection(address)
        connection.connect(Session(self._name, system.key, lambda target: address), time.monotonic() + SECONDS)
        connection.sock.settimeout(SECONDS)
        return connection, FrameReader()

    def close(self) -> None:
        for connection, _ in self._links.values():
            connection.close()


@pytest.fixture
def liar() -> Iterator[Liar]:
    tq.close()
    tq.init({"system": {"name": f"wrong-{uuid.uuid4().hex[:8]}"}})
    made = Liar()
    yield made
    made.close()
    tq.close()


def publish(extent: int, offset: int = 0, length: int = 1 << 16, nbytes: int = 64) -> Publish:
    dims = (nbytes // 4).to_bytes(8, "little")
    return Publish("p", 1, block=NewBlock(0, extent, offset, 1, nbytes, 1, SPEC, dims, length), pre_allocate=0)


def work(client: Any, partition: str) -> None:
    """Put small and large values, change, claim, read and clear them."""
    for length in (4, LARGE):
        keys = [f"{length}-{at}" for at in range(3)]
        data = TensorDict({"x": torch.arange(3.0 * length).reshape(3, length)}, batch_size=[3])
        client.kv_batch_put(keys, partition, data)
        client.kv_batch_put(keys[:1], partition, data[:1] + 1)
        assert torch.equal(client.kv_batch_get(keys, partition)["x"][0], data["x"][0] + 1)
        meta = client.get_meta(["x"], 3, partition, task_name="t", timeout=SECONDS)
        assert client.get_data(meta).batch_size == (3,)
        client.kv_clear(keys, partition)


def kill_servers() -> None:
    for name in ("controller", "unit-0"):
        server_process(name).kill()


def test_places_that_no_unit_has_leased_block_nobody(liar: Liar) -> None:
    for extent in range(1, 20):
        liar.send(False, publish(extent, (extent - 1) << 16))
        liar.send(False, publish(100 + extent, (extent - 1) << 16, 1 << 40, nbytes=1 << 24))
    work(tq.get_client(), "before")
    kill_servers()
    work(tq.get_client(), "after")


def test_space_is_not_freed_while_its_writer_uses_it(liar: Liar) -> None:
    """The writer has leased an extent, and the controller knows no block in it yet."""
    client = tq.get_client()
    client.put(TensorDict({"x": torch.ones(1, 4)}, batch_size=[1]), partition_id="before")  # which has a client learn
    (space,) = client.storage_manager.space.allocators
    reserved = run_blocking(client.storage_manager.session, space.reserve(LARGE))
    before = client.storage_manager.units.arena(0).generation(reserved.offset)
    for extent in range(1, 20):
        liar.send(False, CloseExtents([(0, extent)]))
        liar.send(False, Publish("p", 1, closes=[(0, extent)]))
    work(client, "before")
    assert client.storage_manager.units.arena(0).generation(reserved.offset) == before
    space.abandon(reserved)
    kill_servers()
    work(client, "after")


def test_a_client_works_after_requests_of_every_kind_with_every_wrong_number(liar: Liar) -> None:
    client = tq.get_client()
    client.kv_batch_put(["a", "b"], "p", TensorDict({"x": torch.ones(2, 4)}, batch_size=[2]))
    client.get_meta(["x"], 1, "p", task_name="p")
    put = publish(3)
    examples = {kind: array(example) for kind, example in ((NewBlock, put.block), (Publish, put))}
    kinds: tuple[type[RequestBody], ...] = (*REQUESTS, ReportBatches)
    for kind in dict.fromkeys(kinds):
        for body in bodies(kind, examples, NEAR):
            for to_unit in (False, True):
                liar.send(to_unit, body)
    liar.send(False, Drain(0, undo=True))  # a drain is a valid request
    work(client, "before")
    work(client, "p")
    kill_servers()
    work(client, "after")
