"""What travels between clients, controller and storage units: requests, replies, descriptors.

Every message is a `msgspec.Struct` encoded as a msgpack array; a request type is told by its tag.
Columns of numbers travel as the bytes of little-endian numpy arrays (`i8`, `i4`, `u8`), so that a
batch costs a few buffers and no object per row. Records, which only the core writes and replays,
are in `core/records.py`.

This module knows nothing of sockets, files, torch or clocks. Durations are seconds.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

PROTOCOL_VERSION = 1

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what decoding bytes that are no message raises
MOVER = ""
"""The writer, by name, of extents into which storage units themselves have moved blocks; no client's name."""
DELETE_CODE = 64  # msgpack Ext: a tag entry to remove (see `Delete`)


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all messages."""


# ---------------------------------------------------------------- descriptors


class FieldSpec(Message, frozen=True):
    """How one field lies in a block.

    kind: "tensor" or "object". dtype: torch's name without the prefix ("float32"), "object" for objects.
    ndim: dimensions of one row; an object has 1, its number of encoded bytes; -1 (`layout.MIXED_RANK`): the
    rows of this block differ in rank (ragged, at least two rows), and dims hold for each row its rank followed
    by so many sizes. ragged: the block's dims hold one shape a row; otherwise one shape for all its rows.
    """

    name: str
    kind: str
    dtype: str
    ndim: int
    ragged: bool


class Place(Message, frozen=True):
    """Where a block lies; see `NewBlock`. length: bytes of its extent, 0 where that is not told."""

    unit: int
    extent: int
    offset: int
    generation: int
    length: int = 0


class NewBlock(Message, frozen=True):
    """A block just written, as its writer publishes it.

    unit, extent, offset, generation: where it lies (`storage.arena`); nbytes: how long it is.
    rows: how many. schema: its fields in layout order. dims: i8 array, for each field in order its row
    shape (ndim numbers), or the shapes of all rows (rows x ndim numbers) where ragged. The byte
    layout follows from these alone (`wire.layout`). length: bytes of the extent, 0 where that is not told.
    copies: where else the same bytes lie, one place at most, in another unit.
    """

    unit: int
    extent: int
    offset: int
    generation: int
    nbytes: int
    rows: int
    schema: list[FieldSpec]
    dims: bytes
    length: int = 0
    copies: list[Place] = []


class FieldType(Message, frozen=True):
    """What is known of a field over all its live rows.

    shape: the row shape while all rows agree, else None. differs: bit d set once two live rows
    differed in row dimension d. mixed_rank: rows of different rank have been seen.
    """

    name: str
    kind: str
    dtype: str
    ndim: int
    shape: list[int] | None
    differs: int
    mixed_rank: bool


class Blocks(Message, frozen=True):
    """Blocks that a reply refers to, as columns of equal length.

    unit i4, offset i8, generation i8, nbytes i8, rows i4; schema i4 and dims i4 index into the lists.
    """

    unit: bytes
    offset: bytes
    generation: bytes
    nbytes: bytes
    rows: bytes
    schema: bytes
    dims: bytes
    schemas: list[list[FieldSpec]]
    dims_values: list[bytes]


class Placement(Message, frozen=True):
    """Where the rows of some fields lie: for each row a block of the reply (i4) and the row in it (i4)."""

    fields: list[str]
    block: bytes
    slot: bytes


# ---------------------------------------------------------------- requests to the controller


class Request(Message, frozen=True, tag=True):
    """Base of what a client may ask."""


class Topology(Request, frozen=True):
    """Asks for the units and the configuration of the system."""


class PartitionOptions(Message, frozen=True):
    """What a partition was made with; it never changes.

    group_size: samples of each declared group. producers: how many seals seal it.
    free_when: tasks; a row that all of them have finished is cleared. replicas: how many readers of each row of a
    task must finish it. max_staleness, rows_per_version: admission of new rows (`core.admission`).
    keep_rows, keep_bytes, keep_seconds: the oldest rows beyond these are dropped (`core.retention`).
    max_deliveries: rows of leases that ended so often without an ack are set aside; 0: never, None: the system's.
    """

    group_size: int | None = None
    producers: int = 1
    free_when: list[str] = []
    replicas: int = 1
    max_staleness: int | None = None
    rows_per_version: int | None = None
    keep_rows: int | None = None
    keep_bytes: int | None = None
    keep_seconds: float | None = None
    max_deliveries: int | None = None


class CreatePartition(Request, frozen=True):
    """Makes a partition; False if it exists. pre_allocate: rows reserved at once."""

    partition: str
    pre_allocate: int = 1
    options: PartitionOptions = PartitionOptions()


class Reserve(Request, frozen=True):
    """Reserves rows: `count` new ones, or one for each key that is not known (all keys are answered)."""

    partition: str
    count: int
    keys: list[str] | None
    pre_allocate: int = 1
    groups: list[str] | None = None
    wait: float | None = None


class Publish(Request, frozen=True):
    """Makes written values visible, together with tags, keys and groups.

    Target rows: `rows` (i8 global indexes), or `keys` (unknown ones are created), or neither: `count`
    new rows. block: what was written, its rows in the order of the targets; None for tags alone.
    tags: one dict a row to merge, None entries for rows without; replace_tags: they replace instead.
    closes: extents of this writer that will take no more blocks, as (unit, extent).
    wait: seconds to wait for capacity; None fails at once. epoch: in which `rows` were learnt; None: any.
    """

    partition: str
    count: int
    rows: bytes | None = None
    keys: list[str] | None = None
    block: NewBlock | None = None
    tags: list[dict[str, Any] | None] | None = None
    replace_tags: bool = False
    groups: list[str] | None = None
    closes: list[tuple[int, int]] = []
    pre_allocate: int = 1
    wait: float | None = None
    epoch: int | None = None


class Claim(Request, frozen=True):
    """Wants `count` rows for a task, with all these fields, through the sampler.

    wait: seconds to stay parked; None answers at once. probe: deal nothing; answer when a claim like
    this could be met or never can (`ClaimReply.ended`). finite: a wholly consumed partition is an end.
    since: a probe is not answered, unless by the end, while the partition has this version.
    hold: what the asking client was given before is not finished by this claim, only by `Finish`.
    lease: what is dealt is claimed for so many seconds (and renewed), until it is acknowledged; None: it is consumed.
    replicas: acks of a kept batch by so many tokens consume it; None: as many as the partition's replicas.
    """

    partition: str
    task: str
    fields: list[str]
    count: int
    sampling: dict[str, Any] = {}
    wait: float | None = None
    probe: bool = False
    finite: bool = False
    since: int | None = None
    hold: bool = False
    lease: float | None = None
    replicas: int | None = None


class Ack(Request, frozen=True):
    """These rows (i8 global indexes) of a lease are consumed. Done(True) where it counts for any of them."""

    partition: str
    token: int
    rows: bytes


class Nack(Request, frozen=True):
    """These rows (i8 global indexes) of a lease are given back. Done(True) where the lease had any of them.

    delivered: somebody has had them; it counts as a delivery that was not acknowledged.
    """

    partition: str
    token: int
    rows: bytes
    delivered: bool = True


class Renew(Request, frozen=True):
    """These leases, (partition, token), have all their time again. Done([bool]): which are still in force."""

    leases: list[tuple[str, int]]


class RankGone(Request, frozen=True):
    """A rank will not come back: what it has not acknowledged of its kept batches is anybody's. Done(rows)."""

    partition: str
    task: str
    dp_rank: int


