"""Puts of very many fields, which are prepared in steps between which others are served.

A step looks at some of the fields: whether they are described rightly, and what is known of them once they are put;
then columns are made for them. It changes nothing of the state, but only where values of fields that the partition has
lie in the memory of this process. The last step is the put itself: one record, so that it is there whole or not at
all. If a process dies in between, nothing of the put is left.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Union

import msgspec
import numpy as np

from transfer_queue.core.effects import Effect
from transfer_queue.core.fields import check_dims, check_kind, check_place, dims_end, fields_of, shape_of
from transfer_queue.core.partition import Partition
from transfer_queue.core.prepared import Prepared, PreparedColumns, PreparedTypes
from transfer_queue.core.rows import CHUNK, CHUNK_BITS, MASK, Chunk, capacity_for
from transfer_queue.core.state import State
from transfer_queue.errors import FieldTypeError, InvalidArgumentError, TransferQueueError
from transfer_queue.messages import Envelope, FieldSpec, NewBlock, Publish, Reserve

if TYPE_CHECKING:
    from transfer_queue.core.controller import Controller

WIDE = 2048  # fields, from which on a put is prepared; and where its schema comes in parts
STEP = 512  # fields; a millisecond or two
AWAY = 4096  # of what a put has replaced, which are freed at a time
TRIES = 3  # to prepare a put while others change what it was prepared for


class Job:
    """A put that is being prepared. peer: where it is answered. tries: that are left.

    schema: what is decoded of the block's, with parts of it to come. names: of the fields that were looked at; `at` is
    where they end in the block's dims. looked: at all of them. made: nothing is left to be prepared. answered: all
    that is left to do is to free what the put has replaced.
    """

    def __init__(self, client: str, peer: int, envelope: Envelope, body: Publish, block: NewBlock) -> None:
        self.client = client
        self.peer = peer
        self.envelope = envelope
        self.body = body
        self.block = block
        self.dims = np.frombuffer(block.dims, "<i8")
        self.tries = TRIES
        self.answered = False
        self._begin()

    def _begin(self) -> None:
        self.prepared = Prepared(self.block)
        self.schema = list(self.block.schema)
        self.parts = deque(self.block.parts)
        self.names: set[str] = set()
        self.at = 0
        self.looked = self.named = self.made = False

    def step(self, state: State) -> bool:
        """Prepares some fields; whether the put is to be decided on now, all of them being prepared.

        Raises InvalidArgumentError for a block that describes itself wrongly.
        """
        partition = state.partitions.get(self.body.partition)
        if self.made:
            if self._current(partition) or not self.tries:
                return True
            self.tries -= 1
            self._begin()
        elif self.looked:
            self.made = self._make(partition)
        elif self.parts or len(self.names) < len(self.schema):
            self._look(state, partition)
        else:
            self._looked(state, partition)
        return False

    def _look(self, state: State, partition: Partition | None) -> None:
        if not self.names:
            if partition is not None and self._known(partition):
                return
            fields, typed = ({}, 0) if partition is None else (partition.fields, partition.typed)
            self.prepared.types = PreparedTypes(fields, typed)
        for _ in range(STEP):  # there may be parts without fields
            if not self.parts or len(self.schema) >= len(self.names) + STEP:
                break
            self.schema += fields_of(self.parts.popleft())
        self._take_in(self.schema[len(self.names) : len(self.names) + STEP])

    def _known(self, partition: Partition) -> bool:
        """Whether the partition has learnt the shape of this very block, as from one writer's loop."""
        learnt = partition.learnt
        if learnt is None or learnt[:-1] != shape_of(self.block)[:-1]:
            return False
        if not self.block.parts and learnt[-1] != self.block.schema:
            return False
        self.prepared.block = msgspec.structs.replace(self.block, schema=learnt[-1])
        self.looked = True
        return True

    def _looked(self, state: State, partition: Partition | None) -> None:
        if not self.schema:
            raise InvalidArgumentError("a block needs fields; it has none")
        check_dims(self.dims, self.at, self.block.rows, len(self.schema))
        self.prepared.block = msgspec.structs.replace(self.block, schema=state.blocks.schema_of(self.schema))
        self.looked = True

    def _take_in(self, some: list[FieldSpec]) -> None:
        before = len(self.names)
        self.names.update(spec.name for spec in some)
        if len(self.names) != before + len(some):
            raise InvalidArgumentError(f"a block needs fields, each once; of its first {before + len(some)} "
                                       f"{len(self.names)} have names of their own")  # fmt: skip
        for spec in some:
            check_kind(spec)
            start, self.at = self.at, dims_end(spec, self.dims, self.at, self.block.rows)
            if self.at > len(self.dims):
                raise InvalidArgumentError(f"field {spec.name!r}: the block's dims end before it does")
            if self.prepared.types is not None:
                try:
                    self.prepared.types.add(spec, self.dims[start : self.at])
                except FieldTypeError:
                    self.prepared.types = None  # the put itself is refused, which says more

    def _make(self, partition: Partition | None) -> bool:
        prepared = self.prepared
        chunk, capacity, rows = _room(partition, self.body)
        if prepared.columns is not None:
            return not prepared.columns.hold_for(chunk) or prepared.columns.make(STEP, rows)
        if not capacity:
            return True  # the put will be refused
        if partition is not None and partition.ready and not self.named:
            partition.names_of(prepared.block.schema)  # which the put will ask for
            self.named = True
            return False
        if chunk is not None and capacity != chunk.capacity:
            chunk.ensure(capacity)
            return False
        if chunk is not None and chunk.wide_columns(prepared.block.schema) is not None:
            return True
        prepared.columns = PreparedColumns([spec.name for spec in prepared.block.schema], chunk, capacity)
        return False

    def _current(self, partition: Partition | None) -> bool:
        """Whether what was prepared still is what is needed."""
        types, columns = self.prepared.types, self.prepared.columns
        if types is not None and partition is not None and not types.hold_for(partition.fields, partition.typed):
            return False
        return columns is None or columns.hold_for(_room(partition, self.body)[0])


