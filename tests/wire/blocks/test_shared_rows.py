"""Rows that share a value: found in memory or by a hash, stored once, and read as if every row had been stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from simulated import rows_of
from tests.differential import differential
from tests.wire.codec_arenas import Arenas
from transfer_queue.wire.blocks.column_sources import MIN_SAVED, find_equal_keys, find_same_memory
from transfer_queue.wire.blocks.encode import encode_columns, encode_put
from transfer_queue.wire.blocks.equal_rows import hash_put
from transfer_queue.wire.blocks.gather import gather

LARGE = MIN_SAVED // 4
"""The number of float32 elements of a value that is worth storing once."""


def reply_of(arenas, put):
    """Writes the blocks of a put, and gives the lookup of all its rows."""
    fields = {}
    for block in put.split():
        number = arenas.write(block)
        slots = range(put.rows) if block.slots is None else slots_of(block)
        fields.update({spec.name: [(number, slot) for slot in slots] for spec in block.schema})
    return arenas.reply(fields={spec.name: fields[spec.name] for spec in put.schema})


def slots_of(block):
    return None if block.slots is None else np.frombuffer(block.slots, "<i4").tolist()


def plain(column):
    """A column as a list of lists."""
    return [value.tolist() if hasattr(value, "tolist") else value for value in rows_of(column)]


def images(count, size=LARGE):
    return [torch.full((size,), float(number)) for number in range(count)]


def shared_columns():
    """Columns of 6 rows which share values, and the number of distinct ones."""
    kept = images(3)
    rows = [kept[0], kept[0], kept[1], kept[2], kept[1], kept[0]]
    document = {"pages": "page " * LARGE}
    return [
        ("expanded tensor", kept[0].expand(6, LARGE), 1),
        ("expanded array", np.broadcast_to(np.arange(LARGE), (6, LARGE)), 1),
        ("the same tensor", rows, 3),
        ("views of one storage", [kept[0].view(2, -1), kept[0].view(2, -1), *(kept[1][:] for _ in range(4))], 2),
        ("the same object", [document, document, {"other": 1}, document, None, None], 3),
        ("one object for all", NonTensorData(document, batch_size=[6]), 1),
    ]  # fmt: skip


@pytest.mark.parametrize(("column", "distinct"), [case[1:] for case in shared_columns()],
                         ids=[case[0] for case in shared_columns()])  # fmt: skip
def test_rows_that_share_memory_are_stored_once_and_read_as_they_were_put(column, distinct):
    put, plainly, arenas, others = encode_put({"x": column}, 6), encode_columns({"x": column}, 6), Arenas(), Arenas()
    assert [block.rows for block in put.split()] == [distinct]
    assert put.nbytes < plainly.nbytes / 6 * (distinct + 1)
    others.write(plainly)
    want = gather(others.reply(), others.memory)["x"]
    got = gather(reply_of(arenas, put), arenas.memory)["x"]
    assert type(got) is type(want)
    assert plain(got) == plain(want)


def test_fields_that_share_values_in_the_same_way_are_in_one_block():
    kept = images(2)
    rows = [kept[0], kept[0], kept[1]]
    put = encode_put({"a": rows, "s": torch.arange(3), "b": [row.double() for row in kept[:1]] * 2 + [kept[1].double()],
                      "e": kept[0].expand(3, LARGE)}, 3)  # fmt: skip
    assert [[spec.name for spec in block.schema] for block in put.split()] == [["a", "b"], ["s"], ["e"]]
    assert [spec.name for spec in put.schema] == ["a", "s", "b", "e"]


@pytest.mark.parametrize("column", [torch.zeros(1).expand(64, 1), ["a", "a"] * 32, [True, False] * 32, [None] * 64,
                                    [torch.zeros(2)] * 64])  # fmt: skip
def test_values_too_small_to_save_anything_stay_in_the_common_block(column):
    put = encode_put({"x": column, "y": torch.arange(64)}, 64)
    assert [block.slots for block in put.split()] == [None]
    arenas = Arenas()
    assert plain(gather(reply_of(arenas, put), arenas.memory)["x"]) == plain(column)


def test_tensors_over_the_same_memory_with_other_values_are_not_shared():
    base = torch.complex(torch.ones(4), torch.ones(4))
    tensors = [base, base.conj(), base[:2], base[::2], base.view(2, 2), base.view(2, 2).t()]
    assert find_same_memory(tensors) is None
    found = find_same_memory([*tensors, base.conj()])
    assert found is not None
    assert found.slots.tolist() == [0, 1, 2, 3, 4, 5, 1]


@given(st.lists(st.integers(0, 4)))
def test_equal_keys_get_the_slot_of_their_first_row(keys):
    found = find_equal_keys(keys)
    if found is None:
        assert len(set(keys)) == len(keys)
        return
    assert [keys[row] for row in found.firsts] == list(dict.fromkeys(keys))
    assert [keys[found.firsts[slot]] for slot in found.slots] == keys


def test_samples_that_share_a_tensor_share_it_as_a_lazy_stack():
    image = images(1)[0]
    rows = [TensorDict({"image": image, "answer": torch.tensor(n)}) for n in range(4)]
    put = encode_put(LazyStackedTensorDict(*rows, stack_dim=0), 4)
    assert {spec.name: block.rows for block in put.split() for spec in block.schema} == {"image": 1, "answer": 4}


@st.composite
def repeated(draw):
    """A column of rows, some of which are equal, and how they are equal: in memory, in bytes, or not."""
    kind = draw(st.sampled_from(["tensors", "objects", "mixed ranks", "dense", "lengths"]))
    values = []
    for number in range(draw(st.integers(1, 3))):
        size = draw(st.sampled_from([0, 1, LARGE, LARGE + 1]))
        value = torch.full((size,), float(number))
        if kind == "objects":
            values.append({"image": value.numpy(), "n": number % 2})
        elif kind == "mixed ranks":
            values.append(value.view(1, -1) if draw(st.booleans()) else value)
        else:
            values.append(torch.full((LARGE,), float(number % 2)) if kind == "dense" else value)
    picked = draw(st.lists(st.sampled_from(range(len(values))), min_size=1, max_size=8))
    copied = draw(st.lists(st.booleans(), min_size=len(picked), max_size=len(picked)))

    def copy(value):
        return {**value, "image": value["image"].copy()} if isinstance(value, dict) else value.clone()

    rows = [copy(values[at]) if new else values[at] for at, new in zip(picked, copied, strict=True)]
    return torch.stack(rows) if kind == "dense" else rows


def equal(one, other):
    """Whether two rows have the same type and the same content."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and np.array_equal(one["image"], other["image"]) and one["n"] == other["n"]
    return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())


