"""Fixtures of the tests of the net layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driven import Driven


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
