"""Requests that create, list, seal and clear partitions, and that steer their producers."""

from __future__ import annotations

from transfer_queue.messages.base import (
    Natural,
    RequestBody,
    Seconds,
)
from transfer_queue.messages.descriptors import PartitionOptions


class CreatePartition(RequestBody, frozen=True):
    """Create a partition. The reply is `Done(False)` if it exists."""

    partition: str
    pre_allocate: Natural = 1
    """The number of rows to reserve at once."""
    options: PartitionOptions = PartitionOptions()
    policy_version: Natural = 0
    """The policy version at which the partition begins."""


class ListPartitions(RequestBody, frozen=True):
    """Ask for the names of the partitions, in order of creation."""


class SetPolicyVersion(RequestBody, frozen=True):
    """Report that the policy has reached this version, which never decreases."""

    partition: str
    version: Natural


class ReadPolicyVersion(RequestBody, frozen=True):
    """Ask for the policy version of a partition. The reply is `Done(int)`."""

    partition: str


class SetGroupDemand(RequestBody, frozen=True, tag="Want"):
    """Set a group demand: the number of complete groups, not consumed yet, that a task wants made or in production."""

    partition: str
    task: str
    groups: Natural


class TakeGroupDemand(RequestBody, frozen=True, tag="Wanted"):
    """Ask how many groups of a task's demand are missing, and promise to produce at most `most` of them."""

    partition: str
    task: str
    most: Natural | None = None
    """The largest number of groups that the producer promises; None promises none."""
    wait: Seconds | None = None
    """Seconds to stay parked while no group is missing; None returns at once."""


class ReportDone(RequestBody, frozen=True):
    """Report that this number of rows, which clients have received before, are done."""

    partition: str
    count: Natural = 1


class AwaitDone(RequestBody, frozen=True):
    """Ask whether all rows that were added so far are done. The reply is `Done(bool)`."""

    partition: str
    wait: Seconds | None = None
    """Seconds to stay parked while some are not; None returns at once."""


class ClearPartition(RequestBody, frozen=True):
    """Remove a partition and its samples. An unknown partition is not an error."""

    partition: str


class Seal(RequestBody, frozen=True):
    """Declare that this producer puts no new rows into the partition."""

    partition: str
    create: bool = False
    """Whether to create the partition without a warning if it does not exist."""
