"""A server whose loop turns when a test says so, and clients that never block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from echo import KEY, EchoService

from transfer_queue.messages.envelopes import ReplyEnvelope, RequestEnvelope
from transfer_queue.messages.partitions import CreatePartition
from transfer_queue.net.drivers.connection import new_socket
from transfer_queue.net.framing import FrameReader, pack_frame
from transfer_queue.net.handshake import ClientHandshake
from transfer_queue.net.server.server_loop import Outgoing, ServerLoop

ENCODE = msgspec.msgpack.Encoder().encode


def frame(sequence: int, words: str = "p") -> bytes:
    return pack_frame(ENCODE(RequestEnvelope(sequence, 0, CreatePartition(words))))


class Client:
    """A socket that never blocks, of a server whose turns the test takes."""

    def __init__(self, driven: Driven, shake: bool = True) -> None:
        self.sock = new_socket(driven.address)
        self.sock.connect(driven.address)
        self.reader = FrameReader()
        self.unsent = b""
        if shake:
            handshake = ClientHandshake("client", "raw", KEY)
            self.sock.send(handshake.start())
            while not handshake.done:
                driven.turn()
                with contextlib.suppress(BlockingIOError):
                    self.sock.send(handshake.receive(self.sock.recv(4096)))
            driven.turn()

    def push(self, data: bytes = b"") -> int:
        """Sends as much as the socket takes now; gives the bytes that it took."""
        self.unsent += data
        sent = 0
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self.unsent:
                count = self.sock.send(self.unsent)
                sent += count
                self.unsent = self.unsent[count:]
        return sent

    def pull(self) -> list[ReplyEnvelope]:
        """The answers that are there now."""
        answers = []
        with contextlib.suppress(BlockingIOError):
            while data := self.sock.recv(1 << 20):
                answers += [msgspec.msgpack.decode(body, type=ReplyEnvelope) for body, _ in self.reader.feed(data)]
        return answers

    @property
    def ended(self) -> bool:
        """Return whether the server has closed the connection. Bytes that have arrived are read and dropped."""
        try:
            while self.sock.recv(1 << 20):
                pass
        except BlockingIOError:
            return False
        except ConnectionError:
            pass
        return True


class Ticking(EchoService):
    """Wants to be ticked at once, so that a turn of the loop never sleeps."""

    def next_deadline(self) -> float | None:
        return 0.0

    def on_deadline(self, now: float) -> Iterable[Outgoing]:
        return ()


class Driven:
    """A server whose loop turns when the test says so, and whose clock stands still unless the test has its own."""

    def __init__(
        self, folder: Path, service: Any = None, clock: Callable[[], float] = lambda: 0.0, **options: Any
    ) -> None:
        self.service = Ticking() if service is None else service
        self.server = ServerLoop(self.service, KEY, clock, **options)
        self.address = self.server.listen(str(folder / "s.sock"))
        self.clients: list[Client] = []

    def client(self, shake: bool = True) -> Client:
        client = Client(self, shake)
        self.clients.append(client)
        return client

    def turn(self, turns: int = 1) -> None:
        for _ in range(turns):
            self.server._turn()

    @property
    def peers(self) -> list[Any]:
        return list(self.server._peers.values())
