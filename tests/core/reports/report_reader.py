"""Asks a harness for reports about samples as a client does, page by page."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

import pytest
from harness import Harness

from transfer_queue.client.conversion import sample_reports
from transfer_queue.messages.envelopes import AnyRequest
from transfer_queue.messages.reports.samples import DescribeSample, SampleReport, StuckReport
from transfer_queue.net.calls import AskController, Operation

T = TypeVar("T")


def describe(h: Harness, row: int | None = None, key: str | None = None, partition: str = "p") -> SampleReport:
    """The report about a sample."""
    sample = DescribeSample(partition, row, key)
    return _result(sample_reports.describe_sample(_ask(h), sample, allow_pickle=False, timeout=None))


def find_stuck(h: Harness, seconds: float, partition: str | None = None, limit: int = 20) -> StuckReport:
    """The samples that are stuck."""
    return _result(sample_reports.find_stuck(_ask(h), partition, seconds, limit, timeout=None))


def _ask(h: Harness) -> AskController:
    def ask(request: AnyRequest, kind: type[T], timeout: float | None) -> Operation[T]:
        reply = h.look(request)
        assert isinstance(reply, kind)
        return reply
        yield

    return ask


def _result(operation: Generator[Any, Any, T]) -> T:
    """The result of an operation whose requests the harness answers at once."""
    with pytest.raises(StopIteration) as stop:
        next(operation)
    result: T = stop.value.value
    return result
