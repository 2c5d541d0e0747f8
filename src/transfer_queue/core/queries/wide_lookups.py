"""Lookups of very many fields, which are done in steps so that other requests are served in between.

Each step looks up some of the fields and encodes their types. The last one checks that nothing of the rows has changed
since the first, so that the reply is that of a lookup at this moment. If something has, the lookup begins again, and
after TRIES times it is done in one step.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Union, cast

import msgspec
import numpy as np

from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.events.registry import Caller
from transfer_queue.core.queries import value_locations
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.row_table import indexes_in
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.descriptors import NESTED, SEPARATOR
from transfer_queue.messages.queries import Lookup, LookupReply

WIDE = 2048
"""A lookup of at least this many fields is done in steps."""
STEP = 512
"""Fields of a step, which takes about 2 ms."""
STEP_VALUES = 65536
"""Values of a step, if there are many rows."""
TRIES = 3
"""How often a lookup begins again because its rows have changed."""

Steps = Generator[None, None, LookupReply]
"""Does one step at a time, and returns the reply."""

_encode = msgspec.msgpack.Encoder().encode


class WideLookups:
    """The lookups that are done in steps."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Caller, Steps]] = deque()
        """The next one does a step and goes to the end."""

    def begin(self, state: State, caller: Caller, request: Lookup) -> bool:
        """Begin to carry out a lookup in steps if it is a wide one. Returns whether it is."""
        if request.fields is not None:
            if len(request.fields) < WIDE:
                return False
        else:
            partition = state.partitions.get(request.partition)
            if partition is None or len(partition.fields) < WIDE:
                return False
        self.jobs.append((caller, _steps(state, request)))
        return True

    def drop_connection(self, peer: int) -> None:
        """Drop the lookups of a connection that has ended."""
        self.jobs = deque(job for job in self.jobs if job[0].peer != peer)

    def step(self, context: ControllerContext) -> list[Effect]:
        """Do one step of the next lookup."""
        if not self.jobs:
            return []
        job = caller, steps = self.jobs.popleft()
        try:
            next(steps)
        except StopIteration as end:
            return [Send(caller.peer, caller.envelope.sequence, end.value)]
        except TransferQueueError as error:
            return [context.failure(caller.peer, caller.envelope.sequence, error)]
        self.jobs.append(job)
        return []


def _steps(state: State, request: Lookup) -> Steps:
    for _ in range(TRIES):
        partition = state.partitions.get(request.partition)
        positions = None if partition is None else _positions(partition, request)
        if partition is None or positions is None or partition.losses.counts:
            break
        versions = partition.changes.versions_of(positions)
        found = _WideLookup(partition, request, positions)
        yield from found.find()
        if state.partitions.get(request.partition) is not partition:
            continue
        now = _positions(partition, request)
        if now is None or not np.array_equal(now, positions):
            continue
        same = np.array_equal(partition.changes.versions_of(positions), versions)
        if not same or not found.has_live_blocks(state):
            continue
        if found.is_incomplete or not found.alike:
            break  # the request gets an error, or an empty reply
        reply = found.reply(state)
        schemas: list[Any] = []
        for schema in reply.blocks.schemas:
            schemas.append((yield from _packed_list(schema)) if len(schema) >= STEP else schema)
        return msgspec.structs.replace(reply, blocks=msgspec.structs.replace(reply.blocks, schemas=schemas))
    return value_locations.locate(state, request)


def _positions(partition: Partition, request: Lookup) -> np.ndarray | None:
    """Return the positions of the rows or keys; None if a row does not exist, or if there are none."""
    if request.rows is not None:
        positions = partition.rows.positions_of(indexes_in(request.rows))
        return positions if len(positions) and int(positions.min()) >= 0 else None
    positions = partition.positions_of_keys(request.keys or [])
    return positions if len(positions) else None


def _packed_list(items: Iterable[Any]) -> Generator[None, None, msgspec.Raw]:
    """Encode a list in steps. The result is encoded as the list itself."""
    parts: list[bytes] = []
    count = 0
    items = iter(items)
    while some := list(islice(items, STEP)):
        count += len(some)
        parts.append(b"".join(map(_encode, some)))
        yield
    return msgspec.Raw(_list_head(count) + b"".join(parts))


