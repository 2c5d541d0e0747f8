"""Where values lie and what they are: blocks, fields, units; and what a partition was made with."""

from __future__ import annotations

import msgspec

from transfer_queue.messages.base import Bytes, Dimensions, ExtentNumber, Message, Natural, Seconds, Small, Unit

MEMORY, DISK = "memory", "disk"
STORE = "store"  # how the tier of an external store is told
"""Tiers of storage units: where their arenas lie."""


NESTED = "nested"
SEPARATOR = "::"
"""Separates the name of a nested TensorDict from the name of a field in it: the field y of x is stored as x::y."""


def parents(name: str) -> list[str]:
    """Return the names of the nested TensorDicts that contain a field of this name, the innermost last."""
    names = name.split(SEPARATOR)
    return [SEPARATOR.join(names[:end]) for end in range(1, len(names))]


class FieldSpec(Message, frozen=True):
    """How one field lies in a block.

    kind: "tensor", "object", or "nested": a TensorDict, whose leaves are fields of their own (`leaf`); such a column
    has no bytes. dtype: torch's name without the prefix ("float32"), "object" for objects and nested.
    ndim: dimensions of one row; an object has 1, its number of encoded bytes; -1 (`layout.MIXED_RANK`): the
    rows of this block differ in rank (ragged, at least two rows), and dims hold for each row its rank followed
    by so many sizes. ragged: the block's dims hold one shape a row; otherwise one shape for all its rows.
    """

    name: str
    kind: str
    dtype: str
    ndim: Dimensions
    ragged: bool


class BlockLocation(Message, frozen=True):
    """Where a block lies; see `NewBlock`."""

    unit: Unit
    extent: ExtentNumber
    offset: Bytes
    generation: Natural
    length: Bytes = 0
    session: str = ""


class NewBlock(Message, frozen=True):
    """A block just written, as its writer publishes it.

    unit, extent, offset, generation: where it lies (`storage.arena.arena`); nbytes: how long it is.
    rows: how many. schema: its fields in layout order. dims: i8 array, for each field in order its row
    shape (ndim numbers), or the shapes of all rows (rows x ndim numbers) where ragged. The byte
    layout follows from these alone (`wire.buffers.block_layout`). length: bytes of the extent, 0 where that is not
    told.
    copies: where else the same bytes lie, one place at most, in another unit. session: of a remote writer, under which
    it leased the extent (`OpenSlot.writer`). parts: the schema of very many fields, some of them in each part, encoded
    (`messages.descriptors`), so that whoever receives it can decode it bit by bit; `schema` is then empty.
    """

    unit: Unit
    extent: ExtentNumber
    offset: Bytes
    generation: Natural
    nbytes: Bytes
    rows: Small
    schema: list[FieldSpec]
    dims: bytes
    length: Bytes = 0
    copies: list[BlockLocation] = []
    session: str = ""
    parts: list[bytes] = []


class FieldType(Message, frozen=True):
    """What is known of a field over all its live rows.

    shape: the row shape while all rows agree, else None. differs: bit d set once two live rows
    differed in row dimension d. mixed_rank: rows of different rank have been seen.
    dtypes: all that rows may have, `dtype` first; empty while that is the only one.
    """

    name: str
    kind: str
    dtype: str
    ndim: int
    shape: list[int] | None
    differs: int
    mixed_rank: bool
    dtypes: list[str] = []


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


class UnitInfo(Message, frozen=True):
    """One storage unit: its number, where it listens, the folder of its arena; see `RegisterUnit`."""

    unit: Unit
    address: str
    arena: str
    boot_id: str = ""
    name: str = ""
    node: str = ""
    remote: str = ""
    tier: str = MEMORY
    capacity: Bytes = 0
    store: str = ""

    @property
    def told_tier(self) -> str:
        """Where its blocks lie, as people are told: `MEMORY`, `DISK` or `STORE`."""
        return STORE if self.store else self.tier


class PartitionOptions(Message, frozen=True):
    """What a partition was made with; it never changes.

    group_size: samples of each declared group. producers: how many seals seal it.
    free_when: tasks; a row that all of them have finished is cleared. replicas: how many readers of each row of a
    task must finish it. max_staleness, rows_per_version: admission of new rows (`core.puts.flow_control`).
    keep_rows, keep_bytes, keep_seconds: the oldest rows beyond these are dropped (`core.puts.retention`).
    max_deliveries: rows of leases that ended so often without an ack are set aside; 0: never, None: the system's.
    """

    group_size: Natural | None = None
    producers: Natural = 1
    free_when: list[str] = []
    replicas: Natural = 1
    max_staleness: Natural | None = None
    rows_per_version: Natural | None = None
    keep_rows: Natural | None = None
    keep_bytes: Natural | None = None
    keep_seconds: Seconds | None = None
    max_deliveries: Natural | None = None


WIDE = 2048
"""Fields from which on a schema is sent in parts."""
PART = 512
"""Fields of a part, which is decoded in a fraction of a millisecond."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[FieldSpec]).decode


def schema_parts(schema: list[FieldSpec]) -> list[bytes]:
    """Return the parts of a schema for `NewBlock.parts`; an empty list if it has fewer than `WIDE` fields."""
    if len(schema) < WIDE:
        return []
    return [_encode(schema[start : start + PART]) for start in range(0, len(schema), PART)]


def fields_of_part(part: bytes) -> list[FieldSpec]:
    """Return the fields of a part. Raises one of `messages.UNREADABLE` if it is not a part of a schema."""
    return _decode(part)


MOVER = ""
"""The writer, by name, of extents into which storage units themselves have moved blocks; no client's name."""
