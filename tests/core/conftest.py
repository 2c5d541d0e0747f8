"""Every test of the core ends with a replay of its records."""

from __future__ import annotations

from collections.abc import Iterator

import harness
import pytest


@pytest.fixture(autouse=True)
def replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What each test's records say is what its states hold, under the limits that the test had set."""
    harness.made.clear()
    yield
    for each in harness.made:
        each.replay()


@pytest.fixture
def h() -> harness.Harness:
    """A controller with the sequential sampler and one storage unit."""
    return harness.Harness()
