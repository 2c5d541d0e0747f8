"""A client that reads and writes no samples, and so does not import torch, which takes seconds."""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING, TypeVar

import msgspec

from transfer_queue.client.conversion.sample_reports import describe_sample, find_stuck
from transfer_queue.config.settings import Settings
from transfer_queue.errors import (
    AttachError,
    AuthenticationError,
    ConnectionLostError,
    TransferQueueError,
)
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyRequest
from transfer_queue.messages.queries import Explain
from transfer_queue.messages.reports.overview import ShowViews, ViewsReply
from transfer_queue.messages.reports.samples import DescribeSample, SampleReport, StuckReport
from transfer_queue.messages.reports.timeline import TimelineReply
from transfer_queue.messages.system import Status, SystemStatus, Topology, TopologyReply
from transfer_queue.net.calls import ask_controller
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.net.session import Session

if TYPE_CHECKING:
    from transfer_queue.client.units import SystemAddress
    from transfer_queue.timeline.recording import Recording

T = TypeVar("T")

ENDED_ERRORS = (ConnectionLostError, AttachError, AuthenticationError)
"""The errors of a request if the system has ended."""


class ControlClient:
    """One session with a system's controller. Its methods raise the same errors as those of `TransferQueueClient`."""

    def __init__(self, system: SystemAddress) -> None:
        self._session = Session(
            uuid.uuid4().hex,
            system.key,
            lambda target: system.controller,
            log_of=system.log_of,
            alive=lambda target: system.is_alive(),
            tls=system.tls,
        )

    def status(self, *, timeout: float | None = None) -> SystemStatus:
        """See `TransferQueueClient.status`."""
        status = self.request(Status(), SystemStatus, timeout)
        with contextlib.suppress(TransferQueueError):  # units that do not answer
            status = self.request(ShowViews(), ViewsReply, timeout).with_views(status)
        return status

    def explain(
        self, partition_id: str, global_index: int | None, key: str | None, task: str | None, fields: list[str] | None,
        *, timeout: float | None = None,
    ) -> str:  # fmt: skip
        """See `TransferQueueClient.explain`."""
        return str(self.request(Explain(partition_id, global_index, key, task, fields), Done, timeout).value)

    def topology(self, *, timeout: float | None = None) -> tuple[TopologyReply, Settings]:
        """Return the storage units of the system, and its settings."""
        reply = self.request(Topology(), TopologyReply, timeout)
        return reply, Settings.from_json(msgspec.json.decode(reply.config)["settings"])

    def describe_sample(
        self, partition_id: str, global_index: int | None, key: str | None, allow_pickle: bool = False,
        *, timeout: float | None = None,
    ) -> SampleReport:  # fmt: skip
        """See `TransferQueueClient.describe_sample`. allow_pickle: whether tags that need pickle are decoded."""
        sample = DescribeSample(partition_id, global_index, key)
        return run_blocking(self._session, describe_sample(ask_controller, sample, allow_pickle, timeout))

    def find_stuck(self, partition_id: str | None, older_than: float, limit: int) -> StuckReport:
        """See `TransferQueueClient.find_stuck`."""
        return run_blocking(self._session, find_stuck(ask_controller, partition_id, older_than, limit, None))

    def read_timeline(self, recording: Recording, timeout: float | None = None) -> None:
        """Add to a recording what has happened since its last event."""
        recording.add(self.request(recording.request(), TimelineReply, timeout))
        while not recording.caught_up:
            recording.add(self.request(recording.request(), TimelineReply, timeout))

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def request(self, request: AnyRequest, kind: type[T], timeout: float | None = None) -> T:
        """Make a request to the controller and return its reply, which must be of this kind."""
        return run_blocking(self._session, ask_controller(request, kind, timeout))

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def still_runs(system: SystemAddress) -> bool:
    """Whether a system that was found replies. One that this process has just started is not asked.

    If all processes of a system are killed, the last of them may still end while the next start looks for the system.
    """
    if system.new:
        return True
    try:
        with ControlClient(system) as client:
            client.topology()
    except ConnectionLostError:
        return False
    return True
