"""The records: all that ever changes the controller's state, in the order in which it happened.

`core.state.apply` is the only module that reads them. A record holds outcomes, never reasons: replaying
one calls no sampler, looks at no clock and checks no limit. Rows are named by global index (i8 bytes).
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

from transfer_queue.messages.claims import Claim
from transfer_queue.messages.descriptors import MEMORY, NewBlock, PartitionOptions
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.partitions import TakeGroupDemand
from transfer_queue.messages.puts import Publish, Reserve
from transfer_queue.messages.queries import Watch

LARGEST = (1 << 63) - 1  # int that a record or reply can carry


class Record(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of all records."""


class PartitionMade(Record, frozen=True):
    """A partition begins."""

    partition: str
    options: PartitionOptions


class RowsReserved(Record, frozen=True):
    """Rows begin: first `taken` pre-allocated ones, then `count` new ones from `first_index` on.

    keys, groups: one entry for each of the taken + count rows, None where rows have none.
    pre_allocated: the new rows wait to be taken. client: who reserved the rows.
    """

    partition: str
    first_index: int
    count: int
    taken: int = 0
    keys: list[str] | None = None
    groups: list[str] | None = None
    pre_allocated: bool = False
    client: str = ""


class Published(Record, frozen=True):
    """Values of these rows became visible as block number `block_number` (0: tags or groups alone)."""

    partition: str
    rows: bytes
    writer: str
    block_number: int = 0
    block: NewBlock | None = None
    tags: list[dict[str, Any] | None] | None = None
    replace_tags: bool = False
    groups: list[str] | None = None


class RowsPut(Record, frozen=True):
    """New rows begin with all that their put brings: as `RowsReserved` and `Published`, of which it is in one.

    They are `count` rows from `first_index` on, none of them pre-allocated. client: who has put them. keys, groups,
    tags: one entry for each row, None where rows have none; tags without entries to remove.
    """

    partition: str
    client: str
    first_index: int
    count: int
    keys: list[str] | None = None
    groups: list[str] | None = None
    tags: list[dict[str, Any] | None] | None = None
    block_number: int = 0
    block: NewBlock | None = None


class ExtentsClosed(Record, frozen=True):
    """These extents take no more blocks. lengths: of each, where it is shorter than it was."""

    extents: list[tuple[int, int]]
    lengths: list[int] = []


class Share(msgspec.Struct, array_like=True, frozen=True):
    """What one data-parallel rank gets of a deal (i8 global indexes)."""

    dp_rank: int
    rows: bytes


class RowsLeased(Record, frozen=True, tag="Leased"):
    """A client was given claimed rows for a while. batch: dp_rank and batch_index of a kept one. See `leases.Lease`."""

    partition: str
    task: str
    token: int
    client: str
    rows: bytes
    seconds: float
    batch: tuple[int, int] | None
    replicas: int
    unit: int


class Dealt(Record, frozen=True):
    """A sampler's outcome.

    batch_index: None for a deal that is not kept; else the shares are kept under (task, dp_rank, batch_index) with the
    batch size they were asked with. claimed: what is given is not consumed, but claimed until it is acknowledged; of
    `consumed` what is not given is consumed. lease: of who asked.
    """

    partition: str
    task: str
    batch_index: int | None
    batch_size: int
    shares: list[Share]
    consumed: bytes
    claimed: bool = False
    lease: RowsLeased | None = None


class LeaseAcked(Record, frozen=True):
    """A lease's rows are acknowledged; `consumed`: those with which it is enough, for any lease of their batch.

    token 0: rows of a kept batch were given without a lease, and so are consumed. freed: as in `RowsFinished`.
    """

    partition: str
    task: str
    token: int
    rows: bytes
    consumed: bytes
    freed: bytes = b""


class LeaseEnded(Record, frozen=True):
    """Rows leave a lease without an ack. reason: "expired" or "nacked".

    counted: those of which it was a delivery that nobody acknowledged. returned: those that are ready again.
    """

    partition: str
    task: str
    token: int
    rows: bytes
    counted: bytes
    returned: bytes
    reason: str


class RankLeft(Record, frozen=True):
    """A rank is gone: its leases of kept batches end, and what it has not acknowledged of these is ready again.

    A batch of which this is true of any row is kept no more. counted: as in `LeaseEnded`.
    """

    partition: str
    task: str
    dp_rank: int
    tokens: list[int]
    rows: bytes
    counted: bytes


class PassedOver(Record, frozen=True):
    """A task shall never be dealt these rows, and is through with them. reason: in a word, for counts.

    freed: those that end with it, as in `RowsFinished`.
    """

    partition: str
    task: str
    rows: bytes
    reason: str
    freed: bytes = b""


class RowsCleared(Record, frozen=True):
    """Rows end, with their keys, tags and values."""

    partition: str
    rows: bytes


class RowsDropped(Record, frozen=True):
    """Rows end like cleared ones, and are counted under a reason.

    unborn: members of dropped groups that are still to come, by group id; they are dropped when they do.
    """

    partition: str
    rows: bytes
    reason: str
    unborn: list[tuple[str, int]] = []


class RowsHeld(Record, frozen=True, tag="Handed"):
    """A client was given rows for a task in a partition with `free_when`, and holds them until they are finished."""

    partition: str
    task: str
    client: str
    dp_rank: int
    rows: bytes


class HoldInherited(Record, frozen=True, tag="Inherited"):
    """What a client that is not there any more holds for a rank is `heir`'s, who goes on in its place."""

    partition: str
    task: str
    client: str
    dp_rank: int
    heir: str


