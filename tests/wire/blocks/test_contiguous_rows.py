"""Rows that follow one another in one block: found where the general way finds them, never out of bounds."""

import msgspec
import numpy as np
import pytest
import torch
from codec_arenas import Arenas
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.errors import ProtocolError
from transfer_queue.wire.blocks import gather as gathering
from transfer_queue.wire.blocks.contiguous_rows import row_runs
from transfer_queue.wire.blocks.encode import encode_columns
from transfer_queue.wire.blocks.gather import gather
from transfer_queue.wire.blocks.row_addressing import locate_rows


def written(rows=6):
    """An arena with two blocks of fields of each kind."""
    arenas = Arenas()
    for seed in range(2):
        jagged = torch.nested.nested_tensor([torch.arange(n + seed) for n in range(rows)], layout=torch.jagged)
        columns = {
            "dense": torch.rand(rows, 3, 2), "scalar": torch.rand(rows).bfloat16(), "jagged": jagged,
            "objects": [f"row {n}" * n for n in range(rows)], "alike": [1] * rows, "empty": torch.zeros(rows, 0),
            "mixed": [torch.zeros([1] * (n % 3)) for n in range(rows)],
        }  # fmt: skip
        arenas.write(encode_columns(columns, rows))
    return arenas


KINDS = ["dense", "scalar", "jagged", "objects", "alike", "empty"]


@given(st.integers(0, 1), st.integers(0, 5), st.integers(1, 6), st.sets(st.sampled_from([*KINDS, "mixed"]), min_size=1))
def test_they_are_what_the_general_way_finds(block, first, count, names):
    arenas = written()
    wanted = [(block, slot) for slot in range(first, min(first + count, 6))]
    reply = arenas.reply(wanted, sorted(names))
    found = row_runs(reply, arenas.memory)
    assert (found is None) == ("mixed" in names)
    for rows in locate_rows(reply, arenas.memory):
        if found is not None:
            mine = found[rows.type.name].field_rows()
            for part in ("units", "starts", "lengths", "shapes"):
                assert np.array_equal(getattr(mine, part), getattr(rows, part)), part


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), min_size=1, max_size=5))
def test_whatever_rows_are_asked_for_the_values_are_the_same(pairs):
    arenas = written()
    reply = arenas.reply(pairs, KINDS)
    fast = gather(reply, arenas.memory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "row_runs", lambda reply, memory: None)
        slow = gather(reply, arenas.memory)
    for name in KINDS:
        assert type(fast.get(name)) is type(slow.get(name))
        if isinstance(fast.get(name), torch.Tensor):
            assert all(map(torch.equal, fast.get(name).unbind(), slow.get(name).unbind()))
            assert fast.get(name).dtype == slow.get(name).dtype
        else:
            assert fast.get(name).tolist() == slow.get(name).tolist()


def test_fields_of_several_puts_are_runs_too():
    arenas = Arenas()
    arenas.write(encode_columns({"x": torch.arange(4)}, 4))
    arenas.write(encode_columns({"y": torch.arange(4) * 2}, 4))
    reply = arenas.reply(fields={"x": [(0, 1), (0, 2)], "y": [(1, 2), (1, 3)]})
    assert {name: run.count for name, run in row_runs(reply, arenas.memory).items()} == {"x": 2, "y": 2}
    table = gather(reply, arenas.memory)
    assert (table["x"].tolist(), table["y"].tolist()) == ([1, 2], [4, 6])


@pytest.mark.parametrize("pairs", [[(0, 1), (0, 0)], [(0, 0), (0, 0)], [(0, 0), (0, 2)], [(0, 5), (1, 0)]], ids=str)
def test_rows_in_another_order_are_none(pairs):
    arenas = written()
    assert row_runs(arenas.reply(pairs, ["dense"]), arenas.memory) is None


I4 = np.dtype("<i4")


@pytest.mark.parametrize("bent", [
    {"block": np.array([7, 7], I4).tobytes()}, {"block": np.array([-1, -1], I4).tobytes()}, {"block": b""},
    {"slot": np.array([3, 4], I4).tobytes()}, {"slot": np.array([-1, 0], I4).tobytes()}, {"fields": ["y"]},
], ids=str)  # fmt: skip
def test_rows_outside_of_their_block_are_refused(bent):
    arenas = Arenas()
    arenas.write(encode_columns({"x": torch.zeros(4, 2)}, 4))
    reply = arenas.reply([(0, 0), (0, 1)])
    placement = msgspec.structs.replace(reply.placements[0], **bent)
    with pytest.raises(ProtocolError):
        gather(msgspec.structs.replace(reply, placements=[placement]), arenas.memory)


def test_a_field_that_is_otherwise_than_its_type_is_refused():
    arenas = Arenas()
    arenas.write(encode_columns({"x": torch.zeros(4, 2)}, 4))
    reply = arenas.reply()
    for bent in (
        {"dtype": "float64"},
        {"dtype": "int32"},
        {"kind": "object", "dtype": "object"},
        {"ndim": 2},
        {"dtype": "no such"},
    ):
        types = [msgspec.structs.replace(reply.types[0], **bent)]
        with pytest.raises(ProtocolError):
            gather(msgspec.structs.replace(reply, types=types), arenas.memory)
