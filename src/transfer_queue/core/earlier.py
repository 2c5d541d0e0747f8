"""Converts what earlier builds have saved to the present form: records of journals, and trees of states.

It is the only module that knows earlier forms which have no column or record any more. The readers of journals and of
saved states call it first, so that all other code knows the present form only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transfer_queue.core.columns.joined_columns import unpack_texts
from transfer_queue.core.events import records as r
from transfer_queue.core.tables.field_types import with_schema
from transfer_queue.messages.descriptors import NewBlock
from transfer_queue.messages.tag_table import SentTags

# ------------------------------------------------------------ records


class RowsReserved(r.Record, frozen=True):
    """Rows without values: pre-allocated ones were taken, new ones added."""

    partition: str
    first_index: int
    count: int
    taken: int = 0
    keys: list[str] | None = None
    groups: list[str | None] | None = None
    pre_allocated: bool = False
    client: str = ""


class Published(r.Record, frozen=True):
    """Values, tags or groups of existing rows."""

    partition: str
    rows: bytes
    writer: str
    block_number: int = 0
    block: NewBlock | None = None
    tags: SentTags | None = None
    replace_tags: bool = False
    groups: list[str | None] | None = None
    further: list[NewBlock] = []


class RowsPut(r.Record, frozen=True):
    """New rows with their values."""

    partition: str
    client: str
    first_index: int
    count: int
    keys: list[str] | None = None
    groups: list[str | None] | None = None
    tags: SentTags | None = None
    block_number: int = 0
    block: NewBlock | None = None
    further: list[NewBlock] = []


class RowsPutTogether(r.Record, frozen=True):
    """New rows of several clients, each with a block."""

    partition: str
    first_index: int
    block_number: int
    puts: list[tuple[str, NewBlock]]
    keys: list[str] | None = None
    tags: list[dict[str, Any] | None] | None = None


class ValuesShared(r.Record, frozen=True):
    """Values that rows of a put shared with earlier puts, before the record of the put's own blocks."""

    partition: str
    rows: bytes
    fields: list[r.SharedField]


class DigestsNoted(r.Record, frozen=True):
    """Digests of the values of the put before."""

    partition: str
    fields: list[r.NotedField]


def current_record(record: r.Record) -> r.AnyRecord:
    """Return a record of a journal in its present form."""
    convert = _PRESENT_FORMS.get(type(record))
    present: Any = record if convert is None else convert(record)
    return present  # type: ignore[no-any-return]


def _part(client: str, count: int, block: NewBlock | None, further: Sequence[NewBlock] = ()) -> r.PutPart:
    """Return a put with the schemas of its blocks as lists, which may be in parts."""
    return r.PutPart(client, count, [] if block is None else [with_schema(each) for each in (block, *further)])


def _of_reservation(old: RowsReserved) -> r.SamplesPut:
    return r.SamplesPut(
        old.partition, [_part(old.client, old.taken + old.count, None)], old.first_index, old.count, old.keys,
        old.groups, taken=old.taken, pre_allocated=old.pre_allocated,
    )  # fmt: skip


def _of_published(old: Published) -> r.SamplesPut:
    part = _part(old.writer, len(old.rows) // 8, old.block, old.further)
    return r.SamplesPut(
        old.partition, [part], groups=old.groups, tags=old.tags, first_block=old.block_number, rows=old.rows,
        replace_tags=old.replace_tags,
    )  # fmt: skip


def _of_rows_put(old: RowsPut) -> r.SamplesPut:
    part = _part(old.client, old.count, old.block, old.further)
    return r.SamplesPut(
        old.partition, [part], old.first_index, old.count, old.keys, old.groups, old.tags, old.block_number
    )  # fmt: skip


def _of_rows_put_together(old: RowsPutTogether) -> r.SamplesPut:
    parts = [_part(client, block.rows, block) for client, block in old.puts]
    count = sum(part.count for part in parts)
    return r.SamplesPut(
        old.partition, parts, old.first_index, count, old.keys, None, old.tags, old.block_number
    )  # fmt: skip


def _of_values_shared(old: ValuesShared) -> r.SamplesPut:
    return r.SamplesPut(old.partition, [_part("", len(old.rows) // 8, None)], rows=old.rows, shared=old.fields)


def _of_digests_noted(old: DigestsNoted) -> r.SamplesPut:
    return r.SamplesPut(old.partition, [], rows=b"", noted=old.fields)


_PRESENT_FORMS: dict[type, Callable[[Any], r.SamplesPut]] = {
    RowsReserved: _of_reservation,
    Published: _of_published,
    RowsPut: _of_rows_put,
    RowsPutTogether: _of_rows_put_together,
    ValuesShared: _of_values_shared,
    DigestsNoted: _of_digests_noted,
}

EARLIER_RECORDS = tuple(_PRESENT_FORMS)
"""The records of earlier builds that this build does not write."""

# ------------------------------------------------------------ trees


def current_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a saved state in its present form. The given tree is not changed."""
    if not any("field_groups" in partition for partition in tree["partitions"].values()):
        return tree
    return {**tree, "partitions": {name: _without_groups(each) for name, each in tree["partitions"].items()}}


def _without_groups(partition: dict[str, Any]) -> dict[str, Any]:
    """Give each field columns of its own. Before, fields that were put together could share them as a group."""
    partition = dict(partition)
    groups = {
        number: [name for names in unpack_texts(packed) for name in names]
        for number, packed in partition.pop("field_groups", {}).items()
    }
    rows = partition["rows"]
    chunks = {key: _with_own_columns(chunk, groups) for key, chunk in rows["chunks"].items()}
    return {**partition, "rows": {**rows, "chunks": chunks}}


def _with_own_columns(chunk: dict[str, Any], groups: dict[int, list[str]]) -> dict[str, Any]:
    chunk = dict(chunk)
    field = dict(chunk["field"])
    for number, columns in chunk.pop("shared", {}).items():
        field.update((name, [column.copy() for column in columns]) for name in groups[number])
    return {**chunk, "field": field}