class Show(Request, frozen=True):
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
    """Where values lie. By rows (i8) every row must have every field; by keys unknown ones are left out
    and the fields every found key has are cut to `fields` (None: all). epoch: as in `Publish`."""

    partition: str
    rows: bytes | None = None
    keys: list[str] | None = None
    fields: list[str] | None = None
    epoch: int | None = None


class ListKeys(Request, frozen=True):
    """Partition -> key -> tag, of one partition or of all. where: entries that the tag must have."""

    partition: str | None = None
    where: dict[str, Any] = {}


class Watch(Request, frozen=True):
    """Wants the rows whose tags or fields changed after version `since` and whose tags have the entries of `where`.

    since: the version of an earlier reply; None or -1: all rows there are. wait: seconds to stay parked until there
    is news; None answers at once.
    """

    partition: str
    since: int | None = None
    where: dict[str, Any] = {}
    wait: float | None = None


class ListPartitions(Request, frozen=True):
    """The names of the partitions, in order of creation."""


class ClearRows(Request, frozen=True):
    """Clears rows (i8 global indexes); unknown ones are fine. epoch: as in `Publish`."""

    partition: str
    rows: bytes
    epoch: int | None = None


class ClearKeys(Request, frozen=True):
    """Clears the rows of these keys; unknown ones are fine."""

    partition: str
    keys: list[str]


