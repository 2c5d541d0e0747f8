"""The records: the only changes of the controller's state, in the order in which they happen.

`core.appliers` applies them. A record contains outcomes and not reasons: a replay calls no sampler, reads no
clock and checks no limit. Rows are named by global index (i8 bytes).
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, Union

import msgspec
import numpy as np

from transfer_queue.core.columns.schema import Count
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.descriptors import MEMORY, NewBlock, PartitionOptions
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.locks import TakeLock
from transfer_queue.messages.partitions import AwaitDone, TakeGroupDemand
from transfer_queue.messages.puts import Publish, Reserve
from transfer_queue.messages.queries import Watch
from transfer_queue.messages.reports.timeline import Introduce
from transfer_queue.messages.tag_table import SentTags

Parkable = Union[Claim, Publish, Reserve, TakeGroupDemand, TakeLock, AwaitDone, Watch]
"""The requests that may wait."""
LARGEST = (1 << 63) - 1  # the largest int that a record or a reply can contain


class Wakes(Enum):
    """Which of the requests that wait for a partition a record of the partition may meet."""

    NONE = "none of them"
    ALL = "any of them"
    ALL_IF_FREED = "any of them, if rows were removed with it; otherwise none"
    ROWS = "those for which rows became ready; all of a sealed partition if rows joined groups"
    SHARES = "the claims for the batches that were dealt"
    SPACE = "the puts that wait for space"
    TASK = "those of the record's task; all if rows were removed with it"
    LOCKS = "those that wait for a lock"
    WORK = "the producers that wait for group demand, and those who wait until all rows are done"


class Record(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of all records."""

    wakes: ClassVar[Wakes] = Wakes.ALL
    by_clock: ClassVar[str] = ""
    """The attribute that is a time by the controller's clock, which a controller on another machine converts."""


class PartitionMade(Record, frozen=True):
    """A partition is created."""

    partition: str
    options: PartitionOptions


class WriterPart(msgspec.Struct, array_like=True, frozen=True):
    """What one client puts: rows, which follow those of the part before, and the blocks with their values."""

    client: str
    count: int
    """The number of its rows."""
    blocks: list[NewBlock] = []
    """No two of them have the same field."""


class SharedField(msgspec.Struct, array_like=True, frozen=True):
    """The values of one field that a put shares with earlier puts."""

    name: str
    targets: bytes
    """The places among the rows of the put, i4, of those that get a value that is there already."""
    blocks: bytes
    """The block of each of these values, i8."""
    slots: bytes
    """The row of the block, i4."""


class NotedField(msgspec.Struct, array_like=True, frozen=True):
    """The digests of one field in a block."""

    name: str
    block: int
    """The number of the block."""
    digests: bytes
    """16 bytes each."""
    slots: bytes
    """The row of the block for each digest, i4."""


class SamplesPut(Record, frozen=True):
    """Rows are added, or get values, tags, keys or groups: a reservation, a put, or puts of several clients.

    First `taken` pre-allocated rows are taken, then `count` new rows are added.
    """

    wakes: ClassVar[Wakes] = Wakes.ROWS

    partition: str
    puts: list[WriterPart]
    """Several puts have one block each, with equal schemas, or none; all of their rows are new, or none is."""
    first_index: int = 0
    """Global index of the first new row."""
    count: int = 0
    keys: list[str] | None = None
    """One for each of the taken + count rows; None if they have no keys."""
    groups: list[str | None] | None = None
    """The group id of each row; None if the rows join no groups. A row without one is dropped with this event."""
    tags: SentTags | None = None
    """The tags that are merged into those of the rows."""
    first_block: int = 0
    """The number of the first block; those of the others follow."""
    rows: bytes | None = None
    """The global index of each row, new or not; None if the rows are exactly those that are taken and added."""
    taken: int = 0
    pre_allocated: bool = False
    """Whether the new rows wait to be taken by later puts."""
    replace_tags: bool = False
    """Whether the tags replace those of the rows instead."""
    shared: list[SharedField] = []
    """Values of earlier puts, which the blocks of this one do not have."""
    noted: list[NotedField] = []
    """The digests of values that are in the blocks."""


