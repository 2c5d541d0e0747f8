"""Puts of very many fields, whose fields are prepared in steps between which others are served.

A step looks at some of the fields: whether they are described rightly, and what rows look like that have them; then
columns are made for those that the partition does not have. It changes nothing of the state. The last step is the put
itself: one record, so that it is there whole or not at all. If a process dies in between, nothing of the put is left.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from transfer_queue.core.effects import Effect
from transfer_queue.core.fields import Field, Prepared, check_dims, check_kind, check_place, dims_end, shape_of
from transfer_queue.core.partition import Partition
from transfer_queue.core.rows import CHUNK, CHUNK_BITS, MASK, capacity_for
from transfer_queue.core.state import State
from transfer_queue.core.wide_columns import MANY_FIELDS, WideColumns
from transfer_queue.errors import InvalidArgumentError, TransferQueueError
from transfer_queue.messages import Envelope, NewBlock, Publish

if TYPE_CHECKING:
    from transfer_queue.core.controller import Controller

WIDE = 2048  # fields, from which on a put is prepared
STEP = 512  # fields; a millisecond or two


class Job:
    """A put that is being prepared. peer: where it is answered. done: of its fields; at: of the block's dims.

    made: columns, of the fields that the partition does not have. rows: where in their chunk the put's will be.
    """

    def __init__(self, client: str, peer: int, envelope: Envelope, block: NewBlock) -> None:
        self.client = client
        self.peer = peer
        self.envelope = envelope
        self.prepared = Prepared(block)
        self.dims = np.frombuffer(block.dims, "<i8")
        self.names: set[str] = set()
        self.done = 0
        self.at = 0
        self.made = 0
        self.rows = slice(0)

    def step(self, partition: Partition | None) -> bool:
        """Prepares some fields; whether these were the last.

        Raises InvalidArgumentError for a block that describes itself wrongly.
        """
        if self.done < len(self.prepared.block.schema):
            self._look({} if partition is None else partition.fields)
            return self.done == len(self.prepared.block.schema) and len(self.prepared.fresh) < MANY_FIELDS
        return self._make(partition)

    def _look(self, known: dict[str, Field]) -> None:
        prepared, block = self.prepared, self.prepared.block
        prepared.looks_at(known)
        some = block.schema[self.done : self.done + STEP]
        self.names.update(spec.name for spec in some)
        if len(self.names) != self.done + len(some):
            raise InvalidArgumentError(f"a block needs fields, each once; of its first {self.done + len(some)} "
                                       f"{len(self.names)} have names of their own")  # fmt: skip
        for spec in some:
            hash(spec)  # which it keeps
            check_kind(spec)
            start, self.at = self.at, dims_end(spec, self.dims, self.at, block.rows)
            part = self.dims[start : self.at]
            if spec.name in known:
                prepared.others.append((spec, part))
                continue
            if self.at > len(self.dims):
                raise InvalidArgumentError(f"field {spec.name!r}: the block's dims end before it does")
            field = prepared.fresh[spec.name] = Field(spec.name)
            field.add(spec, part)
            field.live = field.ever = block.rows
        self.done += len(some)
        if self.done == len(block.schema):
            check_dims(self.dims, self.at, block.rows, len(block.schema))

    def _make(self, partition: Partition | None) -> bool:
        prepared = self.prepared
        if prepared.wide is None:
            body = self.envelope.body
            assert isinstance(body, Publish)
            capacity, self.rows = _room(partition, body)
            prepared.wide = WideColumns(list(prepared.fresh), capacity)
        prepared.wide.touch(self.made, self.made + STEP, self.rows)
        prepared.columns.update(prepared.wide.columns(self.made, self.made + STEP))
        self.made += STEP
        return self.made >= len(prepared.fresh)


def _room(partition: Partition | None, body: Publish) -> tuple[int, slice]:
    """The capacity of the chunk in which the rows of a put will be, and where in it; others' puts may yet change it."""
    if partition is None:
        return capacity_for(0, min(max(body.count, body.pre_allocate), CHUNK)), slice(0, body.count)
    if body.rows is not None:
        position = int(partition.rows.positions_of(np.frombuffer(body.rows, "<i8", 1))[0])
        chunk = partition.rows.chunks.get(position >> CHUNK_BITS)
        return (0 if chunk is None else chunk.capacity), slice(position & MASK, (position & MASK) + body.count)
    fresh = max(0, body.count - len(partition.waiting))
    first = partition.rows.end & MASK
    return partition.rows.capacity_after(fresh), slice(first, first + fresh)


class WidePuts:
    """jobs: those that are being prepared, each has a step in turn."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()

    def begin(self, state: State, client: str, peer: int, envelope: Envelope) -> Envelope | None:
        """Takes a put on where it is a wide one (None); the same again is answered on the newest connection.

        Otherwise the request, which is to be decided on now. Where the partition has learnt the put's schema, it is
        that very list, so that whoever compares them compares no fields.
        """
        body = envelope.body
        if not isinstance(body, Publish) or body.block is None or len(body.block.schema) < WIDE:
            return envelope
        prepared = state.blocks.prepared
        if prepared is not None and prepared.block is body.block:
            return envelope
        for job in self.jobs:
            if (job.client, job.envelope.sequence) == (client, envelope.sequence):
                job.peer = max(job.peer, peer)
                return None
        partition = state.partitions.get(body.partition)
        if partition is not None and partition.learnt is not None and partition.learnt == shape_of(body.block):
            block = msgspec.structs.replace(body.block, schema=partition.learnt[0])
            return msgspec.structs.replace(envelope, body=msgspec.structs.replace(body, block=block))
        check_place(body.block, body.count)
        if len(body.block.dims) % 8:
            return envelope  # what is no column is refused at once
        if body.rows is not None and (not body.rows or len(body.rows) % 8):
            return envelope
        self.jobs.append(Job(client, peer, envelope, body.block))
        return None

    def closed(self, peer: int) -> None:
        """Who put on this connection will put again on another, or never."""
        self.jobs = deque(job for job in self.jobs if job.peer != peer)

    def step(self, core: Controller) -> list[Effect]:
        """One step of the job whose turn it is."""
        if not self.jobs:
            return []
        job = self.jobs.popleft()
        body = job.envelope.body
        assert isinstance(body, Publish)
        partition = core.state.partitions.get(body.partition)
        try:
            if not job.step(partition):
                self.jobs.append(job)
                return []
            core.state.blocks.prepared = job.prepared
            return core.answer(job.client, job.peer, job.envelope)
        except TransferQueueError as error:
            return [core.failure(job.peer, job.envelope.sequence, error)]
        finally:
            core.state.blocks.prepared = None
