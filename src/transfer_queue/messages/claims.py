"""Requests of consumers: claims, and the end of leases and references."""

from __future__ import annotations

from typing import Any

from transfer_queue.messages.base import (
    Natural,
    Reply,
    RequestBody,
    Seconds,
    Version,
)
from transfer_queue.messages.descriptors import FieldType
from transfer_queue.messages.queries import LookupReply
from transfer_queue.messages.tag_table import StoredTags


class Claim(RequestBody, frozen=True):
    """Ask for `count` rows with all these fields for a task. The sampler chooses them."""

    partition: str
    task: str
    fields: list[str]
    count: Natural
    sampling: dict[str, Any] = {}
    wait: Seconds | None = None
    """Seconds to stay parked; None returns at once."""
    probe: bool = False
    """Deal nothing. The reply comes when such a claim could be met, or if it never can (`ClaimReply.ended`)."""
    finite: bool = False
    """Whether a partition that is consumed entirely is an end."""
    since: Version | None = None
    """A probe is not answered while the partition has this version, unless it has ended."""
    hold: bool = False
    """Do not finish the rows that the client got before; only `Finish` does."""
    lease: Seconds | None = None
    """Claim the rows for this time, which can be renewed, until they are acknowledged; None consumes them."""
    replicas: Natural | None = None
    """The number of tokens whose acks consume a dealt batch; None for the partition's replicas."""
    places: bool = False
    """Whether the reply also has the locations of the values (`ClaimReply.places`)."""
    waited: Seconds = 0.0
    """Seconds that the caller waited before this request; the message of a timeout includes them."""
    quiet: bool = False
    """Whether the reply has no rows, instead of being a failure, if the wait ends without rows."""
    ahead: Natural = 0
    """The number of batches by which this one is ahead of the batch that its rank needs now.

    A batch ahead takes no rows that other ranks may need.
    """
    least: Natural | None = None
    """The number of rows that are enough if fewer than `count` are ready; None for `count`.

    Samplers whose batches belong to a rank deal `count` rows.
    """
    hand_over: bool = False
    """Whether rows that belong to no rank stay with the client until it has handed them over (`ReportBatches`).

    They are consumed, but a `Nack` of the token in the reply, the cancellation of the claim, or the end of the client
    makes them ready again. Without effect on a claim with a lease.
    """
    again: bool = False
    """Return only a batch that was dealt before under its (dp_rank, batch_index); nothing is dealt.

    Without such a batch the claim is refused at once with `BatchGoneError`.
    """


class ReportBatches(RequestBody, frozen=True):
    """Report what became of batches of claims with `hand_over`, each by its partition and token.

    A request carries it (`RequestEnvelope.report`), or it is sent with sequence 0 and gets no reply. It may arrive
    several times.
    """

    handed_over: list[tuple[str, Natural]] = []
    """The batches that the consumer has got, so that nothing makes their rows ready again."""
    finished: list[tuple[str, Natural]] = []
    """The same, of batches whose values were read: the consumer does not refer to their rows any more (`Finish`)."""
    returned: list[tuple[str, Natural]] = []
    """The batches that no consumer will get. Their rows become ready again."""
    withdrawn: list[Natural] = []
    """The sequences of claims of this client whose replies it does not wait for any more, as in `Cancel`."""
    left: bool = False
    """Whether the client closes, so that it hands nothing over any more."""


class Ack(RequestBody, frozen=True):
    """Make rows of a lease consumed. The reply is `Done(True)` if the ack counts for any of them."""

    partition: str
    token: Natural
    rows: bytes
    """Global indexes, i8."""


class AckMany(RequestBody, frozen=True):
    """Make rows of several leases consumed, one acknowledgement after the other.

    The reply is `Done` with an entry for each: True or False as for `Ack`, or the class name and message of its error.
    """

    acks: list[Ack]


class Nack(RequestBody, frozen=True):
    """Return rows of a lease. The reply is `Done(True)` if the lease had any of them."""

    partition: str
    token: Natural
    rows: bytes
    """Global indexes, i8."""
    delivered: bool = True
    """Whether the consumer received the rows, so that this counts as a delivery without an acknowledgement."""


class Renew(RequestBody, frozen=True):
    """Renew leases and locks (partition, token) for their full duration.

    The reply is `Done([bool])`: which of them are still in force.
    """

    leases: list[tuple[str, Natural]]


class RankGone(RequestBody, frozen=True):
    """Report that a rank will not return, so that rows of its dealt batches without its ack become ready again.

    The reply is `Done` with the number of these rows.
    """

    partition: str
    task: str
    dp_rank: Natural


class Finish(RequestBody, frozen=True):
    """Report that the task does not need rows any more that client `holder` got."""

    partition: str
    task: str
    rows: bytes
    """Global indexes, i8."""
    holder: str
    epoch: Natural | None = None
    """As in `Publish`."""


class ResetConsumption(RequestBody, frozen=True):
    """Forget which rows a task has consumed, and its dealt batches."""

    partition: str
    task: str | None = None
    """None for every task."""


class Cancel(RequestBody, frozen=True):
    """Report that the client does not wait for its request `sequence` any more, and undo its effect if possible.

    The reply is `Done(True)` if nothing of the request is left: it was waiting, or was undone (the lease of a claim
    was returned, a lock released, a put of new rows withdrawn). After `Done(False)` the client may send the request
    again: it gets its reply if it had an effect, which then stays; otherwise it is refused.
    """

    sequence: Natural


class ClaimReply(Reply, frozen=True):
    """The rows of a claim, with their metadata."""

    rows: bytes
    """Global indexes, i8."""
    fields: list[FieldType] = []
    produced: bytes | None = None
    """i1 [rows]; None if all are 1."""
    tags: StoredTags | None = None
    """The tag of each row; None if all are empty."""
    shapes: dict[str, bytes] = {}
    """Field -> row shapes, i8 [rows, ndim] after ndim, for fields whose rows have differed in shape."""
    ended: bool = False
    """Whether this claim can never be met."""
    version: int = -1
    """For a probe: the version of the partition, which grows with every change; -1 if it does not exist.

    For a reservation: as in `PublishReply`.
    """
    held: bool = False
    """Whether the rows stay until the task has finished them (`PartitionOptions.free_when`)."""
    warning: str | None = None
    """A message that the client logs once."""
    epoch: int = 0
    """The epoch of the state (see `core.state.state`)."""
    token: int = 0
    """The token of the lease; 0 without a lease."""
    deliveries: bytes | None = None
    """The delivery number of each row, i4, from 1; 0 for a row that was cleared; None if all are 1."""
    places: LookupReply | None = None
    """The reply that a lookup at the same moment would have had.

    None if the claim did not ask for it, if rows were cleared, and in a reply that is sent again.
    """
    dtypes: dict[str, bytes] = {}
    """Field -> positions in `FieldType.dtypes`, i1 [rows], for fields that have several dtypes."""
