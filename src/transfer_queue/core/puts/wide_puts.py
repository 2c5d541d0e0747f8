"""Puts of very many fields, which are prepared in steps so that other requests are served in between.

Each step decodes and checks some of the fields and adds them to the types of the partition's fields. Then each step
makes columns for some fields. These steps do not change the state; they only move existing columns of the partition in
memory. The last step is the put itself: one record, so that the put is applied completely or not at all. If the process
dies in between, nothing of the put is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Union

import msgspec
import numpy as np

from transfer_queue.core.columns.wide_columns import MANY_FIELDS, PreparedColumns
from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.events.registry import Caller
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.block_table import Prepared
from transfer_queue.core.tables.field_types import (
    PreparedTypes,
    check_dims,
    check_kind,
    check_place,
    dims_end,
    fields_of,
    shape_of,
)
from transfer_queue.core.tables.row_table import CHUNK, CHUNK_BITS, MASK, Chunk, capacity_for
from transfer_queue.errors import FieldTypeError, InvalidArgumentError, TransferQueueError
from transfer_queue.messages.descriptors import FieldSpec, NewBlock
from transfer_queue.messages.envelopes import AnyRequest
from transfer_queue.messages.puts import Publish, Reserve

WIDE = 2048
"""A put with at least this many fields is prepared. A put whose schema is sent in parts is always prepared."""
STEP = 512
"""Fields of a step, which takes 2 to 4 ms."""
FREED = 4096
"""Objects that a step frees after the put."""
TRIES = 3
"""How often a put is prepared again because other requests have changed the fields of its partition meanwhile."""


class BlockSchema:
    """The schema of one block of a put, which is decoded and checked in steps."""

    def __init__(self, block: NewBlock) -> None:
        self.block = block
        self.schema = list(block.schema)
        """The fields that are decoded."""
        self.checked = 0
        """The number of fields that are checked."""
        self._parts = deque(block.parts)
        """The parts of the schema that are not decoded."""
        self._dims = np.frombuffer(block.dims, "<i8")
        self._at = 0
        """The end of the numbers of the checked fields in the block's dims."""

    @property
    def is_checked(self) -> bool:
        """Whether all fields are checked."""
        return not self._parts and self.checked == len(self.schema)

    def decode_some(self) -> list[FieldSpec]:
        """Return the next STEP fields, or fewer if there are many parts without fields."""
        for _ in range(STEP):  # a part may have no fields
            if not self._parts or len(self.schema) >= self.checked + STEP:
                break
            self.schema += fields_of(self._parts.popleft())
        return self.schema[self.checked : self.checked + STEP]

    def take_dims(self, spec: FieldSpec) -> np.ndarray:
        """Check the next field, and return its part of the block's dims."""
        check_kind(spec)
        start, self._at = self._at, dims_end(spec, self._dims, self._at, self.block.rows)
        if self._at > len(self._dims):
            raise InvalidArgumentError(f"field {spec.name!r}: the block's dims end before those of the field")
        self.checked += 1
        return self._dims[start : self._at]

    def whole_block(self, state: State) -> NewBlock:
        """Return the block with its whole schema, which is checked."""
        check_dims(self._dims, self._at, self.block.rows, len(self.schema))
        return msgspec.structs.replace(self.block, schema=state.blocks.schema_of(self.schema))


