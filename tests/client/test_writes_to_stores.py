"""A write to an external store whose server ends: repeated while the system restarts the server, and only then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import pytest
import torch

from store_in_memory import MemoryStore
from transfer_queue.client.data import store_io
from transfer_queue.errors import CapacityError, ConnectionLostError, TransferQueueError
from transfer_queue.messages.descriptors import UnitInfo
from transfer_queue.messages.reports.store_reports import StoreServerProgress
from transfer_queue.messages.system import TopologyReply
from transfer_queue.net.calls import Pause, Work
from transfer_queue.net.session import Session, Target
from transfer_queue.storage.protocols import Bytes, Reserved
from transfer_queue.storage.stores.base import Store, StoreAddress
from transfer_queue.wire.blocks.encode import EncodedBlock, encode_columns

PATIENCE = 5.0
UNIT = UnitInfo(0, "", "", "boot", store=msgspec.json.encode(StoreAddress("MooncakeStore", {})).decode())
DOWN = StoreServerProgress("MooncakeStore", "n2", "10.0.0.2", 71, False, 1.5, 1)
STARTED = StoreServerProgress("MooncakeStore", "n2", "10.0.0.2", 73, True, 1.5, 1)
LONG_UP = StoreServerProgress("MooncakeStore", "n2", "10.0.0.2", 73, True, 30.0, 1)
NEVER_ENDED = StoreServerProgress("MooncakeStore", "n2", "10.0.0.2", 71, True, 1.5, 0)
OF_ANOTHER_STORE = StoreServerProgress("Yuanrong", "n2", "10.0.0.2", 72, False, 1.5, 1)


class FailingStore(MemoryStore):
    """Raises these errors first, one for each write, and then keeps what is written."""

    def __init__(self, errors: Sequence[TransferQueueError]) -> None:
        super().__init__()
        self.errors = list(errors)
        self.held: dict[str, bytes] = {}

    def write(self, key: str, data: Bytes, within: float) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.held[key] = data.tobytes()


@pytest.fixture
def session() -> Iterator[Session]:
    def nowhere(target: Target) -> str:
        raise AssertionError("nothing is called here")

    made = Session("c", b"key", nowhere)
    made.clock = Clock()
    yield made
    made.close()


class Clock:
    """A clock that moves by the pauses only."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


Servers = Callable[[float], list[StoreServerProgress]]
"""What the controller says of the servers, by the seconds since the write began."""


def always(*servers: StoreServerProgress) -> Servers:
    return lambda seconds: list(servers)


def restarted_after(restart: float) -> Servers:
    def said(seconds: float) -> list[StoreServerProgress]:
        up = msgspec.structs.replace(STARTED, seconds=seconds - restart)
        return [OF_ANOTHER_STORE, DOWN if seconds < restart else up]

    return said


def encoded() -> EncodedBlock:
    return encode_columns({"x": torch.arange(64)}, 64)


def write(session: Session, store: Store, servers: Servers) -> float:
    """Writes a block while the controller says this of the servers; the seconds of all pauses."""
    assert isinstance(session.clock, Clock)
    begun = session.clock.now
    running = store_io.write(session, store, UNIT, encoded(), Reserved(0, 1, 0, 0, 512), 0.25, PATIENCE)
    call = next(running)
    while True:
        try:
            if isinstance(call, Pause):
                session.clock.now += call.seconds
                call = running.send(None)
            elif isinstance(call, Work):
                try:
                    call.function()
                except TransferQueueError as error:
                    call = running.throw(error)
                else:
                    call = running.send(None)
            else:
                call = running.send(TopologyReply([], "{}", servers(session.clock.now - begun)))
        except StopIteration:
            return session.clock.now - begun


def lost(count: int) -> list[TransferQueueError]:
    return [ConnectionLostError(f"the store refuses block {n}") for n in range(count)]


def full(count: int) -> list[TransferQueueError]:
    return [CapacityError("no capacity") for _ in range(count)]


@pytest.mark.parametrize("errors", [lost, full])
def test_it_waits_for_a_server_of_the_store_and_tries_again_until_the_store_uses_it(
    session: Session, errors: Callable[[int], list[TransferQueueError]]
) -> None:
    store = FailingStore(errors(4))
    assert write(session, store, restarted_after(2.05)) == pytest.approx(2.1 + 4 * store_io.RESTART_SECONDS)
    once = FailingStore([])
    assert write(session, once, always()) == 0.0
    assert store.held == once.held
    (content,) = store.held.values()
    assert np.frombuffer(content, "i8").tolist()[:64] == list(range(64))


def test_it_fails_at_once_if_no_server_of_the_store_is_restarted(session: Session) -> None:
    store, begun = FailingStore(lost(1) + full(1) + lost(1)), session.clock()
    with pytest.raises(ConnectionLostError, match=r"^the store refuses block 0$"):
        write(session, store, always(OF_ANOTHER_STORE, NEVER_ENDED))
    with pytest.raises(CapacityError):
        write(session, store, always(OF_ANOTHER_STORE, LONG_UP))
    with pytest.raises(
        ConnectionLostError, match=r"block 0; the MooncakeStore server on .* started 30\.0 s ago in place"
    ):
        write(session, store, always(LONG_UP))
    assert not store.held
    assert session.clock() == begun


def test_it_fails_if_the_server_is_not_restarted_in_time_and_does_not_use_the_store_meanwhile(session: Session) -> None:
    store, begun = FailingStore(lost(1000)), session.clock()
    with pytest.raises(ConnectionLostError, match=r"refuses block \d+; the MooncakeStore server on node 10\.0\.0\.2 "):
        write(session, store, always(DOWN))
    assert PATIENCE <= session.clock() - begun < PATIENCE + 2 * store_io.RESTART_SECONDS
    assert len(store.errors) == 999