class Drop(Request, frozen=True):
    """Clears samples for a reason, which is counted: rows (i8 global indexes), whole declared groups, or both.

    epoch: as in `Publish`.
    """

    partition: str
    reason: str
    rows: bytes = b""
    groups: list[str] = []
    epoch: int | None = None


class Finish(Request, frozen=True):
    """The task is through with these rows (i8 global indexes), which client `holder` was given.

    epoch: as in `Publish`.
    """

    partition: str
    task: str
    rows: bytes
    holder: str
    epoch: int | None = None


class SetPolicyVersion(Request, frozen=True):
    """The policy has reached this version, which never goes back."""

    partition: str
    version: int


class Want(Request, frozen=True):
    """A task wants so many whole groups to be there, or on their way, that it has not consumed."""

    partition: str
    task: str
    groups: int


class Wanted(Request, frozen=True):
    """How many groups a task still misses; of these the asking producer takes `most` upon itself.

    most: None takes none. wait: seconds to stay parked while none is missing; None answers at once.
    """

    partition: str
    task: str
    most: int | None = None
    wait: float | None = None


class ClearPartition(Request, frozen=True):
    """Drops a partition and its data; an unknown one is fine."""

    partition: str


class ProductionStatus(Request, frozen=True):
    """Which rows have which of these fields."""

    partition: str
    fields: list[str]


class ConsumptionStatus(Request, frozen=True):
    """Which rows the task has consumed."""

    partition: str
    task: str


class CheckProduction(Request, frozen=True):
    """Whether every row has every one of these fields."""

    partition: str
    fields: list[str]


class CheckConsumption(Request, frozen=True):
    """Whether the task has consumed every row."""

    partition: str
    task: str


class ResetConsumption(Request, frozen=True):
    """Forgets what a task (None: every task) has consumed, and its dealt batches."""

    partition: str
    task: str | None = None


class Seal(Request, frozen=True):
    """No new rows will come (from this producer)."""

    partition: str


class Explain(Request, frozen=True):
    """Why a sample is not handed out, in words."""

    partition: str
    row: int | None = None
    key: str | None = None
    task: str | None = None
    fields: list[str] | None = None


class Status(Request, frozen=True):
    """Progress of every partition by field and task."""


class CloseExtents(Request, frozen=True):
    """These extents of the asking writer will take no more blocks."""

    extents: list[tuple[int, int]]


class RegisterUnit(Request, frozen=True):
    """A storage unit comes up. address: where it listens; arena: the folder of its arena, boot_id: of the arena.

    name: what it is called; it comes in the place of another of its name, whose arena is lost. when: what time it is,
    in words. extents: all that are leased there (i8); None where that is not told. next_extent: the first number that
    was not given to an extent yet: what is newer, writers may have published before this arrives.
    """

    address: str
    arena: str
    boot_id: str = ""
    name: str = ""
    when: str = ""
    extents: bytes | None = None
    next_extent: int | None = None


class Freed(Request, frozen=True):
    """These extents (i8), which the unit was told to free, are not leased there any more."""

    unit: int
    extents: bytes


class WriterGone(Request, frozen=True):
    """A unit proved a writer dead; extents: what it had leased."""

    writer: str
    unit: int
    extents: list[int]


class Moved(Request, frozen=True):
    """What became of a `Move`.

    extent: where the copies lie, closed and of this length and generation; 0 where there was no room for them.
    offsets: i8, of each block that was wanted whole, in order; -1 where it was gone before it was copied.
    repacked: one for each repack, in order, None where its block was gone.
    """

    move: int
    unit: int
    extent: int
    length: int
    generation: int
    offsets: bytes
    repacked: list[NewBlock | None]


class Drain(Request, frozen=True):
    """Wants everything moved off a storage unit, which leases nothing to writers from now on.

    undo: it leases again. wait: seconds to wait until nothing lies there; None answers at once.
    """

    unit: int
    undo: bool = False
    wait: float | None = None


class SpaceShort(Request, frozen=True):
    """A unit's writers that wait for space there, told whenever it changes. freed: how many `Free` the unit has had."""

    unit: int
    writers: list[str]
    freed: int