@differential(60)
@given(repeated(), repeated(), st.booleans(), st.sampled_from(["jagged", "list"]), st.booleans(), st.data())
def test_a_put_that_stores_values_once_is_read_like_one_that_stores_every_row(one, other, hashed, layout, shared, data):
    rows = min(len(one), len(other))
    columns = {"x": one[:rows], "y": other[:rows], "n": torch.arange(rows)}
    plainly, put = encode_columns(columns, rows), encode_put(columns, rows)
    found = hash_put(put, lambda name: name != "n") if hashed else None
    if found is not None:
        put = found.without({})
        for field in found.fields:
            assert len(set(field.digests)) == len(field.digests)
    assert put.nbytes <= plainly.nbytes + 128
    arenas, others = Arenas(size=1 << 16), Arenas(size=1 << 16)
    others.write(plainly)
    order = data.draw(st.lists(st.sampled_from(range(rows)), min_size=1, max_size=6))
    want = gather(others.reply([(0, row) for row in order]), others.memory, layout)
    reply = reply_of(arenas, put)
    picked = [
        type(place)(place.fields, *(np.frombuffer(column, "<i4")[order].tobytes() for column in place_columns(place)))
        for place in reply.placements
    ]
    reply = type(reply)(len(order), reply.types, reply.blocks, picked)
    got = gather(reply, arenas.memory, layout, shared=shared)
    for name in columns:
        pairs = zip(rows_of(got[name]), rows_of(want[name]), strict=True)
        assert all(equal(found, wanted) for found, wanted in pairs)
        if not shared:
            check_apart(rows_of(got[name]))


