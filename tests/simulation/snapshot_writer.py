"""What writes files beside the records of the simulated journal: snapshots, and states that are loaded."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transfer_queue.journal import state_file
from transfer_queue.journal.state_file import LoadedStates

MAX_SECONDS = 0.5  # of virtual time that a snapshot takes


class SnapshotWriter:
    """A `node.controller.journal_service.Writer`: the file has the state at the start, and exists after a delay.

    later: Calls a function after some seconds. ended: The controller whose child writes was killed.
    """

    def __init__(self, draw: random.Random, later: Callable[[float, Callable[[], object]], None]) -> None:
        self.is_busy = self.ended = False
        self._draw = draw
        self._later = later
        self._under_way: tuple[Path, Path] | None = None

    def begin(self, path: Path, tree: Callable[[], Any], done: Callable[[str | None], Any], sync: bool) -> None:
        """See `node.controller.journal_service.Writer.begin`."""
        draft = path.with_name(f".{path.name}.draft")
        state_file.write(draft, tree(), sync=False)
        self.is_busy, self._under_way = True, (draft, path)
        self._later(self._draw.uniform(0, MAX_SECONDS), lambda: None if self.ended else self._put(done))

    def _put(self, done: Callable[[str | None], Any]) -> None:
        trouble = None
        try:
            self._name()
        except OSError as error:  # the controller of a later term has removed the folder
            trouble = str(error)
        self.is_busy = False
        done(trouble)

    def _name(self) -> None:
        assert self._under_way is not None
        draft, path = self._under_way
        draft.rename(path)
        self._under_way = None

    def kill(self) -> None:
        """Kill the controller with its child: before the file has its name, or just after."""
        self.ended = True
        if self._under_way is not None and self._draw.random() < 0.5:
            with contextlib.suppress(OSError):
                self._name()


class RememberedStates(LoadedStates):
    """The loaded states of the journal, which removes them later; `all` keeps them for replays of all records."""

    def __init__(self, folder: Path, all: LoadedStates) -> None:
        super().__init__(folder, sync=False)
        self._all = all

    def add(self, source: Path) -> str:
        """See `LoadedStates.add`."""
        name = super().add(source)
        os.link(self.path(name), self._all.path(name))
        return name
