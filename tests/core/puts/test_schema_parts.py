"""The schema of a block with very many fields is sent in parts, and is then a schema like any other."""

from __future__ import annotations

import msgspec
import pytest
from harness import Harness, column, encode, rows_of, tensor

from transfer_queue.errors import CapacityError, InvalidArgumentError
from transfer_queue.messages.descriptors import FieldSpec, NewBlock
from transfer_queue.messages.partitions import ListPartitions
from transfer_queue.messages.puts import Publish
from transfer_queue.messages.queries import Lookup

NAMES = [f"f{number}" for number in range(80)]
KINDS = {name: tensor(shape=[(1,), (number % 3,)]) for number, name in enumerate(NAMES)}

replace = msgspec.structs.replace


def in_parts(block: NewBlock, size: int = 30) -> NewBlock:
    """Return the same block with its schema in parts."""
    schema = block.schema
    parts = [encode(schema[start : start + size]) for start in range(0, len(schema), size)]
    return replace(block, schema=[], parts=parts)


def put_in_parts(request: Publish) -> Publish:
    first, *further = map(in_parts, request.blocks)
    return replace(request, block=first, further=further)


@pytest.mark.parametrize("there", [[], ["f3"], ["f3", "other"], NAMES])
def test_a_schema_in_parts_is_the_same_schema(h: Harness, there: list[str]) -> None:
    if there:
        h.put(2, there)
    rows = []
    for _ in range(3):
        rows += rows_of(h.ask(put_in_parts(h.publish(2, KINDS))))
    h.ask(put_in_parts(h.publish(2, NAMES[::-1], rows=rows[:2])))
    h.put(2, NAMES)
    assert [set(row) for row in h.lookup(rows, NAMES)] == [set(NAMES)] * 6
    block = h.publish(2, KINDS).block
    assert block is not None
    assert h.look(Lookup("p", column(rows[2:4]))).blocks.schemas == [block.schema]


def test_blocks_in_parts_may_be_any_of_a_put(h: Harness) -> None:
    put = h.publish_blocks(2, (["x"], None), (NAMES, [1, 0]))
    rows = rows_of(h.ask(replace(put, further=[in_parts(put.further[0])])))
    assert [{slot for _, slot in row.values()} for row in h.lookup(rows, NAMES)] == [{1}, {0}]
    assert all("x" in row for row in h.lookup(rows, ["x"]))


@pytest.mark.parametrize("wrong", ["both", "no part", "cut", "other", "empty", "number"])
def test_invalid_parts_of_a_schema_are_refused(h: Harness, wrong: str) -> None:
    good = put_in_parts(h.publish(2, NAMES))
    assert good.block is not None
    parts: list[bytes] = [*good.block.parts]
    schema: list[FieldSpec] = []
    if wrong == "both":
        schema = [FieldSpec("x", "tensor", "float32", 1, False)]
    elif wrong == "no part":
        parts[1] = b""
    elif wrong == "cut":
        parts[-1] = parts[-1][:-3]
    elif wrong == "other":
        parts[0] = encode({"a": 1})
    elif wrong == "empty":
        parts = [encode([])] * 3
    else:
        parts[-1] = encode([("f79", "tensor", "float32", 1 << 40, False)])
    with pytest.raises(InvalidArgumentError):
        h.ask(replace(good, block=replace(good.block, schema=schema, parts=parts)))
    assert h.ask(ListPartitions()).value == []
    assert len(rows_of(h.ask(good))) == 2


@pytest.mark.parametrize("restarted", [False, True])
def test_a_put_in_parts_may_wait_for_capacity(restarted: bool) -> None:
    h = Harness(capacity=2)
    before = h.put(2)
    request = put_in_parts(h.publish(2, NAMES, wait=10.0))
    with pytest.raises(CapacityError):
        h.ask(replace(request, wait=None))
    sequence = h.send(request)
    assert h.reply(sequence) is None
    if restarted:
        h.restart()
        h.send(request, sequence=sequence)
    h.clear(before)
    assert len(rows_of(h.reply(sequence))) == 2
