"""Removes the values that need pickle from a checkpoint that is loaded with allow_pickle=False.

Their bytes are overwritten before they reach storage, so that no process of the system can run the code in them. A
reader of such a value gets an error that names it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from msgspec.msgpack import Ext

from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.rows import Chunk
from transfer_queue.errors import InvalidArgumentError, ProtocolError, UncarriableValueError
from transfer_queue.utils.logging_utils import get_logger
from transfer_queue.wire.buffers.block_layout import columns
from transfer_queue.wire.objects.extensions import encode_refused
from transfer_queue.wire.objects.object_decoder import decode_object
from transfer_queue.wire.objects.object_values import OBJECT_CODE


class PickledValues:
    """Removes the values of a saved state that need pickle."""

    def __init__(self, state: State) -> None:
        self.found: Counter[tuple[str, str]] = Counter()
        """(partition, field or tag) -> number of removed values."""
        self._blocks = state.blocks
        self._objects = {at for at, schema in enumerate(state.blocks.schemas.values) if _has_objects(schema)}
        self._rows: dict[tuple[int, str, int], tuple[str, int]] = {}
        """(block, field, row in the block) -> partition and global index, for all objects."""
        for partition in state.partitions.values():
            self._note_rows(partition)

    def _note_rows(self, partition: Partition) -> None:
        for name, field in partition.fields.items():
            if field.kind == "tensor":
                continue
            for chunk in partition.rows.chunks.values():
                if name in chunk.field:
                    numbers, slots = chunk.field[name]
                    at = np.flatnonzero(numbers)
                    for number, slot, index in zip(numbers[at].tolist(), slots[at].tolist(), chunk.index[at].tolist()):
                        self._rows[number, name, slot] = (partition.name, index)

    def strip(self, number: int, content: np.ndarray) -> None:
        """Overwrite the values that need pickle in the bytes (u1) of a block."""
        schema, dims, rows = self._blocks.shape_source(number)
        if not _has_objects(schema):
            return
        for column in columns(schema, np.frombuffer(dims, "<i8"), rows):
            if column.spec.kind != "object":
                continue
            starts, lengths = column.locate(0, np.arange(rows))
            for slot, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
                value = content[start : start + length]
                if len(value) and needs_pickle(value.tobytes()):
                    partition, index = self._rows.get((number, column.spec.name, slot), ("", -1))
                    words = f"field {column.spec.name!r} of row {index} of partition {partition!r}"
                    self.found[partition, f"field {column.spec.name!r}"] += index >= 0
                    value[:] = np.frombuffer(encode_refused(len(value), words), "u1")

    def strip_tags(self, state: State) -> None:
        """Replace the values that need pickle in the tags of all rows."""
        for partition in state.partitions.values():
            for chunk in partition.rows.chunks.values():
                if chunk.tags is not None:
                    self._strip_tags_of(partition, chunk)

    def _strip_tags_of(self, partition: Partition, chunk: Chunk) -> None:
        tags = chunk.tag_columns()
        for at, tag in enumerate(tags.rows(slice(0, chunk.size))):
            for name, value in tag.items():
                words = f"tag {name!r} of row {int(chunk.index[at])} of partition {partition.name!r}"
                kept = _without_pickle(value, words)
                if kept is not value:
                    tags.put([at], [{name: kept}])
                    self.found[partition.name, f"tag {name!r}"] += 1

    def report(self) -> None:
        """Log how many values were refused."""
        counts = [f"{what} of {partition!r}: {count}" for (partition, what), count in self.found.items() if count]
        if counts:
            get_logger(__name__).warning(
                "the checkpoint was loaded with allow_pickle=False; values that need pickle cannot be read: %s",
                "; ".join(counts[:20]),
            )


def needs_pickle(data: bytes) -> bool:
    """Whether decoding an object from these bytes needs pickle."""
    try:
        decode_object(data, allow_pickle=False)
    except UncarriableValueError:
        return True
    except (ProtocolError, InvalidArgumentError):
        return False  # every reader fails before it reaches pickle
    return False


def _has_objects(schema: Any) -> bool:
    return any(spec.kind == "object" for spec in schema or ())


def _without_pickle(value: Any, words: str) -> Any:
    """Return the value of a tag, in which each value that needs pickle is replaced."""
    if isinstance(value, Ext):
        data = bytes(value.data)
        return Ext(value.code, encode_refused(0, words)) if value.code == OBJECT_CODE and needs_pickle(data) else value
    if isinstance(value, list):
        kept: Any = [_without_pickle(each, words) for each in value]
        return value if all(a is b for a, b in zip(kept, value)) else kept
    if isinstance(value, dict):
        kept = {key: _without_pickle(each, words) for key, each in value.items()}
        return value if all(kept[key] is value[key] for key in value) else kept
    return value
