"""Messages about external stores: which of their servers run, and which blocks they may have lost."""

from __future__ import annotations

from collections.abc import Iterable

from transfer_queue.messages.base import ExtentNumber, Message, Natural, RequestBody, Unit

SHORT = 8  # characters of the id of a node in messages
SETTLE_SECONDS = 15.0  # after its start, in which a store may not use the memory of a server yet
RECENT_SECONDS = 60.0  # after its start, in which the messages of errors name a server that has replaced another one


class ReportStoreServer(RequestBody, frozen=True):
    """Report that a server of an external store runs. It has ended when the connection of this request ends."""

    backend: str
    """The backend of the store."""
    node: str
    """The node on which the server runs."""
    host: str
    """The address of the node for people; "" in a system of one machine."""
    life: str
    """Differs from that of the server before it, whose blocks are lost."""
    process: Natural
    """The id of its process on the node."""
    first: bool = False
    """Whether it is that of the first node, which the servers of the other nodes join."""


class AwaitFirstStoreServer(RequestBody, frozen=True):
    """Wait until a server of a store runs on the first node, or until a known one has ended.

    The reply has the life of the server that runs, or "" if the known one has ended and no other one runs.
    """

    backend: str
    """The backend of the store."""
    life: str = ""
    """The life of the known server; "" to wait until one runs."""


class StoreServerProgress(Message, frozen=True):
    """A server of an external store that the system has started, or uses on a node."""

    backend: str
    """The backend of the store."""
    node: str
    """The node on which the server runs; "" in a system of one machine."""
    host: str
    """The address of the node; "" in a system of one machine."""
    process: Natural
    """The id of its process on the node."""
    up: bool
    """Whether it runs."""
    seconds: float
    """For how long it has run, or has been down."""
    ends: int = 0
    """How often a server of this store on this node has ended."""

    @property
    def is_settling(self) -> bool:
        """Whether it has replaced another one, and is so new that the store may not use it yet."""
        return self.up and self.ends > 0 and self.seconds < SETTLE_SECONDS

    @property
    def place(self) -> str:
        """The server for messages: "the MooncakeStore server on node 10.0.0.2 (e1d4f7a2, process 71)"."""
        node = f" on node {self.host or self.node}" if self.host or self.node else ""
        name = f"{self.node[:SHORT]}, " if self.host and self.node else ""
        return f"the {self.backend} server{node} ({name}process {self.process})"


def describe_trouble(servers: Iterable[StoreServerProgress], backend: str) -> str:
    """Return which servers of a store are down or have just been restarted, and what to do; "" if none is."""
    troubles = []
    for server in servers:
        if server.backend == backend and not server.up:
            troubles.append(f"{server.place} has been down for {server.seconds:.1f} s")
        elif server.backend == backend and server.ends and server.seconds < RECENT_SECONDS:
            troubles.append(f"{server.place} was started {server.seconds:.1f} s ago in place of one that had ended")
    if not troubles:
        return ""
    return (
        f"{'; '.join(troubles)}. The system restarts such a server by itself, and reports the values that only the old "
        f"one had as lost: try again, and put lost values again (tq status shows both)"
    )


class CheckStore(RequestBody, frozen=True):
    """Controller to unit: the external store may have lost blocks. The unit replies with a `StoreChanged`."""


class StoreChanged(RequestBody, frozen=True):
    """Report that the external store of a unit may have lost blocks. The controller orders `CheckExtents`."""

    unit: Unit
    next_extent: ExtentNumber
    """The lowest number that no extent of the unit has had yet."""


class CheckExtents(RequestBody, frozen=True):
    """Controller to unit: check whether the external store has the blocks of these extents, and report lost ones."""

    extents: bytes
    """i8."""
