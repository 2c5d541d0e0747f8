"""Requests that read: metadata, locations of values, keys, status of samples, changes."""

from __future__ import annotations

from typing import Any

from transfer_queue.messages.base import (
    AnyIndex,
    AnyUnit,
    Natural,
    Reply,
    RequestBody,
    Seconds,
    Version,
)
from transfer_queue.messages.descriptors import Blocks, FieldType, Placement
from transfer_queue.messages.tag_table import StoredTags, tag_rows


class FindEqual(RequestBody, frozen=True):
    """Ask which values a partition has already, by their digests."""

    partition: str
    fields: list[tuple[str, bytes]]
    """Fields with distinct digests, `descriptors.DIGEST` bytes each."""


class EqualReply(Reply, frozen=True):
    """Which of the digests are known."""

    known: list[bytes]
    """For each field 1 for each known digest, and 0 for the others."""


class ShowRows(RequestBody, frozen=True, tag="Show"):
    """Ask for live rows of a partition with the state of these fields. Nothing is dealt or consumed."""

    partition: str
    fields: list[str]
    rows: bytes | None = None
    """Global indexes, i8. Cleared ones are left out. None for all rows."""
    task: str | None = None
    """Leave out the rows that this task skips; None for none."""


class ReadBacklog(RequestBody, frozen=True):
    """Ask how many rows of a partition wait for a task, and how many are not done."""

    partition: str
    task: str


class Backlog(Reply, frozen=True):
    """How many samples of a partition wait for a task, and how many are not done."""

    waiting: int
    """The number of samples that the task has neither consumed nor claimed under a lease."""
    claimed: int
    """The number of samples that the task has claimed under a lease."""
    undone: int
    """The number of samples that were added, and neither reported as done nor dropped."""
    sealed: bool
    """Whether the partition is sealed."""
    max_rows: int | None = None
    """The setting `max_rows` of the partition; None for no limit."""


class RetrieveMeta(RequestBody, frozen=True):
    """Ask for the rows of these keys, in the order of the keys. Unknown keys are left out."""

    partition: str
    keys: list[str]


class RetrieveKeys(RequestBody, frozen=True):
    """Ask for the keys of rows."""

    partition: str
    rows: bytes
    """Global indexes, i8."""


class Lookup(RequestBody, frozen=True):
    """Ask where values are.

    Every one of `rows` must have every field. Of `keys`, unknown ones are left out, and the result has those of
    `fields` that every found key has.
    """

    partition: str
    rows: bytes | None = None
    """Global indexes, i8."""
    keys: list[str] | None = None
    fields: list[str] | None = None
    """None for all fields."""
    epoch: Natural | None = None
    """As in `Publish`."""
    near: list[AnyUnit] = []
    """The units to prefer for values that are in two units."""
    avoid: list[AnyUnit] = []
    """The units not to name for values that are also in another unit."""
    versions: bool = False
    """Whether the reply to a lookup by keys has the version of each found row."""


class ListKeys(RequestBody, frozen=True):
    """Ask for the next page of a list of keys and tags by partition."""

    partitions: list[str] | None = None
    """The partitions that are not listed yet; None for all."""
    where: dict[str, Any] = {}
    """Entries that the tag must have."""
    made: Natural | None = None
    """`KeysReply.made` of the previous page; None for the first page."""
    start: Natural = 0
    """`KeysReply.start` of the previous page."""


class Watch(RequestBody, frozen=True):
    """Ask for the rows whose tags or fields changed after a version, and whose tags have the entries of `where`."""

    partition: str
    since: Version | None = None
    """The version of an earlier reply; None or -1 for all rows."""
    where: dict[str, Any] = {}
    wait: Seconds | None = None
    """Seconds to stay parked while there are no changes; None returns at once."""


class ProductionStatus(RequestBody, frozen=True):
    """Ask which rows have which of these fields."""

    partition: str
    fields: list[str]


class ConsumptionStatus(RequestBody, frozen=True):
    """Ask which rows the task has consumed."""

    partition: str
    task: str


class TakeSnapshot(RequestBody, frozen=True):
    """Ask for a page of the rows of a partition."""

    partition: str
    made: Natural | None = None
    """`SnapshotReply.made` of the first page, to detect that another partition was created under this name."""
    start: Natural = 0
    """The position of the first row of the page."""


class CheckProduction(RequestBody, frozen=True):
    """Ask whether every row has every one of these fields."""

    partition: str
    fields: list[str]


