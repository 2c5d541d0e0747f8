"""Puts of very many fields, which are prepared in steps so that other requests are served in between.

Each step decodes and checks some of the fields and adds them to the types of the partition's fields. These steps do not
change the state. The last step is the put itself: one record, so that the put is applied completely or not at all. If
the process dies in between, nothing of the put is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from transfer_queue.core.blocks.prepared_put import Discarded, PreparedPut
from transfer_queue.core.columns.wide_schema import WIDE, SchemaMaker, WideSchema
from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.events.effects import Effect
from transfer_queue.core.events.registry import Caller
from transfer_queue.core.puts import put_decisions
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import ParkedRequest, RequestKey
from transfer_queue.core.tables.field_types import (
    MAX_FIELDS,
    PreparedTypes,
    check_dims,
    check_kind,
    check_number,
    check_place,
    dims_end,
    fields_of,
    shape_of,
)
from transfer_queue.errors import CapacityError, FieldTypeError, InvalidArgumentError, TransferQueueError
from transfer_queue.messages.descriptors import FieldSpec, NewBlock
from transfer_queue.messages.envelopes import AnyRequest
from transfer_queue.messages.puts import Publish

STEP = 256
"""Fields of a step, which takes about 1 ms."""
TRIES = 3
"""How often a put is prepared again because other requests have changed the fields of its partition meanwhile."""


class BlockSchema:
    """The schema of one block of a put, which is decoded and checked in steps."""

    def __init__(self, block: NewBlock) -> None:
        self.block = block
        self.checked = 0
        """The number of fields that are checked."""
        self._decoded = list(block.schema)
        """The fields that are decoded and not checked, the next one last."""
        self._decoded.reverse()
        self._maker = SchemaMaker()
        """The checked fields."""
        self._parts = deque(block.parts)
        """The parts of the schema that are not decoded."""
        self._dims = np.frombuffer(block.dims, "<i8")
        self._at = 0
        """The end of the numbers of the checked fields in the block's dims."""

    @property
    def is_checked(self) -> bool:
        """Whether all fields are checked."""
        return not self._parts and not self._decoded

    def decode_some(self) -> list[FieldSpec]:
        """Return the next STEP fields, or fewer if there are many parts without fields."""
        for _ in range(STEP):  # a part may have no fields
            if not self._parts or len(self._decoded) >= STEP:
                break
            self._decoded[:0] = reversed(fields_of(self._parts.popleft()))
        some = self._decoded[-STEP:][::-1]
        del self._decoded[-STEP:]
        self._maker.add(some)
        return some

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
        made = self._maker.make()
        schema = state.blocks.known_schema(made)
        if isinstance(made, WideSchema) and schema is not made:
            state.blocks.discarded.append(list(made.pieces))
        check_dims(self._dims, self._at, self.block.rows, len(schema))
        whole: Any = schema if isinstance(schema, WideSchema) else list(schema)
        return msgspec.structs.replace(self.block, schema=whole)


class WidePut:
    """A put that is being prepared."""

    def __init__(self, caller: Caller, body: Publish, arrived: float, waits: bool) -> None:
        self.caller = caller
        self.arrived = arrived
        self.body = body
        self.waits = waits
        """Whether the request is parked."""
        self.tries = TRIES
        self._begin()

    def _begin(self) -> None:
        self.prepared = PreparedPut(self.body.blocks)
        self.unchecked = deque(map(BlockSchema, self.body.blocks))
        """The blocks whose fields are not all checked."""
        self.names: set[str] = set()
        """The names of the fields that are checked."""
        self.made = False
        """Whether nothing is left to be prepared."""

    def step(self, state: State) -> bool:
        """Prepare some fields of one block. Returns True, and does nothing, if the put can be decided.

        Raises:
            InvalidArgumentError: The description of a block is not valid.
        """
        partition = state.partitions.get(self.body.partition)
        if self.made:
            if self.is_current(partition) or not self.tries:
                return True
            self.tries -= 1
            state.blocks.discarded += self.unused()
            self._begin()
        elif not self.unchecked:
            self._make_names(partition)
            self.made = True
        elif self.unchecked[0].checked and self.unchecked[0].is_checked:
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
        if len(self.names) > MAX_FIELDS:
            check_number(self.body.partition, {} if partition is None else partition.fields, sorted(self.names))
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
        if not block.parts and [*learnt[-1]] != block.schema:
            return False
        if not partition.field_groups.knows(learnt[-1]):
            return False
        self.prepared.add(msgspec.structs.replace(block, schema=learnt[-1]))
        self.unchecked.clear()
        return True

    def _make_names(self, partition: Partition | None) -> None:
        """Build the set of the names of all fields, which the put needs if there are ready sets."""
        if partition is None or not partition.ready:
            return
        schema = self.prepared.blocks[0].schema
        if len(self.prepared.blocks) > 1:
            self.prepared.names = frozenset(self.names)
        elif self.names:
            partition.note_names(schema, frozenset(self.names))
        else:
            partition.names_of(schema)

    def unused(self) -> list[Discarded]:
        """Return the collections that are not needed after the put."""
        return [self.names, *self.prepared.unused()]

    def is_current(self, partition: Partition | None) -> bool:
        """Return whether the partition and its chunk are still those for which the put was prepared."""
        types = self.prepared.types
        if not self.names and (partition is None or partition.learnt != shape_of(self.prepared.blocks[0])):
            return False  # the partition knows other types now than those of the put before
        if not self.names and partition is not None:
            return partition.field_groups.knows(self.prepared.blocks[0].schema)
        return types is None or partition is None or types.is_current(partition.fields, partition.typed)


