"""Runs with an external store whose servers die in the middle of puts and gets: the same holds as without it.

Nothing of a put that failed is visible, nothing is left in the store, and what it has lost is reported.
"""

from __future__ import annotations

import pytest

from tests.simulation import chaos

SEEDS, PART = 60, 15


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_seeds(first: int) -> None:
    reads, happened = chaos.run_part(range(first, first + PART), "stores")
    assert reads > 10 * PART
    for each in ("server", "put", "get", "lost_values"):
        assert happened[each] > 0, happened


def test_a_failing_seed_says_how_to_replay_it() -> None:
    assert chaos.replay(3, "stores") == "python -m tests.simulation.chaos --stores --seed 3"
