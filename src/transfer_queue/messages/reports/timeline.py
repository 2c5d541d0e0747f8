"""Requests about the timeline: the task and rank of each client, and the events; and the verdict about them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from transfer_queue.display import worker_text
from transfer_queue.messages.base import Bytes, Finite, Message, Natural, Reply, RequestBody, Seconds

Rank = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
"""A rank of a task; -1 if it is not known."""
Name = Annotated[str, Meta(max_length=1024)]


class Introduce(RequestBody, frozen=True):
    """Report the task and rank of the client, so that its puts have a producer with a name. The reply is `Done`."""

    task: Name
    rank: Rank = -1
    host: Name = ""
    pid: Natural = 0


class Leave(RequestBody, frozen=True):
    """Announce that the client closes in order, so the end of its connections is not a failure. The reply is `Done`."""


class ValueRead(Message, frozen=True):
    """A get that a client has made. The controller sees only its lookup, so the client reports it."""

    ago: Seconds
    """When it ended, in seconds before it is reported."""
    seconds: Seconds
    """How long it took, the lookup included."""
    partition: str
    """The partition; the names of several, joined by commas."""
    fields: list[str]
    """The fields whose values were read, the first ones if there are very many."""
    rows: Natural
    """The number of rows."""
    nbytes: Bytes
    """The bytes of the tensors that were read. Objects count as 0, and so do tensors in a list."""


class ReadTimeline(RequestBody, frozen=True):
    """Ask for the next events of the timeline. The reply is a `TimelineReply`."""

    boot: str = ""
    """`TimelineReply.boot` of the previous reply; "" for the first request."""
    position: Natural | None = None
    """`TimelineReply.position` of the previous reply; None begins `seconds` ago."""
    seconds: Finite = 60.0
    """How far back the first request begins, in seconds."""
    lanes: Natural = 0
    """The reader knows the lanes below this number."""
    partitions: Natural = 0
    """The reader knows the names of the partitions below this number."""
    fields: Natural = 0
    """The reader knows the tuples of fields below this number."""
    most: Natural = 0
    """How many events before the last one the first request begins at most; 0 for no limit."""


class Lane(Message, frozen=True):
    """A client in one task. A client that claims for several tasks has a lane for each of them."""

    number: int
    client: str
    """The client id."""
    task: str
    """The task; "" if the client has neither claimed nor reported its task."""
    rank: int = -1
    """The rank in the task; -1 if it is not known."""
    host: str = ""
    """The host of the client's process; "" if it is not known."""
    pid: int = 0
    """The process id; 0 if it is not known."""

    @property
    def label(self) -> str:
        """The client for people, as `rank 0, pid 17, node-1`."""
        return worker_text("", self.rank, self.pid, self.host, self.client)

    @property
    def name(self) -> str:
        """The rank for people, as `rank 0`; the label if the rank is not known, "" if nothing is."""
        return f"rank {self.rank}" if self.rank >= 0 else self.label if self.client else ""

    @property
    def process(self) -> str:
        """The process of a client whose name does not say it, as `pid 17, node-1`; "" otherwise."""
        return worker_text(pid=self.pid, host=self.host) if self.rank >= 0 and self.pid else ""


class OpenWait(Message, frozen=True):
    """A request that waits at the controller."""

    lane: int
    since: float
    """When it began to wait, by the controller's clock."""
    partition: str
    fields: list[str]
    """The fields of a claim; empty for a put."""
    rows: int
    """The number of rows that it waits to get, or to put; with `demand` the number of groups that it would make."""
    holds: bool = False
    """True for a producer, which waits for capacity, a policy version or group demand; False for a claim."""
    ahead: bool = False
    """True if the claim is ahead of the batch that its rank needs now, so that its rank does not wait."""
    demand: bool = False
    """True for a producer that waits for group demand."""


class TimelineReply(Reply, frozen=True):
    """Events of the timeline, and the names that the reader does not know."""

    boot: str
    """Differs after each start of the controller. Positions and numbers of another boot mean nothing."""
    now: float
    """The controller's time."""
    wall: float
    """Unix seconds minus the controller's time."""
    position: int
    """The position behind the returned events."""
    end: int
    """The position behind all events. If it is larger than `position`, ask again immediately."""
    missed: int
    """The number of events between the requested position and the first returned one, which the ring has lost."""
    events: bytes
    """The events in order, as an array of `timeline.events.EVENT`."""
    lanes: list[Lane]
    """The lanes from `ReadTimeline.lanes` on, by number. A lane that has changed has a new number.

    A reply has a limited number of names, and no event or wait with a later one: the next reply has them.
    """
    partitions: dict[int, str]
    """Number -> name of a partition, from `ReadTimeline.partitions` on."""
    fields: dict[int, list[str]]
    """Number -> fields, from `ReadTimeline.fields` on."""
    open: list[OpenWait] = []
    """The claims and producers that wait now, the oldest first, if `position` is `end`; otherwise empty."""
    connected: list[str] = []
    """The clients that are connected now, if `position` is `end`; otherwise empty."""
    departed: dict[str, float] = {}
    """Client that is gone -> when its last connection ended, by the controller's clock, if `position` is `end`;
    otherwise empty. A client that has closed is not gone."""


class Verdict(Message, frozen=True):
    """What slows a training.

    Example:
        >>> verdict = client.verdict()
        >>> verdict.stage is None  # nothing slows this system down
        True
    """

    text: str
    """The verdict in words."""
    state: str
    """"starting": the system has not run long enough, and the text says what was seen so far. "flowing": nothing slows
    the last tasks down. "slow": they wait for another task, or have too much to do. "stopped": claims wait, but nothing
    is dealt, or all workers of a stage are gone. "idle": no claim waits, and nothing happens. "": not judged."""
    stage: str | None = None
    """The slowest task; None if nothing is slow, or if it is not a single task."""
    field: str | None = None
    """The missing field that the slowest task puts; None if no task waits for a field of it."""
    wait_share: float = 0.0
    """The share of its time, from 0 to 1, for which the task at the end of the pipeline waits; if none does, for which
    the producer is held that is held most."""
    queue_rows: int = 0
    """The rows that are ready for the slowest task and not claimed."""
    queue_growth: float = 0.0
    """The rows by which this queue grows, in rows per second; negative if it shrinks."""
    since: float | None = None
    """When the rate of the slowest task changed last by more than 25 %, or the number of its ranks, in Unix seconds. If
    the state is stopped or idle, when the last rows were dealt or the last worker of the stage was gone, or when
    anything happened last. None if nothing of this was recorded."""
    cause: str = ""
    """Why the task is slow, as far as the timeline shows it: ranks that are gone, a slow rank, capacity or policy, a
    field that no task puts. "" if it shows no reason."""
    advice: str = ""
    """How many ranks the task needs: the rows that come per second, divided by those of one rank. "" if this is no more
    than it has, or is not known."""
