"""What one connection can do to the others: nothing. Progress is counted in requests and bytes, never in seconds."""

import asyncio
import contextlib
import os
import resource
import socket
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driven import Driven, Ticking, frame
from echo import KEY, Driver, EchoService, Running, drivers, one, raw, until

from transfer_queue.errors import AttachError
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import ReplyEnvelope
from transfer_queue.messages.partitions import CreatePartition
from transfer_queue.net.drivers.asyncio_driver import run_async
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.net.fd_limits import ReservedDescriptor
from transfer_queue.net.framing import HEADER
from transfer_queue.net.server.server_connection import OUTPUT_MARK
from transfer_queue.net.server.server_loop import FRAMES_A_TURN, READ_SIZE, TURN_SECONDS, Outgoing, ServerLoop
from transfer_queue.net.session import Session

# ---------------------------------------------------------------- reading fairly


def test_a_flood_costs_others_a_turn(driven: Callable[..., Driven]) -> None:
    system = driven()
    flood, other = system.client(), system.client()
    flood.push(b"".join(frame(i) for i in range(1, 1001)))
    for round_ in range(1, 11):
        other.push(frame(round_))
        before = len(system.service.envelopes)
        system.turn()
        # twice: of those that were read in this turn, and of those that were left of the turn before
        assert len(system.service.envelopes) - before <= 2 * FRAMES_A_TURN + 1
        assert [answer.sequence for answer in other.pull()] == [round_]
    answers = flood.pull()
    while len(answers) < 1000:
        system.turn()
        answers += flood.pull()
    assert [answer.sequence for answer in answers] == list(range(1, 1001))


def test_long_requests_of_one_connection_are_served_in_several_turns(driven: Callable[..., Driven]) -> None:
    now = 0.0

    class Slow(Ticking):
        def on_message(self, *arguments: Any) -> Iterable[Outgoing]:
            nonlocal now
            now += TURN_SECONDS / 2
            return super().on_message(*arguments)

    system = driven(service=Slow(), clock=lambda: now)
    flood, other = system.client(), system.client()
    flood.push(b"".join(frame(i) for i in range(1, 13)))
    other.push(frame(1))
    system.turn()
    assert len(other.pull()) == 1
    served = [len(flood.pull())]
    while sum(served) < 12:
        system.turn()
        served.append(len(flood.pull()))
    assert served[0] <= 6, "a turn reads once, and serves what the turn before has left"
    assert set(served[1:]) <= {1, 2, 3}


def test_who_leaves_his_answers_unread_is_not_read_from(driven: Callable[..., Driven]) -> None:
    system = driven()
    flood, other = system.client(), system.client()
    words = "x" * 1000
    wanted = 10_000
    flood.push(b"".join(frame(i, words) for i in range(1, wanted + 1)))
    for round_ in range(1, 500):
        flood.push()
        other.push(frame(round_))
        system.turn()
        assert [answer.sequence for answer in other.pull()] == [round_]
        assert max(peer.out_bytes for peer in system.peers) <= OUTPUT_MARK + 2 * len(words)
        assert max(len(peer.inbox) for peer in system.peers) <= READ_SIZE // len(words)
    assert flood.unsent  # its own socket is full
    assert system.server.counters["slow"] == 0
    answers = flood.pull()
    while len(answers) < wanted:
        flood.push()
        system.turn()
        answers += flood.pull()
    assert [answer.sequence for answer in answers] == list(range(1, wanted + 1))


def test_a_clogged_connection_does_not_turn_the_loop_until_it_ends(driven: Callable[..., Driven]) -> None:
    system = driven()
    flood = system.client()
    flood.push(b"".join(frame(i, "x" * 1000) for i in range(1, 4001)))
    for _ in range(400):
        flood.push()
        system.turn()
    assert system.peers[0].out_bytes > OUTPUT_MARK
    assert system.server._poller.poll(0) == []
    flood.sock.close()
    system.turn(3)
    assert system.peers == []
    assert system.service.gone


def test_what_was_sent_before_the_end_is_served(driven: Callable[..., Driven]) -> None:
    system = driven()
    flood = system.client()
    flood.push(b"".join(frame(i) for i in range(1, 101)))
    flood.sock.shutdown(socket.SHUT_WR)
    system.turn(10)
    assert len(system.service.envelopes) == 100
    assert system.peers == []


