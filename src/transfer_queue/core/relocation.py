"""Blocks of a saved state at other places: those where a client has written them to load it."""

from __future__ import annotations

import numpy as np

from transfer_queue.core.blocks import CHUNK_BITS, PLACE, BlockTable
from transfer_queue.core.extents import Extent

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
            extent = blocks.extents[unit, number] = Extent(writer, lengths[unit, number])
            extent.blocks = count
    blocks.leased, blocks.leased_in = 0, {}
    for (unit, _), extent in blocks.extents.items():
        blocks.lengthen(unit, extent.length)
    blocks.count_stored()
