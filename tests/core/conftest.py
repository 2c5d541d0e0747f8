"""Every test of the core ends with a replay of its records, and its state goes through a file."""

from __future__ import annotations

from collections.abc import Iterator

import harness
import pytest


@pytest.fixture(autouse=True)
def replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What each test's records say is what its states hold, under the limits that it had set; they can be saved."""
    harness.made.clear()
    yield
    for each in harness.made:
        each.replay()
        each.check_saving()


@pytest.fixture
def h() -> harness.Harness:
    """A controller with the sequential sampler and one storage unit."""
    return harness.Harness()