class WidePut:
    """A put that is being prepared."""

    def __init__(self, caller: Caller, body: Publish, arrived: float) -> None:
        self.caller = caller
        self.arrived = arrived
        self.body = body
        self.tries = TRIES
        self.answered = False
        """Whether the put was decided, so that only the objects that it replaced remain to be freed."""
        self._begin()

    def _begin(self) -> None:
        self.prepared = Prepared(self.body.blocks)
        self.unchecked = deque(map(BlockSchema, self.body.blocks))
        """The blocks whose fields are not all checked."""
        self.names: set[str] = set()
        """The names of the fields that are checked."""
        self.named = False
        """Whether the set of all names was built, which the put needs if there are ready sets."""
        self.made = False
        """Whether nothing is left to be prepared."""

    def step(self, state: State) -> bool:
        """Prepare some fields of one block. Returns True, and does nothing, if the put can be decided.

        Raises:
            InvalidArgumentError: The description of a block is not valid.
        """
        partition = state.partitions.get(self.body.partition)
        if self.made:
            if self._is_current(partition) or not self.tries:
                return True
            self.tries -= 1
            self._begin()
        elif not self.unchecked:
            self.made = self._make(partition)
        elif self.unchecked[0].schema and self.unchecked[0].is_checked:
            self.prepared.add(self.unchecked.popleft().whole_block(state))
        else:
            self._check(self.unchecked[0], partition)
        return False

    def _check(self, block: BlockSchema, partition: Partition | None) -> None:
        if not self.names:
            if partition is not None and self._use_known_types(partition):
                return
            fields, typed = ({}, 0) if partition is None else (partition.fields, partition.typed)
            self.prepared.types = PreparedTypes(fields, typed)
        some = block.decode_some()
        if not some and block.is_checked:
            raise InvalidArgumentError("a block must have at least one field, got none")
        before = len(self.names)
        self.names.update(spec.name for spec in some)
        if len(self.names) != before + len(some):
            raise InvalidArgumentError(f"a put must have each field only once, but its first {before + len(some)} "
                                       f"fields have only {len(self.names)} names")  # fmt: skip
        for spec in some:
            dims = block.take_dims(spec)
            if self.prepared.types is not None:
                try:
                    self.prepared.types.add(spec, dims)
                except FieldTypeError:
                    self.prepared.types = None  # the put itself is refused, with all fields in its error

    def _use_known_types(self, partition: Partition) -> bool:
        """Return whether the partition knows the types of the only block from the put before it, as in a loop."""
        learnt, block = partition.learnt, self.unchecked[0].block
        if learnt is None or len(self.body.blocks) > 1 or learnt[:-1] != shape_of(block)[:-1]:
            return False
        if not block.parts and learnt[-1] != block.schema:
            return False
        self.prepared.add(msgspec.structs.replace(block, schema=learnt[-1]))
        self.unchecked.clear()
        return True

    def _make(self, partition: Partition | None) -> bool:
        prepared = self.prepared
        chunk, capacity, rows = _target_chunk(partition, self.body)
        if prepared.columns is not None:
            return not prepared.columns.is_current(chunk) or prepared.columns.make(STEP, rows)
        if not capacity:
            return True  # the put will be refused
        if partition is not None and partition.ready and not self.named:
            self._make_names(partition)
            self.named = True
            return False
        schemas = [block.schema for block in prepared.blocks if len(block.schema) >= MANY_FIELDS]
        fits = chunk is not None and capacity == chunk.capacity
        if not schemas or (chunk is not None and fits and all(map(chunk.wide_columns, schemas))):
            return True
        prepared.columns = PreparedColumns(schemas, chunk, capacity)
        return False

    def _make_names(self, partition: Partition) -> None:
        """Build the set of the names of all fields."""
        if len(self.prepared.blocks) > 1:
            self.prepared.names = frozenset(self.names)
        else:
            partition.names_of(self.prepared.blocks[0].schema)

    def _is_current(self, partition: Partition | None) -> bool:
        """Return whether the partition and its chunk are still those for which the put was prepared."""
        types, columns = self.prepared.types, self.prepared.columns
        if not self.names and (partition is None or partition.learnt != shape_of(self.prepared.blocks[0])):
            return False  # the partition knows other types now than those of the put before
        if types is not None and partition is not None and not types.is_current(partition.fields, partition.typed):
            return False
        return columns is None or columns.is_current(_target_chunk(partition, self.body)[0])


