"""Requests of readers that show a system continuously, each cheap enough to be made every second."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from transfer_queue.messages.base import Finite, Message, Natural, Reply, RequestBody
from transfer_queue.messages.reports.unit_reports import ServerMeasures, UnitMeasures
from transfer_queue.messages.storage import ReadHold
from transfer_queue.messages.system import SystemStatus

MAX_PARTITIONS = 64
"""Partitions of a `ProgressReply`."""
MAX_COLUMNS = 1024
"""Columns of a `CountColumns`."""
MAX_FIELDS = 50
"""Fields of a `CountColumns`."""
MAX_TASKS = 16
"""Tasks of a `CountColumns`."""

Width = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
"""The rows of a column."""


class ReadProgress(RequestBody, frozen=True):
    """Ask for the progress of some partitions: those with these names, the newest, and a page of all others.

    The reply is a `ProgressReply`. A reader that sends `ProgressReply.next` back with each request gets the progress
    of every partition in turn, so that a system with thousands of them does not delay other requests.
    """

    partitions: list[str] = []
    """The partitions to describe; unknown ones are left out."""
    newest: Natural = 20
    """How many of the partitions that were created last are described."""
    page: Natural = 20
    """How many others are described."""
    after: Natural = 0
    """`ProgressReply.next` of the previous reply; 0 begins with the oldest partition."""


class ProgressReply(Reply, frozen=True):
    """The progress of some partitions, and the totals of all."""

    status: SystemStatus
    """The partitions, and everything else of a status. At most `MAX_PARTITIONS`."""
    numbers: list[int]
    """The number of each of these partitions. Another one that was created under the same name has another number."""
    newest: list[str]
    """The names of the partitions that were created last, the newest first."""
    count: int
    """The number of all partitions."""
    rows: int
    """The live rows of all partitions."""
    nbytes: int
    """The bytes of the values of all partitions."""
    next: int
    """For the next request; 0 if the page has reached the last partition."""


class CountColumns(RequestBody, frozen=True):
    """Ask for the shares of rows with each field and in each state of a task, by ranges of rows: columns.

    The reply is a `ColumnCounts` of as many rows as the controller counts in about a millisecond. The next request
    continues from there.
    """

    partition: str
    width: Width
    """The rows of a column."""
    first: Natural = 0
    """The position, among the live rows, of the first row of the first column."""
    last: Natural = (1 << 63) - 1
    """The position behind the last row. At most `MAX_COLUMNS` columns are counted."""
    takes: dict[str, list[str]] = {}
    """Task -> the fields that its claims name. At most `MAX_TASKS` tasks are counted."""
    group_task: str = ""
    """The task whose fields a complete group has; "" counts no groups."""
    made: Natural | None = None
    """`ColumnCounts.made` of the previous page; None for the first page."""
    chunk: Natural = 0
    """`ColumnCounts.chunk` of the previous page."""
    before: Natural = 0
    """`ColumnCounts.before` of the previous page."""
    version: Natural | None = None
    """For the first page: if the partition still has this version, the reply has `same` and nothing is counted."""


class ColumnCounts(Reply, frozen=True):
    """A page of the columns of a partition."""

    known: bool
    """False if the partition does not exist, or if it was created again since the previous page."""
    made: int = 0
    """Identifies the partition."""
    version: int = 0
    """The version of the partition. It grows with every change."""
    same: bool = False
    """Whether the partition has the version of the request, so that nothing was counted."""
    rows: int = 0
    """The live rows of the partition."""
    reserved: int = 0
    """The rows that are reserved and that no sample has taken yet."""
    group_size: int = 0
    """The samples of a group; 0 if the partition has no groups."""
    column: int = 0
    """The first column of this page. It may have rows of the previous page as well."""
    index: bytes = b""
    """The global index of the first row of each column that is in this page, i8."""
    produced: dict[str, bytes] = {}
    """Field -> rows that have it, i4 by column."""
    lost: dict[str, bytes] = {}
    """Field -> rows that lost it, i4 by column; without the fields that no row of the page has lost."""
    tasks: dict[str, list[bytes]] = {}
    """Task -> rows that are ready, claimed, consumed and skipped, i4 by column."""
    whole: int = 0
    """Groups in this page with all members and all fields of `group_task`."""
    lack_field: int = 0
    """Groups in this page with all members, some of which lack a field."""
    parts: bytes = b""
    """The groups that do not have all members in this page: [number, members, members with all fields], i8."""
    chunk: int | None = None
    """For the next page; None if this is the last one."""
    before: int = 0
    """For the next page: the live rows before it."""


class MeasureServers(RequestBody, frozen=True):
    """Ask for the measures of all server processes. The reply, a `ServersReply`, comes when they have answered."""


class ShowViews(RequestBody, frozen=True):
    """Ask for the views of readers in all storage units. The reply, a `ViewsReply`, comes when they have answered."""


class UnitViews(Message, frozen=True):
    """The views of readers in a storage unit."""

    unit: int
    viewed: int
    """See `UnitStatusReply`."""
    holds: list[ReadHold]


class ViewsReply(Reply, frozen=True):
    """The views of readers in the storage units that answered within a second."""

    units: list[UnitViews]

    def with_views(self, status: SystemStatus) -> SystemStatus:
        """Return the status with the views of these units."""
        by_unit = {each.unit: each for each in self.units}
        units = [
            msgspec.structs.replace(unit, viewed=by_unit[unit.unit].viewed, views=by_unit[unit.unit].holds)
            if unit.unit in by_unit
            else unit
            for unit in status.units
        ]
        return msgspec.structs.replace(status, units=units)


class UnitServer(Message, frozen=True):
    """A storage unit in a `ServersReply`."""

    unit: int
    node: str
    tier: str
    """See `UnitInfo.report_tier`."""
    capacity: int
    """The capacity in bytes; 0 if it is not known."""
    live: int
    """The bytes of its blocks that are needed."""
    drained: bool
    server: ServerMeasures | None
    """None if it did not answer within a second."""
    storage: UnitMeasures | None


class LeaseSummary(Message, frozen=True):
    """The leases of a task."""

    task: str
    count: int
    rows: int
    """The rows that are not acknowledged."""
    oldest: Finite | None = None
    """The seconds since the oldest of them began, or was renewed; None if it is not known."""


class JournalSummary(Message, frozen=True):
    """The journal of the controller."""

    records: int
    """Records since the last snapshot."""
    nbytes: int
    """Bytes of these records."""
    age: float
    """Seconds since the last snapshot."""
    trouble: bool
    """Whether it cannot be written now."""


class ServersReply(Reply, frozen=True):
    """The measures of all servers."""

    controller: ServerMeasures
    units: list[UnitServer]
    leases: list[LeaseSummary]
    redelivered: int
    """Rows whose delivery ended without an acknowledgement, since the controller started."""
    journal: JournalSummary | None
    """None if the system has no journal."""
