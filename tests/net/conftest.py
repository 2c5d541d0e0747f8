"""Fixtures of the tests of the net layer."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driven import Driven
from echo import Running, until

from leftovers import descriptors, opened_for
from transfer_queue.net.session import Session


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A server of an EchoService."""
    with Running(tmp_path) as running:
        yield running


@pytest.fixture
def session(running: Running) -> Iterator[Session]:
    """A session with it. All that it has opened must be closed at its end."""
    gc.collect()  # what earlier tests have left to it
    before = descriptors()
    session = running.session()
    yield session
    session.close()
    until(lambda: not running.service.peers)
    gc.collect()
    assert opened_for(before) == []


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Callable[..., Driven]]:
    made: list[Driven] = []

    def make(**options: Any) -> Driven:
        made.append(Driven(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.server.close()
        for client in each.clients:
            client.sock.close()
