"""Decides what a put shares with earlier puts: which values a partition has, and which records refer to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transfer_queue.core.context import Context
from transfer_queue.core.events import records as r
from transfer_queue.core.events.registry import Caller, handles
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.errors import EqualValueGoneError, InvalidArgumentError
from transfer_queue.messages.descriptors import DIGEST, EqualField, NewBlock
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.puts import Publish
from transfer_queue.messages.queries import EqualReply, FindEqual

NO_PARTITION = -1
"""The number for which no values are known."""


@handles(FindEqual, reads=True)
def handle_find_equal(context: Context, caller: Caller, request: FindEqual) -> AnyReply:
    """Reply which values the partition has already."""
    state = context.state
    partition = state.partitions.get(request.partition)
    known = []
    for name, packed in request.fields:
        digests = _cut(name, packed)
        owner = NO_PARTITION if partition is None else partition.number
        known.append(bytes(place is not None for place in state.blocks.equal.find(owner, name, digests)))
    return EqualReply(known)


def check_put(request: Publish, blocks: Sequence[NewBlock]) -> None:
    """Raise InvalidArgumentError if the digests of a put do not match its blocks."""
    equal = {field.name: field for field in request.equal}
    if len(equal) != len(request.equal):
        raise InvalidArgumentError("a put must have the digests of each field once")
    for field in request.equal:
        _check_field(field, request.count)
    written: set[str] = set()
    for block in blocks:
        absent = np.zeros(request.count, bool) if block.slots is None else np.frombuffer(block.slots, "<i4") < 0
        if not equal and not absent.any():
            continue
        for spec in block.schema:
            written.add(spec.name)
            known = _known_targets(equal[spec.name]) if spec.name in equal else np.zeros(request.count, bool)
            if not np.array_equal(absent, known):
                raise InvalidArgumentError(
                    f"field {spec.name!r}: a put must write exactly the values that it does not say are known"
                )
    for name in sorted(equal.keys() - written):
        if not _known_targets(equal[name]).all():
            raise InvalidArgumentError(f"field {name!r} has values that are neither written nor known")


def _check_field(field: EqualField, count: int) -> None:
    digests = _cut(field.name, field.digests)
    if len(set(digests)) != len(digests) or len(field.known) != len(digests) or not set(field.known) <= {0, 1}:
        raise InvalidArgumentError(f"field {field.name!r} must have distinct digests, and 0 or 1 for each")
    numbers = np.frombuffer(field.numbers, "<i4") if len(field.numbers) == 4 * count else np.zeros(0, "<i4")
    if len(numbers) != count or int(numbers.min()) < -1 or int(numbers.max()) >= len(digests):
        raise InvalidArgumentError(
            f"field {field.name!r} must have the number of a digest, or -1, for each of {count} rows"
        )


def _cut(name: str, digests: bytes) -> list[bytes]:
    if len(digests) % DIGEST:
        raise InvalidArgumentError(
            f"the digests of field {name!r} must have {DIGEST} bytes each, got {len(digests)} bytes"
        )
    return [digests[at : at + DIGEST] for at in range(0, len(digests), DIGEST)]


def _known_targets(field: EqualField) -> np.ndarray:
    """Return for each target of the put whether its value is known."""
    of_digest = np.append(np.frombuffer(field.known, "u1"), np.uint8(0)) > 0  # the last one is that of number -1
    known: np.ndarray = of_digest[np.frombuffer(field.numbers, "<i4")]
    return known


def find_equal(
    state: State, partition: Partition | None, request: Publish
) -> tuple[list[r.SharedField], list[r.NotedField]]:
    """Return the values that a put shares with earlier puts, and the digests of those that it writes.

    Digests that are listed already are left out.

    Raises:
        EqualValueGoneError: A value that the put shares was freed after the client asked for it.
    """
    of_block: dict[str, tuple[int, NewBlock]] = {}
    for number, block in enumerate(request.blocks, state.next_block):
        of_block.update({spec.name: (number, block) for spec in block.schema})
    owner = NO_PARTITION if partition is None else partition.number
    shared, noted = [], []
    for field in request.equal:
        digests, numbers = _cut(field.name, field.digests), np.frombuffer(field.numbers, "<i4")
        places = state.blocks.equal.find(owner, field.name, digests)
        targets = np.flatnonzero(_known_targets(field))
        if len(targets):
            pairs = [places[number] for number in numbers[targets].tolist()]
            if None in pairs:
                raise EqualValueGoneError(
                    f"{pairs.count(None)} values of field {field.name!r} of partition {request.partition!r} were freed "
                    f"after the client asked for them; nothing was put. Put them again."
                )
            located = np.array(pairs, "i8").reshape(-1, 2)
            packed = targets.astype("<i4").tobytes(), located[:, 0].tobytes(), located[:, 1].astype("<i4").tobytes()
            shared.append(r.SharedField(field.name, *packed))
        if field.name in of_block:
            number, block = of_block[field.name]
            slots = np.arange(request.count, dtype="i4") if block.slots is None else np.frombuffer(block.slots, "<i4")
            fresh: dict[bytes, int] = {}
            for at, slot in zip(numbers.tolist(), slots.tolist(), strict=True):
                if at >= 0 and places[at] is None:
                    fresh.setdefault(digests[at], slot)
            if fresh:
                written = b"".join(fresh), np.array(list(fresh.values()), "<i4").tobytes()
                noted.append(r.NotedField(field.name, number, *written))
    return shared, noted
