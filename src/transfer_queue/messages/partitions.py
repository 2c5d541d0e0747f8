"""Requests that create, list, seal and clear partitions, and that steer their producers."""

from __future__ import annotations

from transfer_queue.messages.base import (
    Natural,
    Request,
    Seconds,
)
from transfer_queue.messages.descriptors import PartitionOptions


class CreatePartition(Request, frozen=True):
    """Makes a partition; False if it exists. pre_allocate: rows reserved at once."""

    partition: str
    pre_allocate: Natural = 1
    options: PartitionOptions = PartitionOptions()


class ListPartitions(Request, frozen=True):
    """The names of the partitions, in order of creation."""


class SetPolicyVersion(Request, frozen=True):
    """The policy has reached this version, which never goes back."""

    partition: str
    version: Natural


class SetGroupDemand(Request, frozen=True, tag="Want"):
    """A task wants so many whole groups to be there, or on their way, that it has not consumed."""

    partition: str
    task: str
    groups: Natural


class TakeGroupDemand(Request, frozen=True, tag="Wanted"):
    """How many groups a task still misses; of these the asking producer takes `most` upon itself.

    most: None takes none. wait: seconds to stay parked while none is missing; None answers at once.
    """

    partition: str
    task: str
    most: Natural | None = None
    wait: Seconds | None = None


class ClearPartition(Request, frozen=True):
    """Drops a partition and its data; an unknown one is fine."""

    partition: str


class Seal(Request, frozen=True):
    """No new rows will come (from this producer). create: make the partition without a warning if it does not exist."""

    partition: str
    create: bool = False
