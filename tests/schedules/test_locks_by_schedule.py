"""Runs with faults of clients that update and lock: no increment is lost or happens twice, whoever is killed."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from tests.simulation import lock_run
from tests.simulation.ledger import LedgerError
from tests.simulation.lock_run import History, Increment
from transfer_queue.core.puts import decide
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.leases import LockTable
from transfer_queue.messages.puts import Publish

SEEDS, PART = 60, 30
TAKEOVER_SEEDS = 8
PLANTED_SEEDS = 60


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_seeds(first: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(first, first + PART):
        try:
            happened += lock_run.run(seed).history.happened
        except Exception as error:
            raise AssertionError(f"to replay it: {lock_run.replay(seed)}") from error
    for each in ("controller", "kill_one", "freeze", "break"):
        assert happened[each] > PART // 5, happened
    assert happened["fenced"] > 0, happened
    assert happened["increments"] > 50 * PART, happened


def test_locks_hold_while_other_nodes_take_the_controller_over() -> None:
    happened: Counter[str] = Counter()
    for seed in range(TAKEOVER_SEEDS):
        try:
            happened += lock_run.run(seed, takeovers=True).history.happened
        except Exception as error:
            raise AssertionError(f"to replay it: {lock_run.replay(seed, takeovers=True)}") from error
    assert happened["terms"] > TAKEOVER_SEEDS, happened
    assert happened["increments"] > 50 * TAKEOVER_SEEDS, happened


def test_a_seed_replays() -> None:
    one, two = (lock_run.run(3) for _ in range(2))
    assert one.cluster.network.delivered == two.cluster.network.delivered > 100
    assert [vars(each) for each in one.history.increments] == [vars(each) for each in two.history.increments]


# ---------------------------------------------------------------- planted mistakes


def found(kinds: dict[str, int], *, fenced: bool = True) -> LedgerError:
    """What the first seed says that finds something."""
    for seed in range(PLANTED_SEEDS):
        try:
            lock_run.run(seed, kinds, fenced=fenced)
        except LedgerError as error:
            return error
    raise AssertionError(f"{PLANTED_SEEDS} seeds have found nothing")


def test_puts_without_the_token_of_their_lock() -> None:
    """A frozen holder continues after its lease has ended, and overwrites what the next holder has put."""
    found({"freeze": 1}, fenced=False)


def test_puts_whose_versions_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    check = decide._check_conditions

    def without_versions(state: State, partition: Partition | None, request: Publish) -> None:
        check(state, partition, msgspec.structs.replace(request, expected=None))

    monkeypatch.setattr(decide, "_check_conditions", without_versions)
    assert "updated: two acknowledged increments" in str(found({"slow": 1}))


def test_locks_that_are_granted_while_another_client_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(self: LockTable, token: int) -> None:
        lock = self.by_token.pop(token)
        for key in lock.keys:
            self.of_key.pop((lock.partition, key), None)

    monkeypatch.setattr(LockTable, "is_any_held", lambda self, partition, keys: False)
    monkeypatch.setattr(LockTable, "remove", remove)
    found({"slow": 1})


# ---------------------------------------------------------------- the check itself


def history(*increments: tuple[int | None, float, float, str]) -> History:
    """A history of one counter. Each increment: the value before, its begin and end, and what became of it."""
    made = History()
    for before, began, ended, outcome in increments:
        made.increments.append(Increment("k", began, before, 0, ended, outcome == "acknowledged", outcome == "refused"))
    return made


@pytest.mark.parametrize(
    ("increments", "final"),
    [
        ([(0, 0, 1, "acknowledged"), (1, 2, 3, "acknowledged")], 2),
        ([(0, 0, 9, "acknowledged"), (1, 2, 3, "acknowledged")], 2),  # at the same time
        ([(0, 0, 1, "acknowledged"), (1, 2, 3, "unknown"), (2, 4, 5, "acknowledged")], 3),
        ([(0, 0, 1, "acknowledged"), (1, 2, 3, "unknown"), (1, 4, 5, "refused")], 1),
        ([(None, 0, 1, "unknown")], 0),
    ],
)
def test_histories_that_are_possible(increments: list[tuple[int, float, float, str]], final: int) -> None:
    history(*increments).check({"k": final})


@pytest.mark.parametrize(
    ("increments", "final", "message"),
    [
        ([(0, 0, 1, "acknowledged"), (0, 2, 3, "acknowledged")], 1, "one was lost"),
        ([(0, 0, 1, "acknowledged"), (1, 2, 3, "acknowledged")], 1, "the counter ends at 1"),
        ([(0, 0, 1, "acknowledged"), (1, 2, 3, "refused")], 2, r"no increment counted from \[1\]"),
        ([(1, 0, 1, "acknowledged"), (0, 2, 3, "acknowledged")], 2, "ended before an earlier one began"),
    ],
)
def test_histories_that_are_impossible(
    increments: list[tuple[int, float, float, str]], final: int, message: str
) -> None:
    with pytest.raises(LedgerError, match=message):
        history(*increments).check({"k": final})


def test_increments_in_another_order_than_their_locks_are_found() -> None:
    made = history((0, 0, 9, "acknowledged"), (1, 0, 9, "acknowledged"))
    made.increments[0].token, made.increments[1].token = 2, 1
    with pytest.raises(LedgerError, match="another order than the locks"):
        made.check({"k": 2})