class CheckConsumption(RequestBody, frozen=True):
    """Ask whether the task has consumed every row."""

    partition: str
    task: str


class Explain(RequestBody, frozen=True):
    """Ask for a text that says why a sample is not dealt, or with `count` why a claim for that many rows waits."""

    partition: str
    row: AnyIndex | None = None
    key: str | None = None
    task: str | None = None
    fields: list[str] | None = None
    count: Natural | None = None
    sampling: dict[str, Any] = {}
    """The `sampling_config` of the claim."""


class ExplainWait(RequestBody, frozen=True):
    """Ask for a text that says what another request of this client waits for, and why. It is "" if that does not wait.

    A client sends it on another connection, or among the other requests of its connection.
    """

    sequence: Natural


class KeysReply(Reply, frozen=True):
    """A page of a list of keys."""

    keys: dict[str, list[str]]
    """Partition -> keys in order of creation."""
    tags: dict[str, StoredTags]
    """Partition -> the tag of each of its keys; without partitions whose tags are all empty."""
    left: list[str] = []
    """The partitions that are not listed yet."""
    made: int | None = None
    """Identifies the first of these partitions; None if none of it is listed yet."""
    start: int = 0
    """The position in the first of these partitions at which the next page starts."""

    @property
    def value(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Partition -> key -> tag, as messages contain it."""
        return {
            name: dict(zip(keys, tag_rows(self.tags.get(name), len(keys)), strict=True))
            for name, keys in self.keys.items()
        }


class LookupReply(Reply, frozen=True):
    """Where the values of rows are. `types` and `placements` have the same fields."""

    count: int
    """The number of rows found."""
    types: list[FieldType]
    blocks: Blocks
    placements: list[Placement]
    unknown: list[str] = []
    """For a lookup by keys: the keys that do not exist."""
    lacking: dict[str, int] = {}
    """For a lookup by keys: field -> the number of found rows without it, for each field that is left out.

    If the lookup names no fields, these are fields that at least one row has.
    """
    versions: bytes | None = None
    """The version of the partition at which each found row last changed, i8; None if they were not requested."""
    epoch: int = 0
    """The epoch of these versions (see `core.state.state`)."""


class ChangeReply(Reply, frozen=True):
    """The changes of a partition since a version.

    Changed and cleared rows are in the order of their versions.
    """

    version: int
    """The version of the partition, for the next `Watch`; -1 if it does not exist."""
    changed: bool = False
    """Whether there are changes."""
    rows: bytes = b""
    """The rows that changed, i8."""
    versions: bytes = b""
    """The version at which each row changed, i8."""
    keys: list[str | None] | None = None
    """The key of each row; None if no row has one."""
    tags: StoredTags | None = None
    """The tag of each row; None if all are empty."""
    cleared: bytes = b""
    """The rows that were cleared, i8, whether their tags had the entries of `where` or not."""
    cleared_versions: bytes = b""
    """The version at which each of them was cleared, i8."""
    cleared_keys: list[str | None] | None = None
    """The key of each of them; None if no row had one."""
    sealed: bool = False
    """Whether the partition is sealed."""
    dropped: bool = False
    """Whether the partition does not exist any more, or was created again."""
    complete: bool = True
    """False if there may be cleared rows that are not reported."""
    lost: bytes = b""
    """The rows that lost values which were not put again, i8."""
    lost_keys: list[str | None] | None = None
    """The key of each of these rows; None if no row has one."""
    lost_fields: dict[str, bytes] = {}
    """Field -> which of these rows lost it, i1."""


class StatusReply(Reply, frozen=True):
    """A status of each row of a partition."""

    known: bool
    """False for an unknown partition or field."""
    rows: bytes = b""
    """Global indexes, i8."""
    matrix: bytes = b""
    """i1 [rows, columns], the columns in the order of the request."""


class SnapshotReply(Reply, frozen=True):
    """A page of the rows of a partition."""

    known: bool
    """False for an unknown partition."""
    made: int = 0
    """Identifies the partition: another one that was created under the same name has another number."""
    rows: bytes = b""
    """Global indexes, i8, ascending."""
    fields: list[str] = []
    produced: bytes = b""
    """i1 [rows, fields]."""
    consumed: dict[str, bytes] = {}
    """Task -> i1 [rows]."""
    keys: list[str | None] | None = None
    """The key of each row; None if no row has one."""
    tags: StoredTags | None = None
    """The tag of each row; None if all are empty."""
    start: int | None = None
    """The start of the next page; None if this is the last one."""
