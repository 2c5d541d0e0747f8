"""What is answered."""

from __future__ import annotations

from typing import Any

from transfer_queue.messages.base import Bytes, Message
from transfer_queue.messages.descriptors import MEMORY, Blocks, FieldType, Placement, UnitInfo
from transfer_queue.messages.progress import PartitionProgress, SamplerCost, Timing, UnitProgress


class Reply(Message, frozen=True, tag=True):
    """Base of what is answered."""


class Failure(Reply, frozen=True):
    """An error of the tree by class name, and its message. tensors: see `errors.FieldTypeError`."""

    kind: str
    message: str
    tensors: dict[str, list[str]] = {}


class Done(Reply, frozen=True):
    """The request was carried out. value: a short result. warning: a message that the client writes into its log."""

    value: Any = None
    warning: str | None = None


class KeysReply(Reply, frozen=True):
    """A page of a list of keys: partition -> key -> tag, keys in order of creation.

    left: the partitions that are still to be listed; made, start: where the first of them was left.
    """

    value: dict[str, dict[str, dict[str, Any]]]
    left: list[str] = []
    made: int | None = None
    start: int = 0


class TopologyReply(Reply, frozen=True):
    """The units, and the configuration as JSON text."""

    units: list[UnitInfo]
    config: str


class PublishReply(Reply, frozen=True):
    """rows: i8 global indexes of the targets. epoch: of the state (see `core.state.state`).

    Of a put by keys of which some were known: tags, merged (None: all empty), and fields, common and sorted. fields
    None: all of them are new, and what they have is what was put. dtypes: field -> dtypes, for fields of the put whose
    rows have several dtypes.
    """

    rows: bytes
    tags: list[dict[str, Any]] | None = None
    fields: list[str] | None = None
    epoch: int = 0
    dtypes: dict[str, list[str]] = {}


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


class ClaimReply(Reply, frozen=True):
    """Rows with what a BatchMeta says of them.

    rows i8, produced i1 (None: all 1); tags None where all are empty; shapes: field -> (ndim, i8
    rows x ndim) for fields whose rows have differed. dtypes: field -> i1 rows, positions in `FieldType.dtypes`, for
    fields that have several dtypes. ended: nothing will ever come for this claim.
    version: of a probe, the partition's, which grows with every change in it; -1 where it does not exist.
    held: the rows stay until the task has finished them (`PartitionOptions.free_when`).
    warning: what the asking client's log should say once. epoch: of the state (see `core.state.state`).
    token: of the lease, 0 without one.
    deliveries: the delivery number of each row (i4), from 1, and 0 for a row that is cleared; None if all are 1.
    places: where the values lie, as a lookup in the same moment would have said; None where it was not asked for, or
    rows are gone, and in a reply that is given again.
    """

    rows: bytes
    fields: list[FieldType] = []
    produced: bytes | None = None
    tags: list[dict[str, Any]] | None = None
    shapes: dict[str, bytes] = {}
    ended: bool = False
    version: int = -1
    held: bool = False
    warning: str | None = None
    epoch: int = 0
    token: int = 0
    deliveries: bytes | None = None
    places: LookupReply | None = None
    dtypes: dict[str, bytes] = {}


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


class CutReply(Reply, frozen=True):
    """origin: equal block numbers of equal origins are the same block.

    origins: other origins -> block numbers below this one are the same blocks there.
    """

    origin: str
    origins: dict[str, int] = {}


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


class LeaseReply(Reply, frozen=True):
    """extent: its number, never used again; where it lies; its generation."""

    extent: int
    offset: int
    length: int
    generation: int


class SlotReply(Reply, frozen=True):
    """slot: the writer's number; lock_path: the file to lock."""

    slot: int
    lock_path: str


class KeptReply(Reply, frozen=True):
    """Where copies lie in the unit's own arena, for each block asked for: offsets (i8, -1: none), generations (i8)."""

    offsets: bytes
    generations: bytes


class UnitStatusReply(Reply, frozen=True):
    """Bytes: capacity (most the arena may grow to), held (fallocated), leased, free (held - leased).

    tier: see `UnitInfo.told_tier`.
    largest_free: the longest run of what is not leased, given back to the file system or not.
    """

    capacity: Bytes
    held: Bytes
    leased: Bytes
    free: Bytes
    tier: str = MEMORY
    largest_free: Bytes = 0
