"""The end of a turn: what a server has to say leaves after its commit, and not before."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from echo import KEY, EchoService, Running, one, until

from transfer_queue.messages.base import Done
from transfer_queue.messages.partitions import CreatePartition
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.net.framing import FrameReader
from transfer_queue.net.handshake import Hello
from transfer_queue.net.server.server_loop import Outgoing, ServerLoop
from transfer_queue.net.server.sockets import bind_socket
from transfer_queue.net.session import Session


class Commits:
    """A journal that works or does not."""

    def __init__(self) -> None:
        self.works = True
        self.raises = False
        self.tries = 0

    def __call__(self) -> bool:
        self.tries += 1
        if self.raises:
            raise OSError("no space")
        return self.works


def speak(running: Running, *socks: socket.socket) -> list[Outgoing]:
    """Adopts connections and says a word on each."""
    peers = [running.server.adopt(sock) for sock in socks]
    running.service.peers |= dict.fromkeys(peers, Hello("client", "adopted"))
    return [Outgoing(peer, b"word") for peer in peers]


@pytest.mark.parametrize("how", ["refuses", "raises"])
def test_nothing_leaves_until_the_commit_succeeds(tmp_path: Path, how: str) -> None:
    commits = Commits()
    with Running(tmp_path, commit=commits) as running:
        session = running.session()
        assert run_blocking(session, one(CreatePartition("a"))) == Done("a")
        commits.works, commits.raises = False, how == "raises"
        ours, theirs = socket.socketpair()
        with ours, theirs, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(run_blocking, session, one(CreatePartition("b")))
            until(lambda: len(running.service.envelopes) == 2)
            seen = threading.Event()
            running.server.call_soon(lambda: speak(running, theirs.dup()))
            running.server.call_soon(seen.set)
            assert seen.wait(10), "functions of call_soon run meanwhile"
            tries = commits.tries
            until(lambda: commits.tries >= tries + 2)
            assert not waiting.done()
            ours.setblocking(False)
            with pytest.raises(BlockingIOError):
                ours.recv(1)
            commits.works, commits.raises = True, False
            assert waiting.result(10) == Done("b")
            ours.settimeout(10)
            assert FrameReader().feed(ours.recv(100))[0][0] == b"word"


def test_what_is_served_after_the_output_was_sent_has_a_commit_of_its_own(tmp_path: Path) -> None:
    commits, words, ours = Commits(), [b"first", b"second"], []
    left: list[tuple[int, Outgoing]] = []
    one_end, other_end = socket.socketpair()
    with one_end, other_end:

        def served() -> list[Outgoing]:
            if not ours or not words:
                return []
            one_end.settimeout(10)
            if len(words) == 1:
                assert FrameReader().feed(one_end.recv(100))[0][0] == b"first", "it was sent before this call"
            left.append((commits.tries, Outgoing(ours[0], words.pop(0))))
            return [left[-1][1]]

        with Running(tmp_path, commit=commits, served=served) as running:
            running.server.call_soon(lambda: ours.append(running.server.adopt(other_end.dup())))
            until(lambda: not words)
            assert FrameReader().feed(one_end.recv(100))[0][0] == b"second"
    assert left[0][0] < left[1][0]


def test_a_server_that_cannot_commit_ends_in_silence(tmp_path: Path) -> None:
    commits = Commits()
    ours, theirs = socket.socketpair()
    with ours:
        with Running(tmp_path, commit=commits) as running:
            commits.works = False
            tries = commits.tries
            running.server.call_soon(lambda: speak(running, theirs))
            until(lambda: commits.tries > tries)
        ours.settimeout(10)
        assert ours.recv(100) == b""


def test_what_a_turn_says_shares_a_commit(tmp_path: Path) -> None:
    commits = Commits()
    with Running(tmp_path, commit=commits) as running:
        pairs = [socket.socketpair() for _ in range(50)]

        def begin() -> list[Outgoing]:
            commits.tries = 0
            return speak(running, *(theirs for _, theirs in pairs))

        running.server.call_soon(begin)
        for ours, _ in pairs:
            ours.settimeout(10)
            assert ours.recv(100)
        assert commits.tries <= 3
        for ours, _ in pairs:
            ours.close()


def test_an_inherited_socket_keeps_its_path_and_whoever_waits(tmp_path: Path) -> None:
    """Of two servers one after the other: who connects in between is served by the second."""
    path = str(tmp_path / "kept.sock")
    with bind_socket(path) as listener:
        for _ in range(2):
            server = ServerLoop(EchoService(), KEY)
            server.inherit(listener.dup())
            session = Session("c", KEY, lambda target: path)
            with ThreadPoolExecutor(2) as pool:
                waiting = pool.submit(run_blocking, session, one(CreatePartition("p")))
                serving = pool.submit(server.run)
                assert waiting.result(10) == Done("p")
                session.close()
                server.stop()
                serving.result(10)
            assert Path(path).is_socket()
