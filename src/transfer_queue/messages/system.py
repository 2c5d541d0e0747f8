"""Requests about the whole system: its units, status, sampler and nodes."""

from __future__ import annotations

from transfer_queue.messages.base import (
    Reply,
    Request,
    Seconds,
    Unit,
)
from transfer_queue.messages.descriptors import UnitInfo
from transfer_queue.messages.progress import PartitionProgress, SamplerCost, Timing, UnitProgress


class Topology(Request, frozen=True):
    """Asks for the units and the configuration of the system."""


class Status(Request, frozen=True):
    """Progress of every partition by field and task."""


class NodeGone(Request, frozen=True):
    """A node has failed: its storage units are lost. when: what time it is, in words."""

    node: str
    when: str = ""


class Drain(Request, frozen=True):
    """Wants everything moved off a storage unit, which leases nothing to writers from now on.

    undo: it leases again. wait: seconds to wait until nothing lies there; None answers at once.
    """

    unit: Unit
    undo: bool = False
    wait: Seconds | None = None


class UseSampler(Request, frozen=True):
    """The sampler in the file of this name, in the system's folder of samplers, becomes the system's.

    name: 32 hex digits. Who can write there is the system's user; no code ever comes with a request.
    """

    name: str


class TopologyReply(Reply, frozen=True):
    """The units, and the configuration as JSON text."""

    units: list[UnitInfo]
    config: str


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
