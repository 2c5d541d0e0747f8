"""Requests that read: metadata, locations of values, keys, status of samples, changes."""

from __future__ import annotations

from typing import Any

from transfer_queue.messages.base import (
    AnyIndex,
    AnyUnit,
    Natural,
    Reply,
    Request,
    Seconds,
    Version,
)
from transfer_queue.messages.descriptors import Blocks, FieldType, Placement


class ShowRows(Request, frozen=True, tag="Show"):
    """All live rows of a partition with the state of these fields; deals and consumes nothing."""

    partition: str
    fields: list[str]


class RetrieveMeta(Request, frozen=True):
    """The rows of these keys, in key order, unknown keys left out."""

    partition: str
    keys: list[str]


class RetrieveKeys(Request, frozen=True):
    """The keys of these rows (i8 global indexes)."""

    partition: str
    rows: bytes


class Lookup(Request, frozen=True):
    """Asks where values lie.

    By rows (i8) every row must have every field; by keys unknown ones are left out and the fields every found key has
    are cut to `fields` (None: all). epoch: as in `Publish`. near, avoid: of values that lie in two units, which are
    better, and which are not to be named.
    """

    partition: str
    rows: bytes | None = None
    keys: list[str] | None = None
    fields: list[str] | None = None
    epoch: Natural | None = None
    near: list[AnyUnit] = []
    avoid: list[AnyUnit] = []


class ListKeys(Request, frozen=True):
    """The next page of a list: partition -> key -> tag.

    partitions: those that are left to list, None: all. where: entries that the tag must have. made, start: where the
    first of them was left, as the page before said it.
    """

    partitions: list[str] | None = None
    where: dict[str, Any] = {}
    made: Natural | None = None
    start: Natural = 0


class Watch(Request, frozen=True):
    """Wants the rows whose tags or fields changed after version `since` and whose tags have the entries of `where`.

    since: the version of an earlier reply; None or -1: all rows there are. wait: seconds to stay parked until there
    is news; None answers at once.
    """

    partition: str
    since: Version | None = None
    where: dict[str, Any] = {}
    wait: Seconds | None = None


class ProductionStatus(Request, frozen=True):
    """Which rows have which of these fields."""

    partition: str
    fields: list[str]


class ConsumptionStatus(Request, frozen=True):
    """Which rows the task has consumed."""

    partition: str
    task: str


class TakeSnapshot(Request, frozen=True):
    """What a partition holds, a page of its rows at a time. start: the position from which on.

    made: of the first page, so that a partition made anew under the name is not taken for the one that was asked for.
    """

    partition: str
    made: Natural | None = None
    start: Natural = 0


class CheckProduction(Request, frozen=True):
    """Whether every row has every one of these fields."""

    partition: str
    fields: list[str]


class CheckConsumption(Request, frozen=True):
    """Whether the task has consumed every row."""

    partition: str
    task: str


class Explain(Request, frozen=True):
    """Why a sample is not handed out, in words; with a count, why a claim of the task for `count` rows waits.

    sampling: the sampling_config of that claim.
    """

    partition: str
    row: AnyIndex | None = None
    key: str | None = None
    task: str | None = None
    fields: list[str] | None = None
    count: Natural | None = None
    sampling: dict[str, Any] = {}


class KeysReply(Reply, frozen=True):
    """A page of a list of keys: partition -> key -> tag, keys in order of creation.

    left: the partitions that are still to be listed; made, start: where the first of them was left.
    """

    value: dict[str, dict[str, dict[str, Any]]]
    left: list[str] = []
    made: int | None = None
    start: int = 0


class LookupReply(Reply, frozen=True):
    """Where the rows lie. count: rows found; types and placements cover the same fields.

    For a lookup by keys: unknown: the keys that do not exist. lacking: field -> the number of found rows that do not
    have it, for each field that is left out. If the lookup names no fields, these are fields that at least one row has.
    """

    count: int
    types: list[FieldType]
    blocks: Blocks
    placements: list[Placement]
    unknown: list[str] = []
    lacking: dict[str, int] = {}


class ChangeReply(Reply, frozen=True):
    """What is new in a partition.

    version: of the partition, to ask with next time; -1 where there is none. changed: False where nothing is new.
    rows i8, versions i8: the rows that changed and when, in that order; keys None where none has one, tags None where
    all are empty. cleared, cleared_versions, cleared_keys: the same of rows that ended, whatever their tags were.
    sealed: the partition is. dropped: it is not there any more, or not the same. complete: False where rows may have
    been cleared that are not told.
    lost i8, lost_keys: rows that lost values, which they have not got again; lost_fields: field -> which of them (i1).
    """

    version: int
    changed: bool = False
    rows: bytes = b""
    versions: bytes = b""
    keys: list[str | None] | None = None
    tags: list[dict[str, Any]] | None = None
    cleared: bytes = b""
    cleared_versions: bytes = b""
    cleared_keys: list[str | None] | None = None
    sealed: bool = False
    dropped: bool = False
    complete: bool = True
    lost: bytes = b""
    lost_keys: list[str | None] | None = None
    lost_fields: dict[str, bytes] = {}


class StatusReply(Reply, frozen=True):
    """rows i8; matrix i1, rows x columns in the order asked. known: False for an unknown partition or field."""

    known: bool
    rows: bytes = b""
    matrix: bytes = b""


class SnapshotReply(Reply, frozen=True):
    """A page of a partition's rows. known: False for an unknown partition. made: see `TakeSnapshot`.

    rows i8, ascending; produced i1, rows x fields; consumed: task -> i1, a number a row; keys None where no row has
    one, tags None where all are empty. start: of the next page, None where this was the last.
    """

    known: bool
    made: int = 0
    rows: bytes = b""
    fields: list[str] = []
    produced: bytes = b""
    consumed: dict[str, bytes] = {}
    keys: list[str | None] | None = None
    tags: list[dict[str, Any]] | None = None
    start: int | None = None
