"""Answers questions about single partitions and samples, by clients of their own, so that the stream does not wait."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from transfer_queue.client.control_client import ControlClient
from transfer_queue.errors import AttachError
from transfer_queue.live.answers import MatrixAnswer, MatrixField, MatrixTask, SampleAnswer
from transfer_queue.live.questions.sample_answer import ValueHead, answer_of
from transfer_queue.live.reading.partition_counter import ANSWER_SECONDS as COUNT_SECONDS
from transfer_queue.live.reading.partition_counter import ColumnSums, PartitionCounter
from transfer_queue.live.reading.system_source import SystemSource
from transfer_queue.messages.reports.overview import MAX_COLUMNS, ColumnCounts, CountColumns
from transfer_queue.messages.reports.samples import LIVE, UNKNOWN, SampleReport
from transfer_queue.node.system.launcher import RunningSystem, find
from transfer_queue.token_text import TokenText

ANSWER_SECONDS = 5.0

if TYPE_CHECKING:
    from transfer_queue.live.questions.sample_values import ValueReader


class Questions:
    """Asks the system that a source shows. It is used by one thread.

    Args:
        source: What the page shows.
        values: Whether values may be returned.
        tokens: Decodes token ids; None to leave them numbers.
    """

    def __init__(self, source: SystemSource, *, values: bool, tokens: TokenText | None = None) -> None:
        self._source = source
        self._values = values
        self._tokens = tokens
        self._system: RunningSystem | None = None
        self._client: ControlClient | None = None
        self._counter: MatrixCounter | None = None
        self._reader: ValueReader | None = None

    def _connected(self) -> ControlClient:
        """Return a client of the system that is shown now."""
        system = self._source.system
        if system is None or not system.is_running():
            system = find(self._source.folder)
        if system is None:
            raise AttachError("the system is not running")
        if self._client is None or self._system is None or self._system.key != system.key:
            self.close()
            self._system, self._client = system, ControlClient(system)
            self._counter = MatrixCounter(self._client)
            self._source.other_clients = 1
        return self._client

    def close(self) -> None:
        """Close the connections."""
        for each in (self._client, self._reader):
            if each is not None:
                each.close()
        self._reader = None
        self._client = self._counter = None
        self._source.other_clients = 0

    def matrix(self, partition: str, first: int, last: int | None, columns: int) -> MatrixAnswer | None:
        """Return the matrix of a partition; None if the partition does not exist."""
        self._connected()
        assert self._counter is not None
        return self._counter.answer(partition, first, last, columns, self._source.takes)

    def explain(self, partition: str, index: int | None, key: str | None, task: str | None) -> str:
        """Return why a sample is not delivered, or what the claims of a task wait for."""
        fields = None
        if index is None and key is None:
            fields = self._source.takes.get(task or "", [])
            task = task or ""
        return self._connected().explain(partition, index, key, task, fields, timeout=ANSWER_SECONDS)

    def sample(self, partition: str, index: int | None, key: str | None) -> SampleAnswer | None:
        """Return what is known of a sample; None if it is not known."""
        report = self._connected().describe_sample(partition, index, key, timeout=ANSWER_SECONDS)
        if report.state == UNKNOWN:
            return None
        heads = None
        if self._values:
            heads = self._read_values(report) if report.state == LIVE else {}
        return answer_of(report, self._source.last_task, heads)

    def _read_values(self, report: SampleReport) -> dict[str, ValueHead]:
        if self._reader is None:
            from transfer_queue.live.questions.sample_values import ValueReader  # with torch, which takes seconds

            assert self._system is not None
            self._reader = ValueReader(self._system, self._tokens)
            self._source.other_clients = 2
        return self._reader.read(report)


# ------------------------------------------------------------ the matrix

ROWS_LIMIT = (1 << 63) - 1
MIN_GROUPS = 16  # of fewer groups, a column is a sample and not a group


class MatrixCounter:
    """Answers `GET /api/matrix`. Equal questions share one count."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._counters: dict[tuple[str, int, int, int], PartitionCounter] = {}

    def answer(
        self, partition: str, first: int, last: int | None, columns: int, takes: Mapping[str, list[str]]
    ) -> MatrixAnswer | None:
        """Return the matrix of a partition; None if the partition does not exist.

        Args:
            partition: The partition.
            first: The position of the first row among the live rows.
            last: The position behind the last row; None for the end.
            columns: The number of columns.
            takes: Task -> the fields that its claims name.
        """
        columns = max(1, min(columns, MAX_COLUMNS))
        # Without counting anything: how many rows there are, and the size of a group.
        task = next(iter(takes), "")
        probe = CountColumns(partition, ROWS_LIMIT, ROWS_LIMIT, takes={}, group_task=task or "-")
        counts = self._client.request(probe, ColumnCounts, COUNT_SECONDS)
        if not counts.known:
            return None
        first = min(first, counts.rows)
        stop = counts.rows if last is None else max(min(last, counts.rows), first)
        width = max(-(-(stop - first) // columns), 1)
        if counts.group_size > 1 and (width > 1 or stop - first >= MIN_GROUPS * counts.group_size):
            width = -(-width // counts.group_size) * counts.group_size
        key = partition, first, stop, columns
        counter = self._counters.pop(key, None) or PartitionCounter(self._client, partition)
        self._counters[key] = counter  # the most recent one is last
        while len(self._counters) > 16:
            del self._counters[next(iter(self._counters))]
        sums = counter.count(CountColumns(partition, width, first, stop, {task: list(takes[task]) for task in takes}))
        if sums is None:
            return None
        return _answer(partition, sums, first, stop, width, counts)


def _answer(partition: str, sums: ColumnSums, first: int, stop: int, width: int, counts: ColumnCounts) -> MatrixAnswer:
    used = sums.used
    rows = np.full(used, width, np.int64)
    if used:
        rows[-1] = max(stop - first - (used - 1) * width, 1)
    fields = [
        MatrixField(name, int(line[:used].sum()), _runs(line[:used], rows), _runs(sums.lost.get(name), rows))
        for name, line in sums.produced.items()
    ]
    tasks = [MatrixTask(task, *(_runs(lines[state], rows) for state in range(4))) for task, lines in sums.tasks.items()]
    epoch = f"{sums.made:x}-{sums.version:x}-{width:x}-{first:x}-{stop:x}"
    return MatrixAnswer(
        partition, epoch, sums.rows, sums.reserved, first, stop,
        used, width, counts.group_size, _segments(sums.index[:used]), fields, tasks,
    )  # fmt: skip


def _runs(counts: np.ndarray | None, rows: np.ndarray) -> str:
    """Return shares as run-length bytes in base64; "" if all are 0."""
    if counts is None or not len(rows):
        return ""
    counts = counts[: len(rows)]
    if not counts.any():
        return ""
    shares = np.clip(np.round(255 * counts / rows), 0, 255).astype(np.int64)
    shares = np.where((counts > 0) & (shares == 0), 1, np.where((counts < rows) & (shares == 255), 254, shares))
    first = np.flatnonzero(np.append(True, shares[1:] != shares[:-1]))
    lengths = np.diff(np.append(first, len(shares)))
    pairs = bytearray()
    for length, value in zip(lengths.tolist(), shares[first].tolist()):
        while length:
            pairs += bytes((min(length, 255), value))
            length -= min(length, 255)
    return base64.b64encode(pairs).decode()


def _segments(index: np.ndarray) -> list[tuple[int, int, int]]:
    """Return the first global index of each column as segments [column, index, step]."""
    segments: list[tuple[int, int, int]] = []
    for column, value in enumerate(index.tolist()):
        if segments:
            begin, base, step = segments[-1]
            if column == begin + 1:
                segments[-1] = begin, base, value - base
                continue
            if value == base + step * (column - begin):
                continue
        segments.append((column, value, 0))
    return segments
