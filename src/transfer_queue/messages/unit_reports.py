"""Messages between storage units and the controller: registration, moves, measurements."""

from __future__ import annotations

from transfer_queue.messages.base import (
    Bytes,
    ExtentNumber,
    Finite,
    Message,
    Natural,
    Request,
    Small,
    Unit,
)
from transfer_queue.messages.descriptors import MEMORY, Blocks, NewBlock
from transfer_queue.messages.progress import Timing
from transfer_queue.messages.storage import UnitStatusReply


class RegisterUnit(Request, frozen=True):
    """A storage unit comes up. address: where it listens; arena: the folder of its arena, boot_id: of the arena.

    name: what it is called; it comes in the place of another of its name, whose arena is lost. when: what time it is,
    in words. extents: all that are leased there (i8); None where that is not told. next_extent: the first number that
    was not given to an extent yet: what is newer, writers may have published before this arrives. node: on which it is;
    its address and arena mean something there alone. remote: "host:port" for other nodes; "" where it serves none.
    tier: where the arena lies, `MEMORY` or `DISK`. capacity: bytes that it may use; 0 where that is not told.
    store: what clients need to reach the external store in which its blocks are (JSON, `stores.base.StoreAddress`); ""
    where they are in its arena.
    """

    address: str
    arena: str
    boot_id: str = ""
    name: str = ""
    when: str = ""
    extents: bytes | None = None
    next_extent: ExtentNumber | None = None
    node: str = ""
    remote: str = ""
    tier: str = MEMORY
    capacity: Bytes = 0
    store: str = ""


class ExtentsGone(Request, frozen=True):
    """The store of these extents (i8) has lost what was in them; they are leased no more. when: in words."""

    unit: Unit
    extents: bytes
    when: str


class BlockMissing(Request, frozen=True, tag="Missed"):
    """A reader did not find in the store what should be in these extents (i8).

    Answered when the unit has looked for them itself: True where some are gone.
    """

    unit: Unit
    extents: bytes


class ExtentsFreedReport(Request, frozen=True, tag="Freed"):
    """These extents (i8), which the controller ordered the unit to free, are not leased there any more.

    failed: why other extents of the same order could not be freed; "" if all were freed.
    """

    unit: Unit
    extents: bytes
    failed: str = ""


class WriterGone(Request, frozen=True):
    """A unit proved a writer dead; extents: what it had leased."""

    writer: str
    unit: Unit
    extents: list[ExtentNumber]


class BlocksMovedReport(Request, frozen=True, tag="Moved"):
    """What became of a `Move`.

    extent: where the copies lie, closed and of this length and generation; 0 where there was no room for them.
    offsets: i8, of each block that was wanted whole, in order; -1 where it was gone before it was copied.
    repacked: one for each repack, in order, None where its block was gone.
    failed: why the order could not be carried out; "" if it was carried out, or if there was no room.
    """

    move: Natural
    unit: Unit
    extent: ExtentNumber
    length: Bytes
    generation: Natural
    offsets: bytes
    repacked: list[NewBlock | None]
    failed: str = ""


class ExtentsRecalledReport(Request, frozen=True, tag="Recalled"):
    """Nothing more is written into these extents (i8), which are so long now (i8): their writers had no use for it."""

    unit: Unit
    extents: bytes
    lengths: bytes


class SpaceShortReport(Request, frozen=True, tag="SpaceShort"):
    """The writers of a unit that wait for space, sent whenever they change.

    freed: how many `ReleaseExtents` the unit has received.
    """

    unit: Unit
    writers: list[str]
    freed: Natural


class ReleaseExtents(Request, frozen=True, tag="Free"):
    """Controller to unit: nothing lives in these extents any more."""

    extents: list[ExtentNumber]


class Repack(Message, frozen=True):
    """Of block `at` of a `Move` only these rows (i4, ascending) and fields are wanted, as a block of their own."""

    at: Small
    slots: bytes
    fields: list[str]


class Move(Request, frozen=True):
    """Controller to unit: copy these blocks into an extent of the unit, and report it with `BlocksMovedReport`.

    number: of the move. arenas: unit -> folder of its arena, of all units on the same node in which the blocks lie.
    remotes: unit -> "host:port", of those on other nodes. repacks: those that are not wanted whole, ascending by `at`.
    """

    number: Natural
    blocks: Blocks
    arenas: dict[Unit, str]
    repacks: list[Repack] = []
    remotes: dict[Unit, str] = {}


class DrainFinished(Request, frozen=True, tag="Drained"):
    """Controller to unit: whether it is being drained, so that it leases nothing to writers."""

    draining: bool


class RefuseWriters(Request, frozen=True, tag="Refuse"):
    """Controller to unit: who waits for space waits in vain. words: why."""

    words: str


class Measure(Request, frozen=True):
    """Controller to unit: say with `Measured` what you have measured. number: of the question."""

    number: Natural


class Measured(Request, frozen=True):
    """The answer to a `Measure`; it changes nothing."""

    number: Natural
    unit: Unit
    server: ServerMeasures
    storage: UnitMeasures


class ServerMeasures(Message, frozen=True):
    """One server's process and its loop.

    requests: type -> time in the loop. waits: of what could not be answered at once, until it was. failures: name of
    an error -> answers with it. rejected: reason -> connections, or messages, that were not served. longest: kind of
    event -> the longest of late (`metrics.timing.Longest`). connections: open now; accepted: so far. cpu, resident:
    of the process; started: when it was, since the epoch.
    """

    requests: list[Timing]
    waits: list[Timing]
    failures: dict[str, Natural]
    rejected: dict[str, Natural]
    longest: dict[str, Finite]
    connections: Natural
    accepted: Natural
    cpu: Finite
    resident: Natural
    started: Finite


class UnitMeasures(Message, frozen=True):
    """One storage unit.

    waiting: leases that wait for space, and for how long the longest has. counters: of the unit, by name.
    """

    space: UnitStatusReply
    extents: Natural
    waiting: Natural
    longest_wait: Finite
    draining: bool
    counters: dict[str, Finite] = {}