def _list_head(count: int) -> bytes:
    """Return the beginning of an encoded list of this many items."""
    return b"\xdd" + count.to_bytes(4, "big")


def _pieces(items: Iterable[str], size: int) -> Iterator[list[str]]:
    items = iter(items)
    while some := list(islice(items, size)):
        yield some


class _WideLookup:
    """The locations of the values of many fields of some rows, as far as they are found."""

    def __init__(self, partition: Partition, request: Lookup, positions: np.ndarray) -> None:
        self.alike: value_locations.Alike = {}
        self.is_incomplete = False
        """Whether a row does not have a field that the request names, so that it is an error."""
        self._partition = partition
        self._request = request
        self._positions = positions
        self._lacking: dict[str, int] = {}
        self._types: list[bytes] = []
        """The encoded types of the fields, joined for each step."""
        self._type_count = 0

    def find(self) -> Generator[None, None, None]:
        """Look up all fields."""
        count = len(self._positions)
        size = max(1, min(STEP, STEP_VALUES // count))
        asked, names = yield from self._names()
        for some in _pieces(names, size):
            self._add(some, asked, count)
            yield

    def _names(self) -> Generator[None, None, tuple[Mapping[str, Any], Iterable[str]]]:
        """Return the fields that the request names (or all fields), and those to look up, in their order."""
        fields, wanted = self._partition.fields, self._request.fields
        if wanted is None:
            parts = []
            for some in _pieces(list(fields), STEP):
                parts.append(sorted(some))
                yield
            return fields, heapq.merge(*parts)
        names: dict[str, None] = {}
        nested = False
        for some in _pieces(wanted, STEP):
            names.update(dict.fromkeys(some))
            nested = nested or any(name in fields and fields[name].kind == NESTED for name in some)
            nested = nested or any(SEPARATOR in name for name in some)
            yield
        return names, value_locations.with_nested(self._partition, list(names)) if nested else names

    def _add(self, names: list[str], asked: Mapping[str, Any], count: int) -> None:
        """Look up some fields. Fields that not all rows have are left out."""
        request = self._request
        by_keys, wanted = request.rows is None, request.fields is not None
        types = []
        for name, (numbers, slots) in value_locations.places_of_fields(self._partition, self._positions, names).items():
            having = int(np.count_nonzero(numbers))
            if having == count:
                self.alike.setdefault((numbers.tobytes(), slots.tobytes()), []).append(name)
                types.append(_encode(self._partition.type_of_values(name, numbers, slots)))
            elif by_keys:
                if (having or wanted) and name in asked:
                    self._lacking[name] = count - having
            elif wanted and name in asked:
                self.is_incomplete = True
        self._types.append(b"".join(types))
        self._type_count += len(types)

    def has_live_blocks(self, state: State) -> bool:
        """Return whether all blocks are still needed. Blocks may have been merged into others."""
        if not self.alike:
            return True
        numbers = np.unique(np.concatenate([np.frombuffer(numbers, "i8") for numbers, _ in self.alike]))
        return len(state.blocks.needed_of(numbers)) == len(numbers)

    def reply(self, state: State) -> LookupReply:
        """Return the reply, whose types are encoded."""
        request, partition, count = self._request, self._partition, len(self._positions)
        packed: Union[list[Any], msgspec.Raw] = msgspec.Raw(_list_head(self._type_count) + b"".join(self._types))
        reply = value_locations.reply_with(state, count, self.alike, cast("list[Any]", packed), request)
        if request.rows is not None:
            return reply
        asked, keys = request.keys or [], partition.keys
        unknown = [] if count == len(asked) else list(dict.fromkeys(key for key in asked if key not in keys))
        versions = partition.changes.versions_of(self._positions).tobytes() if request.versions else None
        return msgspec.structs.replace(
            reply, unknown=unknown, lacking=self._lacking, versions=versions,
            epoch=state.epoch if request.versions else 0,
        )  # fmt: skip
