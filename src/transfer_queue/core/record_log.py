"""The records of the current event, and what the controller counts and times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transfer_queue.core.events.records import AnyRecord
from transfer_queue.core.events.registry import APPLIERS
from transfer_queue.core.state.state import State
from transfer_queue.metrics.timing import Load, Waits


class ControllerMeasures:
    """The counters and timings of the controller and of the server around it."""

    def __init__(self) -> None:
        self.counters = defaultdict[str, float](float, requests=0, failures=0, dealt_rows=0, published_rows=0)
        self.server_counters: Mapping[str, float] = {}
        """The counters of the server's connections. The server sets them."""
        self.load = Load()
        """What the server's loop has had to do. The server sets and measures it."""
        self.waits = Waits()
        """How long requests were parked."""


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

    def apply_all(self, records: Iterable[AnyRecord]) -> None:
        """Apply records. Each one that is decided late, such as those of a generator, sees the ones before it."""
        for record in records:
            self.apply(record)

    def observe(self, kinds: Iterable[type], note: Callable[[Any], None]) -> None:
        """Call `note` with each record of these types from now on, after it is applied."""
        for kind in kinds:
            self._observers.setdefault(kind, []).append(note)

    def take(self) -> list[AnyRecord]:
        """Return the records since the last call, for the journal."""
        taken, self.records = self.records, []
        return taken
