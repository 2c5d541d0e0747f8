"""A node on which a simulated controller runs in one term of the journal, and where it stops in a turn of its loop."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transfer_queue.core.controller import Controller
from transfer_queue.core.events import effects as core_effects
from transfer_queue.core.events.records import AnyRecord
from transfer_queue.journal.journal import Journal, Recovered, list_numbers, segment_path
from transfer_queue.journal.segment import ClockIdentity
from transfer_queue.journal.terms import Term
from transfer_queue.node.controller.controller_service import ControllerService

POINTS = ("begun", "half", "written", "checked", "sending")
"""Where a controller may stop in a turn: before it writes its records, in the middle of the write, between the write
and the check of its term, between the check and the sending, and between two messages that it sends."""


class Frozen(BaseException):
    """The process of the controller stops at this point of its turn."""


@dataclass(frozen=True)
class WatchedTerm(Term):
    """The term of a simulated controller. before_check: Called before each check; it may raise `Frozen` or OSError."""

    before_check: Callable[[], object] = lambda: None

    def is_current(self) -> bool:
        """See `Term.is_current`."""
        self.before_check()
        return super().is_current()


@dataclass
class Turn:
    """A turn of a controller's loop. effects: Those that have not left. committed: Its commit has succeeded."""

    effects: list[core_effects.Effect]
    records: int
    committed: bool = False


@dataclass(frozen=True)
class WrittenFrame:
    """A frame of a journal. segment: The number of its segment. end: The position in it at which the frame ends."""

    records: list[AnyRecord]
    segment: int
    end: int

    def is_in(self, folder: Path) -> bool:
        """Return whether a journal, which may be a copy, has the frame."""
        _, snapshots = list_numbers(folder)
        if snapshots and snapshots[-1] > self.segment:
            return True
        path = segment_path(folder, self.segment)
        return path.exists() and path.stat().st_size >= self.end


@dataclass(eq=False)
class ControllerHost:
    """See the module.

    number: Its position among all hosts of a run.
    skew: What its clock shows more than the virtual time.
    saved: The attributes of the cluster that belong to this controller, while another one runs.
    reasons: Why it does nothing, while another one runs.
    turn: The turn in which it is frozen.
    freeze_at: The point of one of its next turns at which it is frozen.
    cut_off: It does not reach the storage of the journal.
    ended: Its process does not exist any more, and is not started again.
    unsettled: The frames that it has written, or was about to write, since the last check of its term.
    """

    number: int
    term: Term
    skew: float
    saved: dict[str, Any] = field(default_factory=dict)
    reasons: set[str] = field(default_factory=set)
    service: ControllerService = field(init=False)
    turn: Turn | None = None
    freeze_at: str = ""
    cut_off: bool = False
    ended: bool = False
    unsettled: list[WrittenFrame] = field(default_factory=list)

    @property
    def clock(self) -> ClockIdentity:
        """The clock of its node."""
        return ClockIdentity(f"{self.number:016d}".encode(), -self.skew)

    def reach_storage(self) -> None:
        """Raise OSError if the host does not reach the storage."""
        if self.cut_off:
            raise OSError(errno.EIO, "the node does not reach the storage")

    def take_unsettled(self, folder: Path | None = None) -> list[AnyRecord]:
        """Return the unsettled records, of those frames only that a journal has, which may be a copy. None is left."""
        frames, self.unsettled = self.unsettled, []
        return [record for frame in frames if folder is None or frame.is_in(folder) for record in frame.records]


class WatchedJournal(Journal):
    """A journal of which a write may stop in the middle.

    half: Returns how many bytes of a frame are written before `at_half` is called; 0: it is written at once.
    """

    def __init__(
        self, host: ControllerHost, recovered: Recovered, half: Callable[[int], int], at_half: Callable[[], object]
    ) -> None:
        super().__init__(host.term.folder, recovered, host.clock, durable=False)
        self._host = host
        self._half = half
        self._at_half = at_half

    def append(self, records: Sequence[AnyRecord]) -> None:
        """See `Journal.append`."""
        super().append(records)
        self._host.unsettled.append(WrittenFrame(list(records), self.number, self._segment.size))

    def commit(self) -> None:
        """See `Journal.commit`."""
        self._host.reach_storage()
        with patch.object(os, "pwrite", self._stopping_once(os.pwrite)):
            super().commit()

    def _stopping_once(self, pwrite: Callable[[int, bytes, int], int]) -> Callable[[int, bytes, int], int]:
        """Return a `pwrite` whose first call may stop in the middle, and then reports that it has written nothing."""
        has_begun = False

        def write(file: int, data: bytes, offset: int) -> int:
            nonlocal has_begun
            half = 0 if has_begun or len(data) < 2 else self._half(len(data))
            has_begun = True
            if not half:
                return pwrite(file, data, offset)
            pwrite(file, data[:half], offset)
            self._at_half()
            return 0

        return write

    def reserve_space(self) -> None:
        """See `Journal.reserve_space`."""
        self._host.reach_storage()
        super().reserve_space()

    def abandon(self) -> None:
        """Close the file as the end of a killed process does: a frame that is written in part stays so."""
        with patch.object(os, "ftruncate"):
            self.close()


def is_of(host: ControllerHost, controller: Controller) -> bool:
    """Return whether a controller that does not run now is that of a host."""
    return host.saved.get("controller") is controller
