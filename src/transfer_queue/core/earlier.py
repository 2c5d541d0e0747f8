"""Converts the records of puts that the first builds of release 0.2.0 wrote into journals to their present form.

It is the only module that knows records which this build does not write. The reader of journals calls it first, so that
all other code knows the present form only.
"""

from __future__ import annotations

import msgspec

from transfer_queue.core.events import records as r
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.base import UNREADABLE
from transfer_queue.messages.descriptors import FieldSpec, NewBlock
from transfer_queue.messages.tag_table import SentTags

_decode_part = msgspec.msgpack.Decoder(list[FieldSpec]).decode


class _EarlierRecord(r.Record, frozen=True, forbid_unknown_fields=True):
    """Base of these records.

    Builds that no release contains wrote some of them with more entries, such as further blocks. Those are refused,
    because a record without them would lose values.
    """

    def present(self) -> r.SamplesPut:
        """Return the record in its present form."""
        raise NotImplementedError


def _part(client: str, count: int, block: NewBlock | None) -> r.WriterPart:
    """Return a put with the schema of its block as a list, which may be in parts."""
    return r.WriterPart(client, count, [] if block is None else [_with_schema(block)])


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

    def present(self) -> r.SamplesPut:
        """See `_EarlierRecord`."""
        return r.SamplesPut(
            self.partition, [_part(self.writer, len(self.rows) // 8, self.block)], groups=self.groups, tags=self.tags,
            first_block=self.block_number, rows=self.rows, replace_tags=self.replace_tags,
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

    def present(self) -> r.SamplesPut:
        """See `_EarlierRecord`."""
        part = _part(self.client, self.count, self.block)
        return r.SamplesPut(
            self.partition, [part], self.first_index, self.count, self.keys, self.groups, self.tags, self.block_number
        )  # fmt: skip


def current_record(record: r.Record) -> r.AnyRecord:
    """Return a record of a journal in its present form."""
    return record.present() if isinstance(record, _EarlierRecord) else record


EARLIER_RECORDS = tuple(_EarlierRecord.__subclasses__())
"""The records that this build reads and does not write."""