def place_columns(place):
    return place.block, place.slot


def check_apart(rows):
    """Every row has memory of its own."""
    places = [row.data_ptr() for row in rows if isinstance(row, torch.Tensor) and row.numel()]
    places += [row["image"].__array_interface__["data"][0] for row in rows if isinstance(row, dict)
               if row["image"].size]  # fmt: skip
    assert len(set(places)) == len(places)


def test_shared_rows_are_one_tensor_or_one_object_in_the_result():
    kept, document = images(2), {"text": "a" * MIN_SAVED}
    put = encode_put({"x": [kept[0], kept[1], kept[0]], "o": [document] * 3, "n": torch.arange(3)}, 3)
    arenas = Arenas()
    reply = reply_of(arenas, put)
    got = gather(reply, arenas.memory, shared=True)
    first, second, third = got["x"].tolist()
    assert first is third
    assert first.data_ptr() != second.data_ptr()
    first += 1
    assert third[0] == 1
    assert got["o"].tolist()[0] is got["o"].tolist()[2]
    assert got["n"].tolist() == [0, 1, 2]
    own = gather(reply, arenas.memory, "list")["x"].tolist()
    own[0] += 1
    assert own[2][0] == 0


@pytest.mark.parametrize("known", [[], [0], [0, 1]])
def test_known_values_are_left_out_of_a_hashed_put(known):
    rows = [torch.full((LARGE,), float(number)) for number in (0, 1, 0, 1)]
    found = hash_put(encode_put({"x": torch.stack(rows), "n": torch.arange(4)}, 4), lambda name: name == "x")
    (field,) = found.fields
    assert field.numbers.tolist() == [0, 1, 0, 1]
    put = found.without({"x": {field.digests[number] for number in known}})
    slots = {spec.name: slots_of(block) for block in put.split() for spec in block.schema}
    assert list(slots) == (["n"] if len(known) == 2 else ["x", "n"])
    if known == [0]:
        assert slots["x"] == [-1, 0, -1, 0]
    if not known:
        assert slots["x"] == [0, 1, 0, 1]


def test_a_digest_depends_on_the_dtype_and_the_shape():
    zeros = torch.zeros(LARGE)
    columns = {"a": [zeros], "b": [zeros.view(2, -1)], "c": [zeros.int()], "d": [zeros.clone()]}
    digests = {field.name: field.digests for field in hash_put(encode_put(columns, 1), lambda name: True).fields}
    assert digests["a"] == digests["d"]
    assert len({digest for listed in digests.values() for digest in listed}) == 3


def test_short_rows_are_not_hashed():
    column = [torch.zeros(4), torch.ones(LARGE), torch.zeros(4), torch.ones(LARGE)]
    found = hash_put(encode_put({"x": column}, 4), lambda name: True)
    assert found.fields[0].numbers.tolist() == [-1, 0, -1, 0]
    assert slots_of(found.without({}).split()[0]) == [0, 1, 2, 1]
    assert hash_put(encode_put({"x": column[::2]}, 2), lambda name: True) is None


@pytest.mark.parametrize(
    "column",
    [
        torch.arange(2.0 * LARGE).view(LARGE, 2).t(),
        np.arange(2 * LARGE)[::-1].reshape(2, -1),
        np.arange(2 * LARGE, dtype=">i4").reshape(2, -1),
    ],
)
def test_the_digest_of_a_strided_column_is_that_of_its_values(column):
    copied = column.contiguous() if isinstance(column, torch.Tensor) else column.astype(column.dtype.newbyteorder("<"))
    digests = [hash_put(encode_put({"x": one}, 2), lambda name: True).fields[0].digests for one in (column, copied)]
    assert digests[0] == digests[1]
