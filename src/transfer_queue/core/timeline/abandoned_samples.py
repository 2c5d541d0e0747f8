"""Finds the samples that clients had claimed without a lease, and did not finish before they were gone.

A claim without a lease consumes its rows, so nobody is dealt them again if its client is gone. A task that puts fields
has not finished the rows that lack them. Of a task that puts nothing, such as the training, these are the rows of the
client's last claim: with each claim, it says that it has finished the rows of the one before. Which client got which
rows is known from the events, as far back as these go. Nothing here is part of the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from transfer_queue.core.context import Context, CoreService
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.tables.rows import CONSUMED, Indexer, rows_without, runs_of, sort_with_values
from transfer_queue.core.timeline.event_ring import LaneKey, cut_text
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.messages.reports.progress import describe_abandoned, describe_loss
from transfer_queue.timeline.events import EventKind

NO_ROWS = np.zeros(0, "i8")
Use = tuple[str, str]
"""A partition and a task."""


class Abandoned(NamedTuple):
    """The samples of one partition that clients had claimed for one task."""

    partition: str
    task: str
    claimed: dict[str, np.ndarray]
    """Process of a client, for people -> the positions of the rows in the partition, ascending."""

    @property
    def positions(self) -> np.ndarray:
        """The positions of all rows."""
        return np.concatenate(list(self.claimed.values()))

    @property
    def counts(self) -> dict[str, int]:
        """Process -> number of rows."""
        return {process: len(positions) for process, positions in self.claimed.items()}

    def describe(self) -> str:
        """Return a clause about the rows."""
        return describe_abandoned(self.partition, self.task, self.counts)

    def describe_sample(self, position: int) -> str:
        """Return a clause about one of the rows that begins with a verb; "" if the row at this position is none."""
        holder = next((process for process, rows in self.claimed.items() if position in rows), None)
        return "" if holder is None else f"may be lost to {describe_loss(self.partition, self.task, [holder], 1)}"


class AbandonedSamples(CoreService):
    """Finds the samples. While no client is gone it does nothing; otherwise each search reads the new events."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._timeline = context.services[TimelineRecorder]
        self._state = context.state
        self._departed: tuple[str, ...] = ()
        self._position = 0
        """Events before this position were read."""
        self._claims: dict[Use, dict[str, np.ndarray]] = {}
        """For each client that is gone, the global indexes of the rows that it claimed last, of all clients."""
        self._last: dict[Use, dict[str, np.ndarray]] = {}
        """For each client that is gone, those of its last claim."""
        self._acked: set[Use] = set()
        """The tasks that claim with leases, of which nothing is lost."""
        self._puts: dict[Use, set[str]] = {}
        """The fields that the tasks of clients that are gone have put."""

    def find(self, name: str) -> list[Abandoned]:
        """Return the abandoned samples of a partition."""
        partition = self._state.partitions.get(name)
        if partition is None or not self._timeline.departed:
            return []
        self._read_new_events()
        abandoned = []
        for (place, task), claims in self._claims.items():
            if place != cut_text(name):
                continue
            fields, last = self._fields(partition, task), self._last[place, task]
            if not fields and (place, task) in self._acked:
                continue
            lost: dict[str, np.ndarray] = {}
            for client in filter(claims.__contains__, self._timeline.departed):
                rows = claims[client] if fields else np.intersect1d(claims[client], last[client])
                kept, positions = self._unfinished(partition, task, rows, fields)
                if fields:
                    claims[client] = kept
                if len(positions):
                    process = self._state.describe_client(client)
                    lost[process] = np.union1d(lost.get(process, NO_ROWS), positions)
            if lost:
                abandoned.append(Abandoned(name, task, lost))
        return abandoned

    def _fields(self, partition: Partition, task: str) -> list[str]:
        """Return the fields that a task puts; if it has put none here, those that other tasks want and no row has."""
        known = self._puts.get((cut_text(partition.name), task))
        if known:
            return sorted(known)
        live = {name for name, stats in partition.fields.items() if stats.live}
        wanted = [*partition.ready, *self._state.waiting.awaited(partition.name)]
        return sorted({name for other, fields in wanted if other != task for name in fields} - live)

    @staticmethod
    def _unfinished(
        partition: Partition, task: str, rows: np.ndarray, fields: list[str]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return those of these rows that are consumed and lack a field, and the positions of those that may be lost.

        Without fields, none of the rows counts as finished. A batch of a rank is dealt to it again, and one that was
        not handed over returns by itself.
        """
        rows = rows[partition.rows.positions_of(rows) >= 0]
        positions = partition.rows.positions_of(rows)
        lacks = partition.consumption_states(task, positions) == CONSUMED
        if fields:
            lacks &= ~partition.produced_flags(fields, positions).all(axis=1)
        rows, positions = rows[lacks], positions[lacks]
        unseen = [batch.indexes for batch in partition.unseen_batches.by_token.values() if batch.task == task]
        returns = np.isin(rows, np.concatenate([NO_ROWS, *unseen]))
        for _, chunk, at, where in partition.rows.split(positions):
            if task in chunk.dealt:
                returns[where] |= chunk.dealt[task][at] != 0
        positions = positions[~returns]
        if partition.passed.counts_of(task):  # after several leases
            skipped = [partition.passed.reason(task, each) is not None for each in positions.tolist()]
            positions = positions[~np.array(skipped, bool)]
        return rows, positions

    # ------------------------------------------------------------ reading events

    def _read_new_events(self) -> None:
        timeline = self._timeline
        timeline.flush()
        ring, departed = timeline.ring, tuple(timeline.departed)
        if self._departed != departed or self._position < timeline.rows.first:
            self._departed, self._position = departed, timeline.rows.first
            self._claims, self._last, self._puts, self._acked = {}, {}, {}, set()
        begin = max(self._position, ring.first)
        self._position = ring.end
        if begin == ring.end:
            return
        tasks = {task for client in departed for _, task in timeline.lanes.all_of(client).values()}
        lanes = {number: key for number, (key, _) in timeline.lanes.values.items() if key and key[1] in tasks}
        while begin < ring.end:
            page = ring.rows_of(begin, ring.end - begin)
            begin += len(page)
            page = page[np.isin(page["event"]["lane"], list(lanes))]
            self._read_puts(page[page["event"]["kind"] == EventKind.PUT]["event"], lanes)
            self._read_claims(page[page["event"]["kind"] == EventKind.CLAIM], lanes)
            acks = page[page["event"]["kind"] == EventKind.ACK]["event"]
            self._acked.update(use for use, _ in self._by_use(acks, lanes))

    def _read_puts(self, puts: np.ndarray, lanes: dict[int, LaneKey]) -> None:
        for use, places in self._by_use(puts, lanes):
            names = self._puts.setdefault(use, set())
            for number in np.unique(puts["fields"][places]).tolist():
                names.update(self._timeline.fields.values[number][1])

    def _read_claims(self, claims: np.ndarray, lanes: dict[int, LaneKey]) -> None:
        """Note the rows of these claims for their clients, and no longer for those that claimed them before."""
        for use, places in self._by_use(claims["event"], lanes):
            some = claims[places]
            rows, event = self._timeline.rows.listed(some["before"], some["event"]["rows"])
            lane_of = some["event"]["lane"][event].astype("i8")
            last = self._last.setdefault(use, {})
            for lane in np.unique(lane_of).tolist():
                if lanes[lane][0] in self._timeline.departed:
                    last[lanes[lane][0]] = rows[event == event[lane_of == lane].max()]
            rows, newest = sort_with_values(rows, lane_of)
            claimed = self._claims.setdefault(use, {})
            for client, earlier in claimed.items():
                claimed[client] = rows_without(earlier, rows)
            for lane in np.unique(newest).tolist():
                client = lanes[lane][0]
                if client in self._timeline.departed:
                    claimed[client] = np.union1d(claimed.get(client, NO_ROWS), rows[newest == lane])

    def _by_use(self, events: np.ndarray, lanes: dict[int, LaneKey]) -> Iterator[tuple[Use, Indexer]]:
        """Iterate over the partitions and tasks of these events, with the places of the events of each."""
        if not len(events):
            return
        tasks = sorted({task for _, task in lanes.values()})
        numbers = np.array(sorted(lanes))
        task_of = np.array([tasks.index(lanes[number][1]) for number in numbers.tolist()])
        task = task_of[np.searchsorted(numbers, events["lane"])]
        for pair, places in runs_of(task << 32 | events["partition"]):
            _, name = self._timeline.partitions.values[pair & 0xFFFFFFFF]
            yield (name, tasks[pair >> 32]), places
