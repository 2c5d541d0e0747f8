"""What a client may ask the controller."""

from __future__ import annotations

from typing import Any

from transfer_queue.messages.base import (
    AnyIndex,
    AnyUnit,
    ExtentNumber,
    Message,
    Natural,
    Position,
    Seconds,
    Unit,
    Version,
)
from transfer_queue.messages.descriptors import NewBlock, PartitionOptions


class Request(Message, frozen=True, tag=True):
    """Base of what a client may ask."""


class Topology(Request, frozen=True):
    """Asks for the units and the configuration of the system."""


class CreatePartition(Request, frozen=True):
    """Makes a partition; False if it exists. pre_allocate: rows reserved at once."""

    partition: str
    pre_allocate: Natural = 1
    options: PartitionOptions = PartitionOptions()


class Reserve(Request, frozen=True):
    """Reserves rows: `count` new ones, or one for each key that is not known (all keys are answered)."""

    partition: str
    count: Natural
    keys: list[str] | None
    pre_allocate: Natural = 1
    groups: list[str] | None = None
    wait: Seconds | None = None


class Publish(Request, frozen=True):
    """Makes written values visible, together with tags, keys and groups.

    Target rows: `rows` (i8 global indexes), or `keys` (unknown ones are created), or neither: `count`
    new rows. block: what was written, its rows in the order of the targets; None for tags alone.
    tags: one dict a row to merge, None entries for rows without; replace_tags: they replace instead.
    closes: extents of this writer that will take no more blocks, as (unit, extent).
    wait: seconds to wait for capacity; None fails at once. epoch: in which `rows` were learnt; None: any.
    converted: fields of the block whose values the client has converted to tensors, because it expects tensors in the
    field. The put is refused if the field does not hold tensors.
    """

    partition: str
    count: Natural
    rows: bytes | None = None
    keys: list[str] | None = None
    block: NewBlock | None = None
    tags: list[dict[str, Any] | None] | None = None
    replace_tags: bool = False
    groups: list[str] | None = None
    closes: list[tuple[Unit, ExtentNumber]] = []
    pre_allocate: Natural = 1
    wait: Seconds | None = None
    epoch: Natural | None = None
    converted: list[str] = []


class Claim(Request, frozen=True):
    """Wants `count` rows for a task, with all these fields, through the sampler.

    wait: seconds to stay parked; None answers at once. probe: deal nothing; answer when a claim like
    this could be met or never can (`ClaimReply.ended`). finite: a wholly consumed partition is an end.
    since: a probe is not answered, unless by the end, while the partition has this version.
    hold: what the asking client was given before is not finished by this claim, only by `Finish`.
    lease: what is dealt is claimed for so many seconds (and renewed), until it is acknowledged; None: it is consumed.
    replicas: acks of a kept batch by so many tokens consume it; None: as many as the partition's replicas.
    places: the reply is to say where the values lie, too (`ClaimReply.places`).
    waited: seconds that the caller waited before this request; the message of a timeout includes them.
    quiet: if the wait ends without rows, the reply has no rows and is not a failure.
    ahead: by how many batches this one is ahead of the batch that its rank needs now. A batch ahead takes no rows that
    other ranks may need.
    """

    partition: str
    task: str
    fields: list[str]
    count: Natural
    sampling: dict[str, Any] = {}
    wait: Seconds | None = None
    probe: bool = False
    finite: bool = False
    since: Version | None = None
    hold: bool = False
    lease: Seconds | None = None
    replicas: Natural | None = None
    places: bool = False
    waited: Seconds = 0.0
    quiet: bool = False
    ahead: Natural = 0


class Ack(Request, frozen=True):
    """These rows (i8 global indexes) of a lease are consumed. Done(True) where it counts for any of them."""

    partition: str
    token: Natural
    rows: bytes


class Nack(Request, frozen=True):
    """These rows (i8 global indexes) of a lease are given back. Done(True) where the lease had any of them.

    delivered: somebody has had them; it counts as a delivery that was not acknowledged.
    """

    partition: str
    token: Natural
    rows: bytes
    delivered: bool = True


class Renew(Request, frozen=True):
    """These leases, (partition, token), have all their time again. Done([bool]): which are still in force."""

    leases: list[tuple[str, Natural]]


class RankGone(Request, frozen=True):
    """A rank will not come back: what it has not acknowledged of its kept batches is anybody's. Done(rows)."""

    partition: str
    task: str
    dp_rank: Natural


class Show(Request, frozen=True):
    """All live rows of a partition with the state of these fields; deals and consumes nothing."""

    partition: str
    fields: list[str]


class RetrieveMeta(Request, frozen=True):
    """The rows of these keys, in key order, unknown keys left out."""

    partition: str
    keys: list[str]


class RetrieveKeys(Request, frozen=True):
    """The keys of these rows (i8 global indexes)."""

    partition: str
    rows: bytes


class Lookup(Request, frozen=True):
    """Asks where values lie.

    By rows (i8) every row must have every field; by keys unknown ones are left out and the fields every found key has
    are cut to `fields` (None: all). epoch: as in `Publish`. near, avoid: of values that lie in two units, which are
    better, and which are not to be named.
    """

    partition: str
    rows: bytes | None = None
    keys: list[str] | None = None
    fields: list[str] | None = None
    epoch: Natural | None = None
    near: list[AnyUnit] = []
    avoid: list[AnyUnit] = []


class ListKeys(Request, frozen=True):
    """The next page of a list: partition -> key -> tag.

    partitions: those that are left to list, None: all. where: entries that the tag must have. made, start: where the
    first of them was left, as the page before said it.
    """

    partitions: list[str] | None = None
    where: dict[str, Any] = {}
    made: Natural | None = None
    start: Natural = 0


