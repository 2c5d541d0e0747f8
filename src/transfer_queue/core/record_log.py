"""Applies records to the state, and keeps them until the journal takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from transfer_queue.core.events.records import AnyRecord
from transfer_queue.core.events.registry import APPLIERS
from transfer_queue.core.state.state import State


class RecordLog:
    """The state, and the records that have changed it during the current event."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.now = 0.0
        """The time of the current event, on the controller's clock."""
        self.arrived: float | None = None
        """When the request of the current event arrived, if that was before the event."""
        self.actor = ""
        """The client whose request the records of the current event carry out; "" for the controller itself."""
        self.records: list[AnyRecord] = []
        """The records since the last `take`."""
        self._observers: dict[type, list[Callable[[Any], None]]] = {}

    def apply(self, record: AnyRecord) -> None:
        """Apply one record, then pass it to the observers of its type."""
        kind = type(record)
        APPLIERS[kind](self.state, record)
        self.records.append(record)
        for note in self._observers.get(kind, ()):
            note(record)

    def observe(self, kinds: Iterable[type], note: Callable[[Any], None]) -> None:
        """Call `note` with each record of these types from now on, after it is applied."""
        for kind in kinds:
            self._observers.setdefault(kind, []).append(note)

    def take(self) -> list[AnyRecord]:
        """Return the records since the last call, for the journal."""
        taken, self.records = self.records, []
        return taken
