"""Writes the controller's records to its journal before any reply is sent, and takes a snapshot from time to time."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from transfer_queue.core.controller import Controller
from transfer_queue.core.events.records import AnyRecord, StateLoaded
from transfer_queue.journal.journal import Journal, snapshot_of, snapshot_path
from transfer_queue.journal.segment import RESERVED_BYTES, ClockIdentity
from transfer_queue.metrics.samples import JournalMeasures
from transfer_queue.metrics.timing import LOOP_BOUNDS, NOTEWORTHY, Histogram
from transfer_queue.net.server.server_loop import Outgoing
from transfer_queue.node.controller.state_files import Done
from transfer_queue.node.hosting.service_base import BackgroundThread

# ---------------------------------------------------------------- journals that are written to the disk later
# A commit then waits only for the operating system. SYNC_SECONDS later at most, another thread begins to wait for the
# disk. The mirror overwrites the space of extents that are freed, so it is ordered to free them only when the disk has
# the records that made them free. Otherwise a state that is recovered after a failure of the machine could name values
# that were overwritten.


SYNC_SECONDS = 1.0


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
        self._is_busy = False
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
        return self._next if self._synced < self._commits and not self._is_busy else None

    def tick(self, now: float) -> None:
        """Begin to wait for the disk, if it is time."""
        due = self.next_deadline()
        if due is None or due > now:
            return
        assert self._call_soon is not None
        call_soon, commits, files = self._call_soon, self._commits, self._journal.unsynced_files()
        self._is_busy, self._next = True, now + SYNC_SECONDS
        self._worker.begin(lambda: _sync(files), lambda outcome: call_soon(lambda: self._done(commits, outcome)))

    def _done(self, commits: int, outcome: Any) -> list[Outgoing]:
        self._is_busy = False
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


# ---------------------------------------------------------------- the journal

SNAPSHOT_RECORDS = 20_000  # since the last snapshot; a replay of them takes a third of a second
MAX_RECORDS = 100_000  # with more records, the next snapshot begins without a rest
SNAPSHOT_BYTES = 32 << 20
REST = 10.0  # times the duration of the last snapshot
FAILED_SECONDS = 30.0  # between a snapshot that failed and the next attempt
EACH = 8  # one of this many commits without sync is measured, because reading the clock is part of their cost

logger = logging.getLogger(__name__)


class StateFileWriter(Protocol):
    """Writes states to files, as `node.controller.state_files.StateWriter`."""

    @property
    def is_busy(self) -> bool:
        """Whether a state is being written."""

    def begin(self, path: Path, tree: Callable[[], Any], done: Done, sync: bool) -> None:
        """Begin to write a state; see `StateWriter.begin`."""


class Journaling:
    """The journal of one controller.

    `net.server.server_loop.ServerLoop` calls `commit` before it sends anything. After a commit, either the disk has
    space for the next one, or `trouble` is set. Then mutations must wait, while reads can be answered, because the
    whole state that they see is written.
    """

    def __init__(
        self,
        controller: Controller,
        journal: Journal,
        clock: ClockIdentity,
        sync: bool,
        late: JournalSync | None = None,
        patience: float = math.inf,
    ) -> None:
        self.trouble: str | None = None
        """Why the journal cannot be written; None while it can."""
        self.patience = patience
        """Seconds for which a mutation waits for space, after its own wait, unless its client has set another limit."""
        self._controller = controller
        self._journal = journal
        self._clock = clock
        self._sync = sync
        self.late = late
        """Writes the journal through to the disk after the commits; None if a commit does so, or nothing does."""
        self._writer: StateFileWriter | None = None
        """The last commit failed."""
        self._troubled_at = 0.0
        self._next_try = 0.0
        """When the next snapshot may begin."""
        self._begun = 0.0
        """When the snapshot that is being written began."""
        self._is_failing = False
        """The last snapshot failed."""
        self._covered = (0, 0)
        """Records and bytes of the journal that the last snapshot replaces."""
        self._snapshot_at = time.monotonic()
        self._commits = Histogram(LOOP_BOUNDS)
        self._commits_so_far = 0
        self._last_commit = 0.0
        self._failures = 0
        self._counters = controller.context.measures.counters
        self._counters.update(journal_bytes=journal.size, journal_trouble=0)
        self.reserve_space()

    def attach(self, writer: StateFileWriter) -> None:
        """Set the writer of snapshots. From now on they are taken."""
        self._writer = writer

    def commit(self) -> bool:
        """Write the records since the last call. Returns False if that fails."""
        records = self._controller.take_records()
        if not records and self._journal.committed:
            return True
        began = 0.0
        if records:
            self._commits_so_far += 1
            if (self._sync and self.late is None) or self._commits_so_far % EACH == 1:
                began = time.monotonic()
            self._journal.append(records)
        try:
            self._journal.commit()
        except OSError as error:
            self._on_failure(error)
            return False
        if self.late is not None and records:
            self.late.note_commit()
        if began:
            self._on_committed(began)
        self.reserve_space()
        self._counters["journal_bytes"] = self._journal.size
        if records and self.trouble is None and self._is_due() and not _loads(records):
            self._snapshot()
        return True

    def _on_committed(self, began: float) -> None:
        ended = time.monotonic()
        self._last_commit = ended - began
        self._commits.add(self._last_commit)
        if self._last_commit >= NOTEWORTHY:
            self._controller.context.measures.load.longest.record("commit", self._last_commit, ended)

    def measures(self) -> JournalMeasures:
        """Return the measures for metrics."""
        records, nbytes = self._journal.records - self._covered[0], self._journal.written - self._covered[1]
        return JournalMeasures(
            self._journal.size,
            records,
            nbytes,
            time.monotonic() - self._snapshot_at,
            self._commits.to_timing("commit"),
            self._last_commit,
            self._failures,
            self.trouble is not None,
            self._is_failing,
        )

    def reserve_space(self) -> bool:
        """Whether the disk has space for the next commit."""
        try:
            self._journal.reserve_space()
        except OSError as error:
            self._on_failure(error)
            return False
        if self.trouble is not None and self._journal.committed:
            self._end_trouble()
        return True

    @property
    def snapshotting(self) -> bool:
        """Whether a snapshot is being written."""
        return self._writer is not None and self._writer.is_busy

    def _on_failure(self, error: OSError) -> None:
        self._failures += 1
        if self.trouble is None:
            self.trouble = (
                f"the journal in {self._journal.folder} cannot be written: {error}. Mutations wait until it can be "
                f"written: free some space there (it needs {RESERVED_BYTES} bytes), or stop the system"
            )
            self._controller.context.journal_error = self.trouble
            self._troubled_at = time.monotonic()
            self._counters["journal_trouble"] = 1
            logger.error("%s", self.trouble)

    def _end_trouble(self) -> None:
        logger.warning(
            "the journal in %s can be written again after %.1f s",
            self._journal.folder,
            time.monotonic() - self._troubled_at,
        )
        self.trouble = None
        self._controller.context.journal_error = ""
        self._counters["journal_trouble"] = 0

    # ------------------------------------------------------------ snapshots

    def _is_due(self) -> bool:
        records, size = self._journal.records - self._covered[0], self._journal.written - self._covered[1]
        if records < SNAPSHOT_RECORDS and size < SNAPSHOT_BYTES:
            return False
        if self._writer is None or self.snapshotting:
            return False
        return (records >= MAX_RECORDS and not self._is_failing) or time.monotonic() >= self._next_try

    def _snapshot(self) -> None:
        assert self._writer is not None
        self._begun = time.monotonic()
        number = self._journal.rotate()
        self.reserve_space()
        covers = self._journal.records, self._journal.written
        path = snapshot_path(self._journal.folder, number)
        tree = partial(snapshot_of, self._controller.state, self._clock)
        try:
            self._writer.begin(path, tree, partial(self._end_snapshot, number, covers), self._sync)
        except OSError as error:
            self._end_snapshot(number, covers, str(error))

    def _end_snapshot(self, number: int, covers: tuple[int, int], error: str | None) -> None:
        now = time.monotonic()
        self._is_failing = error is not None
        self._next_try = now + (FAILED_SECONDS if self._is_failing else REST * (now - self._begun))
        if error is not None:
            logger.error(
                "the controller cannot write a snapshot to %s: %s; it tries again in %g s, and the journal grows until "
                "then",
                self._journal.folder,
                error,
                FAILED_SECONDS,
            )
            return
        self._covered = covers
        self._snapshot_at = self._begun
        try:
            self._journal.forget_before(number)
        except OSError as failure:
            logger.error("the controller cannot remove old files of the journal: %s", failure)
        self._counters["journal_bytes"] = self._journal.size


def _loads(records: Sequence[AnyRecord]) -> bool:
    """Whether a checkpoint was loaded in this turn of the loop. A fork in the same turn would block others too long."""
    return any(isinstance(record, StateLoaded) for record in records)
