"""Requests of consumers: claims, and what becomes of the claimed samples."""

from __future__ import annotations

from typing import Any

from transfer_queue.messages.base import (
    Natural,
    Reply,
    Request,
    Seconds,
    Version,
)
from transfer_queue.messages.descriptors import FieldType
from transfer_queue.messages.queries import LookupReply


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


class Finish(Request, frozen=True):
    """The task is through with these rows (i8 global indexes), which client `holder` was given.

    epoch: as in `Publish`.
    """

    partition: str
    task: str
    rows: bytes
    holder: str
    epoch: Natural | None = None


class ResetConsumption(Request, frozen=True):
    """Forgets what a task (None: every task) has consumed, and its dealt batches."""

    partition: str
    task: str | None = None


class Cancel(Request, frozen=True):
    """The asking client no longer waits for its request `sequence`."""

    sequence: Natural


class ClaimReply(Reply, frozen=True):
    """Rows with what a BatchMeta says of them.

    rows i8, produced i1 (None: all 1); tags None where all are empty; shapes: field -> (ndim, i8
    rows x ndim) for fields whose rows have differed. dtypes: field -> i1 rows, positions in `FieldType.dtypes`, for
    fields that have several dtypes. ended: nothing will ever come for this claim.
    version: of a probe, the partition's, which grows with every change in it; -1 where it does not exist.
    held: the rows stay until the task has finished them (`PartitionOptions.free_when`).
    warning: what the asking client's log should say once. epoch: of the state (see `core.state.state`).
    token: of the lease, 0 without one.
    deliveries: the delivery number of each row (i4), from 1, and 0 for a row that is cleared; None if all are 1.
    places: where the values lie, as a lookup in the same moment would have said; None where it was not asked for, or
    rows are gone, and in a reply that is given again.
    """

    rows: bytes
    fields: list[FieldType] = []
    produced: bytes | None = None
    tags: list[dict[str, Any]] | None = None
    shapes: dict[str, bytes] = {}
    ended: bool = False
    version: int = -1
    held: bool = False
    warning: str | None = None
    epoch: int = 0
    token: int = 0
    deliveries: bytes | None = None
    places: LookupReply | None = None
    dtypes: dict[str, bytes] = {}
