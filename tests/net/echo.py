"""A service for tests of the net layer, and a server that runs it in a thread."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.claims import Cancel, Claim, ClaimReply, ReportBatches
from transfer_queue.messages.envelopes import AnyReply, AnyRequest, ReplyEnvelope, RequestEnvelope
from transfer_queue.messages.partitions import CreatePartition, ListPartitions, Seal
from transfer_queue.messages.puts import Publish, PublishReply
from transfer_queue.messages.queries import CheckProduction
from transfer_queue.net.calls import Call, Request
from transfer_queue.net.drivers.asyncio_driver import run_async
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.net.drivers.connection import new_socket
from transfer_queue.net.handshake import ClientHandshake, Hello
from transfer_queue.net.server.server_loop import Outgoing, ServerLoop
from transfer_queue.net.session import Session

KEY = bytes(range(32))
CONTROLLER = ("controller", 0)


class EchoService:
    """Answers requests in ways that tests can see.

    CreatePartition: Done(its name). Claim: parked until Cancel, or until the connection ends, or for `wait`.
    Seal: an exception. CheckProduction: Failure of the kind named by the partition. Publish: PublishReply.
    ListPartitions: drops the connection without an answer, once, then counts how often it was asked.
    """

    def __init__(self) -> None:
        self.envelopes: list[tuple[str, RequestEnvelope]] = []
        self.record = True
        self.peers: dict[int, Hello] = {}
        self.gone: list[int] = []
        self.parked: dict[tuple[str, int], tuple[int, float]] = {}
        self.cancelled: list[tuple[str, int]] = []
        self.drops = 0
        self.drop: Callable[[int], None] = lambda peer: None
        self.payloads: list[bytes] = []
        self._decode = msgspec.msgpack.Decoder(RequestEnvelope).decode
        self._encode = msgspec.msgpack.Encoder().encode

    def on_connect(self, peer: int, hello: Hello) -> None:
        self.peers[peer] = hello

    def on_message(self, peer: int, body: bytes, payload: memoryview | None, now: float) -> Iterable[Outgoing]:
        if payload is not None:
            self.payloads.append(bytes(payload))
            return [Outgoing(peer, body, [payload])]
        envelope = self._decode(body)
        client = self.peers[peer].client_id
        if self.record:
            self.envelopes.append((client, envelope))
        reply = self.reply(client, peer, envelope, now)
        return () if reply is None else [self.answer(peer, envelope.sequence, reply)]

    def answer(self, peer: int, sequence: int, reply: AnyReply) -> Outgoing:
        return Outgoing(peer, self._encode(ReplyEnvelope(sequence, reply)))

    def reply(self, client: str, peer: int, envelope: RequestEnvelope, now: float) -> AnyReply | None:
        request = envelope.body
        if isinstance(request, ReportBatches):
            for sequence in request.withdrawn:
                self.parked.pop((client, sequence), None)
            return None
        if isinstance(request, Publish):
            return PublishReply(rows=request.rows or b"")
        if isinstance(request, CreatePartition):
            return Done(request.partition)
        if isinstance(request, CheckProduction):
            return Failure(request.partition, "as asked")
        if isinstance(request, Claim):
            self.parked[client, envelope.sequence] = (peer, now + (1e9 if request.wait is None else request.wait))
            return None
        if isinstance(request, Cancel):
            self.parked.pop((client, request.sequence), None)
            self.cancelled.append((client, request.sequence))
            return Done()
        if isinstance(request, ListPartitions) and self.drops:
            self.drops -= 1
            self.drop(peer)
            return None
        if isinstance(request, Seal):
            raise RuntimeError("the service fails, as asked")
        return Done(sum(1 for c, e in self.envelopes if (c, e.sequence) == (client, envelope.sequence)))

    def on_disconnect(self, peer: int, now: float) -> Iterable[Outgoing]:
        self.gone.append(peer)
        del self.peers[peer]
        self.parked = {key: parked for key, parked in self.parked.items() if parked[0] != peer}
        return ()

    def next_deadline(self) -> float | None:
        return min((until for _, until in self.parked.values()), default=None)

    def on_deadline(self, now: float) -> Iterable[Outgoing]:
        due = [(key, peer) for key, (peer, until) in self.parked.items() if until <= now]
        for key, peer in due:
            del self.parked[key]
            yield self.answer(peer, key[1], ClaimReply(rows=b""))


class Running:
    """A server in a thread; `with Running(tmp_path) as running`."""

    def __init__(self, folder: Path, service: Any = None, address: Any = None, tls: Any = None, **options: Any) -> None:
        self.service = EchoService() if service is None else service
        self.address = str(folder / f"s{next(_numbers)}.sock") if address is None else address
        self._tls = tls
        self._options = options
        self._sessions: list[Session] = []
        self.start()

    def start(self) -> None:
        self.server = ServerLoop(self.service, KEY, **self._options)
        self.address = self.server.listen(self.address, self._tls)
        if isinstance(self.service, EchoService):
            self.service.peers.clear()  # of a server before
            self.service.drop = lambda peer: self.server._drop(self.connections[peer])
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()

    @property
    def connections(self) -> dict[int, Any]:
        """Those of the server, also those that have not proved yet that they have the key."""
        return self.server._peers

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        for session in self._sessions:
            session.close()
        self.stop()

    def answer_parked(self) -> None:
        """Answers all claims that wait."""
        self.server.call_soon(lambda: list(self.service.on_deadline(1e18)))

    def session(self, client_id: str = "c", key: bytes = KEY, **options: Any) -> Session:
        """A session with the server, which is closed at the end."""
        self._sessions.append(Session(client_id, key, lambda target: self.address, **options))
        return self._sessions[-1]


_numbers = itertools.count()


def ask(name: str) -> CreatePartition:
    return CreatePartition(name)


def one(request: AnyRequest, timeout: float | None = 10.0) -> Generator[Call, AnyReply, AnyReply]:
    """The operation of one request."""
    return (yield Request(CONTROLLER, request, timeout))


Driver = Callable[[Session, Generator[Call, AnyReply, Any]], Any]


def blocking(session: Session, operation: Generator[Call, AnyReply, Any]) -> Any:
    return run_blocking(session, operation)


def in_a_loop(session: Session, operation: Generator[Call, AnyReply, Any]) -> Any:
    return asyncio.run(run_async(session, operation))


drivers = pytest.mark.parametrize("run", [blocking, in_a_loop])


def in_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    """What a function returns for each number below `count`. The calls run at the same time, in threads."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def raw(address: Any, shake: bool = True) -> socket.socket:
    """A blocking socket to a server, past its handshake."""
    sock = new_socket(address)
    sock.settimeout(10)
    sock.connect(address)
    if shake:
        handshake = ClientHandshake("client", "raw", KEY)
        sock.sendall(handshake.start())
        while not handshake.done:
            sock.sendall(handshake.receive(sock.recv(4096)))
    return sock


def parked_claim(wait: float | None = None) -> Claim:
    return Claim("p", "t", ["f"], 1, wait=wait)


def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Waits for what another thread or process does."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it never came true"
        time.sleep(0.002)
