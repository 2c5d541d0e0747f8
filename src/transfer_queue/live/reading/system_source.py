"""The systems of one name, one after the other, as the hub shows them."""

from __future__ import annotations

import contextlib

from transfer_queue.client.control_client import ControlClient
from transfer_queue.errors import ConnectionLostError
from transfer_queue.live import payload
from transfer_queue.live.answers import LanesAnswer
from transfer_queue.live.reading.system_reader import SystemReader
from transfer_queue.live.view.view_maker import Parts, ViewMaker
from transfer_queue.node.system.launcher import RunningSystem, find_successor
from transfer_queue.node.system.processes import Process
from transfer_queue.utils.installations import PACKAGE, version_of


class SystemSource:
    """Reads the system in one folder, and whichever system takes its place there.

    Args:
        folder: The folder of the system; it need not be up yet.
        values: Whether the page may show values.
    """

    def __init__(self, folder: str, *, values: bool) -> None:
        self.folder = folder
        """The folder of the system."""
        self._values = values
        self.system: RunningSystem | None = None
        """The system that is shown; None before the first one is up."""
        self._reader: SystemReader | None = None
        self._maker: ViewMaker | None = None
        self.other_clients = 0
        """The clients of this process except the client of the reader."""

    @property
    def takes(self) -> dict[str, list[str]]:
        """Task -> the fields that its claims name."""
        return {} if self._maker is None else dict(self._maker.takes)

    @property
    def last_task(self) -> str:
        """The task at the end of the pipeline."""
        return "" if self._maker is None else self._maker.last

    def make(self) -> tuple[float, Parts]:
        """See `hub.ViewSource`."""
        if self._maker is None and not self.find_successor():
            raise ConnectionLostError("the system is not up yet")
        assert self._maker is not None
        assert self._reader is not None
        assert self.system is not None
        if not self.system.is_running():
            raise ConnectionLostError(f"the system {self.system.name} has ended")
        self._reader.own_clients = 1 + self.other_clients
        return self._maker.make()

    def full_parts(self) -> Parts:
        """See `hub.ViewSource`."""
        return {} if self._maker is None else self._maker.full_parts()

    def lanes(self, task: str, first: int, count: int, after: str) -> LanesAnswer | None:
        """See `hub.ViewSource`."""
        if self._maker is None:
            raise ConnectionLostError("the page has not reached the system yet; try again")
        return self._maker.lanes(task, first, count, after)

    def renewed(self) -> bool:
        """See `hub.ViewSource`."""
        return self._maker is not None and self._maker.renewed

    def describe_end(self) -> str:
        """See `hub.ViewSource`."""
        system = self.system
        if system is None or system.is_alive():
            return ""
        its = system.description
        with contextlib.closing(Process(its.starter_pid, None)) as starter:
            dead = not its.detached and starter.has_ended()
        why = f"its starter, process {its.starter_pid} ({its.starter_command}), has ended" if dead else "it was stopped"
        return f"The system {system.name} has ended: {why}. Below is its last state."

    def find_successor(self) -> bool:
        """See `hub.ViewSource`."""
        successor = find_successor(self.folder, self.system)
        if successor is None:
            return False
        self.close()
        self.system = successor
        self._begin(successor)
        return True

    def _begin(self, system: RunningSystem) -> None:
        started = system.description.started_at
        info = payload.SystemInfo(
            system.name, round(started, 1), system.describe(), version_of(PACKAGE) or "", self._values
        )
        self._reader = SystemReader(ControlClient(system), str(system.logs))
        self._maker = ViewMaker(self._reader, info)

    def forget(self) -> None:
        """See `hub.ViewSource`."""
        if self.system is not None:
            self.close()
            self._begin(self.system)

    def close(self) -> None:
        """Close the connections."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._maker = None