class RowsFinished(Record, frozen=True, tag="Finished"):
    """A client holds these rows no longer: the task is through with them. freed: those that end with it."""

    partition: str
    task: str
    client: str
    rows: bytes
    freed: bytes


class AgesRecorded(Record, frozen=True, tag="Aged"):
    """All rows reserved so far were there at this time. time: on the controller's clock."""

    partition: str
    time: float


class PolicyAdvanced(Record, frozen=True):
    """The policy has reached a version."""

    partition: str
    version: int


class GroupsWanted(Record, frozen=True):
    """A task wants so many groups to be there or on their way; 0 takes the wish back."""

    partition: str
    task: str
    groups: int


class GroupsTaken(Record, frozen=True):
    """A producer has promised a task so many rows of new groups; 0 takes all its promises back."""

    partition: str
    task: str
    client: str
    rows: int


class PartitionDropped(Record, frozen=True):
    """A partition ends, with all its rows."""

    partition: str


class ConsumptionForgotten(Record, frozen=True):
    """A task (None: every task) has consumed nothing, and its dealt batches are forgotten."""

    partition: str
    task: str | None


class SealCounted(Record, frozen=True):
    """One of the partition's producers has sealed it."""

    partition: str


class RequestParked(Record, frozen=True, tag="Parked"):
    """A request waits. deadline: on the controller's clock."""

    client: str
    sequence: int
    since: float
    deadline: float
    request: Union[Claim, Publish, Reserve, TakeGroupDemand, Watch]


class Unparked(Record, frozen=True):
    """It waits no longer: met, timed out or cancelled."""

    client: str
    sequence: int


class ReplySent(Record, frozen=True, tag="Replied"):
    """The answer to a mutation, kept until the client has it; those up to `acknowledged` and in `finished` go."""

    client: str
    sequence: int
    acknowledged: int
    reply: AnyReply
    finished: list[tuple[int, int]] = []


class RepliesSent(Record, frozen=True, tag="Answered"):
    """Answers to requests that were met at once, kept like those in `ReplySent`: client, sequence, reply."""

    answers: list[tuple[str, int, AnyReply]]


class ClientForgotten(Record, frozen=True):
    """A client that left long ago: its kept replies go."""

    client: str


class UnitRegistered(Record, frozen=True):
    """A storage unit came up under this number. boot_id: of its arena. name: what it is called, whatever its arena.

    node, remote, tier, capacity, store: see `RegisterUnit`.
    """

    unit: int
    address: str
    arena: str
    boot_id: str = ""
    name: str = ""
    node: str = ""
    remote: str = ""
    tier: str = MEMORY
    capacity: int = 0
    store: str = ""


class UnitLost(Record, frozen=True):
    """A storage unit will not come back; values that lay there alone are lost. when: in words."""

    unit: int
    when: str = ""


class ExtentsLost(Record, frozen=True):
    """These extents of a unit (i8) are gone; values that lay there alone are lost. when: in words."""

    unit: int
    extents: bytes
    when: str = ""


class ExtentsFreed(Record, frozen=True):
    """A unit has freed these extents (i8), as it was told."""

    unit: int
    extents: bytes


class WriterFenced(Record, frozen=True):
    """A writer is proven dead: it publishes no more, and its extents on this unit are closed."""

    writer: str
    unit: int
    extents: list[int]


class StateLoaded(Record, frozen=True):
    """The state of a checkpoint replaced the state; see `core.state.restore`.

    file: the name of the journal's file that contains the loaded state (`journal.loaded_states`). A replay first reads
    it into `State.prepared`. "": `state` contains it (`core.columns.tree_codec`), as in records of older releases, or
    there is no journal.
    time: on the controller's clock.
    """

    state: bytes
    time: float
    file: str = ""


class RowsRepacked(msgspec.Struct, array_like=True, frozen=True):
    """Rows of a partition that lie in blocks of their own now, numbered from `first_block` on.

    For each row, block by block: its global index (rows, i8), the block that it was in (sources, i8) and its row in
    there (slots, i4). Of a field the row has moved if it still lay there.
    """

    partition: str
    first_block: int
    blocks: list[NewBlock]
    rows: bytes
    sources: bytes
    slots: bytes


class BlocksMoved(Record, frozen=True, tag="Moved"):
    """Blocks were copied into an extent of `unit`, which takes no more.

    blocks, offsets (i8): those that are needed there instead of in unit `left` (-1: as well as where they are),
    unless they have gone since. repacked: rows that lie in new blocks instead.
    """

    unit: int
    extent: int
    length: int
    generation: int
    left: int
    blocks: bytes
    offsets: bytes
    repacked: list[RowsRepacked] = []


class UnitDraining(Record, frozen=True):
    """Everything is to be moved off a unit, or no longer."""

    unit: int
    draining: bool


AnyRecord = Union[
    PartitionMade, RowsReserved, Published, ExtentsClosed, Dealt, RowsCleared, PartitionDropped, ConsumptionForgotten,
    SealCounted, RequestParked, Unparked, ReplySent, ClientForgotten, UnitRegistered, WriterFenced, RowsDropped,
    RowsHeld, RowsFinished, AgesRecorded, PolicyAdvanced, GroupsWanted, GroupsTaken, PassedOver, RowsLeased,
    LeaseAcked, LeaseEnded, RankLeft, BlocksMoved, UnitDraining, UnitLost, ExtentsLost, ExtentsFreed, StateLoaded,
    HoldInherited, RowsPut, RepliesSent,
]  # fmt: skip
