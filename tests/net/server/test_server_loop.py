import errno
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from echo import CONTROLLER, KEY, EchoService, Running, one, parked_claim, raw, until

from leftovers import descriptors, opened_for
from transfer_queue.errors import AttachError, AuthenticationError, ProtocolError
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import ReplyEnvelope, RequestEnvelope
from transfer_queue.messages.partitions import CreatePartition, Seal
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.net.drivers.connection import Pool
from transfer_queue.net.framing import HEADER, FrameReader, pack_frame
from transfer_queue.net.handshake import ClientHandshake
from transfer_queue.net.server.server_loop import Outgoing, ServerLoop

ENCODE = msgspec.msgpack.Encoder().encode


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    gc.collect()  # what earlier tests have left to it
    before = descriptors()
    with Running(tmp_path) as running:
        yield running
    assert opened_for(before) == []
    assert not list(tmp_path.glob("*.sock"))


def read_frames(sock: socket.socket, count: int) -> list[tuple[bytes, bytes]]:
    reader, frames = FrameReader(), []
    while len(frames) < count:
        data = sock.recv(1 << 20)
        assert data, "the server closed the connection"
        frames += [(body, bytes(payload or b"")) for body, payload in reader.feed(data)]
    return frames


def test_many_frames_in_one_read_are_answered_in_order(running: Running) -> None:
    with raw(running.address) as sock:
        requests = [RequestEnvelope(i, 0, CreatePartition(f"p{i}")) for i in range(1, 501)]
        sock.sendall(b"".join(pack_frame(ENCODE(request)) for request in requests))
        answers = [msgspec.msgpack.decode(body, type=ReplyEnvelope) for body, _ in read_frames(sock, 500)]
    assert answers == [ReplyEnvelope(i, Done(f"p{i}")) for i in range(1, 501)]


def test_messages_sent_together_with_the_proof_are_served(running: Running) -> None:
    with raw(running.address, shake=False) as sock:
        handshake = ClientHandshake("client", "raw", KEY)
        sock.sendall(handshake.start())
        proof = handshake.receive(sock.recv(4096))
        sock.sendall(proof + pack_frame(ENCODE(RequestEnvelope(1, 0, CreatePartition("p")))))
        assert msgspec.msgpack.decode(read_frames(sock, 1)[0][0], type=ReplyEnvelope) == ReplyEnvelope(1, Done("p"))


