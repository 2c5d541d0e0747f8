"""Whoever connects finds the newest controller, and connections to earlier ones end."""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from transfer_queue.errors import ConnectionLostError
from transfer_queue.messages.descriptors import UnitInfo
from transfer_queue.node.system import controller_moves
from transfer_queue.node.system.controller_moves import controller_address, move_session, watch_controller
from transfer_queue.system_folder.paths import ControllerPlace, SystemFolder

FIRST = "127.0.0.1:1"


@pytest.fixture
def system(tmp_path: Path) -> SystemFolder:
    folder = SystemFolder(tmp_path / "s")
    folder.create()
    return folder


def test_the_first_address_holds_until_the_controller_moves(system: SystemFolder) -> None:
    assert controller_address(system, FIRST) == ("127.0.0.1", 1)
    assert controller_address(system, "/a/socket") == "/a/socket"
    system.write_controller_place(ControllerPlace(2, "127.0.0.1:2"))
    assert controller_address(system, FIRST) == ("127.0.0.1", 2)
    system.write_controller_place(ControllerPlace(3, "127.0.0.1:3"))
    assert controller_address(system, FIRST) == ("127.0.0.1", 3)


def test_the_former_addresses_are_reported_after_each_move(
    system: SystemFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_moves, "LOOK_SECONDS", 0.001)
    seen: list[Any] = []
    looked, ended = threading.Event(), threading.Event()

    def look(former: Collection[Any], moved: bool) -> bool:
        if moved:
            seen.append(set(former))
        looked.set()
        if len(seen) == 1:
            system.write_controller_place(ControllerPlace(3, "127.0.0.1:3"))
        if len(seen) == 2:
            ended.set()
        return len(seen) < 2

    watch_controller(system, FIRST, look)
    assert looked.wait(30)
    system.write_controller_place(ControllerPlace(2, "127.0.0.1:2"))
    assert ended.wait(30)
    assert seen == [{("127.0.0.1", 1)}, {("127.0.0.1", 1), ("127.0.0.1", 2)}]


class Connections:
    """Stands in for a session and its pool: the addresses to which it is connected, and which of them were ended."""

    def __init__(self, *addresses: Any) -> None:
        self.addresses = set(addresses)
        self.ended: list[Any] = []
        self.closed = False

    def transport(self, kind: Any) -> Connections:
        return self

    def end_connections(self, addresses: Collection[Any]) -> None:
        self.ended += self.addresses & set(addresses)


def test_connections_to_units_that_are_lost_end_after_a_takeover(
    system: SystemFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen unit ends no connection. The new controller learns after a while that it is lost."""
    monkeypatch.setattr(controller_moves, "LOOK_SECONDS", 0.001)
    here, there = UnitInfo(1, "/unit-1", "/arena"), UnitInfo(2, "/unit-2", "/arena", remote="127.0.0.1:12")
    frozen = UnitInfo(0, "/unit-0", "/arena", remote="127.0.0.1:10")
    session = Connections(("127.0.0.1", 1), ("127.0.0.1", 2), "/unit-1", ("127.0.0.1", 12), ("127.0.0.1", 10))
    replies: list[Any] = [ConnectionLostError("not yet"), [frozen, here, there], [here, there]]
    asked, ended = threading.Event(), threading.Event()

    def ask(of: Any, operation: Any) -> list[UnitInfo]:
        reply = replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        if frozen in reply:
            assert ("127.0.0.1", 10) not in session.ended
            asked.set()
        if not replies:
            replies.append(reply)
            if ("127.0.0.1", 10) in session.ended:
                session.closed = True
                ended.set()
        return reply  # type: ignore[no-any-return]

    monkeypatch.setattr(controller_moves, "run_blocking", ask)
    move_session(session, system, FIRST)  # type: ignore[arg-type]
    system.write_controller_place(ControllerPlace(2, "127.0.0.1:2"))
    assert asked.wait(30)
    assert ended.wait(30)
    assert set(session.ended) == {("127.0.0.1", 1), ("127.0.0.1", 10)}