class Cancel(Request, frozen=True):
    """The asking client no longer waits for its request `sequence`."""

    sequence: int


class BeginCheckpoint(Request, frozen=True):
    """The asking client saves the system as it is now. name: 32 hex digits of its own choice.

    The state is in the file of this name, in the system's folder of state files, when this is answered; and until
    `EndCheckpoint`, or until the client has gone, no space that its values lie in is used again.
    """

    name: str


class EndCheckpoint(Request, frozen=True):
    """The asking client is through with a checkpoint; answered by whether all of it was there until now."""

    name: str


class LoadState(Request, frozen=True):
    """The state in the file of this name, in the system's folder of state files, becomes the system's."""

    name: str


# ---------------------------------------------------------------- requests to a storage unit


class Lease(Request, frozen=True):
    """Wants an extent of at least `nbytes` for the writer whose slot lock is `slot`.

    want: what the writer would like, at least nbytes. wait: seconds to wait for space; None fails at once.
    unit: the number of the unit that is meant, -1 for whichever answers; the same of the requests below.
    """

    slot: int
    nbytes: int
    want: int
    wait: float | None = None
    unit: int = -1


class OpenSlot(Request, frozen=True):
    """A writer registers; the reply names its slot, whose lock file it must hold (`storage.ownership`)."""

    writer: str
    unit: int = -1


class Return(Request, frozen=True):
    """Gives back extents in which nothing was published."""

    slot: int
    extents: list[int]
    unit: int = -1


class UnitStatus(Request, frozen=True):
    """Bytes held, leased and free in the arena."""


class Free(Request, frozen=True):
    """Controller to unit: nothing lives in these extents any more."""

    extents: list[int]


class Repack(Message, frozen=True):
    """Of block `at` of a `Move` only these rows (i4, ascending) and fields are wanted, as a block of their own."""

    at: int
    slots: bytes
    fields: list[str]


class Move(Request, frozen=True):
    """Controller to unit: copy these blocks into an extent of the unit's own, and say with `Moved` where they lie.

    number: of the move. arenas: unit -> folder of its arena, of all units in which the blocks lie. repacks: those
    that are not wanted whole, ascending by `at`.
    """

    number: int
    blocks: Blocks
    arenas: dict[int, str]
    repacks: list[Repack] = []


class Drained(Request, frozen=True):
    """Controller to unit: whether it is being drained, so that it leases nothing to writers."""

    draining: bool


class Refuse(Request, frozen=True):
    """Controller to unit: who waits for space waits in vain. words: why."""

    words: str


# ---------------------------------------------------------------- replies


class Reply(Message, frozen=True, tag=True):
    """Base of what is answered."""


class Failure(Reply, frozen=True):
    """An error of the tree by class name, and its message."""

    kind: str
    message: str


class Done(Reply, frozen=True):
    """Nothing more to say; value for yes/no and short answers."""

    value: Any = None


class UnitInfo(Message, frozen=True):
    """One storage unit: its number, where it listens, the folder of its arena; see `RegisterUnit`."""

    unit: int
    address: str
    arena: str
    boot_id: str = ""
    name: str = ""


class TopologyReply(Reply, frozen=True):
    """The units, and the configuration as JSON text."""

    units: list[UnitInfo]
    config: str


class PublishReply(Reply, frozen=True):
    """rows: i8 global indexes of the targets. tags: merged ones (None: all empty), fields: common and
    sorted; both only for a put by keys. epoch: of the state (see `core.state`)."""

    rows: bytes
    tags: list[dict[str, Any]] | None = None
    fields: list[str] | None = None
    epoch: int = 0