@pytest.mark.parametrize("size", [1, 70_000, 20 << 20])
def test_payloads_go_through_in_both_directions(running: Running, size: int) -> None:
    payload = os.urandom(1024) * (size // 1024) + b"x" * (size % 1024)
    with raw(running.address) as sock:
        sender = threading.Thread(target=sock.sendall, args=(pack_frame(b"body", size) + payload,))
        sender.start()
        assert read_frames(sock, 1) == [(b"body", payload)]
        sender.join()
    assert running.service.payloads == [payload]


def test_a_socket_file_is_its_owners_alone(running: Running) -> None:
    assert os.stat(running.address).st_mode & 0o777 == 0o600


def test_a_failing_service_costs_one_connection(running: Running) -> None:
    with raw(running.address) as good, raw(running.address) as bad:
        bad.sendall(pack_frame(ENCODE(RequestEnvelope(1, 0, Seal("p")))))
        assert bad.recv(10) == b""
        good.sendall(pack_frame(ENCODE(RequestEnvelope(1, 0, CreatePartition("p")))))
        assert len(read_frames(good, 1)) == 1
    assert running.server.counters["errors"] == 1
    until(lambda: len(running.service.gone) == 2)


def test_bodies_that_mean_nothing_cost_one_connection(running: Running) -> None:
    with raw(running.address) as sock:
        sock.sendall(pack_frame(b"\xc1 no msgpack"))
        assert sock.recv(10) == b""
    assert running.server.counters["errors"] == 1


def test_a_frame_over_the_limit_costs_one_connection(tmp_path: Path) -> None:
    with Running(tmp_path, max_body=1000) as running, raw(running.address) as sock:
        sock.sendall(HEADER.pack(1001, 0))
        assert sock.recv(10) == b""
        assert running.server.counters["broken"] == 1


class Flood(EchoService):
    """Answers every message with a megabyte, to all peers."""

    def on_message(self, peer: int, body: bytes, payload: memoryview | None, now: float) -> Iterable[Outgoing]:
        return [Outgoing(other, b"flood", [bytes(1 << 20)]) for other in self.peers]


def test_a_reader_that_does_not_read_is_dropped_and_others_are_not(tmp_path: Path) -> None:
    running = Running(tmp_path, service=Flood(), max_output=4 << 20)
    with running, raw(running.address) as slow, raw(running.address) as quick:
        until(lambda: len(running.service.peers) == 2)
        for _ in range(20):
            quick.sendall(pack_frame(b"more"))
            assert read_frames(quick, 1)[0][0] == b"flood"
        assert running.server.counters["slow"] == 1
        assert len(running.service.gone) == 1
        while slow.recv(1 << 20):  # what had left before, then the end
            pass


def test_connections_over_the_cap_are_told_why(tmp_path: Path) -> None:
    with Running(tmp_path, max_connections=2) as running:
        held = [raw(running.address) for _ in range(2)]
        session = running.session()
        with pytest.raises(AttachError, match="refuses this connection: it has 2 connections, its maximum"):
            run_blocking(session, one(CreatePartition("p")))
        assert running.server.counters["refused"] == 1
        for sock in held:
            sock.close()
        until(lambda: len(running.service.gone) == 2)
        assert run_blocking(session, one(CreatePartition("p"))) == Done("p")


def test_running_out_of_descriptors_pauses_accepting_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer_queue.net.server.sockets.ACCEPT_PAUSE", 0.05)
    exhausted = threading.Event()
    exhausted.set()
    accept = socket.socket.accept

    def out_of_descriptors(self: socket.socket) -> Any:
        if exhausted.is_set():
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", out_of_descriptors)
    with Running(tmp_path) as running:
        start = time.monotonic()
        sock = raw(running.address, shake=False)
        until(lambda: running.server.counters["accept_errors"] >= 3)
        assert time.monotonic() - start >= 0.1
        exhausted.clear()
        handshake = ClientHandshake("client", "raw", KEY)
        sock.sendall(handshake.start())
        handshake.receive(sock.recv(4096))
        assert handshake.done
        sock.close()


def test_a_silent_connection_is_dropped_after_its_deadline(tmp_path: Path) -> None:
    with Running(tmp_path, handshake_seconds=0.05) as running, raw(running.address, shake=False) as sock:
        assert sock.recv(10) == b""
        assert running.server.counters["rejected"] == 1
        assert running.service.peers == {}


def test_foreign_bytes_and_wrong_keys_never_reach_the_service(running: Running) -> None:
    with raw(running.address, shake=False) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert sock.recv(100) == b""
    stranger = running.session(key=b"?" * 32)
    with pytest.raises(AuthenticationError):
        run_blocking(stranger, one(CreatePartition("p")))
    with raw(running.address, shake=False) as sock:
        sock.sendall(ClientHandshake("client", "c", KEY, version=99).start())
        with pytest.raises(ProtocolError, match="version"):
            ClientHandshake("client", "c", KEY, version=99).receive(sock.recv(100))
    assert running.service.envelopes == []
    assert running.service.peers == {}
    until(lambda: not running.connections)


def test_adopted_connections_are_served_like_others(running: Running) -> None:
    ours, theirs = socket.socketpair()
    numbers: list[int] = []

    def adopt() -> list[Outgoing]:
        peer = running.server.adopt(theirs)
        running.service.peers[peer] = ClientHandshake  # any entry: `opened` is not called
        numbers.append(peer)
        return [Outgoing(peer, b"hello")]

    running.server.call_soon(adopt)
    assert read_frames(ours, 1) == [(b"hello", b"")]
    ours.sendall(pack_frame(b"body", 3) + b"abc")
    assert read_frames(ours, 1) == [(b"body", b"abc")]
    ours.close()
    until(lambda: running.service.gone == numbers)


def test_deadlines_of_the_service_are_kept(running: Running) -> None:
    start = time.monotonic()
    run_blocking(running.session(), one(parked_claim(wait=0.1)))
    assert 0.1 <= time.monotonic() - start < 5


class BadTicks(EchoService):
    """Wants to be ticked all the time and fails each time."""

    ticks = 0

    def next_deadline(self) -> float | None:
        return 0.0

    def on_deadline(self, now: float) -> Iterable[Outgoing]:
        self.ticks += 1
        raise RuntimeError("no tick today")


def test_a_failing_tick_neither_ends_nor_spins_the_loop(tmp_path: Path) -> None:
    with Running(tmp_path, service=BadTicks()) as running:
        start = time.monotonic()
        until(lambda: running.service.ticks >= 2)
        assert run_blocking(running.session(), one(CreatePartition("p"))) == Done("p")
        assert running.service.ticks <= 2 + 10 * (time.monotonic() - start)


def test_stop_from_a_signal_handler(tmp_path: Path) -> None:
    server = ServerLoop(EchoService(), KEY)
    server.listen(str(tmp_path / "s.sock"))
    previous = signal.signal(signal.SIGUSR1, lambda *_: server.stop())
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        server.run()
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert not (tmp_path / "s.sock").exists()
    server.stop()  # again, after the end


def test_what_was_queued_leaves_before_the_end(tmp_path: Path) -> None:
    with Running(tmp_path) as running, raw(running.address) as sock:
        size = 8 << 20

        def last_words() -> list[Outgoing]:
            running.server.stop()
            return [Outgoing(next(iter(running.service.peers)), b"bye", [bytes(size)])]

        until(lambda: running.service.peers)
        running.server.call_soon(last_words)
        assert read_frames(sock, 1) == [(b"bye", bytes(size))]
        assert sock.recv(1) == b""


def test_a_thousand_connections_come_and_go(running: Running) -> None:
    session = running.session()
    pool = session.transport(Pool)
    for _ in range(10):
        held = [pool.connect(session, CONTROLLER, time.monotonic() + 10) for _ in range(100)]
        for connection in held:
            pool.discard(connection)
    until(lambda: not running.connections)
    assert running.server.counters["accepted"] == 1000


def test_idle_work_is_done_between_events_until_there_is_none(tmp_path: Path) -> None:
    left = [3]

    def idle() -> bool:
        left[0] -= 1
        return left[0] > 0

    with Running(tmp_path, idle=idle) as running:
        until(lambda: left[0] == 0)
        run_blocking(running.session(), one(CreatePartition("p")))
        until(lambda: left[0] < 0)  # asked anew after an event


def test_failing_idle_work_is_counted_and_not_repeated_at_once(tmp_path: Path) -> None:
    with Running(tmp_path, idle=lambda: 1 // 0 > 0) as running:
        until(lambda: running.server.counters["errors"] == 1)
        assert run_blocking(running.session(), one(CreatePartition("p"))) == Done("p")


class Strict(EchoService):
    def on_message(self, peer: int, body: bytes, payload: memoryview | None, now: float) -> Iterable[Outgoing]:
        raise ProtocolError("I do not know this")


def test_a_message_that_makes_no_sense_to_the_service_costs_its_connection(tmp_path: Path) -> None:
    with Running(tmp_path, service=Strict()) as running, raw(running.address) as sock:
        sock.sendall(pack_frame(b"what"))
        assert sock.recv(10) == b""
        assert running.server.counters["broken"] == 1
        assert running.server.counters["errors"] == 0


def test_a_path_that_another_server_has_taken_over_is_left_alone(tmp_path: Path) -> None:
    with Running(tmp_path) as late:
        os.unlink(late.address)
        with Running(tmp_path, address=late.address) as successor:
            late.stop()
            assert run_blocking(successor.session(), one(CreatePartition("p"))) == Done("p")
    assert not Path(late.address).exists()