class ExtentsClosed(Record, frozen=True):
    """These extents, as (unit, extent), receive no more blocks."""

    extents: list[tuple[int, int]]
    lengths: list[int] = []
    """The length of each extent, which is applied if it is shorter than before."""


class Share(msgspec.Struct, array_like=True, frozen=True):
    """The rows that one data-parallel rank gets in a deal (i8 global indexes)."""

    dp_rank: int
    rows: bytes


class RowsLeased(Record, frozen=True, tag="Leased"):
    """A client gets claimed rows under a lease. See `leases.RowLease`."""

    wakes: ClassVar[Wakes] = Wakes.NONE

    partition: str
    task: str
    token: int
    client: str
    rows: bytes
    seconds: float
    batch: tuple[int, int] | None
    """(dp_rank, batch_index) of the dealt batch that contains the rows; None if it is not kept."""
    replicas: int
    unit: int


class UnseenBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The rows of one claim, until its client has handed them over. See `leases.UnseenBatches`."""

    token: Count
    task: str
    client: str
    rows: bytes
    """Global indexes, i8, in the order in which they were dealt. Some may be cleared."""
    policy_version: int
    """The policy version of the partition when the rows were dealt."""

    @property
    def indexes(self) -> np.ndarray:
        """The rows as an array."""
        return np.frombuffer(self.rows, "<i8")


class Dealt(Record, frozen=True):
    """The outcome of a sampler."""

    wakes: ClassVar[Wakes] = Wakes.SHARES

    partition: str
    task: str
    batch_index: int | None
    """None: the deal is not kept. Otherwise the shares are kept under (task, dp_rank, batch_index)."""
    batch_size: int
    """The batch size that the claim asked for; kept with the shares."""
    shares: list[Share]
    consumed: bytes
    """All rows that the sampler consumed (i8), which may be more than the rows of the shares."""
    claimed: bool = False
    """Whether the rows of the shares are claimed until they are acknowledged, instead of consumed."""
    lease: RowsLeased | None = None
    """The lease of the client whose claim was dealt."""
    leases: list[RowsLeased] = []
    """The leases of the clients whose claims were dealt together."""
    unasked: list[int] = []
    """The ranks of the shares that have never asked for a batch of the task."""
    unseen: list[UnseenBatch] = []
    """The consumed rows by the clients that must hand them over: one for each claim that was dealt."""


class LeaseAcked(Record, frozen=True):
    """Rows of a lease are acknowledged."""

    wakes: ClassVar[Wakes] = Wakes.TASK

    partition: str
    task: str
    token: int
    """0: rows of a dealt batch were returned to a client without a lease, and are thereby consumed."""
    rows: bytes
    consumed: bytes
    """The rows that have enough acknowledgements; they leave all leases of their batch."""
    freed: bytes = b""
    """As in `RowsFinished`."""


class LeaseEnded(Record, frozen=True):
    """Rows leave a lease without an acknowledgement."""

    wakes: ClassVar[Wakes] = Wakes.TASK

    partition: str
    task: str
    token: int
    rows: bytes
    counted: bytes
    """The rows whose delivery count increases."""
    returned: bytes
    """The rows that become ready again."""
    reason: str
    """`"expired"` or `"nacked"`; of a batch that was not handed over also `"left"` or `"gone"`, of its client."""


class HandedOver(Record, frozen=True):
    """A batch was handed over to its consumer. See `leases.UnseenBatches`."""

    wakes: ClassVar[Wakes] = Wakes.NONE

    partition: str
    token: int


class RankLeft(Record, frozen=True):
    """A rank is gone: its leases of dealt batches end, and its unacknowledged rows become ready again.

    A batch that contains such rows is not kept any longer.
    """

    wakes: ClassVar[Wakes] = Wakes.TASK

    partition: str
    task: str
    dp_rank: int
    tokens: list[int]
    rows: bytes
    counted: bytes
    """As in `LeaseEnded`."""


class PassedOver(Record, frozen=True):
    """A task skips these rows: it is never dealt them, and counts as having finished them."""

    wakes: ClassVar[Wakes] = Wakes.TASK

    partition: str
    task: str
    rows: bytes
    reason: str
    """A short text under which they are counted."""
    freed: bytes = b""
    """As in `RowsFinished`."""


class RowsCleared(Record, frozen=True):
    """Rows are removed with their keys, tags and values."""

    wakes: ClassVar[Wakes] = Wakes.SPACE

    partition: str
    rows: bytes


class RowsDropped(Record, frozen=True):
    """Rows are removed like cleared ones, and are counted under a reason."""

    wakes: ClassVar[Wakes] = Wakes.SPACE

    partition: str
    rows: bytes
    reason: str
    unborn: list[tuple[str, int]] = []
    """(group id, members) of dropped groups: these members are not put yet, and are dropped when they are put."""
    withdrawn: bool = False
    """Whether the rows are removed as if they had never been put: they are not counted, and leave their groups."""


class RowsHeld(Record, frozen=True, tag="Handed"):
    """A client got rows for a task in a partition with `free_when`, and refers to them until it finishes them."""

    wakes: ClassVar[Wakes] = Wakes.NONE

    partition: str
    task: str
    client: str
    dp_rank: int
    rows: bytes


class HoldInherited(Record, frozen=True, tag="Inherited"):
    """A client takes over the references to rows that a client which is gone has for a rank."""

    wakes: ClassVar[Wakes] = Wakes.NONE

    partition: str
    task: str
    client: str
    """The client that is gone."""
    dp_rank: int
    heir: str
    """The client that continues in its place."""


class RowsFinished(Record, frozen=True, tag="Finished"):
    """A client does not refer to these rows any longer, because the task has finished them."""

    wakes: ClassVar[Wakes] = Wakes.ALL_IF_FREED

    partition: str
    task: str
    client: str
    rows: bytes
    freed: bytes
    """The rows that are cleared with this, because all tasks of `free_when` have finished them (i8)."""


class AgesRecorded(Record, frozen=True, tag="Aged"):
    """All rows that are reserved so far existed at this time."""

    wakes: ClassVar[Wakes] = Wakes.NONE
    by_clock: ClassVar[str] = "time"

    partition: str
    time: float
    """By the controller's clock."""


