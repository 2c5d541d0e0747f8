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
    """All partitions, counters of the controller, and what users' samplers cost it.

    trouble: why what changes anything waits at the moment; "" where it does not. units: the storage units.
    requests: how long each type of them took in the controller's loop. longest: the longest event there of late, what
    it was and its seconds.
    """

    partitions: list[PartitionProgress]
    counters: dict[str, float]
    samplers: list[SamplerCost] = []
    trouble: str = ""
    units: list[UnitProgress] = []
    requests: list[Timing] = []
    longest: tuple[str, float] = ("", 0.0)