class Watch(Request, frozen=True):
    """Wants the rows whose tags or fields changed after version `since` and whose tags have the entries of `where`.

    since: the version of an earlier reply; None or -1: all rows there are. wait: seconds to stay parked until there
    is news; None answers at once.
    """

    partition: str
    since: Version | None = None
    where: dict[str, Any] = {}
    wait: Seconds | None = None


class ListPartitions(Request, frozen=True):
    """The names of the partitions, in order of creation."""


class ClearRows(Request, frozen=True):
    """Clears rows (i8 global indexes); unknown ones are fine. epoch: as in `Publish`."""

    partition: str
    rows: bytes
    epoch: Natural | None = None


class ClearKeys(Request, frozen=True):
    """Clears the rows of these keys; unknown ones are fine."""

    partition: str
    keys: list[str]


class Drop(Request, frozen=True):
    """Clears samples for a reason, which is counted: rows (i8 global indexes), whole declared groups, or both.

    epoch: as in `Publish`.
    """

    partition: str
    reason: str
    rows: bytes = b""
    groups: list[str] = []
    epoch: Natural | None = None


class Finish(Request, frozen=True):
    """The task is through with these rows (i8 global indexes), which client `holder` was given.

    epoch: as in `Publish`.
    """

    partition: str
    task: str
    rows: bytes
    holder: str
    epoch: Natural | None = None


class SetPolicyVersion(Request, frozen=True):
    """The policy has reached this version, which never goes back."""

    partition: str
    version: Natural


class Want(Request, frozen=True):
    """A task wants so many whole groups to be there, or on their way, that it has not consumed."""

    partition: str
    task: str
    groups: Natural


class Wanted(Request, frozen=True):
    """How many groups a task still misses; of these the asking producer takes `most` upon itself.

    most: None takes none. wait: seconds to stay parked while none is missing; None answers at once.
    """

    partition: str
    task: str
    most: Natural | None = None
    wait: Seconds | None = None


class ClearPartition(Request, frozen=True):
    """Drops a partition and its data; an unknown one is fine."""

    partition: str


class ProductionStatus(Request, frozen=True):
    """Which rows have which of these fields."""

    partition: str
    fields: list[str]


class ConsumptionStatus(Request, frozen=True):
    """Which rows the task has consumed."""

    partition: str
    task: str


class TakeSnapshot(Request, frozen=True):
    """What a partition holds, a page of its rows at a time. start: the position from which on.

    made: of the first page, so that a partition made anew under the name is not taken for the one that was asked for.
    """

    partition: str
    made: Natural | None = None
    start: Natural = 0


class CheckProduction(Request, frozen=True):
    """Whether every row has every one of these fields."""

    partition: str
    fields: list[str]


class CheckConsumption(Request, frozen=True):
    """Whether the task has consumed every row."""

    partition: str
    task: str


class ResetConsumption(Request, frozen=True):
    """Forgets what a task (None: every task) has consumed, and its dealt batches."""

    partition: str
    task: str | None = None


class Seal(Request, frozen=True):
    """No new rows will come (from this producer). create: make the partition without a warning if it does not exist."""

    partition: str
    create: bool = False


class Explain(Request, frozen=True):
    """Why a sample is not handed out, in words; with a count, why a claim of the task for `count` rows waits.

    sampling: the sampling_config of that claim.
    """

    partition: str
    row: AnyIndex | None = None
    key: str | None = None
    task: str | None = None
    fields: list[str] | None = None
    count: Natural | None = None
    sampling: dict[str, Any] = {}


class Status(Request, frozen=True):
    """Progress of every partition by field and task."""


class CloseExtents(Request, frozen=True):
    """These extents of the asking writer will take no more blocks."""

    extents: list[tuple[Unit, ExtentNumber]]


class FetchState(Request, frozen=True):
    """Asks for a part of a state file, for a client on another node.

    The reply is `Done` with how many bytes there are from `start` on (None if there is no such file), and `length` of
    them as payload.
    """

    name: str
    start: Natural
    length: Natural


class SendState(Request, frozen=True):
    """The payload goes to this place of a state file, for a client on another node that is about to load it.

    start: -1 removes the file.
    """

    name: str
    start: Position


class NodeGone(Request, frozen=True):
    """A node has failed: its storage units are lost. when: what time it is, in words."""

    node: str
    when: str = ""


class Drain(Request, frozen=True):
    """Wants everything moved off a storage unit, which leases nothing to writers from now on.

    undo: it leases again. wait: seconds to wait until nothing lies there; None answers at once.
    """

    unit: Unit
    undo: bool = False
    wait: Seconds | None = None


class Cancel(Request, frozen=True):
    """The asking client no longer waits for its request `sequence`."""

    sequence: Natural


class BeginCheckpoint(Request, frozen=True):
    """The asking client saves the system as it is now. name: 32 hex digits of its own choice.

    The state is in the file of this name, in the system's folder of state files, when this is answered; and until
    `EndCheckpoint`, or until the client has gone, no space that its values lie in is used again.
    """

    name: str


class EndCheckpoint(Request, frozen=True):
    """The asking client is through with a checkpoint; answered by whether all of it was there until now."""

    name: str


class UseSampler(Request, frozen=True):
    """The sampler in the file of this name, in the system's folder of samplers, becomes the system's.

    name: 32 hex digits. Who can write there is the system's user; no code ever comes with a request.
    """

    name: str


class LoadState(Request, frozen=True):
    """The state in the file of this name, in the system's folder of state files, becomes the system's."""

    name: str
