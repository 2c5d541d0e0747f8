"""TLS beneath the handshake: who gets in, who is told why not, and that bytes arrive as over a bare socket."""

import asyncio
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from echo import KEY, Running, one, until

from transfer_queue.errors import (
    AttachError,
    AuthenticationError,
    InvalidArgumentError,
    ProtocolError,
    TransferQueueError,
    WaitTimeoutError,
)
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyReply, AnyRequest, ReplyEnvelope, RequestEnvelope
from transfer_queue.messages.partitions import CreatePartition
from transfer_queue.messages.puts import Publish, PublishReply
from transfer_queue.net.drivers import asyncio_driver
from transfer_queue.net.drivers import connection as connections
from transfer_queue.net.drivers.asyncio_driver import run_async
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.net.framing import MAX_PAYLOAD, FrameReader, pack_frame
from transfer_queue.net.handshake import ClientHandshake
from transfer_queue.net.server.server_connection import Outgoing
from transfer_queue.net.session import Session
from transfer_queue.net.tls import Tls, make_context
from transfer_queue.net.tls_contexts import tls_context

FOLDER = Path(__file__).parent / "certificates"
ANY_PORT = ("127.0.0.1", 0)
ENCODE = msgspec.msgpack.Encoder().encode


def files(name: str = "member", authority: str = "authority") -> dict[str, str]:
    names = {"certificate": f"{name}.crt", "private_key": f"{name}.key", "authority": f"{authority}.crt"}
    return {key: str(FOLDER / file) for key, file in names.items()}


class Contexts(NamedTuple):
    server: ssl.SSLContext
    client: ssl.SSLContext


def made(name: str = "member", authority: str = "authority") -> Contexts:
    paths = files(name, authority)
    return Contexts(make_context(paths, server=True), make_context(paths, server=False))


MEMBER = made()


def ask_blocking(session: Session, request: AnyRequest, timeout: float = 10.0) -> AnyReply:
    return run_blocking(session, one(request, timeout))


def ask_async(session: Session, request: AnyRequest, timeout: float = 10.0) -> AnyReply:
    return asyncio.run(run_async(session, one(request, timeout)))


Ask = Callable[..., AnyReply]


@pytest.fixture(params=[ask_blocking, ask_async])
def ask(request: pytest.FixtureRequest) -> Ask:
    asked: Ask = request.param
    return asked


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with Running(tmp_path, address=ANY_PORT, tls=MEMBER.server) as running:
        yield running


def connected(address: Any) -> socket.socket:
    return socket.create_connection(address, timeout=10)


class Wire:
    """A blocking socket past both handshakes, for what is no request."""

    def __init__(self, address: Any, context: ssl.SSLContext = MEMBER.client) -> None:
        self.sock = connected(address)
        self.tls = Tls(context, server=False)
        self.sock.sendall(self.tls.start())
        while not self.tls.done:
            self.hear()
        handshake = ClientHandshake("client", "wire", KEY)
        self.say(handshake.start())
        while not handshake.done:
            self.say(handshake.receive(self.hear()))

    def say(self, data: bytes) -> None:
        if data:
            self.tls.encrypt(data)
        self.sock.sendall(self.tls.outgoing())

    def hear(self) -> bytes:
        data = self.sock.recv(1 << 18)
        assert data, "the server closed the connection"
        said = self.tls.receive(data)
        self.sock.sendall(self.tls.outgoing())
        return said


