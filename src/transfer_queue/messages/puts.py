"""Requests that reserve, publish, clear and drop samples."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from transfer_queue.messages.base import (
    ExtentNumber,
    Natural,
    Reply,
    RequestBody,
    Seconds,
    Unit,
)
from transfer_queue.messages.descriptors import EqualField, NewBlock
from transfer_queue.messages.tag_table import SentTags, StoredTags


class Reserve(RequestBody, frozen=True):
    """Reserve rows: `count` new ones, or one for each unknown key. The reply has the rows of all keys."""

    partition: str
    count: Natural
    keys: list[str] | None
    pre_allocate: Natural = 1
    groups: list[str] | None = None
    wait: Seconds | None = None
    """As in `Publish`."""


class Publish(RequestBody, frozen=True):
    """Make written values visible, together with tags, keys and groups.

    The targets are `rows`, or the rows of `keys` (unknown keys are created), or without both `count` new rows.
    """

    partition: str
    count: Natural
    rows: bytes | None = None
    """The global indexes of the targets, i8."""
    keys: list[str] | None = None
    block: NewBlock | None = None
    """The written block, its rows in the order of the targets (see `NewBlock.slots`); None to change only tags."""
    tags: SentTags | None = None
    """The tag of each row, which is merged into its present one."""
    replace_tags: bool = False
    """Whether the tags replace the present ones."""
    groups: list[str] | None = None
    closes: list[tuple[Unit, ExtentNumber]] = []
    """Extents (unit, extent) of this writer to which it adds no more blocks."""
    pre_allocate: Natural = 1
    wait: Seconds | None = None
    """Seconds to wait for capacity; None fails at once."""
    epoch: Natural | None = None
    """The epoch in which the client learned `rows`; None accepts any epoch."""
    converted: list[str] = []
    """Fields of the block whose values the client has converted to tensors, because it expects tensors in the field.

    The put is refused if such a field does not contain tensors.
    """
    expected: bytes | None = None
    """The version that each of `keys` must have, i8; 0: the key must not exist. None accepts any versions."""
    fence: Natural | None = None
    """The token of a lock that must be in force; None for no such condition."""
    create: bool = True
    """Whether the put creates the partition if it does not exist. False refuses it then."""
    further: list[NewBlock] = []
    """Further blocks, which have other fields. The values of all blocks become visible together."""

    equal: list[EqualField] = []
    """The digests of fields, and which of these values the partition has already, so that no block has them.

    The put is refused with `EqualValueGoneError` if such a value was freed meanwhile.
    """

    puts: list[Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]] = []
    """The numbers of rows of the puts that a client has joined, in the order of the targets; empty: one put.

    All of them are carried out, or none is. The reply says for each of them what its rows have.
    """

    @property
    def blocks(self) -> list[NewBlock]:
        """All blocks of the put."""
        return [] if self.block is None else [self.block, *self.further]


class ClearRows(RequestBody, frozen=True):
    """Clear rows. Unknown rows are not an error."""

    partition: str
    rows: bytes
    """Global indexes, i8."""
    epoch: Natural | None = None
    """As in `Publish`."""


class ClearKeys(RequestBody, frozen=True):
    """Clear the rows of these keys. Unknown keys are not an error."""

    partition: str
    keys: list[str]


class Drop(RequestBody, frozen=True):
    """Clear samples and count them under a reason: rows, all members of declared groups, or both."""

    partition: str
    reason: str
    rows: bytes = b""
    """Global indexes, i8."""
    groups: list[str] = []
    epoch: Natural | None = None
    """As in `Publish`."""
    withdraws: bool = False
    """Whether to remove only those of `rows` that no task was dealt, as if they had never been put.

    They are not counted under the reason.
    """


class CloseExtents(RequestBody, frozen=True):
    """Report that the client, which is their writer, adds no more blocks to these extents (unit, extent).

    The reply has those in which the controller knows no block, which the client returns to their units.
    """

    extents: list[tuple[Unit, ExtentNumber]]


class PublishReply(Reply, frozen=True):
    """The rows of a put, and for a put by keys of which some existed, what these rows have now."""

    rows: bytes
    """The global indexes of the targets, i8."""
    tags: StoredTags | None = None
    """The merged tag of each row; None if all are empty, or if the tags are those of the put (`tags_as_sent`)."""
    fields: list[str] | None = None
    """The fields that all rows have, sorted; None if all rows are new, so that they have the fields of the put."""
    epoch: int = 0
    """The epoch of the state (see `core.state.state`)."""
    dtypes: dict[str, list[str]] = {}
    """Field -> dtypes, for fields of the put whose rows have several dtypes."""
    each: list[list[str]] = []
    """For each of `Publish.puts` the fields that all its rows have, sorted; empty if all rows are new, or without
    `puts`."""
    tags_as_sent: bool = False
    """Whether the rows have exactly the tags of the put. So do new rows, without the entries to remove, for which this
    is False."""
    warning: str | None = None
    """A warning that the client logs."""
    version: int = 0
    """The version of the partition after the put if it added all of its rows, otherwise 0. A row that has changed since
    has a higher version."""
