"""Mistakes planted in the code that runs: the ledger of the runs with faults finds each within 200 seeds."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from tests.simulation import chaos, lock_run
from tests.simulation.faulty_cluster import FaultyCluster
from tests.simulation.ledger import LedgerError
from transfer_queue.client.units import Units
from transfer_queue.core.claims import answers
from transfer_queue.core.claims.plan import ClaimPlan, OpenClaim
from transfer_queue.core.events.effects import Effect, SendToUnit
from transfer_queue.core.state.state import State
from transfer_queue.core.units.store_servers import StoreServers
from transfer_queue.journal import terms
from transfer_queue.journal.terms import Term, Terms
from transfer_queue.messages.reports.unit_reports import ReleaseExtents
from transfer_queue.net.session import Notices
from transfer_queue.node.controller.controller_service import ControllerService
from transfer_queue.testing import simulated_locks

SEEDS = 200


def found(
    kinds: dict[str, int], variant: str = "", others: type[Exception] | tuple[()] = (), first: int = 0
) -> LedgerError:
    """What the ledger of the first seed says that finds something.

    others: Errors of other checks, to ignore. first: The seed to begin with, shortly before one that finds something.
    """
    for seed in range(first, first + SEEDS):
        try:
            chaos.run(seed, kinds, variant=variant)
        except LedgerError as error:
            return error
        except others:
            continue
    raise AssertionError(f"{SEEDS} seeds have found nothing")


@pytest.mark.parametrize("program", [chaos, lock_run])
def test_a_run_without_seeds_is_an_error(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would report that all of its seeds have passed."""
    monkeypatch.setattr(sys, "argv", ["program", "--seeds", "5..5"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2


def test_extents_freed_before_the_record_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    carried_out = FaultyCluster._run_core_effects

    def early(self: FaultyCluster, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendToUnit) and isinstance(effect.request, ReleaseExtents):
                self._deliver_to_unit(effect.unit, effect.request)
        carried_out(self, effects)

    monkeypatch.setattr(FaultyCluster, "_run_core_effects", early)
    assert "needed extents were free" in str(found({"controller": 1}, first=20))


def test_readers_that_do_not_look_at_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Units, "is_unchanged", lambda self, reply: True)
    assert "foreign bytes" in str(found({"late": 1}))


def test_space_taken_back_from_a_silent_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a timeout: a writer whose connections broke is taken for dead, though it holds its lock."""
    monkeypatch.setattr(simulated_locks.SimulatedSlots, "withdraw", lambda self, slot: True)
    assert "foreign bytes" in str(found({"tear": 1}))


def test_batches_that_are_over_when_the_controller_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    grant = answers.grant

    def forget(state: State, plan: ClaimPlan, claims: Sequence[OpenClaim], *others: Any) -> Any:
        asked = [msgspec.structs.replace(each.claim, hand_over=False) for each in claims]
        forgotten = [msgspec.structs.replace(each, claim=claim) for each, claim in zip(claims, asked, strict=True)]
        return grant(state, plan, forgotten, *others)

    monkeypatch.setattr(answers, "grant", forget)
    words = str(found({"break": 1, "kill_one": 1}))
    assert "nobody has seen them" in words or "is lost" in words


def test_notices_that_never_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Notices, "frame", lambda self: b"")
    monkeypatch.setattr(Notices, "take", lambda self, sequence: self.waiting.clear())
    words = str(found({"break": 1}))
    assert "can be claimed again" in words or "handed over twice" in words


def test_a_store_whose_units_are_not_told_that_a_server_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreServers, "check_all", lambda self, backend: None)
    assert "not reported as lost" in str(found({"server": 1, "put": 1}, variant="stores"))


def test_a_controller_that_does_not_check_its_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers requests of clients that do not know the next controller yet, which does not know what it answers."""

    def commit(self: ControllerService) -> bool:
        assert self._journaling is not None
        assert self._term is not None
        self._term.is_current()  # the simulation stops some controllers here
        return self._journaling.commit()

    monkeypatch.setattr(ControllerService, "commit", commit)
    found({"takeover": 1, "slow": 1}, variant="takeovers", others=Exception)


def test_a_controller_that_copies_the_journal_before_it_ends_the_earlier_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier controller writes after the copy, finds its term open, and answers."""
    take_journal, close, closed = Terms._take_journal, terms._close, list[Path]()

    def take_first(self: Terms, term: Term) -> Generator[None, None, None]:
        yield from take_journal(self, term)
        while closed:
            close(closed.pop())
            yield

    monkeypatch.setattr(terms, "_close", closed.append)
    monkeypatch.setattr(Terms, "_take_journal", take_first)
    found({"claim": 1, "break": 1}, variant="takeovers", others=Exception)