def _room(partition: Partition | None, body: Publish) -> tuple[Chunk | None, int, slice]:
    """In which chunk the rows of a put will be, or the first of them, its capacity then, and where in it.

    Others' puts may yet change it.
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
    """The same request, whose schema is not in parts that would be decoded each time that it is looked at."""
    if isinstance(body, Reserve) or body.block is None or not body.block.parts:
        return body
    block = msgspec.structs.replace(state.blocks.opened(body.block), parts=[])
    return msgspec.structs.replace(body, block=block)


class WidePuts:
    """jobs: those that are being prepared, one after the other."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()

    def begin(self, state: State, client: str, peer: int, envelope: Envelope) -> bool:
        """Takes a put on where it is a wide one; the same again is answered on the newest connection."""
        body = envelope.body
        if not isinstance(body, Publish) or body.block is None:
            return False
        block = body.block
        if len(block.schema) < WIDE and not block.parts:
            return False
        if state.blocks.prepared is not None and state.blocks.prepared.sent is block:
            return False
        for job in self.jobs:
            if (job.client, job.envelope.sequence) == (client, envelope.sequence) and not job.answered:
                job.peer = max(job.peer, peer)
                return True
        check_place(block, body.count)
        if block.schema and block.parts:
            raise InvalidArgumentError("a block's schema is sent as it is or in parts, not both")
        if len(block.dims) % 8:
            raise InvalidArgumentError("the block's dims are no numbers of a block")
        if body.rows is not None and len(body.rows) != 8 * body.count:
            raise InvalidArgumentError(f"{len(body.rows) // 8} rows are named for {body.count} rows of values")
        self.jobs.append(Job(client, peer, envelope, body, block))
        return True

    def closed(self, peer: int) -> None:
        """Who put on this connection will put again on another, or never."""
        self.jobs = deque(job for job in self.jobs if job.peer != peer)

    def step(self, core: Controller) -> list[Effect]:
        """One step of the oldest job."""
        if not self.jobs:
            return []
        job = self.jobs[0]
        if job.answered:
            if job.prepared.let_go(AWAY):
                self.jobs.popleft()
            return []
        ends = True
        try:
            ends = job.step(core.state)
            if not ends:
                return []
            core.state.blocks.prepared = job.prepared
            return core.answer(job.client, job.peer, job.envelope)
        except TransferQueueError as error:
            return [core.failure(job.peer, job.envelope.sequence, error)]
        finally:
            job.answered = ends
            core.state.blocks.prepared = None