# ---------------------------------------------------------------- memory of what comes in


def unread(system: Driven) -> int:
    """The memory of the output that clients have not read, as the server counts it."""
    return sum(peer.counted for peer in system.peers)


def test_unfinished_messages_are_bounded_in_total(driven: Callable[..., Driven]) -> None:
    system = driven(max_input=300_000)
    small, large = system.client(), system.client()
    small.push(HEADER.pack(200_000, 0) + b"x" * 100_000)
    large.push(HEADER.pack(1 << 29, 0))
    for _ in range(10):
        large.push(b"x" * 50_000)
        system.turn()
        assert sum(peer.held for peer in system.peers) <= 300_000
    assert large.ended
    assert not small.ended
    assert system.server.counters["crowded"] == 1
    assert len(system.service.gone) == 1


def test_unread_replies_are_bounded_in_total_and_the_slowest_readers_are_dropped(driven: Callable[..., Driven]) -> None:
    system = driven(max_unread=2_000_000)
    idle, reading = [system.client() for _ in range(6)], system.client()
    for client in (*idle, reading):
        client.push(b"".join(frame(i, "x" * 1000) for i in range(1, 3001)))
    answers = []
    for _ in range(2000):
        for client in (*idle, reading):
            client.push()
        system.turn()
        answers += reading.pull()
        assert unread(system) <= 2_000_000
    assert [answer.sequence for answer in answers] == list(range(1, 3001))
    dropped = [client.ended for client in idle]
    assert 0 < sum(dropped) < len(idle), "no more are dropped than needed"
    assert dropped == sorted(dropped, reverse=True), "those that have read nothing for the longest time are first"
    assert system.server.counters["slow"] == sum(dropped) == len(system.service.gone)


def test_unread_replies_that_take_no_memory_do_not_count(driven: Callable[..., Driven]) -> None:
    """A storage unit sends values out of its arena without a copy."""
    arena = np.zeros(4 << 20, np.uint8)[:]

    class Unit(Ticking):
        def on_message(self, peer: int, body: bytes, payload: memoryview | None, now: float) -> Iterable[Outgoing]:
            return [Outgoing(peer, b"value", [arena.data])]

    system = driven(service=Unit(), max_unread=1_000_000)
    clients = [system.client() for _ in range(3)]
    for client in clients:
        client.push(frame(1))
    system.turn(5)
    assert len(system.peers) == 3
    assert unread(system) < 1000
    for client in clients:
        received = 0
        while received < arena.nbytes:
            with contextlib.suppress(BlockingIOError):
                received += len(client.sock.recv(1 << 20))
            system.turn()
    assert unread(system) == 0
    assert all(peer.lent == 0 for peer in system.peers)


def test_a_reply_behind_unread_memory_of_an_arena_counts(driven: Callable[..., Driven]) -> None:
    arena, copied = np.zeros(768 << 10, np.uint8)[:], bytes(500_000)

    class Unit(Ticking):
        def on_message(self, peer: int, body: bytes, payload: memoryview | None, now: float) -> Iterable[Outgoing]:
            return [Outgoing(peer, b"value", [arena.data]) if len(body) < 100 else Outgoing(peer, copied, ())]

    system = driven(service=Unit())
    client = system.client()
    client.push(frame(1))
    system.turn(3)
    (peer,) = system.peers
    assert peer.out_bytes - peer.lent < 1000, "what is unread takes no memory"
    client.push(frame(2, "x" * 1000))
    system.turn(3)
    assert unread(system) > len(copied)


def test_one_large_reply_is_sent_whole(driven: Callable[..., Driven]) -> None:
    system = driven(max_unread=100_000)
    client = system.client()
    client.push(frame(1, "x" * 2_000_000))
    answers = []
    while not answers:
        client.push()
        system.turn()
        answers += client.pull()
    assert system.server.counters["slow"] == 0


def test_memory_is_counted_back_when_a_message_is_whole_or_its_sender_gone(driven: Callable[..., Driven]) -> None:
    system = driven(max_input=120_000)
    first, second, third = (system.client() for _ in range(3))
    whole = frame(1, "x" * 100_000)
    first.push(whole[:50_000])
    second.push(whole[:60_000])
    system.turn(2)
    assert [peer.held for peer in system.peers] == [50_000, 60_000, 0]
    first.push(whole[50_000:])
    second.sock.close()
    system.turn(2)
    third.push(whole[:90_000])
    system.turn(2)
    assert system.server.counters["crowded"] == 0
    assert first.pull() == [ReplyEnvelope(1, Done("x" * 100_000))]


