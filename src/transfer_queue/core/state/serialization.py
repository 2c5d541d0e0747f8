"""The state as a tree of plain values, and back: for the journal's snapshots and for checkpoints.

Every part of the state has `save_state()`, which gives dicts, lists, text, numbers, bytes and numpy arrays, and
`restore(saved)`, which takes them in on a fresh one. Arrays are those of the state, not copies: who saves writes the
tree before the state changes (or in a forked child), and who restores owns the arrays that he gives. Tags stay encoded
until somebody looks at them.

Not in it is what replay need not reproduce: parked requests (who waits asks again), configuration (capacity, watched
tags), and all that follows from the rest (ready sets, rankings, columns of watched tags).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from transfer_queue.core.columns.schema import BrokenInvariant
from transfer_queue.core.state.invariants import check_loaded
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.block_table import CHUNK_BITS, PLACE, BlockTable
from transfer_queue.core.tables.extent_records import ExtentRecord
from transfer_queue.errors import CheckpointError


def save_state(state: State) -> dict[str, Any]:
    """The state as plain values and arrays."""
    tree: dict[str, Any] = state.saved()
    return tree


def saved_sound(state: State) -> dict[str, Any]:
    """Return the saved tree of a state, after all the checks that are made when it is loaded.

    Raises CheckpointError if the state contradicts itself. Takes seconds for a million rows, and the memory of a second
    state, so call it in another process than the controller's.
    """
    tree = save_state(state)
    try:
        load_untrusted(tree)
    except CheckpointError as error:
        raise CheckpointError(
            f"the controller's state contradicts itself, so a checkpoint of it could not be loaded: "
            f"{error.__cause__}. This is a defect of this package, please report it. Load an older checkpoint to go on"
        ) from error
    return tree


def load_state(tree: Any, capacity: int | None = None, watched: Iterable[str] = ()) -> State:
    """The state that was saved, without anybody who waits. capacity, watched: see `State`.

    Raises CheckpointError where the tree has not the form of a state. That what it says is true is not looked at; for
    that see `load_untrusted`.
    """
    state = State(capacity)
    state.watched = list(watched)
    try:
        state.restore(tree)
        for partition in state.partitions.values():
            for tag in state.watched:
                partition.rows.watch(tag)
    except Exception as error:  # whatever a tree leads to: it is the tree's fault
        raise CheckpointError(
            f"what was saved is no state that this release knows ({type(error).__name__}: {error}); nothing was "
            f"changed. Load it with the release that saved it."
        ) from error
    return state


def load_untrusted(tree: Any, capacity: int | None = None, watched: Iterable[str] = ()) -> State:
    """Return the state of a tree of which nothing is known except that it is complete.

    Raises CheckpointError also if it contradicts itself. Costs some seconds for a million rows.
    """
    state = load_state(tree, capacity, watched)
    try:
        check_loaded(state)
    except Exception as error:  # as above; BrokenInvariant says it best
        words = str(error) if isinstance(error, BrokenInvariant) else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"what was saved is no state that a system can have had: {words}; nothing was changed. Load another one."
        ) from error
    return state


Columns = dict[str, np.ndarray]


def needed(blocks: BlockTable) -> Columns:
    """number, and the columns unit, extent, offset, generation, nbytes, of all needed blocks, ascending."""
    names = (*PLACE, "nbytes")
    parts: dict[str, list[np.ndarray]] = {name: [np.zeros(0, "i8")] for name in ("number", *names)}
    for key in sorted(blocks.chunks):
        columns = blocks.chunks[key].columns
        at = np.flatnonzero(columns["live"])
        parts["number"].append(at + (key << CHUNK_BITS))
        for name in names:
            parts[name].append(columns[name][at].astype("i8"))
    return {name: np.concatenate(part) for name, part in parts.items()}


def relocate(blocks: BlockTable, placed: list[Columns], lengths: dict[tuple[int, int], int], writer: str) -> None:
    """Set the locations of all needed blocks.

    placed: columns with the numbers of these and other blocks, ascending, and their `PLACE`; two entries for blocks
    with two places. lengths: of all extents in it, which are `writer`'s and still open. There are no others any more.
    """
    wanted = needed(blocks)["number"]
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
            for name in PLACE:
                chunk.second[name][at] = chosen[1][name][where]
    blocks.freed, blocks.untold = {}, {}
    blocks.extents = {}
    for columns in chosen:
        places, counts = np.unique(np.stack([columns["unit"], columns["extent"]]), axis=1, return_counts=True)
        for (unit, number), count in zip(places.T.tolist(), counts.tolist(), strict=True):
            extent = blocks.extents[unit, number] = ExtentRecord(writer, lengths[unit, number])
            extent.blocks = count
    blocks.leased, blocks.leased_in = 0, {}
    for (unit, _), extent in blocks.extents.items():
        blocks.lengthen(unit, extent.length)
    blocks.count_stored()
