"""Whoever connects finds the newest controller, and connections to earlier ones end."""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from transfer_queue.node.system import controller_moves
from transfer_queue.node.system.controller_moves import controller_address, watch_controller
from transfer_queue.node.system.paths import ControllerPlace, SystemFolder

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
