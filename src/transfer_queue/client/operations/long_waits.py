"""The log of long waits: when a wait of many requests is logged, and the text of every such log.

A single request that waits is logged while it waits, by the driver (`net.session.RetryPolicy`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transfer_queue.client.attachment import Attachment
from transfer_queue.client.data.timeline_reader import EVENTS_OF_A_LONG_WAIT, TimelineReader
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.checkpoints import BeginCheckpoint, LoadState
from transfer_queue.messages.queries import ExplainWait
from transfer_queue.messages.reports.progress import without_repeated_losses
from transfer_queue.messages.storage import LeaseExtent
from transfer_queue.messages.system import Status, SystemStatus
from transfer_queue.net.calls import Operation, Request
from transfer_queue.utils.logging_utils import get_logger

REPORT_SECONDS = 2.0
"""Seconds in which the controller must reply to each request of the log of a long wait."""


class WaitReports:
    """Logs what the calls of one client wait for.

    Args:
        attachment: The attachment of the client.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        attachment.session.report = self._report

    def _report(self, call: Request, waited: float) -> Operation[None]:
        """Log what a call waits for, unless it has its reply meanwhile. The last line is the verdict."""
        try:
            verdict = yield from self.bottleneck(REPORT_SECONDS)
            text = describe_call(call)
            if not text:
                explain = ExplainWait(call.sequence)
                text = str((yield from self._attachment.ask(explain, Done, REPORT_SECONDS)).value)
        except TransferQueueError as error:
            text, verdict = f"The controller did not say why {type(call.body).__name__} waits: {error}", ""
        if text:
            report(__name__, waited, with_verdict(text, verdict))

    def bottleneck(self, timeout: float | None = None) -> Operation[str]:
        """Return the text of the verdict for the log of a long wait; "" if the system has no timeline.

        It is made of the newest events, unless this client has read the others before.
        """
        attachment = self._attachment
        if not attachment.settings.timeline_events:
            return ""
        reader = attachment.timeline
        if not reader.begun:
            reader = TimelineReader(lambda: attachment.session.clock(), EVENTS_OF_A_LONG_WAIT)
        status = yield from attachment.ask(Status(), SystemStatus, timeout)
        yield from reader.read(attachment.ask, timeout)
        return reader.judge(status).text


class LongWait:
    """The current wait of a caller that waits for one thing after another. Each wait may take many requests."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._awaited: Any = None
        self._since = 0.0
        self._reported = 0.0

    def begin(self, awaited: Any) -> None:
        """Start a wait for `awaited`; if the caller already waits for the same, the wait goes on."""
        if awaited != self._awaited:
            self._awaited, self._since, self._reported = awaited, self._clock(), 0.0

    def seconds_to_log(self, first: float | None) -> float | None:
        """Return the seconds of the wait if it must be logged now, otherwise None.

        Args:
            first: Seconds after which a wait is logged for the first time; None for never.
        """
        waited = self._clock() - self._since
        if first is None or waited < (2 * self._reported or first):
            return None
        self._reported = waited
        return waited


def with_verdict(text: str, verdict: str) -> str:
    """Return a text with the verdict as its last line, if there is one. It does not repeat which samples are lost."""
    return f"{text}\n{without_repeated_losses(verdict, text)}" if verdict else text


def report(name: str, waited: float, text: str) -> None:
    """Log why a caller waits, with the logger of this name, the text of `explain` and the verdict."""
    get_logger(name).warning(f"Still waiting after {waited:.3g} s. {text}")


def describe_call(call: Request) -> str:
    """Return what a call waits for that the controller cannot explain; "" for one that it can."""
    request = call.body
    if isinstance(request, LeaseExtent):
        return (
            f"A put waits for {request.nbytes} bytes in storage unit {request.unit}, which has no space for them. "
            f"Samples that are cleared or consumed make space; `tq status` shows what each unit stores."
        )
    if isinstance(request, BeginCheckpoint):
        return f"The save of checkpoint {request.name!r} waits until the controller has written its state."
    if isinstance(request, LoadState):
        return f"The load of checkpoint {request.name!r} waits until the controller has read the state."
    return ""
