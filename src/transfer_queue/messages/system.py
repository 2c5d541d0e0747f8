"""Requests about the whole system: its units, status, sampler and nodes."""

from __future__ import annotations

from transfer_queue.messages.base import (
    Reply,
    RequestBody,
    Seconds,
    Unit,
)
from transfer_queue.messages.descriptors import UnitInfo
from transfer_queue.messages.locks import LockSummary
from transfer_queue.messages.reports.progress import (
    MirrorProgress,
    PartitionProgress,
    SamplerCost,
    Timing,
    UnitProgress,
)
from transfer_queue.messages.reports.progress_text import status_line, status_page
from transfer_queue.messages.reports.store_reports import StoreServerProgress
from transfer_queue.messages.reports.timeline import Verdict


class Topology(RequestBody, frozen=True):
    """Ask for the storage units and the configuration of the system. The reply is a `TopologyReply`."""


class Status(RequestBody, frozen=True):
    """Ask for the progress of every partition by field and task. The reply is a `SystemStatus`."""


class NodeGone(RequestBody, frozen=True):
    """Report that a node has failed, so that its storage units are lost."""

    node: str
    when: str = ""
    """The time of the report, as text."""


class Drain(RequestBody, frozen=True):
    """Move everything off a storage unit, which from now on leases nothing to writers."""

    unit: Unit
    undo: bool = False
    """True to end the drain: the unit leases to writers again."""
    wait: Seconds | None = None
    """Seconds to wait until the unit is empty; None returns at once."""


class UseSampler(RequestBody, frozen=True):
    """Replace the sampler of the system by the one in a file of the system's folder of samplers.

    A request never contains code. Only the user of the system can write to that folder.
    """

    name: str
    """The name of the file: 32 hex digits."""


class RegisterSampler(RequestBody, frozen=True):
    """Use a built-in sampler for a task, for as long as the system exists.

    It is refused if the task has another sampler of its own.
    """

    task: str
    sampler: str
    """The name of the class."""
    arguments: str = "{}"
    """The arguments of the class, as JSON. An inner sampler is a mapping with the keys `sampler`, `sampler_args`."""


class TopologyReply(Reply, frozen=True):
    """The storage units and the configuration of the system."""

    units: list[UnitInfo]
    config: str
    """JSON."""
    stores: list[StoreServerProgress] = []
    """The servers of external stores."""


class SystemStatus(Reply, frozen=True):
    """The state of a whole system: partitions, storage units, and the load of the controller.

    Example:
        >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
        >>> [(each.name, each.rows) for each in client.status().partitions]
        [('train_0', 1)]
    """

    partitions: list[PartitionProgress]
    """The progress of each partition."""
    counters: dict[str, float]
    """The counters of the controller, by name."""
    samplers: list[SamplerCost] = []
    """The cost of users' samplers."""
    trouble: str = ""
    """Why mutations are blocked; "" if they are not."""
    units: list[UnitProgress] = []
    """The storage units."""
    requests: list[Timing] = []
    """How long each type of request took in the controller's loop."""
    longest: tuple[str, float] = ("", 0.0)
    """The longest recent event in the controller's loop, and its time in seconds."""
    verdict: Verdict = Verdict("", "")
    """What slows the training, at most a second old. `TransferQueueClient.verdict` returns a new verdict."""
    locks: LockSummary = LockSummary()
    """The locks of keys."""
    mirror: MirrorProgress | None = None
    """The mirror on disk; None if the system has none."""
    stores: list[StoreServerProgress] = []
    """The servers of external stores, one for each node."""

    def __repr__(self) -> str:
        return status_line(self.partitions, self.trouble, self.verdict.text)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the verdict, the partitions with their fields and tasks, and the units."""
        return status_page(self.partitions, self.units, self.trouble, "SystemStatus", self.verdict.text).html()
