"""Runs in which other nodes take the controller over, from nodes that are dead, frozen or alive: the same holds.

`tests/journal/test_terms.py` interleaves the steps of claims alone.
"""

from __future__ import annotations

import pytest

from tests.simulation import chaos

SEEDS, PART = 24, 12


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_seeds(first: int) -> None:
    reads, happened = chaos.run_part(range(first, first + PART), "takeovers")
    assert reads > 10 * PART
    for each in ("takeover", "terms", "terms_ended", "snapshots"):
        assert happened[each] > PART // 4, happened
    assert any(happened[f"frozen_{point}"] for point in ("begun", "half", "written", "checked", "sending")), happened


def test_a_seed_replays() -> None:
    one, two = (chaos.run(11, variant="takeovers") for _ in range(2))
    assert one.happened["terms"] > 1
    assert one.cluster.network.delivered == two.cluster.network.delivered > 100
    assert one.happened == two.happened
    assert repr(one.ledger.samples) == repr(two.ledger.samples)


def test_a_failing_seed_says_how_to_replay_it() -> None:
    assert chaos.replay(3, "takeovers") == "python -m tests.simulation.chaos --takeovers --seed 3"
