"""Runs with faults, each drawn by its seed: nothing is lost, nothing split, no byte is another's, nothing leaks.

The variant `stores` has an external store whose servers die in the middle of puts and gets. In the variant `takeovers`
other nodes take the controller over, from nodes that are dead, frozen or alive; `tests/journal/test_terms.py`
interleaves the steps of claims alone. `make chaos` runs thousands of seeds of each variant.
"""

from __future__ import annotations

import pytest

from tests.simulation import chaos

# Chosen: together these seeds reach the branches of the package that the first seeds of the variants reach (200 without
# a variant, 60 of stores, 24 of takeovers).
SEEDS = {
    "": [
        2, 3, 10, 13, 15, 17, 21, 27, 30, 34, 35, 36, 40, 41, 50, 52, 56, 58, 61, 62, 63, 65, 66, 77, 105, 106, 118,
        152, 181, 184, 188,
    ],
    "stores": [1, 5, 6, 13, 14, 29, 36, 39, 49, 51, 52],
    "takeovers": [0, 1, 2, 3, 6, 7, 11, 13, 14, 15, 22, 23],
}  # fmt: skip
HAPPENED = {
    "": ("break", "controller", "system", "freeze", "snapshots", "moves", "saves"),
    "stores": ("server", "put", "get", "lost_values"),
    "takeovers": ("takeover", "terms", "terms_ended", "snapshots"),
}
"""What the seeds of a variant must contain."""


@pytest.mark.parametrize("variant", SEEDS)
def test_seeds(variant: str) -> None:
    seeds = SEEDS[variant]
    reads, happened = chaos.run_part(seeds, variant)
    assert reads > 10 * len(seeds)
    assert all(happened[each] > len(seeds) // 10 for each in HAPPENED[variant]), happened


@pytest.mark.parametrize(("variant", "seed"), [("", 7), ("takeovers", 11)])
def test_a_seed_replays(variant: str, seed: int) -> None:
    one, two = (chaos.run(seed, variant=variant) for _ in range(2))
    assert one.cluster.network.delivered == two.cluster.network.delivered > 100
    assert one.happened == two.happened
    assert repr(one.ledger.samples) == repr(two.ledger.samples)


def test_a_failing_seed_says_how_to_replay_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(seed: int, variant: str) -> None:
        raise AssertionError("broken on purpose")

    monkeypatch.setattr(chaos, "run", fail)
    monkeypatch.setattr("sys.argv", ["chaos", "--stores", "--seeds", "3..5"])
    assert chaos.main() == 1
    assert "python -m tests.simulation.chaos --stores --seed 3" in capsys.readouterr().out
