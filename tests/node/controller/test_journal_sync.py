"""The journal of a system with a mirror is written through beside the loop; the mirror frees space only after that."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from transfer_queue.core.events.records import SealCounted
from transfer_queue.journal.journal import Journal, recover
from transfer_queue.journal.segment import ClockIdentity
from transfer_queue.net.server.server_loop import Outgoing
from transfer_queue.node.controller.journal_service import SYNC_SECONDS, JournalSync

CLOCK = ClockIdentity(b"b" * 16, 1000.0)
SECONDS = 60


class Loop:
    """Stands in for the loop: takes what the thread hands over, and does it in the test's thread."""

    def __init__(self) -> None:
        self._handed: list[Callable[[], Iterable[Outgoing]]] = []
        self._come = threading.Semaphore(0)

    def call_soon(self, function: Callable[[], Iterable[Outgoing]]) -> None:
        self._handed.append(function)
        self._come.release()

    def take(self) -> list[Outgoing]:
        assert self._come.acquire(timeout=SECONDS)
        return list(self._handed.pop(0)())


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path, recover(tmp_path, CLOCK), CLOCK, durable=True, late=True)


def commit(journal: Journal, late: JournalSync) -> None:
    journal.append([SealCounted("p")])
    journal.commit()
    late.note_commit()


def test_what_depends_on_a_record_is_sent_when_the_disk_has_the_record(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync
    journal.reserve_space()

    def noted(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    loop, late = Loop(), JournalSync(journal)
    late.attach(loop.call_soon)
    assert late.next_deadline() is None, "nothing was committed"
    late.send_later(Outgoing(1, b"first"))
    commit(journal, late)
    assert synced == [], "a commit does not wait for the disk"
    late.tick(10.0)
    late.send_later(Outgoing(1, b"second"))
    commit(journal, late)
    assert late.next_deadline() is None, "one wait at a time"
    assert loop.take() == [Outgoing(1, b"first")]
    assert synced == [str(journal.folder / "segment-000000000001")]
    assert late.next_deadline() == 10.0 + SYNC_SECONDS
    late.tick(10.0 + SYNC_SECONDS)
    assert loop.take() == [Outgoing(1, b"second")]
    assert late.next_deadline() is None


def test_segments_that_have_ended_are_written_through_too(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    loop, late = Loop(), JournalSync(journal)
    late.attach(loop.call_soon)
    commit(journal, late)
    journal.rotate()
    commit(journal, late)
    synced.clear()
    late.tick(0.0)
    loop.take()
    assert [Path(path).name for path in synced] == ["segment-000000000001", "segment-000000000002"]


def test_a_disk_that_fails_is_tried_again_and_nothing_is_sent_before(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: int) -> None:
        raise OSError(5, "Input/output error")

    loop, late = Loop(), JournalSync(journal)
    late.attach(loop.call_soon)
    late.send_later(Outgoing(1, b"freed"))
    commit(journal, late)
    with monkeypatch.context() as failing:
        failing.setattr(os, "fsync", fail)
        late.tick(0.0)
        assert loop.take() == []
    due = late.next_deadline()
    late.tick(due)
    assert loop.take() == [Outgoing(1, b"freed")]
