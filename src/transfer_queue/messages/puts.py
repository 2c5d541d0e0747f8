"""Requests that reserve, publish and end samples."""

from __future__ import annotations

from typing import Any

from transfer_queue.messages.base import (
    ExtentNumber,
    Natural,
    Reply,
    Request,
    Seconds,
    Unit,
)
from transfer_queue.messages.descriptors import NewBlock


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


class CloseExtents(Request, frozen=True):
    """These extents of the asking writer will take no more blocks."""

    extents: list[tuple[Unit, ExtentNumber]]


class PublishReply(Reply, frozen=True):
    """rows: i8 global indexes of the targets. epoch: of the state (see `core.state.state`).

    Of a put by keys of which some were known: tags, merged (None: all empty), and fields, common and sorted. fields
    None: all of them are new, and what they have is what was put. dtypes: field -> dtypes, for fields of the put whose
    rows have several dtypes.
    """

    rows: bytes
    tags: list[dict[str, Any]] | None = None
    fields: list[str] | None = None
    epoch: int = 0
    dtypes: dict[str, list[str]] = {}
