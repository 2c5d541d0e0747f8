"""Answers questions about single partitions and samples, by clients of their own, so that the stream does not wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer_queue.client.control_client import ControlClient
from transfer_queue.errors import AttachError
from transfer_queue.live.answers import MatrixAnswer, SampleAnswer
from transfer_queue.live.questions.matrix import MatrixCounter
from transfer_queue.live.questions.sample_answer import ValueHead, answer_of
from transfer_queue.live.reading.system_source import SystemSource
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
