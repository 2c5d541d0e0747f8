"""A controller whose term has ended answers no request, although its own journal can still be written."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.controller import Controller
from transfer_queue.journal.journal import Journal, recover
from transfer_queue.journal.segment import ClockIdentity
from transfer_queue.journal.terms import Term, Terms
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.partitions import CreatePartition
from transfer_queue.net.handshake import Hello
from transfer_queue.node.controller.controller_service import CHECK_SECONDS, ControllerService
from transfer_queue.node.controller.journal_service import Journaling
from transfer_queue.node.controller.state_files import StateFiles
from transfer_queue.sampler import SequentialSampler

CLOCK = ClockIdentity(b"b" * 16, 1000.0)
HELLO = Hello("client", "c")


class Served:
    """The service of a controller in a term; `ended` is whether it has asked its server to end."""

    def __init__(self, term: Term) -> None:
        found = recover(term.folder, CLOCK)
        self.controller = Controller(CoreConfig(SequentialSampler()), restored=found.state)
        self.journaling = Journaling(self.controller, Journal(term.folder, found, CLOCK, False), CLOCK, False)
        self.service = ControllerService(self.controller, StateFiles(term.folder), self.journaling, term=term)
        self.ended = False
        self.service.end = self.end
        self.service.on_connect(1, HELLO)

    def end(self) -> None:
        self.ended = True

    def create(self, name: str, sequence: int) -> None:
        request = RequestEnvelope(sequence, 0, CreatePartition(name, 0))
        list(self.service.handle(HELLO, 1, request, None, time.monotonic()))


def test_a_current_controller_answers_after_its_commit(tmp_path: Path) -> None:
    served = Served(Terms(tmp_path).claim("s"))
    served.create("p", 1)
    assert served.service.commit()
    assert not served.ended


def test_a_replaced_controller_answers_nothing_and_ends(tmp_path: Path) -> None:
    served = Served(Terms(tmp_path).claim("s"))
    served.create("early", 1)
    assert served.service.commit()
    later = Served(Terms(tmp_path).claim("s"))
    served.create("late", 2)
    assert not served.service.commit()
    assert served.ended
    assert list(later.controller.state.partitions) == ["early"]
    assert later.service.commit()


def test_a_replaced_controller_answers_no_read_either(tmp_path: Path) -> None:
    served = Served(Terms(tmp_path).claim("s"))
    Terms(tmp_path).claim("s")
    assert not served.service.commit()


def test_an_idle_controller_checks_its_term_from_time_to_time(tmp_path: Path) -> None:
    served = Served(Terms(tmp_path).claim("s"))
    now = time.monotonic()
    list(served.service.on_deadline(now))
    due = served.service.next_deadline()
    assert due <= now + CHECK_SECONDS


def test_a_storage_that_does_not_answer_is_not_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server tries the commit again, and sends nothing meanwhile."""
    served = Served(Terms(tmp_path).claim("s"))

    def fail(*_: object, **__: object) -> int:
        raise OSError(5, "no answer")

    with monkeypatch.context() as patch:
        patch.setattr("transfer_queue.journal.terms.os.open", fail)
        with pytest.raises(OSError, match="no answer"):
            served.service.commit()
    assert not served.ended
    assert served.service.commit()
