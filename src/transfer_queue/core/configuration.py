"""What a controller is given when it begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field

from transfer_queue.core.samplers.calls import AnySampler, Values, copy_containers

MAX_DELIVERIES = 16
"""Deliveries of a row without an acknowledgement, if neither its partition nor the system sets another limit."""

TIMELINE_EVENTS = 1 << 18
"""The number of events of the timeline that are kept if the configuration names no other."""


@dataclass(frozen=True)
class Watermarks:
    """The fill levels of a unit in memory, as fractions of its bytes."""

    high: float = 0.8
    """The level above which extents are moved to disk."""
    low: float = 0.6
    """The level at which this ends."""


@dataclass(frozen=True)
class MaxLag:
    """How far the mirror may be behind acknowledged puts."""

    nbytes: int
    """-1: every put waits until the mirror has its blocks."""
    seconds: float


@dataclass(frozen=True)
class CoreConfig:
    """The configuration of a controller, and what it asks of the process around it."""

    sampler: AnySampler
    """The sampler of claims that name no other."""
    _: KW_ONLY
    task_samplers: Mapping[str, AnySampler] = field(default_factory=dict)
    """Task, or pattern of tasks -> its sampler in the configuration."""
    strict: bool = False
    """Whether entries of a sampling_config that the sampler does not take are errors."""
    values: Values = copy_containers
    """Decodes a value of a message, for a user's sampler in this process."""

    client_config: str = "{}"
    """JSON text that clients get when they attach."""
    capacity: int | None = None
    """The most rows at a time; None for no limit."""
    max_deliveries: int = MAX_DELIVERIES
    """The limit of the partitions that do not set one. See `PartitionOptions`."""
    timeline_events: int = TIMELINE_EVENTS
    """The number of events of the timeline that are kept; 0: none are written."""

    replicas: int = 1
    """The number of units that store each block."""
    marks: Watermarks = Watermarks()
    """The fill levels at which blocks are moved to disk."""
    max_lag: MaxLag | None = None
    """How far a mirror may be behind acknowledged puts; None: the system has no mirror."""
    lease_key: bytes | None = None
    """The key with which units prove their leases; None: proofs are not checked."""

    timer: Callable[[], float] = lambda: 0.0
    """Returns seconds, to measure what a user's sampler costs. The core has no clock of its own."""
    lives: Callable[[str], bool] = lambda client: False
    """Returns whether the process of a client is known to be alive."""
    handed_over: Callable[[], Collection[int]] = frozenset
    """Returns the tokens of batches that processes of this node have handed over and noted."""
    boot: str = ""
    """An identifier that no other controller has. It tells apart block numbers that are equal."""
    part: int | None = None
    """The number of effects after which an event may return, before it has met all requests that can be met.

    The caller must call `Controller.settle_further` as long as `unfinished`. None: an event returns all effects.
    """