class PolicyAdvanced(Record, frozen=True):
    """Training has reached a policy version."""

    partition: str
    version: int


class GroupsWanted(Record, frozen=True):
    """A task sets its group demand: the number of groups that should exist or be in production; 0 removes it."""

    partition: str
    task: str
    groups: int


class GroupsTaken(Record, frozen=True):
    """A producer promises a task this number of rows of new groups; 0 withdraws all its promises."""

    partition: str
    task: str
    client: str
    rows: int


class PartitionDropped(Record, frozen=True):
    """A partition is removed with all its rows."""

    partition: str


class ConsumptionForgotten(Record, frozen=True):
    """The consumption of a task (None: of every task) is reset, and its dealt batches are forgotten."""

    partition: str
    task: str | None


class SealCounted(Record, frozen=True):
    """One of the producers of the partition has sealed it."""

    partition: str


class RequestParked(Record, frozen=True, tag="Parked"):
    """A request waits."""

    client: str
    sequence: int
    since: float
    """When it began to wait, by the controller's clock."""
    deadline: float
    """By the controller's clock."""
    request: Parkable


class Unparked(Record, frozen=True):
    """A request does not wait any longer: it was answered, timed out or was cancelled."""

    client: str
    sequence: int


class ReplySent(Record, frozen=True, tag="Replied"):
    """The reply to a mutation, which is kept until the client has received it."""

    client: str
    sequence: int
    acknowledged: int
    """The client needs no reply up to this sequence number; these are removed from the cache."""
    reply: AnyReply
    finished: list[tuple[int, int]] = []
    """Ranges (first, last) of later sequence numbers whose replies it does not need either."""


class RepliesSent(Record, frozen=True, tag="Answered"):
    """Replies to requests that were answered at once, kept like those of `ReplySent`."""

    answers: list[tuple[str, int, AnyReply]]
    """(client, sequence, reply) of each."""


class ClientIntroduced(Record, frozen=True):
    """A client has reported its task and rank."""

    client: str
    introduction: Introduce


class SamplerRegistered(Record, frozen=True):
    """A task has a built-in sampler of its own from now on."""

    wakes: ClassVar[Wakes] = Wakes.NONE

    task: str
    sampler: str
    """The name of the class."""
    arguments: str
    """All arguments of the class, as JSON."""


