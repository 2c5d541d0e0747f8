"""Converts what earlier builds have saved to the present form: records of journals, and trees of states.

It is the only module that knows earlier forms which have no column or record any more. The readers of journals and of
saved states call it first, so that all other code knows the present form only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from transfer_queue.core.columns.kinds import unpack_texts
from transfer_queue.core.events import records as r
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.base import UNREADABLE
from transfer_queue.messages.descriptors import FieldSpec, NewBlock
from transfer_queue.messages.tag_table import SentTags

_decode_part = msgspec.msgpack.Decoder(list[FieldSpec]).decode

# ------------------------------------------------------------ records


class _EarlierRecord(r.Record, frozen=True):
    """Base of the records that this build does not write any more. All of them are of puts."""

    def present(self) -> r.SamplesPut:
        """Return the record in its present form."""
        raise NotImplementedError


def _part(client: str, count: int, block: NewBlock | None, further: Sequence[NewBlock] = ()) -> r.WriterPart:
    """Return a put with the schemas of its blocks as lists, which may be in parts."""
    return r.WriterPart(client, count, [] if block is None else [_with_schema(each) for each in (block, *further)])


def _with_schema(block: NewBlock) -> NewBlock:
    if not block.parts:
        return block
    try:
        schema = [spec for part in block.parts for spec in _decode_part(part)]
    except UNREADABLE as error:
        raise InvalidArgumentError(f"a part of the schema of the block cannot be decoded: {error}") from error
    return msgspec.structs.replace(block, schema=schema, parts=[])


class RowsReserved(_EarlierRecord, frozen=True):
    """Rows without values: pre-allocated ones were taken, new ones added."""

    partition: str
    first_index: int
    count: int
    taken: int = 0
    keys: list[str] | None = None
    groups: list[str | None] | None = None
    pre_allocated: bool = False
    client: str = ""

    def present(self) -> r.SamplesPut:
        """See `_EarlierRecord`."""
        part = _part(self.client, self.taken + self.count, None)
        return r.SamplesPut(
            self.partition, [part], self.first_index, self.count, self.keys, self.groups, taken=self.taken,
            pre_allocated=self.pre_allocated,
        )  # fmt: skip


class Published(_EarlierRecord, frozen=True):
    """Values, tags or groups of existing rows."""

    partition: str
    rows: bytes
    writer: str
    block_number: int = 0
    block: NewBlock | None = None
    tags: SentTags | None = None
    replace_tags: bool = False
    groups: list[str | None] | None = None
    further: list[NewBlock] = msgspec.field(default_factory=list)

    def present(self) -> r.SamplesPut:
        """See `_EarlierRecord`."""
        part = _part(self.writer, len(self.rows) // 8, self.block, self.further)
        return r.SamplesPut(
            self.partition, [part], groups=self.groups, tags=self.tags, first_block=self.block_number, rows=self.rows,
            replace_tags=self.replace_tags,
        )  # fmt: skip


class RowsPut(_EarlierRecord, frozen=True):
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
    further: list[NewBlock] = msgspec.field(default_factory=list)

    def present(self) -> r.SamplesPut:
        """See `_EarlierRecord`."""
        part = _part(self.client, self.count, self.block, self.further)
        return r.SamplesPut(
            self.partition, [part], self.first_index, self.count, self.keys, self.groups, self.tags, self.block_number
        )  # fmt: skip


class RowsPutTogether(_EarlierRecord, frozen=True):
    """New rows of several clients, each with a block."""

    partition: str
    first_index: int
    block_number: int
    puts: list[tuple[str, NewBlock]]
    keys: list[str] | None = None
    tags: list[dict[str, Any] | None] | None = None

    def present(self) -> r.SamplesPut:
        """See `_EarlierRecord`."""
        parts = [_part(client, block.rows, block) for client, block in self.puts]
        count = sum(part.count for part in parts)
        return r.SamplesPut(
            self.partition, parts, self.first_index, count, self.keys, None, self.tags, self.block_number
        )  # fmt: skip


class ValuesShared(_EarlierRecord, frozen=True):
    """Values that rows of a put shared with earlier puts, before the record of the put's own blocks."""

    partition: str
    rows: bytes
    fields: list[r.SharedField]

    def present(self) -> r.SamplesPut:
        """See `_EarlierRecord`."""
        return r.SamplesPut(self.partition, [_part("", len(self.rows) // 8, None)], rows=self.rows, shared=self.fields)


class DigestsNoted(_EarlierRecord, frozen=True):
    """Digests of the values of the put before."""

    partition: str
    fields: list[r.NotedField]

    def present(self) -> r.SamplesPut:
        """See `_EarlierRecord`."""
        return r.SamplesPut(self.partition, [], rows=b"", noted=self.fields)


def current_record(record: r.Record) -> r.AnyRecord:
    """Return a record of a journal in its present form."""
    return record.present() if isinstance(record, _EarlierRecord) else record


EARLIER_RECORDS = tuple(_EarlierRecord.__subclasses__())
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
