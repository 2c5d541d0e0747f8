"""Fetches of blocks from several nodes: all units are asked at once, and one that is gone does not delay the others."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import ReplyEnvelope, RequestEnvelope
from transfer_queue.net.handshake import Hello
from transfer_queue.net.server.server_loop import Outgoing, ServerLoop
from transfer_queue.node.unit import unit_service
from transfer_queue.node.unit.unit_service import fetch_blocks
from transfer_queue.storage.unit.unit_effects import Fetch, RemoteBlock

KEY = bytes(range(32))
SECONDS = 10.0
LENGTH = 1000


class Unit:
    """Sends bytes of its number, once all units have been asked. Blocks of generation 0 do not exist."""

    def __init__(self, number: int, barrier: threading.Barrier) -> None:
        self._number = number
        self._barrier = barrier
        self._decode = msgspec.msgpack.Decoder(RequestEnvelope).decode
        self._asked = 0

    def on_connect(self, peer: int, hello: Hello) -> None:
        pass

    def on_message(self, peer: int, body: bytes, payload: memoryview | None, now: float) -> Iterable[Outgoing]:
        envelope = self._decode(body)
        request = envelope.body
        if not self._asked:
            self._barrier.wait(SECONDS)
        self._asked += 1
        there = bool(np.frombuffer(request.generations, "<i8").all())
        answer = msgspec.msgpack.encode(ReplyEnvelope(envelope.sequence, Done(there)))
        nbytes = int(np.frombuffer(request.lengths, "<i8").sum()) if there else 0
        return [Outgoing(peer, answer, [memoryview(bytes([self._number]) * nbytes)] if nbytes else [])]

    def on_disconnect(self, peer: int, now: float) -> Iterable[Outgoing]:
        return ()

    def next_deadline(self) -> None:
        return None

    def on_deadline(self, now: float) -> Iterable[Outgoing]:
        return ()


@contextmanager
def units(count: int) -> Iterator[dict[int, str]]:
    """Return the addresses of this many units, from number 1 on."""
    barrier = threading.Barrier(count)
    servers: list[tuple[ServerLoop, threading.Thread]] = []
    remotes = {}
    try:
        for number in range(1, count + 1):
            service: Any = Unit(number, barrier)
            server = ServerLoop(service, KEY)
            host, port = server.listen(("127.0.0.1", 0))
            remotes[number] = f"{host}:{port}"
            thread = threading.Thread(target=server.run, daemon=True)
            thread.start()
            servers.append((server, thread))
        yield remotes
    finally:
        for server, thread in servers:
            server.stop()
            thread.join(SECONDS)


def order(remotes: dict[int, str], wanted: list[tuple[int, int, int, int]]) -> tuple[Fetch, list[bytearray]]:
    into = [bytearray(block[3]) for block in wanted]
    blocks = [RemoteBlock(*block) for block in wanted]
    return Fetch(1, blocks, remotes, [memoryview(each) for each in into]), into


def test_units_are_asked_at_once() -> None:
    with units(3) as remotes:
        wanted = [(unit, 64 * at, 1, LENGTH) for at in range(2) for unit in (1, 2, 3)]
        fetch, into = order(remotes, wanted)
        assert fetch_blocks(fetch, KEY) == set(range(6))
        assert into == [bytearray([unit] * LENGTH) for unit, *_ in wanted]


def test_more_units_than_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_service, "MAX_LANES", 1)
    with units(1) as remotes:
        fetch, into = order({1: remotes[1], 2: remotes[1]}, [(1, 0, 1, 5), (2, 0, 1, 5), (1, 64, 0, 5)])
        assert fetch_blocks(fetch, KEY) == {0, 1}, "the last was gone"
        assert into[:2] == [bytearray([1] * 5)] * 2


def test_a_unit_that_is_gone_does_not_delay_the_others(caplog: pytest.LogCaptureFixture) -> None:
    with units(1) as gone:
        pass
    with units(1) as remotes:
        fetch, into = order({1: remotes[1], 7: gone[1]}, [(7, 0, 1, 5), (1, 0, 1, 5), (8, 0, 1, 5)])
        assert fetch_blocks(fetch, KEY) == {1}
        assert into[1] == bytearray([1] * 5)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert all("1 blocks cannot be fetched from storage unit" in words for words in told)
