"""Decides which rows of a partition go without a request that clears them. Reads the state and returns records.

These are the rows that no client needs or will write: clients are finished with them, or the client that reserved them
is gone, or no put took them, or the client has cancelled the put that added them.

A put is withdrawn as a whole: if it added all of its rows, and since then no row was changed by another put, cleared,
or dealt to a task. The version in its kept reply says both what it added and what has changed since. Nothing else of
the partition changes with a withdrawal, so the rows leave their groups and all counts as if they had never been there.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.rows import CHUNK_BITS, rows_without
from transfer_queue.messages.claims import ClaimReply
from transfer_queue.messages.puts import PublishReply

GONE = "reserved by a client that is gone"


def drop_abandoned(partition: Partition, connected: Collection[str]) -> list[r.AnyRecord]:
    """Return the drop of a partition's rows that clients reserved, and did not put before they disconnected."""
    absent = [number for client, number in partition.owners.items() if client not in connected]
    if not absent:
        return []
    parts = []
    for key, chunk in partition.rows.chunks.items():
        empty = (chunk.alive[: chunk.size] == 1) & np.isin(chunk.owner[: chunk.size], absent)
        for blocks, _ in chunk.field.values():
            empty &= blocks[: chunk.size] == 0
        places = np.flatnonzero(empty)
        if len(places) and chunk.tags is not None:  # tags that no request has read are in their saved form
            places = places[~chunk.tags.tagged(places)]
        parts.append(places + (key << CHUNK_BITS))
    positions = np.concatenate(parts) if parts else np.zeros(0, "i8")
    if not len(positions):
        return []
    return [r.RowsDropped(partition.name, partition.rows.indexes_of(positions).tobytes(), GONE)]


def clear_pre_allocated(partition: Partition) -> list[r.AnyRecord]:
    """Return the clear of a partition's rows that were pre-allocated and not taken: it is sealed, or was loaded.

    Those of a loaded one may have been taken since it was saved, and a global index never names another sample.
    """
    if not partition.waiting:
        return []
    rows = partition.rows.indexes_of(np.array(partition.waiting, "i8"))
    return [r.RowsCleared(partition.name, rows.tobytes())]


def finish_rows(partition: Partition, task: str, client: str, rows: np.ndarray) -> list[r.AnyRecord]:
    """Return the record that a client has finished those of these rows that it refers to; it frees unneeded rows."""
    unseen = [batch.indexes for batch in partition.unseen_batches.by_token.values() if batch.task == task]
    if unseen:  # these are not finished: their clients may return them
        rows = rows_without(rows, np.unique(np.concatenate(unseen)))
    held, times = partition.holds.held_among(task, client, rows)
    if not len(held):
        return []
    positions = partition.rows.positions_of(held)
    is_live = positions >= 0
    free = held[is_live][partition.holds.finished_rows(positions[is_live], task, times[is_live])]
    return [r.RowsFinished(partition.name, task, client, held.tobytes(), free.tobytes())]


CANCELLED = "put cancelled"


def withdraw_unseen(state: State, client: str, sequence: int) -> list[r.AnyRecord]:
    """Return the record that withdraws a put or a reservation that its client cancels; none if its effect stays."""
    kept = state.clients.get(client)
    reply = None if kept is None else kept.replies.get(sequence)
    if not isinstance(reply, (PublishReply, ClaimReply)) or reply.version <= 0 or reply.epoch != state.epoch:
        return []
    rows = np.frombuffer(reply.rows, "<i8")
    for partition in state.partitions.values() if len(rows) else ():
        positions = partition.rows.positions_of(rows)
        if (positions >= 0).all():
            changed = (partition.changes.versions_of(positions) > reply.version).any()
            if changed or not are_undealt(partition, positions).all():
                return []
            return [r.RowsDropped(partition.name, np.unique(rows).tobytes(), CANCELLED, withdrawn=True)]
    return []


def are_undealt(partition: Partition, positions: np.ndarray) -> np.ndarray:
    """Return for each row whether it is not dealt to any task, claimed, consumed or skipped by it (bool)."""
    undealt = np.ones(len(positions), bool)
    for _, chunk, at, where in partition.rows.split(positions):
        for column in (*chunk.consumed.values(), *chunk.dealt.values()):
            undealt[where] &= column[at] == 0
    return undealt
