"""Converts what earlier builds have saved to the present form: records of journals, and trees of states.

It is the only module that knows earlier forms which have no column or record any more. The readers of journals and of
saved states call it first, so that all other code knows the present form only.
"""

from __future__ import annotations

from typing import Any

from transfer_queue.core.columns.joined_columns import unpack_texts
from transfer_queue.core.events import records as r
from transfer_queue.core.tables.field_types import with_schemas


def current_record(record: r.AnyRecord) -> r.AnyRecord:
    """Return a record of a journal in its present form: the schema of a block is a list, and was in parts before."""
    return with_schemas(record) if isinstance(record, (r.RowsPut, r.Published)) else record


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