class WidePuts:
    """The wide puts that wait or are being prepared."""

    def __init__(self) -> None:
        self.jobs: deque[WidePut] = deque()
        """The oldest job is prepared first."""
        self.parked: dict[RequestKey, WidePut] = {}
        """What was prepared for puts that wait for capacity."""

    def begin(self, state: State, caller: Caller, now: float) -> bool:
        """Begin to prepare a put if it is a wide one. Returns whether it is.

        A put that is sent again is answered on its newest connection.
        """
        body = caller.envelope.body
        if not isinstance(body, Publish) or not is_wide(body):
            return False
        blocks = body.blocks
        if state.blocks.prepared is not None and state.blocks.prepared.whole(blocks[0]) is not None:
            return False
        for job in self.jobs:
            if job.caller.waiter == caller.waiter:
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
        self.jobs.append(WidePut(caller, body, now, waits=False))
        return True

    def must_prepare(self, state: State, waiting: ParkedRequest, caller: Caller) -> bool:
        """Return whether a put that waits cannot be decided now, because it must be prepared first.

        Begins to prepare it if there is capacity for it. A put that was prepared, and then waited, is decided with what
        was prepared if that is still current.
        """
        body = waiting.request
        if not isinstance(body, Publish) or not is_wide(body) or state.blocks.prepared is not None:
            return False
        job = self.parked.get(waiting.waiter)
        if job is not None and job.is_current(state.partitions.get(body.partition)):
            state.blocks.prepared = job.prepared
            return False
        if not any(job.caller.waiter == waiting.waiter for job in self.jobs) and _may_be_put(state, body):
            self.jobs.append(WidePut(caller, body, waiting.since, waits=True))
        return True

    def drop_connection(self, peer: int) -> None:
        """Drop the jobs of a connection that has ended. Its client may send the puts again on another connection.

        Puts that wait end with their wait.
        """
        self.jobs = deque(job for job in self.jobs if job.waits or job.caller.peer != peer)

    def step(
        self,
        context: ControllerContext,
        change: Callable[[Caller, AnyRequest], list[Effect]],
        retry: Callable[[ParkedRequest], list[Effect]],
    ) -> list[Effect]:
        """Do one step of the oldest job.

        Args:
            context: The controller's.
            change: Decides the put when it is completely prepared.
            retry: Does the same for a put that waits.
        """
        if not self.jobs:
            return []
        job, state = self.jobs[0], context.state
        waiting = state.waiting.by_waiter.get(job.caller.waiter) if job.waits else None
        kept = state.clients.get(job.caller.client)
        ends = True
        try:
            if job.waits and waiting is None:
                return []  # its time is over, or its connection ended
            if kept is not None and kept.is_finished(job.caller.envelope.sequence):
                return []  # its client has cancelled it
            ends = job.step(state)
            if not ends:
                return []
            state.blocks.prepared = job.prepared
            if waiting is not None:
                return retry(waiting)
            context.timeline.arrived = job.arrived
            return change(job.caller, job.body)
        except TransferQueueError as error:
            if waiting is not None:
                return context.refuse(waiting, error)
            return [context.failure(job.caller.peer, job.caller.envelope.sequence, error)]
        finally:
            state.blocks.prepared = context.timeline.arrived = None
            if ends:
                self._end(self.jobs.popleft(), state)

    def _end(self, job: WidePut, state: State) -> None:
        """Keep what was prepared for a put that waits, and discard what is not needed any more."""
        by_waiter = state.waiting.by_waiter
        for waiter in [waiter for waiter in self.parked if waiter not in by_waiter or waiter == job.caller.waiter]:
            state.blocks.discarded += self.parked.pop(waiter).unused()
        if job.caller.waiter in by_waiter and not job.unchecked:
            self.parked[job.caller.waiter] = job
        else:
            state.blocks.discarded += job.unused()


def is_wide(body: Publish) -> bool:
    """Return whether a put is prepared in steps."""
    if body.block is None:
        return False
    if not (body.further or body.block.parts) and len(body.block.schema) < WIDE:
        return False
    return any(len(block.schema) >= WIDE or block.parts for block in body.blocks)


def _may_be_put(state: State, body: Publish) -> bool:
    """Return whether there is capacity for the new rows of a put."""
    partition = state.partitions.get(body.partition)
    count = body.count
    if body.rows is not None:
        count = 0
    elif body.keys is not None and partition is not None:
        count = sum(key not in partition.keys for key in body.keys)
    try:
        put_decisions.check_limits(state, body.partition, count)
    except CapacityError:
        return False
    return True
