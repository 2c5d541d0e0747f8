"""A process that attaches by itself: to what runs, and to what runs after that has ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import transfer_queue as tq
from transfer_queue.config import Settings
from transfer_queue.node.launcher import RunningSystem, start_local

NAME = "attached-to"


@pytest.fixture
def systems(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts systems that this process has not called `init` for."""
    monkeypatch.setenv("TQ_SYSTEM", NAME)
    started: list[RunningSystem] = []

    def start() -> RunningSystem:
        started.append(start_local(NAME, {"settings": Settings.from_config(None).to_json()}))
        return started[-1]

    yield start
    tq.close()
    for system in started:
        system.stop()


def test_what_has_ended_is_forgotten(systems: Any) -> None:
    """The next one under its name is another, also if nothing was called in between."""
    for value in (1, 2):
        system = systems()
        assert tq.kv_list() == {}
        tq.kv_put("k", "p", {"x": value})
        assert tq.kv_batch_get("k", "p")["x"].tolist() == [value]
        system.stop()


def test_where_nothing_runs_any_more(systems: Any) -> None:
    system = systems()
    assert tq.kv_list() == {}
    system.stop()
    with pytest.raises(tq.NotInitializedError, match=r"call tq.init\(\) first"):
        tq.kv_list()
    assert systems().alive()
    assert tq.kv_list() == {}


def test_what_init_was_called_for_is_not_changed_behind_its_back(systems: Any) -> None:
    """Its end is an error, until `init` is called again."""
    system = systems()
    tq.init({"system": {"name": NAME}})
    system.stop()
    systems()
    with pytest.raises((tq.ConnectionLostError, tq.AuthenticationError)):
        tq.kv_list()
    tq.init({"system": {"name": NAME}})
    assert tq.kv_list() == {}
