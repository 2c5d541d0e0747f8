"""Runs with faults, each drawn by its seed: nothing is lost, nothing split, no byte is another's, nothing leaks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.simulation import chaos

# The last part is chosen: with it, these seeds reach the branches of the package that the first 200 seeds reach.
PARTS = [
    range(25), range(25, 50), range(50, 75),
    [77, 79, 105, 106, 118, 119, 131, 147, 152, 169, 181, 183, 184, 188, 189],
]  # fmt: skip


@pytest.mark.parametrize("seeds", PARTS, ids=lambda seeds: str(seeds[0]))
def test_seeds(seeds: Sequence[int]) -> None:
    reads, happened = chaos.run_part(seeds)
    assert reads > 10 * len(seeds)
    for each in ("break", "controller", "system", "freeze", "snapshots", "moves", "saves"):
        assert happened[each] > len(seeds) // 10, happened
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
