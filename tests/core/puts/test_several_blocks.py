"""A put of several blocks becomes visible at once, and rows that share a value end one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from harness import OBJECT, Harness, column, places, rows_of, tensor

from transfer_queue.errors import FieldTypeError, InvalidArgumentError, ProtocolError, TransferQueueError
from transfer_queue.messages.descriptors import BlockLocation
from transfer_queue.messages.partitions import ListPartitions
from transfer_queue.messages.puts import Publish
from transfer_queue.messages.queries import Lookup, ShowRows
from transfer_queue.messages.reports.unit_reports import RegisterUnit

replace = msgspec.structs.replace


def values(h: Harness, rows: list[int], *fields: str) -> list[dict[str, tuple[int, int]]]:
    return places(h.look(Lookup("p", column(rows), fields=list(fields))))


def test_a_claim_gets_the_rows_only_when_all_blocks_are_there(h: Harness) -> None:
    waiting = h.claim(2, fields=["x", "y"], wait=10.0)
    h.put(2)
    assert h.parked(waiting, "r")
    put = h.publish_blocks(2, (["x"], None), (["y", "z"], None))
    rows = rows_of(h.ask(put))
    assert h.got(waiting) == rows
    assert h.dealt(2, "u", fields=["x", "y", "z"]) == rows
    assert put.block is not None
    first, second = put.block.offset, put.further[0].offset
    assert values(h, rows, "x", "y", "z") == [
        {"x": (first, at), "y": (second, at), "z": (second, at)} for at in range(2)
    ]


@pytest.mark.parametrize("target", ["new", "keys", "existing"])
def test_rows_share_the_values_of_a_block(h: Harness, target: str) -> None:
    slots = [1, 0, 1, 1]
    more: dict[str, Any] = {}
    if target == "keys":
        more = {"keys": ["a", "b", "c", "d"]}
    if target == "existing":
        more = {"rows": column(h.put(4))}
    put = h.publish_blocks(4, ({"image": tensor(shape=[(2,), (3,)])}, slots), (["x"], None), **more)
    rows = rows_of(h.ask(put))
    assert put.block is not None
    assert [row["image"] for row in values(h, rows, "image")] == [(put.block.offset, slot) for slot in slots]
    shapes = h.ask(ShowRows("p", ["image"])).shapes["image"]
    assert np.frombuffer(shapes, "<i8").tolist() == [3, 2, 3, 3]


def test_a_block_is_needed_until_its_last_row_is_cleared_or_replaced(h: Harness) -> None:
    rows = rows_of(h.ask(h.publish_blocks(4, (["image"], [0, 0, 1, 1]))))
    state = h.controller.state
    held = state.blocks.live_bytes
    h.clear(rows[:2])
    h.put(1, ["image"], rows=[rows[2]])
    assert state.blocks.live_bytes == 2 * held
    h.clear([rows[3]])
    assert state.blocks.live_bytes == held
    h.clear(rows)
    assert state.blocks.live_bytes == state.partitions["p"].nbytes == 0


def test_a_put_with_a_wrong_field_in_its_second_block_leaves_nothing(h: Harness) -> None:
    h.put(1, {"y": OBJECT})
    with pytest.raises(FieldTypeError):
        h.ask(h.publish_blocks(2, (["x"], None), (["y"], None)))
    assert h.ask(ShowRows("p", ["y"])).produced == b"\1"
    assert "x" not in h.controller.state.partitions["p"].fields


def test_a_put_reports_the_dtypes_of_all_its_blocks(h: Harness) -> None:
    h.put(1, {"x": tensor("float32"), "y": tensor("float32")})
    reply = h.ask(h.publish_blocks(2, ({"x": tensor("float64")}, None), ({"y": tensor("int64")}, None)))
    assert {name: set(dtypes) for name, dtypes in reply.dtypes.items()} == {
        "x": {"float32", "float64"}, "y": {"float32", "int64"},
    }  # fmt: skip


def _moved(put: Publish, **changes: Any) -> Publish:
    return replace(put, further=[replace(put.further[0], **changes)])


def _packed(*slots: int) -> bytes:
    return np.array(slots, "<i4").tobytes()


WRONG: dict[str, tuple[Callable[[Publish], Publish], type[TransferQueueError]]] = {
    "a field twice": (lambda put: _moved(put, schema=put.blocks[0].schema), InvalidArgumentError),
    "too few slots": (lambda put: _moved(put, slots=bytes(4)), InvalidArgumentError),
    "slots of no whole number": (lambda put: _moved(put, slots=bytes(11)), InvalidArgumentError),
    "a slot beyond the block": (lambda put: _moved(put, slots=_packed(0, 2, 1)), InvalidArgumentError),
    "a slot below zero": (lambda put: _moved(put, slots=_packed(0, -1, 1)), InvalidArgumentError),
    "more rows than targets": (lambda put: _moved(put, rows=4), InvalidArgumentError),
    "no rows": (lambda put: _moved(put, rows=0), InvalidArgumentError),
    "no first block": (lambda put: replace(put, block=None), InvalidArgumentError),
    "the same place": (lambda put: _moved(put, offset=put.blocks[0].offset), ProtocolError),
    "places that overlap": (lambda put: _moved(put, offset=put.blocks[0].offset + 64), ProtocolError),
    "another extent": (lambda put: _moved(put, extent=77, offset=1 << 30), ProtocolError),
    "a copy at the place of a block": (
        lambda put: replace(put, block=replace(put.blocks[0], copies=[BlockLocation(1, 9, 64, 1)]),
                            further=[replace(put.further[0], copies=[BlockLocation(1, 9, 64, 1)])]),
        ProtocolError,
    ),
    "very many bytes": (
        lambda put: replace(put, block=replace(put.blocks[0], nbytes=1 << 61), further=[
            replace(put.further[0], nbytes=1 << 61, offset=(1 << 61) + put.blocks[0].offset),
        ]),
        ProtocolError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_blocks_are_refused_together(h: Harness, wrong: str) -> None:
    h.ask(RegisterUnit("1.sock", "/1", "boot", "unit-1"), "unit-1")
    change, error = WRONG[wrong]
    put = h.publish_blocks(3, (["x"], None), (["y"], [0, 1, 1]))
    with pytest.raises(error):
        h.ask(change(put))
    assert h.ask(ListPartitions()).value == []
    assert len(rows_of(h.ask(put))) == 3
