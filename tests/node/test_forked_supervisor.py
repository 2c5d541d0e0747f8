"""Supervisors of tests are forked, and are otherwise like those of users."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from transfer_queue.config.settings import Settings
from transfer_queue.node.system.launcher import start_local

SPAWNED = "transfer_queue.node.supervisor"


def seen(name: str, found: dict[str, object]) -> None:
    system = start_local(name, {"settings": Settings.from_config(None).to_json()}, timeout=60)
    try:
        process = psutil.Process(system.description.pid)
        found["arguments"] = process.cmdline()[1:]
        found["parent"] = process.ppid()
        found["folder"] = process.cwd()
        found["session"] = os.getsid(process.pid)
        found["pid"] = process.pid
        found["files"] = {os.readlink(f"/proc/{process.pid}/fd/{number}") for number in (0, 1, 2)}
        found["log"] = str(system.logs / "supervisor.log")
    finally:
        system.stop()
    found["is left"] = psutil.pid_exists(process.pid)


def test_forked_and_spawned(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))
    forked: dict[str, object] = {}
    seen("forked", forked)
    # a short path, because it has sockets
    monkeypatch.setenv("TQ_RUNTIME_DIR", str(Path(os.environ["TQ_RUNTIME_DIR"]) / "own"))
    spawned: dict[str, object] = {}
    seen("spawned", spawned)
    (Path(os.environ["TQ_RUNTIME_DIR"])).rmdir()
    assert str(forked.pop("arguments")).endswith("forked_supervisor.py']")
    assert spawned.pop("arguments") == ["-m", SPAWNED]
    for one in (forked, spawned):
        assert one.pop("session") == one.pop("pid")
        assert one.pop("files") == {os.devnull, one.pop("log")}
    assert forked == spawned == {"parent": os.getpid(), "folder": os.getcwd(), "is left": False}