def _target_chunk(partition: Partition | None, body: Publish) -> tuple[Chunk | None, int, slice]:
    """Return the chunk of a put's first row, its capacity after the put, and the slice of the rows in it.

    The chunk is None if it does not exist yet; the capacity is 0 if the row does not exist. Puts of other clients may
    change the result.
    """
    if partition is None:
        return None, capacity_for(0, min(max(body.count, body.pre_allocate), CHUNK)), slice(0, body.count)
    position = partition.waiting[0] if partition.waiting else partition.rows.end
    if body.rows is not None:
        position = int(partition.rows.positions_of(np.frombuffer(body.rows, "<i8", 1))[0])
    elif body.keys:
        position = partition.keys.get(body.keys[0], position)
    chunk, first = partition.rows.chunks.get(position >> CHUNK_BITS), position & MASK
    if position == partition.rows.end:
        return chunk, partition.rows.capacity_after(body.count), slice(first, first + body.count)
    return chunk, 0 if chunk is None else chunk.capacity, slice(first, first + body.count)


def with_whole_schema(state: State, body: Union[Publish, Reserve]) -> Union[Publish, Reserve]:
    """Return the request with a whole schema, so that a request that waits is not decoded at each attempt."""
    if isinstance(body, Reserve) or not any(block.parts for block in body.blocks):
        return body
    blocks = state.blocks.complete_schemas(body.block, body.further)
    blocks = [msgspec.structs.replace(block, parts=[]) for block in blocks]
    return msgspec.structs.replace(body, block=blocks[0], further=blocks[1:])


class WidePuts:
    """The wide puts that wait or are being prepared."""

    def __init__(self) -> None:
        self.jobs: deque[WidePut] = deque()
        """The oldest job is prepared first."""

    def begin(self, state: State, caller: Caller, now: float) -> bool:
        """Begin to prepare a put if it is a wide one. Returns whether it is.

        A put that is sent again is answered on its newest connection.
        """
        body = caller.envelope.body
        if not isinstance(body, Publish) or body.block is None:
            return False
        if not (body.further or body.block.parts) and len(body.block.schema) < WIDE:
            return False
        blocks = body.blocks
        if not any(len(block.schema) >= WIDE or block.parts for block in blocks):
            return False
        if state.blocks.prepared is not None and state.blocks.prepared.whole(blocks[0]) is not None:
            return False
        for job in self.jobs:
            if job.caller.waiter == caller.waiter and not job.answered:
                job.caller = job.caller.with_newest_peer(caller.peer)
                return True
        for block in blocks:
            check_place(block, body.count)
            if block.schema and block.parts:
                raise InvalidArgumentError("a block has a schema and parts of a schema; send only one of them")
            if len(block.dims) % 8:
                raise InvalidArgumentError(f"the dims of a block must be i8 numbers, got {len(block.dims)} bytes")
        if body.rows is not None and len(body.rows) != 8 * body.count:
            raise InvalidArgumentError(f"the put has {body.count} rows of values, but names {len(body.rows) // 8} rows")
        self.jobs.append(WidePut(caller, body, now))
        return True

    def drop_connection(self, peer: int) -> None:
        """Drop the jobs of a connection that has ended. Its client may send the puts again on another connection."""
        self.jobs = deque(job for job in self.jobs if job.caller.peer != peer)

    def step(self, context: ControllerContext, change: Callable[[Caller, AnyRequest], list[Effect]]) -> list[Effect]:
        """Do one step of the oldest job. change: decides the put when it is completely prepared."""
        if not self.jobs:
            return []
        job = self.jobs[0]
        if job.answered:
            if job.prepared.free_some(FREED):
                self.jobs.popleft()
            return []
        ends = True
        try:
            ends = job.step(context.state)
            if not ends:
                return []
            context.state.blocks.prepared = job.prepared
            context.timeline.arrived = job.arrived
            return change(job.caller, job.body)
        except TransferQueueError as error:
            return [context.failure(job.caller.peer, job.caller.envelope.sequence, error)]
        finally:
            job.answered = ends
            context.state.blocks.prepared = context.timeline.arrived = None
