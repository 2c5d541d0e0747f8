"""Asks a harness for reports about samples as a client does, page by page."""

from __future__ import annotations

from harness import Harness

from transfer_queue.client.conversion.sample_reports import ReportPages, StuckPages
from transfer_queue.messages.reports.samples import SampleReport, StuckReport


def describe(h: Harness, row: int | None = None, key: str | None = None, partition: str = "p") -> SampleReport:
    """The report about a sample."""
    return _report(h, ReportPages(partition, row, key))


def _report(h: Harness, pages: ReportPages) -> SampleReport:
    while pages.request is not None:
        pages.add(h.look(pages.request))
    return pages.report(h.look(pages.explain).value, allow_pickle=False)


def find_stuck(h: Harness, seconds: float, partition: str | None = None, limit: int = 20) -> StuckReport:
    """The samples that are stuck."""
    pages = StuckPages(partition, seconds, limit)
    while pages.request is not None:
        pages.add(h.look(pages.request))
    return pages.describe([_report(h, each) for each in pages.oldest])
