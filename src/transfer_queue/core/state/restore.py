"""Replaces the state by a saved state, and decides what of either remains."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.serialization import load_state
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.blocks import BlockTable
from transfer_queue.errors import CheckpointError

MOST_ORIGINS = 32  # checkpoints that are remembered; a checkpoint has no more files
_ARRAY = 1  # msgpack Ext: dtype, a zero byte, the bytes of a one-dimensional array


def _decode(code: int, content: memoryview) -> Any:
    if code != _ARRAY:
        return msgspec.msgpack.Ext(code, bytes(content))
    packed = bytes(content)
    dtype, _, values = packed.partition(b"\0")
    return np.frombuffer(values, np.dtype(dtype.decode())).copy()


_decoder = msgspec.msgpack.Decoder(ext_hook=_decode)


def unpack(packed: bytes) -> Any:
    """Return the tree of a loaded state that an older release wrote into a record. Its arrays are copies.

    This release writes a loaded state into a file of its own, which the record names (`journal.state_file`).
    """
    return _decoder.decode(packed)


def replace_state(state: State, record: r.StateLoaded) -> None:
    """Replace the partitions by those of a saved state. Clients, units and waiting requests remain.

    Counters never decrease. All leases end, the present ones and the saved ones, and their samples are delivered again.
    All locks end, too: what their holders have read does not belong to the loaded state.
    Promises and reservations of clients are forgotten. A client that is still connected keeps its saved references to
    rows; those of other clients go to the next client that asks for their task and rank. All checks come first.
    """
    tree, loaded = take_loaded(state, record)
    _join(state, loaded.blocks)
    state.epoch = max(state.epoch, loaded.epoch) + 1
    state.next_index = max(state.next_index, loaded.next_index)
    state.next_block = max(state.next_block, loaded.next_block)
    state.next_token = max(state.next_token, loaded.next_token)
    state.losses = max(state.losses, loaded.losses)
    state.changes = max(state.changes, loaded.changes) + 1
    state.blocks = loaded.blocks
    state.locks.clear()
    keep_samplers(state, loaded)
    state.origins = dict([*loaded.origins.items(), (tree["origin"], loaded.next_block)][-MOST_ORIGINS:])
    shift_ages(loaded, record.time - tree["time"])
    state.partitions, state.aging, state.counted = loaded.partitions, loaded.aging, loaded.counted
    for partition in state.partitions.values():
        partition.awaited = state.waiting.awaited
        partition.version = partition.changes.made = state.changes
        partition.epoch = state.epoch
        _forget_clients(partition)
        partition.end_all_leases()


def take_loaded(state: State, record: r.StateLoaded) -> tuple[dict[str, Any], State]:
    """Return the saved tree that a record names, and the state in it."""
    if state.prepared is not None and state.prepared[0] is record:
        _, tree, loaded = state.prepared
        state.prepared = None
        for partition in loaded.partitions.values():
            for tag in state.watched:
                partition.rows.watch(tag)  # usually it is already watched
        return tree, loaded
    assert not record.file, "the file that a record names must be read before the record is applied"
    tree = unpack(record.state)
    return tree, load_state(tree["state"], state.capacity, state.watched)


def keep_samplers(state: State, loaded: State) -> None:
    """Add the samplers of tasks that were saved. Those that datasets of this system have registered stay."""
    state.samplers = {**loaded.samplers, **state.samplers}


def check_new_extents(state: State, blocks: BlockTable) -> None:
    """Raise CheckpointError unless the extents of the blocks to load are of this system, and new in it."""
    for unit, extent in blocks.extents:
        if unit not in state.units or (unit, extent) in state.blocks.extents:
            raise CheckpointError(f"the state to load has blocks in extent {extent} of unit {unit}, which is not new")


def free_partitions(partitions: list[Partition]) -> None:
    """Free partitions that were replaced, in a thread beside the event loop. Empties the list.

    To free a million rows with keys and tags at once would take 30 ms or more, in which no other thread runs.
    """
    while partitions:
        partition = partitions.pop()
        keys, chunks = partition.keys, list(partition.rows.chunks.values())
        del partition
        del keys  # before the chunks, which refer to the same strings, so that these are freed chunk by chunk
        while chunks:
            chunks.pop()


def _join(state: State, blocks: BlockTable) -> None:
    """Check that the extents of the blocks are new, and add the present extents that writers still fill."""
    check_new_extents(state, blocks)
    blocks.freed, blocks.untold = state.blocks.freed, state.blocks.untold
    for place, before in state.blocks.extents.items():
        blocks.enter_empty(place, before)
    blocks.close([place for place, before in state.blocks.extents.items() if before.closed])


def shift_ages(state: State, shift: float) -> None:
    """Change the times of rows by this number of seconds, from the former clock to the present one."""
    state.locks.shift(shift)
    for partition in state.partitions.values():
        partition.births.shift(shift)


def _forget_clients(partition: Partition) -> None:
    partition.wants.promised.clear()
    partition.owners = {f"before epoch {partition.epoch}: {n}": number for n, number in partition.owners.items()}
