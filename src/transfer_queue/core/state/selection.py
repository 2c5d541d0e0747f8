"""Reduces a saved state to chosen partitions and keys, and lists the values that are lost in it.

A client uses these functions on the state of a checkpoint, never on that of a running system.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transfer_queue.core.puts import apply_clears
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.state.unknown_partitions import require_partition
from transfer_queue.core.tables.row_table import CHUNK_BITS
from transfer_queue.errors import StorageKeyNotFoundError

MOST_NAMED = 5  # unknown keys that an error names

Lost = dict[str, dict["str | int", list[str]]]
"""Partition -> key of a sample (its global index if it has none) -> the fields whose values are lost."""


def select_samples(state: State, names: Sequence[str], keys: Sequence[str] | None = None) -> None:
    """Remove all other partitions from a state, and all other samples.

    Rows that were reserved and never written are removed, too.

    Args:
        state: The state.
        names: The partitions to keep.
        keys: The keys of the samples to keep, of a single partition. Default: None, all samples.

    Raises:
        UnknownPartitionError: The state does not have one of the partitions.
        StorageKeyNotFoundError: The partition does not have one of the keys.
    """
    for name in names:
        require_partition(state.partitions, name, "Nothing was changed. Name only partitions that the checkpoint has")
    for name in [name for name in state.partitions if name not in names]:
        partition = state.partitions.pop(name)
        apply_clears.clear_all(partition)
        state.blocks.stored.pop(partition.number, None)
        state.blocks.saved.pop(partition.number, None)
        state.aging.pop(name, None)
        state.counted.mark_changed(name)
    for partition in state.partitions.values():
        chosen = _written_rows(partition) if keys is None else _rows_with_keys(partition, keys)
        apply_clears.clear_rows(partition, np.setdiff1d(partition.rows.live_positions(), chosen))
        state.counted.mark_changed(partition.name)


def _rows_with_keys(partition: Partition, keys: Sequence[str]) -> np.ndarray:
    unknown = [key for key in keys if key not in partition.keys]
    if unknown:
        more = f" and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
        raise StorageKeyNotFoundError(
            f"partition {partition.name!r} has no samples with the keys {unknown[:MOST_NAMED]}{more}; name keys that "
            f"it has (kv_list). Nothing was changed"
        )
    return np.unique(np.array([partition.keys[key] for key in keys], "i8"))


def _written_rows(partition: Partition) -> np.ndarray:
    """Return the positions of the rows that have a value, a tag or a key, ascending."""
    parts = [np.zeros(0, "i8")]
    for number, chunk in partition.rows.chunks.items():
        size = chunk.size
        written = np.zeros(size, bool)
        for blocks, _ in chunk.field.values():
            written |= blocks[:size] != 0
        for lost in chunk.lost.values():
            written |= lost[:size] != 0
        if chunk.keys is not None:
            written |= np.array([bool(key) for key in chunk.keys[:size]], bool)
        if chunk.tags is not None:
            written |= chunk.tags.tagged(slice(0, size))
        written &= (chunk.alive[:size] == 1) & (chunk.waiting[:size] == 0)
        parts.append(np.flatnonzero(written) + (number << CHUNK_BITS))
    return np.concatenate(parts)


def lost_values(state: State) -> Lost:
    """Return the samples of a state with lost values."""
    found: Lost = {}
    for partition in state.partitions.values():
        positions, fields = partition.losses.lost_since(-1)
        keys, indexes = partition.keys_of(positions), partition.rows.indexes_of(positions).tolist()
        for at, (key, index) in enumerate(zip(keys, indexes, strict=True)):
            names = [name for name, lost in fields.items() if lost[at]]
            found.setdefault(partition.name, {})[index if key is None else key] = names
    return found
