"""Messages between storage units and the controller: registration, migrations, measurements."""

from __future__ import annotations

from transfer_queue.messages.base import (
    Bytes,
    ExtentNumber,
    Finite,
    Message,
    Natural,
    RequestBody,
    Small,
    Unit,
)
from transfer_queue.messages.descriptors import MEMORY, Blocks, NewBlock
from transfer_queue.messages.reports.progress import Timing
from transfer_queue.messages.storage import ReadHold, UnitStatusReply


class RegisterUnit(RequestBody, frozen=True):
    """Report that a storage unit has started. It replaces a unit of the same name, whose arena is then lost."""

    address: str
    """Where the unit listens. Only processes of its node can use it."""
    arena: str
    """The folder of the arena. Only processes of its node can use it."""
    boot_id: str = ""
    """Identifies the arena."""
    name: str = ""
    when: str = ""
    """The time of the start, as text."""
    extents: bytes | None = None
    """The numbers of all leased extents, i8; None if they are not known."""
    next_extent: ExtentNumber | None = None
    """The lowest number that no extent has had yet. Writers may publish newer extents before this request arrives."""
    node: str = ""
    remote: str = ""
    """The "host:port" for processes of other nodes; "" if the unit does not serve them."""
    tier: str = MEMORY
    """The tier of the arena: `MEMORY`, `DISK` or `MIRROR`."""
    capacity: Bytes = 0
    """The bytes that the unit may use; 0 if this is not known."""
    store: str = ""
    """The address of the external store that has the blocks (JSON, `stores.base.StoreAddress`); "" for an arena."""
    retired: bool = False
    """Whether this is the mirror of an earlier term (`core.units.mirror_writer`), which is only read."""


class ExtentsGone(RequestBody, frozen=True):
    """Report that the external store has lost the contents of extents, which are not leased any more."""

    unit: Unit
    extents: bytes
    """i8."""
    when: str
    """The time of the loss, as text."""


class BlockMissing(RequestBody, frozen=True, tag="Missed"):
    """Report that a reader did not find the contents of extents in the external store.

    The reply comes when the unit has searched for them. It is `Done(True)` if some are lost or were freed, and
    `Done(text)` if the store could not be asked, which the text explains. `Done(False)`: the unit has found all of
    them, and has let the store write them again for the reader's node.
    """

    unit: Unit
    extents: bytes
    """i8."""
    given_up: bool = False
    """The reader has missed them for seconds, although the unit has found them: they count as lost."""


class ExtentsFreedReport(RequestBody, frozen=True, tag="Freed"):
    """Report that the unit has freed extents as the controller ordered."""

    unit: Unit
    extents: bytes
    """i8."""
    failed: str = ""
    """Why other extents of the same order could not be freed; "" if all were freed."""


class WriterGone(RequestBody, frozen=True):
    """Report that a writer of the unit has died."""

    writer: str
    unit: Unit
    extents: list[ExtentNumber]
    """The extents that were leased to the writer."""


class BlocksMovedReport(RequestBody, frozen=True, tag="Moved"):
    """Report the result of a `Move`."""

    move: Natural
    unit: Unit
    extent: ExtentNumber
    """The closed extent that contains the copies; 0 if there was no space for them."""
    length: Bytes
    """The length of the extent."""
    generation: Natural
    """The generation of the extent."""
    offsets: bytes
    """The offset of the copy of each block that was to be copied as a whole, i8; -1 if the block was gone before."""
    repacked: list[NewBlock | None]
    """The new block of each repack; None if its block was gone."""
    failed: str = ""
    """Why the order could not be carried out; "" if it was carried out, or if there was no space."""


class ExtentsRecalledReport(RequestBody, frozen=True, tag="Recalled"):
    """Report that writers return the unused rest of extents, to which nothing more is written."""

    unit: Unit
    extents: bytes
    """i8."""
    lengths: bytes
    """The new length of each extent, i8."""


class SpaceShortReport(RequestBody, frozen=True, tag="SpaceShort"):
    """Report the writers of a unit that wait for space. The unit sends it whenever they change."""

    unit: Unit
    writers: list[str]
    freed: Natural
    """The number of `ReleaseExtents` that the unit has received."""


class ReleaseExtents(RequestBody, frozen=True, tag="Free"):
    """Controller to unit: free these extents, which contain nothing that is needed."""

    extents: list[ExtentNumber]


class Repack(Message, frozen=True):
    """Part of a `Move`: copy only some rows and fields of a block, as a new block."""

    at: Small
    """The position of the block in the `Move`."""
    slots: bytes
    """The rows of the block, i4, ascending."""
    fields: list[str]


class Move(RequestBody, frozen=True):
    """Controller to unit: copy these blocks into an extent of the unit and report it with `BlocksMovedReport`."""

    number: Natural
    """The number of the migration."""
    blocks: Blocks
    arenas: dict[Unit, str]
    """Unit -> folder of its arena, for the units of the same node that have blocks."""
    repacks: list[Repack] = []
    """The blocks of which only parts are copied, ascending by `at`."""
    remotes: dict[Unit, str] = {}
    """Unit -> "host:port", for the units of other nodes that have blocks."""


class DrainFinished(RequestBody, frozen=True, tag="Drained"):
    """Controller to unit: a drain has begun or ended. A unit that is drained leases nothing to writers."""

    draining: bool


class RemoveArena(RequestBody, frozen=True):
    """Controller to a retired mirror: nothing in the arena is needed any more; remove it and end."""


class RefuseWriters(RequestBody, frozen=True, tag="Refuse"):
    """Controller to unit: refuse the writers that wait for space, because none can become free."""

    message: str
    """The reason, for the error message."""


class Measure(RequestBody, frozen=True):
    """Controller to unit: report measurements with `Measured`."""

    number: Natural
    """Identifies the question."""


class Measured(RequestBody, frozen=True):
    """The reply to a `Measure`. It changes nothing."""

    number: Natural
    """`Measure.number`."""
    unit: Unit
    server: ServerMeasures
    storage: UnitMeasures


class ServerMeasures(Message, frozen=True):
    """Measurements of the process and the loop of a server."""

    requests: list[Timing]
    """The time in the loop of each type of request."""
    waits: list[Timing]
    """The time until the reply of requests that had to wait, by type and task."""
    failures: dict[str, Natural]
    """Name of an error -> number of replies with it."""
    rejected: dict[str, Natural]
    """Reason -> number of connections or messages that were not served."""
    longest: dict[str, Finite]
    """Kind of event -> the longest recent event in seconds (`metrics.timing.Longest`)."""
    connections: Natural
    """The number of open connections."""
    accepted: Natural
    """The number of connections accepted so far."""
    cpu: Finite
    """The CPU time of the process in seconds."""
    resident: Natural
    """The resident memory of the process in bytes."""
    started: Finite
    """The start of the process, in seconds since the epoch."""


class UnitMeasures(Message, frozen=True):
    """Measurements of a storage unit."""

    space: UnitStatusReply
    extents: Natural
    """The number of leased extents."""
    waiting: Natural
    """The number of leases that wait for space."""
    longest_wait: Finite
    """The time in seconds for which the oldest of them has waited."""
    draining: bool
    counters: dict[str, Finite] = {}
    """The counters of the unit, by name."""
    holds: list[ReadHold] = []
    """The clients that have views."""
