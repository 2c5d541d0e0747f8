"""Finds the differences between two states by comparing all their attributes, including new ones.

A new attribute of the state must therefore be saved and restored (`core.state.serialization`), or be named here with
the reason why it is not.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import numpy as np

from transfer_queue.core.columns.kinds import InternTable, IntervalSet
from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import ReplyCache, State
from transfer_queue.core.tables.blocks import BlockChunk, BlockTable
from transfer_queue.core.tables.changes import ChangeFeed, LostValues
from transfer_queue.core.tables.dealt import DealtBatch, DealtBatches, SkippedRows
from transfer_queue.core.tables.digest_index import DigestIndex
from transfer_queue.core.tables.extents import ExtentRecord
from transfer_queue.core.tables.fields import FieldRanks, FieldStats
from transfer_queue.core.tables.groups import Group, GroupQuotas, GroupTable
from transfer_queue.core.tables.leases import KeyLock, LeaseTable, LockTable, RowLease, RowNumbers, UnseenBatches
from transfer_queue.core.tables.rows import Chunk, RowTable
from transfer_queue.core.tables.windows import AdmissionWindow, DropLog, RowAges, RowRefcounts

PARTS = (
    State, ReplyCache, Partition, RowTable, Chunk, ChangeFeed, GroupTable, Group, RowAges, RowRefcounts, DropLog,
    GroupQuotas, FieldStats, DealtBatches, DealtBatch, SkippedRows, BlockTable, BlockChunk, InternTable, ExtentRecord,
    DigestIndex, FieldRanks, AdmissionWindow,
    IntervalSet, LostValues, LeaseTable, RowLease, RowNumbers, LockTable, KeyLock, UnseenBatches, r.UnseenBatch,
)  # fmt: skip
# Class -> attributes that are not saved, or are compared in another form.
LEFT_OUT: dict[type, set[str]] = {
    # clients send waiting requests again; the key is configuration; the others are derived
    State: {"waiting", "aging", "counted", "lease_key"},
    BlockTable: {
        "changes",
        "newest_schema",  # of the last put, for the timeline
        "unreported",
        "leased_in",
        "stored",
        "saved",
        "spans",
    },  # a unit gets all orders to free extents when it registers; the others are derived
    BlockChunk: {"blocks"},  # the memory of the columns
    DigestIndex: {"of_block"},  # derived
    # derived; the space of cleared blocks is not restored, and the next block proves where the extent begins
    ExtentRecord: {"begin", "low", "top", "limit", "gaps"},
    Partition: {
        "awaited",  # a method of the waiting requests
        "ready",  # derived, like the next one
        "unseen",
        "gained",  # the controller processes it after every event
        "learnt",  # caches
        "learnt_fields",
    },
    FieldRanks: {"rows", "fields", "_blocks"},  # of the partition
    RowTable: {"watched", "_firsts", "_keys"},  # `watched` is set by samplers, and the others are caches
    # `numbers` and `wrong` are derived; tags and keys are compared by `_shown`
    Chunk: {"numbers", "wrong", "_tags", "_packed", "keys"},
}


def differences(one: Any, other: Any) -> list[str]:
    """Return a description of each difference between two states."""
    found: list[str] = []
    _compare(one, other, "state", found, {})
    return found


def _shown(part: Any) -> dict[str, Any]:
    """Return the attributes of a part of the state that must be restored."""
    names = [*getattr(part, "__dict__", ()), *getattr(type(part), "__slots__", ())]
    shown = {name: getattr(part, name) for name in names if name not in LEFT_OUT.get(type(part), ())}
    if isinstance(part, Chunk):
        keys = part.keys or [None] * part.capacity
        tags = [{}] * part.size if part.tags is None else part.tags.rows(slice(0, part.size))
        shown |= {"tags": tags, "keys": keys}
    elif isinstance(part, FieldStats):
        ranks = {rank: (part.counts[rank], shapes) for rank, shapes in sorted(part.further.items())}
        shown |= {"further": ranks, "counts": dict(sorted(part.counts.items()))}
    elif isinstance(part, InternTable):  # the order of this dict has no meaning
        shown["number"] = dict(sorted(part.number.items(), key=lambda item: item[1]))
    elif isinstance(part, LeaseTable):  # the same is true here, but not of the entries
        shown["_of_batch"] = dict(sorted(part._of_batch.items()))
    return shown


def _compare(one: Any, other: Any, where: str, found: list[str], pairs: dict[int, Any]) -> None:
    if type(one) is not type(other):
        found.append(f"{where}: {type(one).__name__} became {type(other).__name__}")
    elif isinstance(one, PARTS):
        # An object to which two attributes refer must be one object in the other state, too.
        if id(one) in pairs:
            if pairs[id(one)] is not other:
                found.append(f"{where}: refers to another {type(one).__name__}")
            return
        pairs[id(one)] = other
        _compare(_shown(one), _shown(other), where, found, pairs)
    elif isinstance(one, np.ndarray):
        if one.dtype != other.dtype or not np.array_equal(one, other):
            found.append(f"{where}: {one!r} became {other!r}")
        elif not other.flags.writeable and one.flags.writeable:
            found.append(f"{where}: cannot be written")
    elif isinstance(one, dict):
        if list(one) != list(other):
            found.append(f"{where}: has {list(one)!r}, and then {list(other)!r}")
            return
        for key in one:
            _compare(one[key], other[key], f"{where}.{key}", found, pairs)
    elif isinstance(one, (list, tuple, deque)):
        if len(one) != len(other):
            found.append(f"{where}: {len(one)} became {len(other)}")
            return
        for at, (value, again) in enumerate(zip(one, other, strict=True)):
            _compare(value, again, f"{where}[{at}]", found, pairs)
    elif isinstance(one, (str, int, float, bytes, set, type(None), msgspec.Struct, msgspec.msgpack.Ext)):
        if one != other and not (one != one and other != other):
            found.append(f"{where}: {one!r} became {other!r}")
    else:
        found.append(f"{where}: {type(one).__name__} is a type that `sameness` cannot compare")
