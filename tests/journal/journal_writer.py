"""A controller that writes its records into a journal, as its server does."""

from __future__ import annotations

from pathlib import Path

from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.controller import Controller
from transfer_queue.journal import state_file
from transfer_queue.journal.journal import Journal, recover, snapshot_of, snapshot_path
from transfer_queue.journal.segment import ClockIdentity
from transfer_queue.messages.envelopes import AnyRequest, RequestEnvelope
from transfer_queue.messages.puts import Publish
from transfer_queue.sampler import SequentialSampler

CLOCK = ClockIdentity(b"b" * 16, 1000.0)


class Writer:
    """A controller with its journal; `put` is one commit."""

    client = "c"

    def __init__(self, folder: Path, durable: bool = False, clock: ClockIdentity = CLOCK) -> None:
        self.found = recover(folder, clock)
        self.journal = Journal(folder, self.found, clock, durable)
        self.controller = Controller(CoreConfig(SequentialSampler()), restored=self.found.state)
        self.sequence = max((max(kept.replies, default=0) for kept in self.found.state.clients.values()), default=0)
        self.clock = clock

    def ask(self, body: AnyRequest, now: float = 0.0) -> None:
        self.sequence += 1
        self.controller.on_connect(self.client, 1)
        self.controller.handle(self.client, 1, RequestEnvelope(self.sequence, 0, body), now)
        self.journal.append(self.controller.take_records())
        self.journal.commit()

    def put(self, key: str, now: float = 0.0) -> None:
        self.ask(Publish("p", 1, keys=[key], tags=[{"n": key}], pre_allocate=0), now)

    def snapshot(self) -> int:
        number = self.journal.rotate()
        state_file.write(snapshot_path(self.journal.folder, number), snapshot_of(self.controller.state, self.clock))
        return number

    def keys(self) -> list[str]:
        partitions = self.controller.state.partitions
        return list(partitions["p"].keys) if "p" in partitions else []
