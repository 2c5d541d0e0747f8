"""Several controllers and one folder: an acknowledged record is never lost, and a late one is never read."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from journal_writer import Writer

from differential import stateful
from transfer_queue.errors import StartError
from transfer_queue.journal.journal import segment_path
from transfer_queue.journal.terms import Term, Terms


class TermWriter(Writer):
    """A controller with the journal of its term. unanswered: Keys that are written, and not acknowledged yet."""

    def __init__(self, term: Term) -> None:
        super().__init__(term.folder)
        self.term = term
        self.client = f"term{term.number}"
        self.unanswered: list[str] = []

    def put(self, key: str, now: float = 0.0) -> None:
        super().put(key, now)
        self.unanswered.append(key)


def claim(folder: Path, owner: str = "s") -> TermWriter:
    return TermWriter(Terms(folder).claim(owner))


def finish(claiming: Generator[None, None, Term]) -> Term:
    """The term, after all further steps of a claim."""
    while True:
        try:
            next(claiming)
        except StopIteration as end:
            term: Term = end.value
            return term


def test_the_first_term_begins_with_nothing(tmp_path: Path) -> None:
    writer = claim(tmp_path)
    assert (writer.term.number, writer.term.owner, writer.keys()) == (1, "s", [])
    assert writer.term.is_current()
    assert [term.folder for term in Terms(tmp_path).list()] == [writer.term.folder]


def test_a_later_term_has_what_the_earlier_ones_wrote_and_ends_them(tmp_path: Path) -> None:
    first = claim(tmp_path)
    first.put("a")
    first.journal.forget_before(first.snapshot())
    first.put("b")
    second = claim(tmp_path)
    assert second.keys() == ["a", "b"]
    assert not first.term.is_current()
    assert second.term.is_current()
    first.put("late")
    second.put("c")
    assert claim(tmp_path).keys() == ["a", "b", "c"]
    assert [term.number for term in Terms(tmp_path).list()] == [3]


def test_a_journal_without_terms_is_taken_over(tmp_path: Path) -> None:
    plain = Writer(tmp_path)
    plain.put("a")
    plain.snapshot()
    plain.put("b")
    assert claim(tmp_path).keys() == ["a", "b"]
    assert [path.name for path in tmp_path.iterdir()] == ["term-000000000001"]


def test_a_torn_tail_of_the_earlier_term_is_dropped(tmp_path: Path) -> None:
    first = claim(tmp_path)
    first.put("a")
    with open(segment_path(first.term.folder, first.journal.number), "ab") as file:
        file.write(b"TQfr half of a frame")
    assert claim(tmp_path).keys() == ["a"]


def test_a_claim_that_dies_before_its_end_is_skipped(tmp_path: Path) -> None:
    """At every step: the next one has everything, whichever steps were done."""
    for steps in range(30):
        folder = tmp_path / str(steps)
        folder.mkdir()
        first = claim(folder)
        first.put("a")
        first.snapshot()
        first.put("b")
        dying = Terms(folder).claim_in_steps("s")
        for _ in range(steps):
            if next(dying, "ended") == "ended":
                return
        dying.close()
        assert claim(folder).keys() == ["a", "b"]
    raise AssertionError("a claim has fewer steps than this")


def test_a_claim_that_was_overtaken_fails(tmp_path: Path) -> None:
    claim(tmp_path).put("a")
    slow = Terms(tmp_path).claim_in_steps("s")
    for _ in range(3):
        next(slow)
    fast = claim(tmp_path)
    with pytest.raises(StartError, match="took over"):
        list(slow)
    assert fast.term.is_current()
    assert claim(tmp_path).keys() == ["a"]


def test_a_number_that_was_chosen_long_ago_does_not_begin_a_term(tmp_path: Path) -> None:
    """The terms before it have been removed, so that its number is free again."""
    slow = Terms(tmp_path).claim_in_steps("s")
    next(slow)  # it has chosen number 1
    claim(tmp_path)
    second = claim(tmp_path)
    assert finish(slow).number == second.term.number + 1


def test_a_term_that_ended_stays_ended_while_a_slow_controller_has_its_number(tmp_path: Path) -> None:
    slow = Terms(tmp_path).claim_in_steps("s")
    next(slow)  # it has chosen number 1
    first = claim(tmp_path)
    claim(tmp_path)
    next(slow)  # it has created a folder with this number
    assert first.term.folder.exists()
    assert not first.term.is_current()


def test_discard_removes_every_term(tmp_path: Path) -> None:
    claim(tmp_path)
    next(Terms(tmp_path).claim_in_steps("s"))
    Terms(tmp_path).discard()
    assert list(tmp_path.iterdir()) == []


def test_a_mark_is_made_before_others_see_the_term(tmp_path: Path) -> None:
    def mark(folder: Path) -> None:
        assert Terms(tmp_path).list() == []
        (folder / "lock").touch()

    assert Terms(tmp_path).claim("s", mark).lock.exists()


class ControllersOfAFolder(RuleBasedStateMachine):
    """Any number of controllers claim, write, check, answer, freeze and die, in any order of their steps."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.claims: list[Generator[None, None, Term]] = []
        self.writers: list[TermWriter] = []
        self.acknowledged: set[str] = set()
        self.written: dict[str, int] = {}
        """Key -> the term that wrote it."""
        self.begun: dict[int, set[str]] = {}
        """Term -> the keys with which it began."""
        self.served: set[int] = set()
        """Terms that have acknowledged anything."""

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule()
    def begin(self) -> None:
        if len(self.claims) < 4:
            self.claims.append(Terms(self.folder).claim_in_steps("s"))

    @precondition(lambda self: self.claims)
    @rule(at=st.integers(0, 3), steps=st.integers(1, 6))
    def step(self, at: int, steps: int) -> None:
        claiming = self.claims[at % len(self.claims)]
        for _ in range(steps):
            try:
                next(claiming)
            except StopIteration as end:
                self.claims.remove(claiming)
                self.start(end.value)
                return
            except StartError:
                self.claims.remove(claiming)
                return

    def start(self, term: Term) -> None:
        if not term.is_current():
            return  # a controller checks it before it reads its journal, too
        writer = TermWriter(term)
        found = set(writer.keys())
        assert self.acknowledged <= found
        for earlier in (number for number in self.served if number < term.number):
            late = {key for key, number in self.written.items() if number < earlier} - self.begun[earlier]
            assert not late & found
        self.begun[term.number] = found
        self.writers.append(writer)

    @precondition(lambda self: self.writers)
    @rule(at=st.integers(0, 3))
    def write(self, at: int) -> None:
        writer = self.writers[at % len(self.writers)]
        key = f"k{len(self.written)}"
        self.written[key] = writer.term.number
        try:
            writer.put(key)
        except FileNotFoundError:
            assert not writer.term.is_current()  # its folder is removed
            self.writers.remove(writer)

    @precondition(lambda self: self.writers)
    @rule(at=st.integers(0, 3))
    def check_and_answer(self, at: int) -> None:
        writer = self.writers[at % len(self.writers)]
        if not writer.term.is_current():
            self.writers.remove(writer)
            return
        self.acknowledged.update(writer.unanswered)
        if writer.unanswered:
            self.served.add(writer.term.number)
        writer.unanswered.clear()

    @precondition(lambda self: self.writers)
    @rule(at=st.integers(0, 3), forget=st.booleans())
    def snapshot(self, at: int, forget: bool) -> None:
        writer = self.writers[at % len(self.writers)]
        try:
            number = writer.snapshot()
            if forget:
                writer.journal.forget_before(number)
        except OSError:
            assert not writer.term.is_current()
            self.writers.remove(writer)

    @precondition(lambda self: self.writers)
    @rule(at=st.integers(0, 3), torn=st.booleans())
    def die(self, at: int, torn: bool) -> None:
        writer = self.writers.pop(at % len(self.writers))
        path = segment_path(writer.term.folder, writer.journal.number)
        if torn and path.exists():
            with open(path, "ab") as file:
                file.write(os.urandom(7))

    @precondition(lambda self: self.claims)
    @rule(at=st.integers(0, 3))
    def die_in_a_claim(self, at: int) -> None:
        self.claims.pop(at % len(self.claims)).close()

    @invariant()
    def one_term_at_most_is_current(self) -> None:
        assert sum(writer.term.is_current() for writer in self.writers) <= 1


TestControllersOfAFolder = stateful(ControllersOfAFolder, 40, 40)
