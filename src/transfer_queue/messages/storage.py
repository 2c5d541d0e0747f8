"""Requests of clients to a storage unit: for extents, and for the bytes of blocks."""

from __future__ import annotations

import hashlib

from transfer_queue.messages.base import (
    AnyUnit,
    Bytes,
    ExtentNumber,
    Finite,
    Message,
    Natural,
    Reply,
    RequestBody,
    Seconds,
    Small,
    Unit,
)
from transfer_queue.messages.descriptors import MEMORY


def lease_proof(key: bytes, unit: int, writer: str, extent: int, begin: int, length: int, generation: int) -> int:
    """Return the proof that a unit has leased an extent to a client, which sends it with what it publishes there.

    Only the unit knows its leases, and only the controller knows what is published. The proof is a hash with the key of
    the system, so the controller can check it without the unit, also while the unit is down and after a restart of
    either.

    Args:
        key: The key of the system.
        unit: The number of the unit.
        writer: The owner of the writer slot (`OpenSlot.writer`).
        extent: The number of the extent.
        begin: The offset of its first byte.
        length: Its length in bytes.
        generation: Its generation.
    """
    lease = f"{unit} {extent} {begin} {length} {generation} {writer}"
    return int.from_bytes(hashlib.blake2b(lease.encode(), digest_size=8, key=key).digest(), "little") >> 1


class ExtentLeaseReply(Reply, frozen=True, tag="LeaseReply"):
    """An extent that was leased."""

    extent: int
    """Its number, which is never used again."""
    offset: int
    length: int
    generation: int
    proof: Natural = 0
    """The proof of this lease (`lease_proof`)."""


class SlotReply(Reply, frozen=True):
    """A writer slot."""

    slot: int
    """The number of the slot."""
    lock_path: str
    """The file that the writer must lock."""


class CachedBlocksReply(Reply, frozen=True, tag="KeptReply"):
    """The copies of requested blocks in the unit's own arena."""

    offsets: bytes
    """The offset of each copy, i8; -1 if there is none."""
    generations: bytes
    """i8."""


class UnitStatusReply(Reply, frozen=True):
    """The space of a storage unit in bytes."""

    capacity: Bytes
    """The size to which the arena may grow."""
    held: Bytes
    """The space that the arena has allocated in the file system."""
    leased: Bytes
    """The space in leased extents."""
    free: Bytes
    """Allocated and not leased: `held - leased`."""
    tier: str = MEMORY
    """See `UnitInfo.report_tier`."""
    largest_free: Bytes = 0
    """The longest run of space that is not leased, whether it is allocated in the file system or not."""
    viewed: Bytes = 0
    """The part of `leased` that is needed only by views of readers: it is free when the last of them ends."""


class ReadHold(Message, frozen=True):
    """The views that a client of a process has in an arena.

    Example:
        >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
        >>> client.status().units[0].views
        []
    """

    client: str
    """The client id."""
    pid: Natural
    """The process, by its number on its node or in its container."""
    since: Finite
    """When its oldest view was made, in seconds since the epoch."""
    nbytes: Natural
    """Bytes of its views."""
    views: Natural
    """The number of its views: one for each field of a read."""


class LeaseExtent(RequestBody, frozen=True, tag="Lease"):
    """Ask for an extent of at least `nbytes` for a writer."""

    slot: Small
    """The writer's slot, whose lock it has."""
    nbytes: Bytes
    want: Bytes
    """The size that the writer prefers; at least `nbytes`."""
    wait: Seconds | None = None
    """Seconds to wait for space; None fails at once."""
    unit: AnyUnit = -1
    """The number of the unit that the request is for; -1 for the unit that receives it. The same in other requests."""


class OpenSlot(RequestBody, frozen=True):
    """Register a writer. The reply names its slot, whose file the writer must lock (`storage.arena.writer_locks`)."""

    writer: str
    """The client id of the writer. For a remote writer, a slash and a suffix follow that distinguishes its slots."""
    unit: AnyUnit = -1
    remote: bool = False
    """Whether the writer is on another node, so that the unit writes for it (`WriteBytes`).

    The slot then has no lock, and ends with the last connection of the writer.
    """


class WriteBytes(RequestBody, frozen=True):
    """Write the payload to this offset of the arena, in an extent that is leased to the slot of a remote writer."""

    slot: Small
    extent: ExtentNumber
    offset: Bytes
    unit: Unit


class ReturnExtent(RequestBody, frozen=True, tag="Return"):
    """Return extents that contain no published block."""

    slot: Small
    extents: list[ExtentNumber]
    unit: AnyUnit = -1


class UnitStatus(RequestBody, frozen=True):
    """Ask for the space of the arena. The reply is a `UnitStatusReply`."""


class CacheBlocks(RequestBody, frozen=True, tag="Keep"):
    """Ask the unit to copy blocks of other units that a reader on its node is about to read.

    The reply, `CachedBlocksReply`, names the blocks of which the unit has copies. The unit may fetch the blocks before
    it replies. All columns have equal length.
    """

    units: bytes
    """The unit of each block, i8."""
    offsets: bytes
    """i8."""
    generations: bytes
    """i8."""
    nbytes: bytes
    """i8."""
    remotes: dict[Unit, str]
    """Unit -> "host:port"."""


class ReadPieces(RequestBody, frozen=True):
    """Ask for bytes of the arena, for a reader that cannot map it. The payload of the reply has the pieces one by one.

    If the arena has other generations, the reply is `Done(False)` without payload, otherwise `Done(True)`. When the
    bytes have arrived, the reader sends the request once more without pieces, to check the generations again.
    """

    unit: Unit
    starts: bytes
    """The start of each piece, i8, in any order."""
    lengths: bytes
    """The length of each piece, i8."""
    offsets: bytes
    """The offset of each block that contains pieces, i8."""
    generations: bytes
    """The generation of each of these blocks, i8."""
