"""Requests of clients to a storage unit: space in extents, bytes of blocks."""

from __future__ import annotations

from transfer_queue.messages.base import (
    AnyUnit,
    Bytes,
    ExtentNumber,
    Reply,
    Request,
    Seconds,
    Small,
    Unit,
)
from transfer_queue.messages.descriptors import MEMORY


class ExtentLeaseReply(Reply, frozen=True, tag="LeaseReply"):
    """extent: its number, never used again; where it lies; its generation."""

    extent: int
    offset: int
    length: int
    generation: int


class SlotReply(Reply, frozen=True):
    """slot: the writer's number; lock_path: the file to lock."""

    slot: int
    lock_path: str


class CachedBlocksReply(Reply, frozen=True, tag="KeptReply"):
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


class LeaseExtent(Request, frozen=True, tag="Lease"):
    """Wants an extent of at least `nbytes` for the writer whose slot lock is `slot`.

    want: what the writer would like, at least nbytes. wait: seconds to wait for space; None fails at once.
    unit: the number of the unit that is meant, -1 for whichever answers; the same of the requests below.
    """

    slot: Small
    nbytes: Bytes
    want: Bytes
    wait: Seconds | None = None
    unit: AnyUnit = -1


class OpenSlot(Request, frozen=True):
    """A writer registers; the reply names its slot, whose lock file it must hold (`storage.arena.writer_locks`).

    remote: it is on another node, and has the unit write for it (`WriteBytes`). Its slot has no lock: it is over with
    the last of the writer's connections. writer: its client id then, a slash, and what tells its slots one after the
    other apart.
    """

    writer: str
    unit: AnyUnit = -1
    remote: bool = False


class WriteBytes(Request, frozen=True):
    """The payload goes to this offset of the arena, within an extent that is leased to the slot of a remote writer."""

    slot: Small
    extent: ExtentNumber
    offset: Bytes
    unit: Unit


class ReturnExtent(Request, frozen=True, tag="Return"):
    """Gives back extents in which nothing was published."""

    slot: Small
    extents: list[ExtentNumber]
    unit: AnyUnit = -1


class UnitStatus(Request, frozen=True):
    """Bytes held, leased and free in the arena."""


class CacheBlocks(Request, frozen=True, tag="Keep"):
    """A reader on the unit's node is about to read these blocks of units elsewhere; all columns i8, of equal length.

    units, offsets, generations, nbytes: of each block. remotes: unit -> "host:port". The reply, `CachedBlocksReply`,
    says which of them the unit has copies of; it may come after these were fetched.
    """

    units: bytes
    offsets: bytes
    generations: bytes
    nbytes: bytes
    remotes: dict[Unit, str]


class ReadPieces(Request, frozen=True):
    """Wants bytes of the arena, for a reader that cannot map it. The reply's payload has them one after the other.

    starts, lengths: i8, of the pieces, in any order. offsets, generations: i8, of the blocks that they lie in; where
    the arena has other generations there the reply is `Done(False)`, without payload, else `Done(True)`. A reader asks
    for that once more, without pieces, after the bytes have come.
    """

    unit: Unit
    starts: bytes
    lengths: bytes
    offsets: bytes
    generations: bytes
