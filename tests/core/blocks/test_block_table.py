"""Blocks and extents: when they are needed and freed; units and writers; lookups of values."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest
from harness import BLOCKS_AN_EXTENT, Harness, column, places, tensor

from transfer_queue.core.tables.blocks import CHUNK, BlockTable
from transfer_queue.errors import InvalidArgumentError, ProtocolError, StorageKeyNotFoundError
from transfer_queue.messages.base import Done
from transfer_queue.messages.descriptors import FieldSpec, NewBlock
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.messages.puts import CloseExtents
from transfer_queue.messages.queries import Lookup
from transfer_queue.messages.reports.unit_reports import RegisterUnit, WriterGone
from transfer_queue.messages.system import Topology


def needed(h: Harness) -> int:
    return len(list(h.state.blocks.live_blocks()))


# ---------------------------------------------------------------- blocks


def test_unused_interned_schemas_and_dims_are_removed(h: Harness) -> None:
    for number in range(20):
        h.put(2, {"x": tensor("float32", (number,))})
    h.put(20, ("y",), rows=range(20))
    assert len(h.state.blocks.schemas.number) == 2
    h.clear(range(40))
    assert h.state.blocks.schemas.number == h.state.blocks.dims.number == {}
    h.put(1)
    assert len(h.state.blocks.dims.values) <= 21, "spare numbers are used again"


def test_block_chunks_grow_and_are_removed_when_empty() -> None:
    table = BlockTable()
    spec = [FieldSpec("x", "tensor", "int8", 0, False)]
    for number in range(1, 2 * CHUNK + 10):
        table.add(number, "w", NewBlock(0, 1, number * 64, 3, 1, 1, spec, b""), 1, 1)
    picked = np.array([1, CHUNK, 2 * CHUNK + 9, 5])
    assert (table.column("offset", picked) == picked * 64).all()
    assert table.column("generation", picked[:1]).tolist() == [3]
    assert sorted(table.chunks) == [0, 1, 2]
    table.release(np.arange(0, CHUNK))
    assert sorted(table.chunks) == [1, 2]
    assert table.extents[0, 1].blocks == CHUNK + 10
    table.release(np.arange(CHUNK, 2 * CHUNK + 10))
    assert (table.chunks, table.live_bytes, table.extents[0, 1].blocks) == ({}, 0, 0)


# ---------------------------------------------------------------- extents


def test_an_extent_is_freed_once_it_is_closed_and_empty(h: Harness) -> None:
    h.put(1)
    h.clear([0])
    assert h.freed == [], "the writer may put more into it"
    h.put(1)
    h.put(1)
    assert h.freed == []
    h.clear([1])
    assert h.freed == []
    h.clear([2])
    assert h.freed == [(0, 1)]
    assert h.state.blocks.extents == {}


def test_dropping_a_partition_frees_its_extents(h: Harness) -> None:
    for number in range(3 * BLOCKS_AN_EXTENT):
        h.put(2, partition=f"p{number % 2}")
    h.ask(ClearPartition("p0"))
    assert h.freed == []
    h.ask(ClearPartition("p1"))
    assert sorted(h.freed) == [(0, 1), (0, 2), (0, 3)]


def test_an_extent_without_known_blocks_is_not_freed_for_a_client(h: Harness) -> None:
    """Only its unit knows whether it is leased to that client, which gets it in the reply and returns it there."""
    h.put(1)
    assert h.ask(CloseExtents([(0, 1), (0, 77), (0, 77)])) == Done([[0, 77]])
    h.ask(msgspec.structs.replace(h.publish(1, name="v"), closes=[(0, 78)]), "v")
    assert h.freed == []
    assert not h.state.blocks.freed


def test_a_writer_cannot_close_or_fill_the_extent_of_another_writer(h: Harness) -> None:
    h.put(1)
    with pytest.raises(ProtocolError, match="to another writer"):
        h.ask(CloseExtents([(0, 1)]), "thief")
    request = h.publish(1, name="thief")
    with pytest.raises(ProtocolError, match="to another writer"):
        h.ask(type(request)("p", 1, block=request.block, closes=[(0, 1)], pre_allocate=0), "thief")
    with pytest.raises(ProtocolError, match="to another writer"):
        h.ask(h.publish(1), "thief")
    assert h.state.partitions["p"].rows.count == 1


def test_a_put_into_a_closed_extent_is_refused(h: Harness) -> None:
    h.put(1)
    h.ask(CloseExtents([(0, 1)]))
    with pytest.raises(ProtocolError, match="closed"):
        h.put(1)


def test_extents_of_a_disconnected_unit_are_freed_when_it_reconnects(h: Harness) -> None:
    h.put(1)
    h.disconnect("unit-0")
    h.ask(CloseExtents([(0, 1)]))
    h.clear([0])
    assert h.freed == []
    h.connect("unit-0")
    assert h.ask(RegisterUnit("unit.sock", "/arena"), "unit-0") == Done(0)
    assert h.freed == [(0, 1)]


# ---------------------------------------------------------------- units and writers


def test_units_are_identified_by_their_arena(h: Harness) -> None:
    assert h.ask(RegisterUnit("second.sock", "/other"), "unit-1") == Done(1)
    assert h.ask(RegisterUnit("moved.sock", "/arena"), "unit-0") == Done(0)
    reply = h.ask(Topology())
    assert [(u.unit, u.address, u.arena) for u in reply.units] == [
        (0, "moved.sock", "/arena"),
        (1, "second.sock", "/other"),
    ]
    assert reply.config == "{}"


def test_a_writer_that_is_proven_dead_cannot_put(h: Harness) -> None:
    h.put(1)
    late = h.publish(1)
    h.ask(WriterGone("w", 0, [1, 5]), "unit-0")
    assert h.freed == [(0, 5)], "an extent without blocks is freed at once"
    with pytest.raises(ProtocolError, match="proven dead"):
        h.ask(late)
    assert h.lookup([0], ["x"])[0]["x"][1] == 0, "published values remain"
    h.clear([0], "p")
    assert h.freed == [(0, 5), (0, 1)]
    assert h.put(1, name="other") == [1]


def test_a_parked_put_of_a_dead_writer_fails() -> None:
    h = Harness(capacity=1)
    h.put(1, name="alive")
    sequence = h.send(h.publish(1, wait=10))
    h.ask(WriterGone("w", 0, [2]), "unit-0")
    h.ask(ClearPartition("p"), "alive")
    with pytest.raises(ProtocolError, match="proven dead"):
        h.result(sequence)


def test_only_the_unit_itself_can_report_a_writer_as_dead(h: Harness) -> None:
    h.put(1)
    for name in ("w", "unit-1"):
        with pytest.raises(ProtocolError, match="only the unit itself"):
            h.ask(WriterGone("w", 0, [1]), name)
    h.disconnect("unit-0")
    h.connect("unit-0")
    with pytest.raises(ProtocolError):
        h.ask(WriterGone("w", 0, [1]), "unit-0")
    h.put(1)


def test_a_bounded_number_of_dead_writers_is_remembered(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer_queue.core.units.apply.MAX_FENCED", 3)
    for number in range(5):
        h.ask(WriterGone(f"w{number}", 0, []), "unit-0")
    assert list(h.state.fenced) == ["w2", "w3", "w4"]


# ---------------------------------------------------------------- lookups


def test_fields_in_the_same_blocks_share_a_placement(h: Harness) -> None:
    h.put(2, ("x", "y", "z"))
    h.put(2, ("y",), rows=[0, 1])
    reply = h.ask(Lookup("p", column([0, 1]), fields=["x", "y", "z"]))
    assert [placement.fields for placement in reply.placements] == [["x", "z"], ["y"]]
    assert [t.name for t in reply.types] == ["x", "y", "z"]
    assert len(reply.blocks.schemas) == len(reply.blocks.dims_values) == 2
    assert np.frombuffer(reply.blocks.rows, "<i4").tolist() == [2, 2]


def test_a_lookup_by_keys_returns_the_common_fields(h: Harness) -> None:
    h.put(2, ("x", "y"), keys=["a", "b"])
    h.put(1, ("y", "z"), keys=["c"])
    every = h.ask(Lookup("p", keys=["c", "nobody", "a", "c"]))
    assert (every.count, [t.name for t in every.types]) == (3, ["y"])
    assert [row["y"][1] for row in places(every)] == [0, 0, 0]
    some = h.ask(Lookup("p", keys=["b", "a"], fields=["y", "nobody", "x", "y"]))
    assert [t.name for t in some.types] == ["y", "x"]
    assert h.ask(Lookup("p", keys=["a"], fields=["z"])).count == -1, "none of the requested fields"
    h.put(1, ("w",), keys=["d"])
    nothing = h.ask(Lookup("p", keys=["a", "d"]))
    assert (nothing.count, nothing.types) == (2, []), "no field in common"
    for missing in (Lookup("p", keys=["q"]), Lookup("p", keys=[]), Lookup("nobody", keys=["a"])):
        assert h.ask(missing).count == 0


def test_a_lookup_by_rows_names_missing_fields_and_rows(h: Harness) -> None:
    h.put(2, ("x", "y"))
    h.put(1, ("x",))
    h.put(1, None, tags=[{}])
    assert list(h.lookup([0, 2], None)[0]) == ["x"]
    with pytest.raises(StorageKeyNotFoundError, match=r"'y' is not produced for 1 of 2.*\[2\]"):
        h.lookup([0, 2], ["x", "y"])
    with pytest.raises(StorageKeyNotFoundError, match="'nobody'"):
        h.lookup([0], ["nobody"])
    with pytest.raises(StorageKeyNotFoundError, match=r"\[55\]"):
        h.lookup([0, 55], ["x"])
    with pytest.raises(StorageKeyNotFoundError):
        h.lookup([0], ["x"], "nobody")
    for nothing, count in ((Lookup("p", column([3])), 1), (Lookup("p", b""), 0), (Lookup("nobody", b""), 0)):
        assert (h.ask(nothing).count, h.ask(nothing).placements) == (count, [])
    assert h.ask(Lookup("p", column([0]), fields=[])).count == 1


# ---------------------------------------------------------------- hostile


@pytest.mark.parametrize(
    "request_",
    [
        WriterGone("w", 9, [1]),
        CloseExtents([(-1, -1)]),
        CloseExtents([(0, 1 << 62)]),
        Lookup("p", b"\xff" * 8, fields=["x"]),
        Lookup("p", column([-1, 1 << 62])),
    ],
    ids=repr,
)
def test_malformed_requests_get_an_error_and_change_nothing(h: Harness, request_: object) -> None:
    h.put(1)
    with contextlib.suppress(ProtocolError, InvalidArgumentError, StorageKeyNotFoundError):
        h.ask(request_)  # type: ignore[arg-type]
    assert h.put(1) == [1]