class ClaimReply(Reply, frozen=True):
    """Rows with what a BatchMeta says of them.

    rows i8, produced i1 (None: all 1); tags None where all are empty; shapes: field -> (ndim, i8
    rows x ndim) for fields whose rows have differed. ended: nothing will ever come for this claim.
    version: of a probe, the partition's, which grows with every change in it; -1 where it does not exist.
    held: the rows stay until the task has finished them (`PartitionOptions.free_when`).
    warning: what the asking client's log should say once. epoch: of the state (see `core.state`).
    token: of the lease, 0 without one.
    deliveries: which delivery this is of each row, from 1 (i4); None where it is the first of all.
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


class LookupReply(Reply, frozen=True):
    """Where the rows lie. count: rows found; types and placements cover the same fields."""

    count: int
    types: list[FieldType]
    blocks: Blocks
    placements: list[Placement]


class CutReply(Reply, frozen=True):
    """origin: equal block numbers of equal origins are the same block."""

    origin: str


class StatusReply(Reply, frozen=True):
    """rows i8; matrix i1, rows x columns in the order asked. known: False for an unknown partition or field."""

    known: bool
    rows: bytes = b""
    matrix: bytes = b""


class FieldProgress(Message, frozen=True):
    """A field of a partition: how many live rows have it, its type in words, and how many rows have had it so far.

    lost: live rows whose value was lost with its storage, and not put again.
    """

    name: str
    produced: int
    type: str
    produced_ever: int = 0
    lost: int = 0


class TaskProgress(Message, frozen=True):
    """A task of a partition: live rows consumed, claims waiting and for how long the longest has.

    consumed_ever: rows consumed so far, those cleared since included; rows consumed anew count anew.
    claimed: live rows that were given under a lease and wait for an ack.
    """

    name: str
    consumed: int
    waiting: int
    longest_wait: float
    consumed_ever: int = 0
    claimed: int = 0


class PolicyProgress(Message, frozen=True):
    """Admission to a partition: the policy's version, rows taken in, and how many may be by now (None: any)."""

    version: int
    admitted: int
    limit: int | None


class PartitionProgress(Message, frozen=True):
    """One partition as `tq status` shows it.

    dropped: reason -> samples. freed: rows cleared because the tasks of `free_when` have finished them.
    wanted: task -> (groups wanted, groups missing). waiting_puts: puts and reservations that wait.
    passed: task -> reason -> samples passed over, which the task was not dealt and never will be.
    """

    name: str
    rows: int
    reserved: int
    sealed: bool
    group_size: int | None
    nbytes: int
    fields: list[FieldProgress]
    tasks: list[TaskProgress]
    orphaned_groups: int = 0
    dropped: dict[str, int] = {}
    freed: int = 0
    policy: PolicyProgress | None = None
    wanted: dict[str, tuple[int, int]] = {}
    waiting_puts: int = 0
    passed: dict[str, dict[str, int]] = {}


class SamplerCost(Message, frozen=True):
    """A user's sampler: how often it was asked, and for how long it has held up the controller, in seconds."""

    name: str
    asked: int
    seconds: float
    longest: float


class SystemStatus(Reply, frozen=True):
    """All partitions, counters of the controller, and what users' samplers cost it."""

    partitions: list[PartitionProgress]
    counters: dict[str, float]
    samplers: list[SamplerCost] = []


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


class UnitStatusReply(Reply, frozen=True):
    """Bytes: capacity (most the arena may grow to), held (fallocated), leased, free (held - leased)."""

    capacity: int
    held: int
    leased: int
    free: int


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """A request on its way. acknowledged: replies up to this sequence of the client are not needed again.

    finished: nor are these beyond it, as (first, last) sequences: all that the client has done with while an older
    request waits. A server may overlook them at any time; they come again with every request.
    """

    sequence: int
    acknowledged: int
    body: AnyRequest
    finished: list[tuple[int, int]] = []


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """A reply on its way."""

    sequence: int
    body: AnyReply


AnyRequest = Union[
    Topology, CreatePartition, Reserve, Publish, Claim, Show, RetrieveMeta, RetrieveKeys, Lookup, ListKeys,
    ListPartitions, ClearRows, ClearKeys, ClearPartition, ProductionStatus, ConsumptionStatus, CheckProduction,
    CheckConsumption, ResetConsumption, Seal, Explain, Status, CloseExtents, RegisterUnit, WriterGone, Cancel,
    Lease, OpenSlot, Return, UnitStatus, Free, Drop, Finish, SetPolicyVersion, Want, Wanted,
    SpaceShort, Refuse, Watch, Freed, BeginCheckpoint, EndCheckpoint, LoadState,
    Ack, Nack, Renew, RankGone,
    Move, Moved, Drain, Drained,
]  # fmt: skip
AnyReply = Union[
    Failure, Done, TopologyReply, PublishReply, ClaimReply, LookupReply, StatusReply, SystemStatus, LeaseReply,
    SlotReply, UnitStatusReply, ChangeReply, CutReply,
]  # fmt: skip