class RankAsked(Record, frozen=True):
    """A rank for which a round holds batches has asked for one for the first time."""

    wakes: ClassVar[Wakes] = Wakes.NONE

    partition: str
    task: str
    dp_rank: int


class ClientForgotten(Record, frozen=True):
    """A client is gone for long enough that its cached replies are removed."""

    client: str


class LockGranted(Record, frozen=True):
    """A client gets a lock of keys. See `leases.KeyLock`."""

    wakes: ClassVar[Wakes] = Wakes.NONE
    by_clock: ClassVar[str] = "since"

    partition: str
    token: int
    keys: list[str]
    client: str
    seconds: float
    since: float
    """By the controller's clock."""


class LockEnded(Record, frozen=True):
    """A lock of keys is not in force any more."""

    wakes: ClassVar[Wakes] = Wakes.LOCKS

    partition: str
    token: int
    reason: str
    """`"released"`, `"expired"` or `"client gone"`."""


class UnitRegistered(Record, frozen=True):
    """A storage unit has started. For `node`, `remote`, `tier`, `capacity` and `store` see `RegisterUnit`."""

    unit: int
    address: str
    arena: str
    boot_id: str = ""
    """Of the arena."""
    name: str = ""
    """Identifies the unit, whatever its arena is."""
    node: str = ""
    remote: str = ""
    tier: str = MEMORY
    capacity: int = 0
    store: str = ""


class UnitLost(Record, frozen=True):
    """A storage unit does not come back; values that have no replica on another unit are lost."""

    unit: int
    when: str = ""
    """The time, as text."""


class ExtentsLost(Record, frozen=True):
    """These extents of a unit (i8) are gone; values that have no replica elsewhere are lost."""

    unit: int
    extents: bytes
    when: str = ""
    """The time, as text."""


class ExtentsFreed(Record, frozen=True):
    """A unit has freed these extents (i8), as the controller ordered."""

    unit: int
    extents: bytes


class WriterFenced(Record, frozen=True):
    """A writer is proven dead: it cannot publish any more, and its extents on this unit are closed."""

    writer: str
    unit: int
    extents: list[int]


class StateLoaded(Record, frozen=True):
    """The state of a checkpoint replaced the state; see `core.state.restore`."""

    by_clock: ClassVar[str] = "time"

    state: bytes
    """Empty: the state is in a file."""
    time: float
    """By the controller's clock."""
    file: str = ""
    """The name of the journal's file that contains the loaded state (`journal.state_file`); "" without a journal.

    A replay reads this file into `State.prepared` before it applies the record.
    """


class StateMerged(StateLoaded, frozen=True):
    """The partitions of a checkpoint were added to the state; see `core.state.restore`."""


class RowsRepacked(msgspec.Struct, array_like=True, frozen=True):
    """Rows of a partition that were copied into new blocks, numbered from `first_block` on.

    A field of a row has moved only if its value was still in the source block at that moment. `NewBlock.slots` has the
    row of the new block for each of its rows here; None: they are in this order.
    """

    partition: str
    first_block: int
    blocks: list[NewBlock]
    rows: bytes
    """The global index of each row (i8), block by block."""
    sources: bytes
    """The block that each row was in (i8)."""
    slots: bytes
    """The row in that source block (i4)."""


class BlocksMoved(Record, frozen=True, tag="Moved"):
    """Blocks were copied into an extent of `unit`, which receives no more blocks."""

    unit: int
    extent: int
    length: int
    generation: int
    left: int
    """The unit that they leave; -1 if the copies are additional replicas."""
    blocks: bytes
    """Their numbers (i8). Blocks that are not needed any more stay as they are."""
    offsets: bytes
    """Their offsets in the extent (i8)."""
    repacked: list[RowsRepacked] = []
    """Rows that were copied into new blocks instead."""


class UnitDraining(Record, frozen=True):
    """A unit begins or stops being drained."""

    unit: int
    draining: bool


class RowsDone(Record, frozen=True):
    """Clients have reported this number of rows as done."""

    wakes: ClassVar[Wakes] = Wakes.WORK

    partition: str
    count: int


AnyRecord = Record
"""A record that has an applier (`registry.applies`). A feature may declare its records in a module of its own."""
