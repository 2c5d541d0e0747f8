"""Notices to the controller, which need no reply: which batches were handed over or given back, and which claims ended.

Every request to the controller carries the notices that no request has carried before, and the controller reads them
before the request. When its reply arrives, they are read; without a reply, the next request carries them again. A
notice that cannot wait for a request is also written at once, as a request with the sequence NOTICE.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from transfer_queue.messages.claims import ReportBatches
from transfer_queue.messages.envelopes import NOTICE, RequestEnvelope
from transfer_queue.net.framing import pack_frame


class Notices:
    """The notices of one client that the controller may not have read. Thread-safe.

    Args:
        encode: Encodes an envelope.
    """

    def __init__(self, encode: Callable[[RequestEnvelope], bytes]) -> None:
        self._encode = encode
        self.waiting: deque[ReportBatches] = deque()
        """Those that no request carries."""
        self.carried: dict[int, ReportBatches] = {}
        """Sequence of a request without a reply -> the notices that it carries. The session removes them."""
        self.on_add: Callable[[], None] | None = None
        """Called when a notice was added."""

    def __bool__(self) -> bool:
        return bool(self.waiting or self.carried)

    @property
    def unread(self) -> int:
        """The number of batches that were handed over and that the controller may not know of."""
        reports = [*self.waiting, *self.carried.values()]
        return sum(len(report.handed_over) + len(report.finished) for report in reports)

    def add(self, report: ReportBatches) -> None:
        """Add the notices of a report."""
        self.waiting.append(report)
        if self.on_add is not None:
            self.on_add()

    def take(self, sequence: int) -> ReportBatches | None:
        """Return the notices that a request carries; None if there are none."""
        report = None
        while self.waiting:
            try:
                further = self.waiting.popleft()
            except IndexError:  # another thread was faster
                break
            report = self.carried[sequence] = further if report is None else _joined([report, further])
        return report

    def fail(self, sequence: int) -> None:
        """Note that a request has ended without a reply, so that the next one carries its notices."""
        report = self.carried.pop(sequence, None)
        if report is not None:
            self.waiting.appendleft(report)

    def frame(self) -> bytes:
        """Return the frame that sends the notices at once. The next request carries them, too."""
        return pack_frame(self._encode(RequestEnvelope(NOTICE, 0, _joined(list(self.waiting)))))


def _joined(reports: list[ReportBatches]) -> ReportBatches:
    return ReportBatches(
        [batch for each in reports for batch in each.handed_over],
        [batch for each in reports for batch in each.finished],
        [batch for each in reports for batch in each.returned],
        [sequence for each in reports for sequence in each.withdrawn],
        any(each.left for each in reports),
    )
