"""Writes the journal through to the disk beside the controller's loop, for a mirror with `durability.mode: async`.

A commit then waits only for the operating system. SYNC_SECONDS later at most, another thread begins to wait for the
disk. The mirror overwrites the space of extents that are freed, so it is ordered to free them only when the disk has
the records that made them free. Otherwise a state that is recovered after a failure of the machine could name values
that were overwritten.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from transfer_queue.journal.journal import Journal
from transfer_queue.net.server.server_loop import Outgoing
from transfer_queue.node.hosting.service_base import BackgroundThread

SYNC_SECONDS = 1.0

logger = logging.getLogger(__name__)

CallSoon = Callable[[Callable[[], Iterable[Outgoing]]], None]


class JournalSync:
    """Writes one journal through."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._worker = BackgroundThread()
        self._call_soon: CallSoon | None = None
        self._commits = 0
        """Commits so far."""
        self._synced = 0
        """The commits that the disk has."""
        self._waiting: deque[tuple[int, Outgoing]] = deque()
        """(number of the commit, what is sent when the disk has it), ascending."""
        self._busy = False
        self._next = 0.0

    def attach(self, call_soon: CallSoon) -> None:
        """Set how the thread reaches the loop."""
        self._call_soon = call_soon

    def note_commit(self) -> None:
        """Note that records were committed."""
        self._commits += 1

    def send_later(self, outgoing: Outgoing) -> None:
        """Send this when the disk has the records of the current event, which the next commit writes."""
        self._waiting.append((self._commits + 1, outgoing))

    def next_deadline(self) -> float | None:
        """Return when `tick` has work to do; None if it has none."""
        return self._next if self._synced < self._commits and not self._busy else None

    def tick(self, now: float) -> None:
        """Begin to wait for the disk, if it is time."""
        due = self.next_deadline()
        if due is None or due > now:
            return
        assert self._call_soon is not None
        call_soon, commits, files = self._call_soon, self._commits, self._journal.unsynced_files()
        self._busy, self._next = True, now + SYNC_SECONDS
        self._worker.begin(lambda: _sync(files), lambda outcome: call_soon(lambda: self._done(commits, outcome)))

    def _done(self, commits: int, outcome: Any) -> list[Outgoing]:
        self._busy = False
        if isinstance(outcome, Exception):
            logger.error("the disk cannot write the journal in %s: %s; tried again", self._journal.folder, outcome)
            self._next = time.monotonic() + SYNC_SECONDS
            return []
        self._synced = commits
        ready = []
        while self._waiting and self._waiting[0][0] <= commits:
            ready.append(self._waiting.popleft()[1])
        return ready


def _sync(files: list[int]) -> None:
    """Wait until the disk has these files, and close them."""
    try:
        for file in files:
            os.fsync(file)
    finally:
        for file in files:
            os.close(file)
