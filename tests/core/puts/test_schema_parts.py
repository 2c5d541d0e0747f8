"""A put whose block has its schema in parts, as clients of earlier releases sent it, is refused."""

from __future__ import annotations

import msgspec
import pytest
from harness import Harness, encode, rows_of

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.descriptors import NewBlock
from transfer_queue.messages.partitions import ListPartitions

NAMES = [f"f{number}" for number in range(80)]

replace = msgspec.structs.replace


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("wrong", ["only parts", "both", "no part"])
def test_a_schema_in_parts_is_refused(h: Harness, wrong: str, there: bool) -> None:
    if there:
        h.put(2, NAMES)
    good = h.publish_blocks(2, (["x"], None), (NAMES, None))

    def in_parts(block: NewBlock) -> NewBlock:
        schema = block.schema if wrong == "both" else []
        return replace(block, schema=schema, parts=[b"" if wrong == "no part" else encode(block.schema)])

    further = [in_parts(block) for block in good.further]
    known = h.ask(ListPartitions()).value
    for put in (replace(good, block=in_parts(good.blocks[0])), replace(good, further=further)):
        with pytest.raises(InvalidArgumentError, match="got parts"):
            h.ask(put)
    assert h.ask(ListPartitions()).value == known
    assert len(rows_of(h.ask(good))) == 2
