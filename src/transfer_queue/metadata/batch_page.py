"""Describes a batch for a notebook: its fields with types and shapes, and its first samples with their tags."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from transfer_queue.display import (
    MOST_ROWS,
    HtmlPage,
    Row,
    SizeCell,
    count_text,
    listed_names,
    short_name,
    short_repr,
    table_of,
)
from transfer_queue.metadata.batch_contents import BatchContents
from transfer_queue.metadata.field_columns import FieldColumn


def batch_page(batch: BatchContents) -> HtmlPage:
    """Return what a `BatchMeta` shows in a notebook."""
    size = batch.size
    names = batch._partitions.names if size else []
    produced = int((batch._status == 1).sum())
    page = HtmlPage("BatchMeta", f"{count_text(size, 'sample')}{f' of {listed_names(names)}' if names else ''}")
    if size:
        page.notes.append("all produced" if produced == size else f"{produced:,} of {size:,} produced")
    if batch._leases:
        page.notes.append(f"fetched under {count_text(len(batch._leases), 'lease')}")
    if batch._extra_info:
        page.notes.append(f"extra_info: {short_repr(batch._extra_info, 200)}")
    fields = (
        [short_name(field.name), _type(field), _row_shape(field), _nbytes(field, size)]
        for field in batch._fields.values()
    )
    page.tables.append(table_of(["field", "type", "shape of a row", "bytes"], fields, len(batch._fields), "field"))
    columns = ["", "global index", *(["partition"] if len(names) > 1 else []), "produced", "tag"]
    page.tables.append(table_of(columns, _samples(batch, len(names) > 1), size, "sample"))
    return page


def _samples(batch: BatchContents, with_partition: bool) -> Iterator[Row]:
    """Yield a row for each of the first samples."""
    tags = batch._tags.first(MOST_ROWS)
    for position, index in enumerate(batch._indexes[:MOST_ROWS].tolist()):
        partition = [short_name(batch._partitions.name_of(position))] if with_partition else []
        tag = tags[position] if position < len(tags) else {}
        yield [position, index, *partition, "yes" if batch._status[position] == 1 else "no", short_repr(tag)]


def _type(field: FieldColumn) -> str:
    if field.is_non_tensor:
        return "objects"
    mixed = field.dtypes is not None and len(set(field.dtypes)) > 1
    name = "not known" if field.dtype is None else str(field.dtype).removeprefix("torch.")
    return f"{name} (rows differ)" if mixed else name


def _row_shape(field: FieldColumn) -> str:
    """Return the shape of a row: `[3]`, or with the least and greatest length if rows differ: `[2..5]`."""
    if field.is_non_tensor:
        return ""
    if field.shape is not None:
        return f"[{', '.join(map(str, field.shape))}]"
    if isinstance(field.shapes, np.ndarray):
        if not len(field.shapes):
            return "rows differ"
        least, most = field.shapes.min(axis=0).tolist(), field.shapes.max(axis=0).tolist()
        return f"[{', '.join(str(a) if a == b else f'{a}..{b}' for a, b in zip(least, most))}]"
    return "rows differ" if field.is_nested else "not known"


def _nbytes(field: FieldColumn, rows: int) -> SizeCell | None:
    """Return the size of the values of a field; None if it is not known."""
    if field.is_non_tensor or field.dtype is None:
        return None
    if field.shape is not None:
        return SizeCell(rows * math.prod(field.shape) * field.dtype.itemsize)
    if isinstance(field.shapes, np.ndarray):
        return SizeCell(int(field.shapes.prod(axis=1).sum()) * field.dtype.itemsize)
    return None