def publish(size: int) -> Publish:
    return Publish("p", 1, rows=os.urandom(1024) * (size // 1024))


def test_requests_are_answered(running: Running, ask: Ask) -> None:
    session = running.session(tls=MEMBER.client)
    for number in range(3):
        assert ask(session, CreatePartition(f"p{number}")) == Done(f"p{number}")
    session.close()
    until(lambda: not running.service.peers)
    assert running.server.counters["broken"] == running.server.counters["rejected"] == 0


def test_large_requests_and_replies_arrive_whole(running: Running, ask: Ask) -> None:
    request = publish(5 << 20)
    assert ask(running.session(tls=MEMBER.client), request) == PublishReply(rows=request.rows)


def test_many_calls_share_one_connection_of_a_loop(running: Running) -> None:
    session = running.session(tls=MEMBER.client)
    requests = [publish(200 << 10) for _ in range(20)]

    async def all_of_them() -> list[AnyReply]:
        return await asyncio.gather(*(run_async(session, one(request)) for request in requests))

    assert asyncio.run(all_of_them()) == [PublishReply(rows=request.rows) for request in requests]
    assert running.server.counters["accepted"] == 1


@pytest.mark.parametrize("size", [1, 70_000, 8 << 20])
def test_payloads_go_through_in_both_directions(running: Running, size: int) -> None:
    payload = os.urandom(1024) * (size // 1024) + b"x" * (size % 1024)
    wire = Wire(running.address)
    with wire.sock:
        wire.say(pack_frame(b"body", size) + payload + pack_frame(b"second", 1) + b"y")
        reader, frames = FrameReader(max_payload=MAX_PAYLOAD), []
        while len(frames) < 2:
            frames += [(body, bytes(data or b"")) for body, data in reader.feed(wire.hear())]
    assert frames == [(b"body", payload), (b"second", b"y")]


def test_bytes_may_come_one_by_one(running: Running) -> None:
    """Records and frames have other borders than what a read of the socket gives."""
    wire = Wire(running.address)
    with wire.sock:
        wire.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.tls.encrypt(pack_frame(ENCODE(RequestEnvelope(1, 0, CreatePartition("p")))))
        for byte in wire.tls.outgoing():
            wire.sock.sendall(bytes([byte]))
        reader = FrameReader()
        while not (frames := reader.feed(wire.hear())):
            pass
    assert msgspec.msgpack.decode(frames[0][0], type=ReplyEnvelope) == ReplyEnvelope(1, Done("p"))


def test_an_adopted_connection_stays_encrypted(running: Running) -> None:
    """A storage unit connects to the controller, which then sends it messages unasked."""
    ours, theirs = socket.socketpair()
    here, there = Tls(MEMBER.server, server=True), Tls(MEMBER.client, server=False)
    data = there.start()
    while not here.done:
        here.receive(data)
        there.receive(here.outgoing())
        data = there.outgoing()
    numbers: list[int] = []

    def adopt() -> list[Outgoing]:
        numbers.append(running.server.adopt(theirs, there))
        return [Outgoing(numbers[0], b"hello")]

    with ours:
        running.server.call_soon(adopt)
        reader = FrameReader()
        while not (frames := reader.feed(here.receive(ours.recv(1 << 16)))):
            pass
        assert frames == [(b"hello", None)]
        here.encrypt(pack_frame(b"body", 3) + b"abc")
        ours.sendall(here.outgoing())
        until(lambda: running.service.payloads == [b"abc"])
    until(lambda: running.service.gone == numbers)


def test_version_1_2_is_enough(running: Running, ask: Ask) -> None:
    context = made().client
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    request = publish(1 << 20)
    assert ask(running.session(tls=context), request) == PublishReply(rows=request.rows)


def test_an_older_version_is_refused(running: Running, ask: Ask) -> None:
    context = made().client
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(TransferQueueError, match=r"TLS with the server failed"):
        ask(running.session(tls=context), CreatePartition("p"))


def test_unix_sockets_never_use_it(tmp_path: Path, ask: Ask) -> None:
    with Running(tmp_path, tls=MEMBER.server) as running:
        for tls in (None, MEMBER.client):
            assert ask(running.session(tls=tls), CreatePartition("p")) == Done("p")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("who", ["nobody", "stranger"])
def test_a_client_without_a_certificate_of_the_authority_is_refused(
    running: Running, ask: Ask, who: str, version: ssl.TLSVersion
) -> None:
    if who == "stranger":
        context = made("stranger").client
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(files()["authority"])
    context.maximum_version = version
    with pytest.raises(AuthenticationError, match=r"TLS with the server failed: .*both sides need a certificate"):
        ask(running.session(tls=context), CreatePartition("p"))
    assert running.server.counters["rejected"] == 1
    assert running.server.counters["accepted"] == 0
    until(lambda: not running.connections)
    assert running.server.counters["rejected"] == 1
    assert running.service.envelopes == []


def test_a_server_with_a_foreign_certificate_is_refused(tmp_path: Path, ask: Ask) -> None:
    with Running(tmp_path, address=ANY_PORT, tls=made("stranger").server) as running:
        with pytest.raises(AuthenticationError, match=r"TLS with the server failed: self.signed certificate"):
            ask(running.session(tls=MEMBER.client), CreatePartition("p"))
        until(lambda: running.server.counters["rejected"] == 1)


def test_the_key_is_needed_as_ever(running: Running, ask: Ask) -> None:
    with pytest.raises(AuthenticationError, match="does not hold the key"):
        ask(running.session(key=b"another" * 5, tls=MEMBER.client), CreatePartition("p"))


def test_a_client_without_tls_is_told_so(running: Running, ask: Ask) -> None:
    with pytest.raises(AttachError, match=r"it takes only connections over TLS; set security.tls"):
        ask(running.session(), CreatePartition("p"))
    assert running.server.counters["refused"] == 1


def test_a_server_without_tls_says_so(tmp_path: Path, ask: Ask) -> None:
    with Running(tmp_path, address=ANY_PORT) as running:
        with pytest.raises(AttachError, match=r"it takes no connections over TLS; leave security.tls unset"):
            ask(running.session(tls=MEMBER.client), CreatePartition("p"))
        assert running.server.counters["refused"] == 1


def test_other_programs_are_turned_away(running: Running) -> None:
    with connected(running.address) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: running.server.counters["rejected"] == 1)
        while sock.recv(4096):
            pass


def test_another_program_at_the_address_is_told(ask: Ask) -> None:
    with socket.create_server(ANY_PORT) as listener:

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"220 welcome to this mail server\r\n")
                while sock.recv(4096):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        session = Session("c", KEY, lambda _: listener.getsockname(), tls=MEMBER.client)
        with pytest.raises(ProtocolError, match=r"TLS with the server failed: .*both sides must use TLS, or neither"):
            ask(session, CreatePartition("p"))
        session.close()
        thread.join(10)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_client_that_is_slow_is_dropped(tmp_path: Path, share: float) -> None:
    with Running(tmp_path, address=ANY_PORT, tls=MEMBER.server, handshake_seconds=0.1) as running:
        with connected(running.address) as sock:
            hello = Tls(MEMBER.client, server=False).start()
            sock.sendall(hello[: int(len(hello) * share)])
            assert sock.recv(4096) == b""
        assert running.server.counters["rejected"] == 1


def test_a_hello_that_is_none_is_answered_and_dropped(running: Running) -> None:
    with connected(running.address) as sock:
        sock.sendall(b"\x16\x03\x01\x00\x04\x01\x00\x00\x00")
        assert sock.recv(4096)[:1] == b"\x15", "no alert"
        assert sock.recv(4096) == b""
    assert running.server.counters["rejected"] == 1


def test_a_server_that_is_slow_is_given_up(monkeypatch: pytest.MonkeyPatch, ask: Ask) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.05)
    monkeypatch.setattr(asyncio_driver, "HANDSHAKE_SECONDS", 0.05)
    with socket.create_server(ANY_PORT) as listener:  # which never accepts
        session = Session("c", KEY, lambda _: listener.getsockname(), tls=MEMBER.client, grace=0.1)
        begun = time.monotonic()
        with pytest.raises(WaitTimeoutError, match="gave no reply"):
            ask(session, CreatePartition("p"), 0.1)
        assert time.monotonic() - begun < 5
        session.close()