# ---------------------------------------------------------------- connections without the key


def test_silent_strangers_keep_nobody_out(driven: Callable[..., Driven]) -> None:
    system = driven(max_connections=3)
    strangers = [system.client(shake=False) for _ in range(3)]
    system.turn()
    member = system.client()
    member.push(frame(1))
    system.turn(2)
    assert len(member.pull()) == 1
    assert strangers[0].ended
    assert not strangers[1].ended
    assert system.server.counters["rejected"] == 1


def test_members_are_not_put_out_by_strangers(driven: Callable[..., Driven]) -> None:
    system = driven(max_connections=2)
    members = [system.client(), system.client()]
    for _ in range(20):
        system.client(shake=False)
    system.turn(3)
    for member in members:
        member.push(frame(1))
    system.turn(2)
    assert [len(member.pull()) for member in members] == [1, 1]


# ---------------------------------------------------------------- the open-file limit


def forked(work: Callable[[], str]) -> str:
    """What `work` returns in a forked child, or its traceback."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(ours)
            try:
                said = work()
            except BaseException:
                said = traceback.format_exc()
            os.write(theirs, said.encode()[:60_000])
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        said_bytes = pipe.read()
    os.waitpid(pid, 0)
    return said_bytes.decode()


def leave_only(files: int) -> int:
    """Lowers the open-file limit so that so many more can be opened; gives the limit."""
    limit = max(map(int, os.listdir("/proc/self/fd"))) + files
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    probes = []
    with contextlib.suppress(OSError):
        while True:
            probes.append(os.dup(0))
    for probe in probes[len(probes) - files :]:
        os.close(probe)
    return limit


@drivers
def test_a_server_without_descriptors_says_so(tmp_path: Path, run: Driver) -> None:
    address = str(tmp_path / "s.sock")
    ready, say = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            server = ServerLoop(EchoService(), KEY)
            server.listen(address)
            leave_only(3)
            os.write(say, b"+")
            server.run()
        finally:
            os._exit(1)
    os.close(say)
    session = Session("c", KEY, lambda target: address)
    held: list[socket.socket] = []
    try:
        assert os.read(ready, 1) == b"+"
        for _ in range(3):
            held.append(raw(address))
        with pytest.raises(AttachError, match=rf"process {pid} has reached its open-file limit of \d+: raise `ulimit"):
            run(session, one(CreatePartition("p")))
        for sock in held:  # those that are in are served
            sock.sendall(frame(1))
            assert sock.recv(100)
        held.pop().close()
        until(lambda: is_answered(session))  # once the server has noticed that a connection has gone
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(ready)
        session.close()
        for sock in held:
            sock.close()


def is_answered(session: Session) -> bool:
    try:
        return run_blocking(session, one(CreatePartition("p"))) == Done("p")
    except AttachError:
        return False


@pytest.mark.parametrize("driver", ["blocking", "asyncio"])
def test_a_client_without_descriptors_says_so(tmp_path: Path, driver: str) -> None:
    with Running(tmp_path) as running:

        def ask() -> str:
            session = running.session()
            call = one(CreatePartition("p"))
            if driver == "asyncio":
                loop = asyncio.new_event_loop()
            limit = leave_only(0)
            try:
                if driver == "asyncio":
                    loop.run_until_complete(run_async(session, call))
                else:
                    run_blocking(session, call)
            except AttachError as error:
                return str(error).replace(f"limit of {limit}", "limit").replace(str(os.getpid()), "PID")
            return "no error"

        assert "cannot open a connection to a server: process PID has reached its open-file limit: raise" in forked(ask)


def test_a_spared_descriptor_is_there_again_after_its_use(tmp_path: Path) -> None:
    spared = ReservedDescriptor()
    spared.close()  # it could not be made again
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        client.connect(str(tmp_path / "socket"))
        assert not spared.refuse_connection(listener, b"words")
        client.shutdown(socket.SHUT_WR)
        assert spared.refuse_connection(listener, b"words")
        assert client.recv(100) == b"words"
    spared.close()
