"""What a client or the controller may ask a storage unit, and what units tell the controller."""

from __future__ import annotations

from transfer_queue.messages.base import AnyUnit, Bytes, ExtentNumber, Message, Natural, Seconds, Small, Unit
from transfer_queue.messages.descriptors import MEMORY, Blocks, NewBlock
from transfer_queue.messages.measures import ServerMeasures, UnitMeasures
from transfer_queue.messages.requests import Request


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


class Missed(Request, frozen=True):
    """A reader did not find in the store what should be in these extents (i8).

    Answered when the unit has looked for them itself: True where some are gone.
    """

    unit: Unit
    extents: bytes


class Freed(Request, frozen=True):
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


class Moved(Request, frozen=True):
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


class Recalled(Request, frozen=True):
    """Nothing more is written into these extents (i8), which are so long now (i8): their writers had no use for it."""

    unit: Unit
    extents: bytes
    lengths: bytes


class SpaceShort(Request, frozen=True):
    """A unit's writers that wait for space there, told whenever it changes. freed: how many `Free` the unit has had."""

    unit: Unit
    writers: list[str]
    freed: Natural


class Lease(Request, frozen=True):
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


class Return(Request, frozen=True):
    """Gives back extents in which nothing was published."""

    slot: Small
    extents: list[ExtentNumber]
    unit: AnyUnit = -1


class UnitStatus(Request, frozen=True):
    """Bytes held, leased and free in the arena."""


class Keep(Request, frozen=True):
    """A reader on the unit's node is about to read these blocks of units elsewhere; all columns i8, of equal length.

    units, offsets, generations, nbytes: of each block. remotes: unit -> "host:port". The reply, `KeptReply`, says which
    of them the unit has copies of; it may come after these were fetched.
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


class Free(Request, frozen=True):
    """Controller to unit: nothing lives in these extents any more."""

    extents: list[ExtentNumber]


class Repack(Message, frozen=True):
    """Of block `at` of a `Move` only these rows (i4, ascending) and fields are wanted, as a block of their own."""

    at: Small
    slots: bytes
    fields: list[str]


class Move(Request, frozen=True):
    """Controller to unit: copy these blocks into an extent of the unit's own, and say with `Moved` where they lie.

    number: of the move. arenas: unit -> folder of its arena, of all units on the same node in which the blocks lie.
    remotes: unit -> "host:port", of those on other nodes. repacks: those that are not wanted whole, ascending by `at`.
    """

    number: Natural
    blocks: Blocks
    arenas: dict[Unit, str]
    repacks: list[Repack] = []
    remotes: dict[Unit, str] = {}


class Drained(Request, frozen=True):
    """Controller to unit: whether it is being drained, so that it leases nothing to writers."""

    draining: bool


class Refuse(Request, frozen=True):
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