def test_broken_records_end_the_connection(running: Running) -> None:
    wire = Wire(running.address)
    with wire.sock:
        until(lambda: running.service.peers)
        wire.sock.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
        until(lambda: not running.service.peers)
    assert running.server.counters["broken"] == 1


def test_who_says_goodbye_is_gone(running: Running) -> None:
    wire = Wire(running.address)
    with wire.sock:
        until(lambda: running.service.peers)
        with pytest.raises(ssl.SSLWantReadError):
            wire.tls._object.unwrap()  # says that it ends, and wants to hear the same
        wire.sock.sendall(wire.tls.outgoing())
        until(lambda: not running.service.peers)
    assert running.server.counters["broken"] == 0


def test_a_connection_that_breaks_is_made_anew(running: Running, ask: Ask) -> None:
    session = running.session(tls=MEMBER.client)
    assert ask(session, CreatePartition("p")) == Done("p")
    running.stop()
    running.start()
    assert ask(session, CreatePartition("q")) == Done("q")


@pytest.mark.parametrize("name", ["certificate", "private_key", "authority"])
def test_files_that_are_none_are_named(tmp_path: Path, name: str) -> None:
    text = tmp_path / "text"
    text.write_text("no PEM")
    for path in (tmp_path / "missing", tmp_path, text):
        with pytest.raises(InvalidArgumentError, match=f"{name} {path}.* cannot be used"):
            make_context({**files(), name: str(path)}, server=True)


def test_a_key_with_a_password_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="the private key is encrypted"):
        make_context({**files(), "private_key": str(FOLDER / "locked.key")}, server=False)


def test_a_key_of_another_certificate_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"cannot be used.*belong to the certificate"):
        make_context({**files(), "private_key": str(FOLDER / "stranger.key")}, server=True)


def test_none_is_none() -> None:
    assert tls_context(None, server=True) is None
