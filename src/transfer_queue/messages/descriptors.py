"""Descriptors in messages: fields, blocks, storage units, and the options of a partition."""

from __future__ import annotations

from transfer_queue.messages.base import Begin, Bytes, Dimensions, ExtentNumber, Message, Natural, Seconds, Small, Unit

MEMORY, DISK = "memory", "disk"
"""The tiers of storage units with an arena."""
MIRROR = "mirror"
"""The tier of a storage unit on disk that has a copy of every block (`core.units.mirror_writer`)."""
STORE = "store"
"""The tier that reports name for a unit with an external store."""


NESTED = "nested"
SEPARATOR = "::"
"""Separates the name of a nested TensorDict from the name of a field in it: the field y of x is stored as x::y."""


def parents(name: str) -> list[str]:
    """Return the names of the nested TensorDicts that contain a field of this name, the innermost last."""
    names = name.split(SEPARATOR)
    return [SEPARATOR.join(names[:end]) for end in range(1, len(names))]


class FieldSpec(Message, frozen=True):
    """The layout of one field in a block."""

    name: str
    kind: str
    """"tensor", "object", or "nested": a TensorDict, whose leaves are fields of their own; its column has no bytes."""
    dtype: str
    """The name of the torch dtype without prefix ("float32"); "object" for objects and nested."""
    ndim: Dimensions
    """The number of dimensions of one row. An object has 1: its number of encoded bytes.

    -1 (`layout.MIXED_RANK`) if the rows of this block differ in rank. The field is then ragged, the block has at least
    two rows, and `NewBlock.dims` has for each row its rank and then its sizes.
    """
    ragged: bool
    """Whether the block has a shape for each row; otherwise all its rows have one shape."""


class BlockLocation(Message, frozen=True):
    """Where a block is. `NewBlock` describes the attributes."""

    unit: Unit
    extent: ExtentNumber
    offset: Bytes
    generation: Natural
    length: Bytes = 0
    session: str = ""
    begin: Begin = -1
    proof: Natural = 0


class NewBlock(Message, frozen=True):
    """A block that its writer has written and publishes."""

    unit: Unit
    extent: ExtentNumber
    offset: Bytes
    """The offset in the arena (`storage.arena.arena`)."""
    generation: Natural
    nbytes: Bytes
    rows: Small
    schema: list[FieldSpec]
    """The fields in the order of the layout."""
    dims: bytes
    """For each field its row shape (ndim numbers), or if it is ragged the shapes of all rows (rows x ndim numbers), i8.

    `wire.buffers.block_layout` computes the layout of the bytes from these columns alone.
    """
    length: Bytes = 0
    """The length of the extent in bytes; 0 if it is not known."""
    copies: list[BlockLocation] = []
    """The location of a copy of the block in another unit: at most one."""
    session: str = ""
    """For a remote writer: the session under which it leased the extent (`OpenSlot.writer`)."""
    parts: list[bytes] = []
    """The encoded parts of a schema with very many fields; `schema` is then empty.

    Only records of earlier releases have parts (`core.earlier`). A put with parts is refused.
    """
    slots: bytes | None = None
    """The row of the block that has the value of each target of the put, i4; None: target k is in row k.

    With slots, several targets may share a row, so the block may have fewer rows than the put has targets. -1: the
    block does not have the value of the target; `EqualField.known` says which values these are.
    """
    begin: Begin = -1
    """The offset of the first byte of the extent; -1 if it is not known."""
    proof: Natural = 0
    """The proof of the lease of the extent (`messages.storage.lease_proof`)."""


class EqualField(Message, frozen=True):
    """The digests of the values of a field in one put, for a field of `dedup.fields`."""

    name: str
    digests: bytes
    """The distinct digests of the put, `DIGEST` bytes each."""
    numbers: bytes
    """For each target of the put the position of its digest, i4; -1 for a value that was not hashed."""
    known: bytes
    """For each digest 1 if the partition has its value already, so that no block of the put has it; otherwise 0."""


DIGEST = 16
"""The length of a digest in bytes."""


class FieldType(Message, frozen=True):
    """The type of a field over all its live rows."""

    name: str
    kind: str
    dtype: str
    ndim: int
    shape: list[int] | None
    """The shape of a row while all rows have the same; otherwise None."""
    differs: int
    """Bit d is set if two live rows have differed in row dimension d."""
    mixed_rank: bool
    """Whether rows have differed in rank."""
    dtypes: list[str] = []
    """All dtypes that rows may have, `dtype` first; empty while there is only one."""


class Blocks(Message, frozen=True):
    """The blocks that a reply refers to, as columns of equal length."""

    unit: bytes
    """i4."""
    offset: bytes
    """i8."""
    generation: bytes
    """i8."""
    nbytes: bytes
    """i8."""
    rows: bytes
    """i4."""
    schema: bytes
    """Positions in `schemas`, i4."""
    dims: bytes
    """Positions in `dims_values`, i4."""
    schemas: list[list[FieldSpec]]
    dims_values: list[bytes]


class Placement(Message, frozen=True):
    """Where the rows of some fields are: for each row its block and its position there."""

    fields: list[str]
    block: bytes
    """The position of the block in the reply, i4."""
    slot: bytes
    """The row in the block, i4."""


class UnitInfo(Message, frozen=True):
    """One storage unit. `RegisterUnit` describes the attributes."""

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
    def report_tier(self) -> str:
        """The tier of its blocks for reports: `MEMORY`, `DISK`, `MIRROR` or `STORE`."""
        return STORE if self.store else self.tier


class PartitionOptions(Message, frozen=True):
    """The options with which a partition was created. They never change."""

    group_size: Natural | None = None
    """The number of samples of each declared group."""
    producers: Natural = 1
    """The number of `Seal` requests that seal the partition."""
    free_when: list[str] = []
    """Tasks. A row is cleared when all of them have finished it."""
    replicas: Natural = 1
    """The number of rank replicas of a task that must finish each row."""
    max_staleness: Natural | None = None
    """See `core.puts.limits`."""
    rows_per_version: Natural | None = None
    """See `core.puts.limits`."""
    keep_rows: Natural | None = None
    """The number of rows beyond which the oldest are dropped (`core.puts.partitions`)."""
    keep_bytes: Natural | None = None
    """The number of bytes beyond which the oldest rows are dropped."""
    keep_seconds: Seconds | None = None
    """The age from which rows are dropped."""
    max_deliveries: Natural | None = None
    """The number of deliveries without an ack after which a row is skipped; 0: never; None: the system's number."""
    max_rows: Natural | None = None
    """The largest number of rows that the tasks have not consumed (`core.puts.limits`)."""
    order: str = ""
    """One of `ORDERS`, in which all tasks get the rows one by one; "": the system's sampler deals them."""
    trained_by: str = ""
    """The task that finishes rows for `max_staleness`; "": those of `free_when`, or all (`core.puts.limits`)."""


ORDERS = ("fifo", "lifo", "priority")
"""The orders of a partition: by arrival, the newest first, or by the tag "priority", the highest first."""


MOVER = ""
"""The name of the writer of extents into which storage units have moved blocks. No client has this name."""
