"""The state as a tree of plain values, and back: for the journal's snapshots and for checkpoints.

The declared columns of each table decide the tree (`core.columns.schema`): dicts, lists, text, numbers, bytes and numpy
arrays. Arrays are not copied: the tree must be written before the state changes (or in a forked child), and a restored
state owns the arrays of its tree. Tags stay encoded until one of them is read.

The tree does not contain what a replay need not reproduce: waiting requests (clients send them again), configuration
(capacity, watched tags), and what is derived from the rest (ready sets, rankings, columns of watched tags).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from transfer_queue.core.columns.schema import BrokenInvariant
from transfer_queue.core.state.check import check_state
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.blocks import CHUNK_BITS, PLACE, BlockTable
from transfer_queue.core.tables.extents import ExtentRecord
from transfer_queue.core.tables.fields import MAX_FIELDS, count_live
from transfer_queue.errors import CheckpointError


def save_state(state: State) -> dict[str, Any]:
    """Return the state as plain values and arrays."""
    tree: dict[str, Any] = state.to_tree()
    return tree


def save_checked(state: State) -> dict[str, Any]:
    """Return the saved tree of a state, after all the checks that are made when it is loaded.

    Raises CheckpointError if the state contradicts itself. Takes seconds for a million rows, and the memory of a second
    state, so call it in another process than the controller's.
    """
    tree = save_state(state)
    try:
        load_untrusted(tree)
    except CheckpointError as error:
        raise CheckpointError(
            f"the state of the controller contradicts itself, so a checkpoint of it could not be loaded: "
            f"{error.__cause__}. This is a defect of this package, please report it. Load an older checkpoint to go on"
        ) from error
    return tree


def load_state(tree: Any, capacity: int | None = None, watched: Iterable[str] = ()) -> State:
    """Return the state that was saved, without waiting requests. For `capacity` and `watched` see `State`.

    Raises CheckpointError if the tree does not have the form of a state. Does not check that its content is consistent;
    see `load_untrusted`.
    """
    state = State(capacity)
    try:
        state.restore(tree)
        state.watch(watched)
    except Exception as error:  # whatever error a tree causes, the tree is wrong
        raise CheckpointError(
            f"this release does not know the form of the saved state ({type(error).__name__}: {error}); nothing was "
            f"changed. Load it with the release that saved it."
        ) from error
    return state


def load_untrusted(tree: Any, capacity: int | None = None, watched: Iterable[str] = ()) -> State:
    """Return the state of a tree from an unknown source, which is known to be complete.

    Raises CheckpointError also if the state contradicts itself. Takes some seconds for a million rows.
    """
    state = load_state(tree, capacity, watched)
    try:
        check_state(state)
    except Exception as error:  # as above; the text of a BrokenInvariant needs no type
        reason = str(error) if isinstance(error, BrokenInvariant) else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"the saved state contradicts itself: {reason}; nothing was changed. Load another checkpoint."
        ) from error
    return state


def check_field_numbers(state: State) -> None:
    """Raise CheckpointError if a partition of a saved state has more fields with values than a put may give it."""
    for name, partition in state.partitions.items():
        live = count_live(partition.fields)
        if live > MAX_FIELDS:
            raise CheckpointError(
                f"partition {name!r} has {live} fields with values, and a partition can have at most {MAX_FIELDS}. Use "
                f"the release that saved it to put the values of that partition into fewer fields"
            )


Columns = dict[str, np.ndarray]


def needed_blocks(blocks: BlockTable) -> Columns:
    """Return `number`, unit, extent, offset, generation and nbytes of all needed blocks, as columns, ascending."""
    names = (*PLACE, "nbytes")
    parts: dict[str, list[np.ndarray]] = {name: [np.zeros(0, "i8")] for name in ("number", *names)}
    for key in sorted(blocks.chunks):
        columns = blocks.chunks[key].columns
        at = np.flatnonzero(columns["live"])
        parts["number"].append(at + (key << CHUNK_BITS))
        for name in names:
            parts[name].append(columns[name][at].astype("i8"))
    return {name: np.concatenate(part) for name, part in parts.items()}


def set_locations(blocks: BlockTable, placed: list[Columns], lengths: dict[tuple[int, int], int], writer: str) -> None:
    """Set the locations of all needed blocks.

    Args:
        blocks: The table, whose extents are replaced.
        placed: For each replica, the numbers of these and other blocks, ascending, and the columns of `PLACE`. The
            first one has all blocks, the second those that have a second location.
        lengths: The lengths of all extents in `placed`.
        writer: The writer of these extents, which are still open.
    """
    wanted = needed_blocks(blocks)["number"]
    chosen = [{name: column[np.isin(each["number"], wanted)] for name, column in each.items()} for each in placed]
    for key in sorted(blocks.chunks):
        chunk = blocks.chunks[key]
        at = np.flatnonzero(chunk.columns["live"])
        where = np.searchsorted(wanted, at + (key << CHUNK_BITS))
        for name in PLACE:
            chunk.columns[name][at] = chosen[0][name][where]
        chunk.second = {}
        if len(chosen) > 1:
            chunk.second = {name: np.zeros(chunk.capacity, chunk.columns[name].dtype) for name in PLACE}
            numbers = at + (key << CHUNK_BITS)
            twice = np.isin(numbers, chosen[1]["number"])
            where = np.searchsorted(chosen[1]["number"], numbers[twice])
            for name in PLACE:
                chunk.second[name][at[twice]] = chosen[1][name][where]
    blocks.freed, blocks.unreported = {}, {}
    blocks.extents = {}
    for columns in chosen:
        places, counts = np.unique(np.stack([columns["unit"], columns["extent"]]), axis=1, return_counts=True)
        for (unit, number), count in zip(places.T.tolist(), counts.tolist(), strict=True):
            extent = blocks.extents[unit, number] = ExtentRecord(writer, lengths[unit, number])
            extent.blocks = count
    blocks.leased = sum(extent.length for extent in blocks.extents.values())
    blocks.derive()
