"""Runs with several controllers and faults: the ledger holds, and it finds planted mistakes (decision 0033).

Only `make chaos` runs this file, because several controllers are a prototype.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.ledger import LedgerError
from tests.simulation.many_controllers import run as many
from tests.simulation.many_controllers.gate import Gate, home_of, names_in
from tests.simulation.run_features import MIB, Features
from transfer_queue.messages.queries import ListKeys

SEEDS = 10  # within which what must happen happens, for each number of controllers
MOST = 60  # seeds within which a planted mistake is found
PLAIN = Features(
    scenario="rows", group=2, leased=True, acks=1, units=1, replicas=1, arena_bytes=8 * MIB, loses=False,
    checkpoints=False, drains=False, snapshot_every=200,
)  # fmt: skip
SAVED = replace(PLAIN, checkpoints=True)


def found(kinds: dict[str, int], features: Features, first: int = 0) -> LedgerError:
    """What the first seed says that finds something. first: The seed to begin with, to save time."""
    for seed in range(first, first + MOST):
        try:
            many.run(seed, 3, kinds, features)
        except LedgerError as error:
            return error
    raise AssertionError(f"{MOST} seeds have found nothing")


@pytest.mark.parametrize("controllers", [1, 2, 3, 4])
def test_seeds(controllers: int) -> None:
    happened = Counter[str]()
    for seed in range(SEEDS):
        try:
            one = many.run(seed, controllers)
        except Exception as error:
            words = f"python -m tests.simulation.many_controllers --seeds {seed} --controllers {controllers}"
            raise AssertionError(f"to replay it: {words}") from error
        assert one.ledger.reads > 50
        happened += one.happened
        if happened["controller"] and (happened["relocated"] or controllers == 1):
            break
    assert happened["controller"] > 0, happened
    assert (happened["relocated"] > 0) == (controllers > 1), happened


def test_checkpoints_of_all_controllers_are_saved_and_loaded() -> None:
    happened = Counter[str]()
    for seed in range(7, 27):
        happened += many.run(seed, 3, {"kill_one": 1, "controller": 1}, SAVED).happened
        if happened["loads"]:
            break  # one of about ten runs loads a checkpoint
    assert happened["saves"] > 0
    assert happened["loads"] > 0


def test_a_seed_replays() -> None:
    one, two = (many.run(5, 2) for _ in range(2))
    assert one.many.network.delivered == two.many.network.delivered > 100
    assert one.faults.happened == two.faults.happened
    assert repr(one.ledger.samples) == repr(two.ledger.samples)


def test_a_former_owner_that_accepts_requests_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has not learnt of a move then puts and reads at the wrong controller."""
    why_not = Gate._why_not

    def lenient(self: Gate, name: str) -> dict[str, Any] | None:
        refusal = why_not(self, name)
        return None if refusal is not None and refusal["why"] == "moved" else refusal

    monkeypatch.setattr(Gate, "_why_not", lenient)
    assert "does not exist" in str(found({"break": 1}, PLAIN))


def test_a_move_without_a_freeze_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    why_not = Gate._why_not

    def lenient(self: Gate, name: str) -> dict[str, Any] | None:
        refusal = why_not(self, name)
        return None if refusal is not None and refusal["why"] == "moving" else refusal

    monkeypatch.setattr(Gate, "_why_not", lenient)
    assert found({"break": 1}, PLAIN)


def test_a_cut_that_holds_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each controller writes its state a little later than the one before, and clients go on meanwhile."""
    must_wait = Gate.must_wait

    def lenient(self: Gate, name: str) -> bool:
        return must_wait(self, name) and self.hold is not None and self.hold.until is None

    monkeypatch.setattr(Gate, "must_wait", lenient)
    assert found({"slow": 1}, SAVED, first=7)


def test_a_name_moves_only_to_a_controller_that_is_added() -> None:
    names = [f"train_{number}" for number in range(400)]
    before, after = ({name: home_of(name, count, 0) for name in names} for count in (3, 4))
    moved = [name for name in names if before[name] != after[name]]
    assert {after[name] for name in moved} == {3}
    assert 60 < len(moved) < 140


def test_the_gate_finds_the_partitions_in_a_request() -> None:
    assert names_in(ListKeys(["a", "b"])) == ["a", "b"]
    assert names_in(ListKeys(None)) == []
