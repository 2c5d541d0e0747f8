"""Silent clients that live: their locks show it, and end with their processes only."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from transfer_queue.config.settings import Settings
from transfer_queue.core.absent_clients import GRACE_SECONDS
from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.controller import Controller
from transfer_queue.journal.journal import Journal, recover
from transfer_queue.journal.segment import ClockIdentity
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.puts import ClearKeys
from transfer_queue.net.handshake import Hello
from transfer_queue.node.controller.controller_process import Sockets, build_controller
from transfer_queue.node.controller.controller_service import ControllerService
from transfer_queue.node.controller.state_files import StateFiles
from transfer_queue.sampler import SequentialSampler
from transfer_queue.system_folder.liveness import LOOKS, ClientLiveness, DepartedClients, is_alive, is_client_alive
from transfer_queue.system_folder.paths import SystemFolder


def test_a_client_lives_until_its_end(tmp_path: Path) -> None:
    assert not is_client_alive(tmp_path, "c1")
    presence = ClientLiveness(tmp_path, "c1")
    assert is_client_alive(tmp_path, "c1")
    presence.end()
    presence.end()
    assert not is_client_alive(tmp_path, "c1")
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_does_not_keep_its_dead_parent_alive(tmp_path: Path) -> None:
    presence = ClientLiveness(tmp_path, "parent")
    go, wait = os.pipe()[::-1]
    child = os.fork()
    if not child:
        os.close(go)
        presence.close_in_child()
        os.read(wait, 1)
        os._exit(0)
    assert is_client_alive(tmp_path, "parent"), "the child has let go of its copy alone"
    presence.end()
    assert not is_client_alive(tmp_path, "parent")
    os.close(go)
    os.close(wait)
    os.waitpid(child, 0)


def test_a_killed_client_is_dead(tmp_path: Path) -> None:
    said, say = os.pipe()
    child = os.fork()
    if not child:
        ClientLiveness(tmp_path, "killed")
        kept = ClientLiveness(tmp_path, "held")
        os.write(say, b"+")
        while kept:
            time.sleep(100)
    os.read(said, 1)
    assert is_client_alive(tmp_path, "held")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not is_client_alive(tmp_path, "held")
    os.close(said)
    os.close(say)


def test_files_of_killed_clients_are_removed(tmp_path: Path) -> None:
    """At the next connection that opens or closes. Files of clients that live stay, connected or not."""
    for name in ("before", "connected", "killed"):
        (tmp_path / name).touch()
    alive = ClientLiveness(tmp_path, "alive")
    departed = DepartedClients(tmp_path)
    service = ControllerService(
        Controller(CoreConfig(SequentialSampler())), StateFiles(tmp_path / "states"), departed=departed
    )
    service.on_connect(1, Hello("client", "connected"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alive", "connected"]
    (tmp_path / "killed").touch()
    for peer, name in enumerate(("killed", "alive"), 2):
        service.on_connect(peer, Hello("client", name))
        service.on_disconnect(peer, 0.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alive", "connected"]
    alive.end()
    service.on_disconnect(1, 0.0)
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_checks_a_few_clients(tmp_path: Path) -> None:
    """All are checked in turn, however many live and are silent."""
    living = [ClientLiveness(tmp_path, f"alive{number}") for number in range(LOOKS)]
    departed = DepartedClients(tmp_path)
    (tmp_path / "dead").touch()
    departed.note_departed("dead")
    departed.sweep({})
    assert (tmp_path / "dead").exists()
    departed.sweep({})
    assert not (tmp_path / "dead").exists()
    for number, presence in enumerate(living):
        assert is_client_alive(tmp_path, f"alive{number}")
        presence.end()


def test_a_client_whose_file_was_swept_before_it_was_locked_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock
    swept: list[str] = []

    def late(file: int, kind: int) -> None:
        if not swept:
            swept.append("c1")
            (tmp_path / "c1").unlink()
        lock(file, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    presence = ClientLiveness(tmp_path, "c1")
    assert is_client_alive(tmp_path, "c1")
    presence.end()


def test_a_process_that_can_open_no_file_treats_no_client_as_dead(tmp_path: Path) -> None:
    alive = ClientLiveness(tmp_path, "c1")
    departed = DepartedClients(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        assert is_client_alive(tmp_path, "c1")
        with pytest.raises(OSError, match="Too many open files"):
            is_alive(tmp_path / "c1")
        departed.sweep({})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (tmp_path / "c1").exists()
    alive.end()
    departed.sweep({})
    assert not is_client_alive(tmp_path, "c1")


def test_a_client_that_a_restored_state_awaits_and_that_died_is_swept(tmp_path: Path) -> None:
    """It has no connection, so nothing will report that it departed."""
    (tmp_path / "dead").touch()
    alive = ClientLiveness(tmp_path, "alive")
    departed = DepartedClients(tmp_path)
    departed.sweep({"dead": set(), "alive": set()})
    assert [path.name for path in tmp_path.iterdir()] == ["alive"]
    alive.end()


def test_an_id_must_not_be_a_path(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w"):
        assert not is_client_alive(tmp_path / "x", "../file")


def test_a_controller_checks_the_lock_before_it_treats_a_client_as_gone(tmp_path: Path) -> None:
    system = SystemFolder(tmp_path)
    clients, journal = system.clients, system.journal
    clients.mkdir()
    journal.mkdir()
    config = msgspec.json.encode({"settings": Settings.from_config(None).to_json(), "conf": {}}).decode()

    def core() -> Any:
        path = str(tmp_path / f"{time.monotonic_ns()}.sock")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        server = build_controller(system, config, bytes(32), {}, Sockets([listener], None), journal)
        service: Any = server._service
        server.close()
        return service._controller

    first = core()
    for client in ("silent", "dead"):
        first.on_connect(client, 1)
        first.handle(client, 1, RequestEnvelope(1, 0, ClearKeys("p", [])), 0.0)
    files = Journal(journal, recover(journal, ClockIdentity.now()), ClockIdentity.now(), durable=False)
    files.append(first.take_records())
    files.commit()
    files.close()
    presence = ClientLiveness(clients, "silent")
    second = core()
    second.tick(time.monotonic() + GRACE_SECONDS)
    assert (list(second.context.connections.peers), list(second.context.connections.departed)) == (["silent"], ["dead"])
    presence.end()
    second.tick(time.monotonic() + 3 * GRACE_SECONDS)
    assert set(second.context.connections.departed) == {"dead", "silent"}
