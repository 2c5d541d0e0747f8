"""Decides what is undone of a put that its client has cancelled. Reads the state and returns records.

A put is withdrawn as a whole: if it added all of its rows, and since then no row was changed by another put, cleared,
or dealt to a task. The version in its kept reply says both what it added and what has changed since. Nothing else of
the partition changes with a withdrawal, so the rows leave their groups and all counts as if they had never been there.
"""

from __future__ import annotations

import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.messages.claims import ClaimReply
from transfer_queue.messages.puts import PublishReply

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
