"""Drives the core of a controller with synthetic requests, without processes and sockets."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from transfer_queue.core.appliers import apply_record
from transfer_queue.core.configuration import TIMELINE_EVENTS, CoreConfig
from transfer_queue.core.controller import Controller
from transfer_queue.core.events.effects import ComputeDeal, Effect, Send
from transfer_queue.core.events.records import Dealt
from transfer_queue.core.jobs import Jobs
from transfer_queue.core.state.state import State
from transfer_queue.messages.base import Failure
from transfer_queue.messages.claims import Claim, ClaimReply
from transfer_queue.messages.descriptors import FieldSpec, NewBlock
from transfer_queue.messages.envelopes import AnyRequest, RequestEnvelope
from transfer_queue.messages.puts import Publish
from transfer_queue.messages.reports.unit_reports import RegisterUnit
from transfer_queue.sampler import BaseSampler, SequentialSampler

BATCH = 32
FIELDS = ("x", "y", "z")
SCHEMA = [FieldSpec(name, "tensor", "float32", 1, False) for name in FIELDS]
DIMS = np.array([128, 128, 1], "<i8").tobytes()
ROW_BYTES = 1028
EXTENT = 64 << 10  # bytes; the smallest that a client leases


class Core:
    """A controller with storage units. `send` measures one request; work beside the loop is done, too.

    now: The virtual clock. work: The processor seconds of the last work beside the loop.
    """

    def __init__(
        self,
        sampler: BaseSampler | None = None,
        units: int = 1,
        timeline_events: int = TIMELINE_EVENTS,
        fields: int | None = None,
        restored: State | None = None,
    ) -> None:
        config = CoreConfig(sampler or SequentialSampler(), timeline_events=timeline_events)
        self.controller = Controller(config, restored=restored)
        self._schema, self._dims, self._row_bytes = SCHEMA, DIMS, ROW_BYTES
        if fields is not None:  # of 128 numbers each, instead of FIELDS
            self._schema = [FieldSpec(f"f{number}", "tensor", "float32", 1, False) for number in range(fields)]
            self._dims, self._row_bytes = np.full(fields, 128, "<i8").tobytes(), 512 * fields
        self.now = 0.0
        self.work = 0.0
        self._sequences: dict[str, int] = {}
        self._extents = 0
        self._end = 0  # the first byte after all extents; the same in all units
        self._open: dict[tuple[str, int], tuple[int, int, int]] = {}  # (client, unit) -> extent, next byte, end
        for unit in range(units):
            name = f"unit-{unit}"
            self.send(RegisterUnit(name, f"/{name}", name=name), name)

    def send(self, request: AnyRequest, client: str = "client") -> tuple[float, list[Effect]]:
        """Handle a request; return the processor seconds of its longest event, and the effects of all events."""
        sequence = self._sequences[client] = self._sequences.get(client, 0) + 1
        envelope = RequestEnvelope(sequence, sequence - 1, request)
        began = time.thread_time()
        effects = self.controller.handle(client, 1, envelope, self.now)
        took = time.thread_time() - began
        self.controller.take_records()
        for effect in effects:
            if isinstance(effect, ComputeDeal):
                began = time.thread_time()
                outcome = effect.run()
                self.work = time.thread_time() - began
                began = time.thread_time()
                effects = effects + self.controller.on_outcome(effect.number, outcome, self.now)
                took = max(took, time.thread_time() - began)
                self.controller.take_records()
        while self.controller.context.services[Jobs].is_working():
            began = time.thread_time()
            effects = effects + self.controller.tick(self.now)
            took = max(took, time.thread_time() - began)
            self.controller.take_records()
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.reply, Failure):
                raise AssertionError(f"{type(request).__name__} failed: {effect.reply.message}")
        return took, effects

    def reply(self, request: AnyRequest, client: str = "reader") -> Any:
        """Return the reply to a request."""
        (reply,) = (effect.reply for effect in self.send(request, client)[1] if isinstance(effect, Send))
        return reply

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the names of the fields of `publish`."""
        return tuple(spec.name for spec in self._schema)

    def publish(
        self, rows: int, partition: str = "p", client: str = "client", unit: int = 0, **more: Any
    ) -> tuple[float, list[Effect]]:
        """Put new rows with all fields. Small blocks share extents, as with a real client."""
        nbytes = self._row_bytes * rows
        extent, offset, end = self._open.get((client, unit), (0, 0, 0))
        if offset + nbytes > end:
            self._extents += 1
            extent, offset, end = self._extents, self._end, self._end + max(EXTENT, nbytes)
            self._end = end
        self._open[client, unit] = extent, offset + nbytes, end
        block = NewBlock(unit, extent, offset, 1, nbytes, rows, self._schema, self._dims)
        return self.send(Publish(partition, rows, block=block, pre_allocate=0, **more), client)

    def fill(self, rows: int, partition: str = "p", put: int = 100_000) -> None:
        """Put `rows` new rows, `put` at a time."""
        for first in range(0, rows, put):
            self.publish(min(put, rows - first), partition)

    def consume(self, rows: np.ndarray, task: str, partition: str = "p") -> None:
        """Mark these rows as consumed by a task."""
        for part in np.array_split(rows, max(1, len(rows) // 100_000)):
            apply_record(self.controller.state, Dealt(partition, task, None, BATCH, [], part.astype("<i8").tobytes()))


def claim(task: str = "train", fields: tuple[str, ...] = FIELDS, partition: str = "p", **more: Any) -> Claim:
    """Return a claim of a batch."""
    return Claim(partition, task, list(fields), more.pop("batch", BATCH), **more)


def claimed(effects: list[Effect]) -> bytes:
    """Return the rows that the replies name."""
    replies = [effect.reply for effect in effects if isinstance(effect, Send)]
    return b"".join(reply.rows for reply in replies if isinstance(reply, ClaimReply))


def rows_of(effects: list[Effect]) -> int:
    """Return the number of rows that the replies name."""
    return len(claimed(effects)) // 8
