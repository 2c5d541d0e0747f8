"""Runs with faults, each drawn by its seed: nothing is lost, nothing split, no byte is another's, nothing leaks."""

from __future__ import annotations

import pytest

from tests.simulation import chaos

SEEDS, PART = 200, 25


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_seeds(first: int) -> None:
    reads, happened = chaos.run_part(first, PART)
    assert reads > 10 * PART
    for each in ("break", "controller", "system", "freeze", "snapshots", "moves", "saves"):
        assert happened[each] > PART // 10, happened
    assert happened["loads"] + happened["lost_values"] + happened["ranks_gone"] > 0, happened


def test_a_seed_replays() -> None:
    one, two = (chaos.run(7) for _ in range(2))
    assert one.cluster.network.delivered == two.cluster.network.delivered > 100
    assert one.faults.happened == two.faults.happened
    assert repr(one.ledger.samples) == repr(two.ledger.samples)


def test_a_failing_seed_says_how_to_replay_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(seed: int, variant: str) -> None:
        raise AssertionError("broken on purpose")

    monkeypatch.setattr(chaos, "run", fail)
    monkeypatch.setattr("sys.argv", ["chaos", "--seeds", "3..5"])
    assert chaos.main() == 1
    assert "python -m tests.simulation.chaos --seed 3" in capsys.readouterr().out
