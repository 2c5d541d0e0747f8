"""Jagged tensors are what torch's own constructor makes, and share what they may."""

import pickle
import tracemalloc

import numpy as np
import pytest
import torch
from carried_values import DTYPES_OF_EACH_SIZE, pattern, same_tensor
from hypothesis import given
from hypothesis import strategies as st

from differential import differential, row_lengths, small
from transfer_queue.messages.descriptors import Blocks, FieldSpec, FieldType, Placement
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.blocks.gather import gather
from transfer_queue.wire.buffers import jagged
from transfer_queue.wire.buffers.jagged import (
    KEPT_ROWS,
    host_offsets,
    is_plain_jagged,
    offsets_of_lengths,
    rows_of_jagged,
)


def i8(*lengths):
    return np.array(lengths, np.int64).tobytes()


def one_and_two(values):
    """A jagged tensor of rows of lengths 1 and 2, which are these values."""
    return offsets_of_lengths(i8(1, 2)).make_jagged(values, 1)


def test_this_torch_has_the_parts():
    """Without them all would be right, and slow. This is how a new torch says so."""
    assert jagged._parts() is not None


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5), st.lists(st.integers(1, 3), max_size=2), st.integers(0, 2),
    st.sampled_from([torch.float32, torch.int64, torch.bfloat16]),
)  # fmt: skip
def test_what_is_made_is_what_torch_makes(lengths, others, ragged, dtype):
    at = min(ragged, len(others))
    shape = [*others[:at], sum(lengths), *others[at:]]
    if torch.Size(others[:at]).numel() != 1:
        shape[:at] = [1] * at
    cut = offsets_of_lengths(i8(*lengths))
    values = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    first, next_one = cut.make_jagged(values.clone(), at + 1), cut.make_jagged(values.clone(), at + 1)
    theirs = torch.nested.nested_tensor_from_jagged(
        values, first.offsets(), jagged_dim=at + 1, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )
    assert _attributes(first) == _attributes(next_one) == _attributes(theirs)  # before torch adds to them
    for ours in (first, next_one):
        for name, length in ours._metadata_cache.items():
            assert length._dynamo_dynamic_indices == theirs._metadata_cache[name]._dynamo_dynamic_indices
        assert ours.shape == theirs.shape
        assert ours.stride() == theirs.stride()
        assert ours.dtype == theirs.dtype
        assert ours._ragged_idx == theirs._ragged_idx
        assert (ours._maybe_min_seqlen, ours._maybe_max_seqlen) == (min(lengths), max(lengths))
        assert ours.is_contiguous() == theirs.is_contiguous()
        assert all(map(torch.equal, ours.unbind(), theirs.unbind()))
        assert all(map(torch.equal, pickle.loads(pickle.dumps(ours)).unbind(), theirs.unbind()))
    next_one.values().zero_()
    assert torch.equal(first.values(), values)


def _attributes(made):
    """All of it and of its values, but no tensors. Marks of dimensions for `torch.compile` are among them."""
    tensors = {"_values", "_metadata_cache"}
    return {name: value for name, value in made.__dict__.items() if name not in tensors}, made._values.__dict__


@st.composite
def jagged_tensors(draw):
    """(lengths, ragged dimension, other sizes, dtype, whether their owner writes into the offsets) of few kinds."""
    at = draw(small)
    others = [1] * at + draw(st.lists(st.sampled_from([1, 1, 2]), max_size=2))
    owner_writes = draw(st.sampled_from([False, False, True]))
    return (
        draw(st.integers(1, 4).flatmap(row_lengths)),
        at,
        others,
        draw(st.sampled_from(DTYPES_OF_EACH_SIZE)),
        owner_writes,
    )


@given(st.lists(jagged_tensors(), min_size=2, max_size=8))
@differential(40)
def test_kept_cuts_and_shapes_give_the_requested_tensors(wanted):
    """This holds whatever was made before, and whatever its owners have done to it."""
    for number, (sizes, at, others, dtype, owner_writes) in enumerate(wanted):
        shape = [*others[:at], sum(sizes), *others[at:]]
        values = pattern(dtype, shape, number)
        made = offsets_of_lengths(i8(*sizes)).make_jagged(values.clone(), at + 1)
        rows = list(values.split(sizes, dim=at))
        assert made.shape[0] == len(sizes)
        assert made.dtype == dtype
        assert (made._maybe_min_seqlen, made._maybe_max_seqlen) == (min(sizes), max(sizes))
        assert all(map(same_tensor, made.unbind(), rows))
        if at == 0:
            start = number % len(sizes)
            cut = rows_of_jagged(made, start, len(sizes), {})
            assert all(map(same_tensor, cut.unbind(), rows[start:]))
        if owner_writes:
            made.offsets().zero_()


def test_what_is_set_on_one_is_not_on_the_next():
    cut = offsets_of_lengths(i8(1, 2))
    first = cut.make_jagged(torch.zeros(3), 1)
    first.mark = "mine"
    first._metadata_cache["other"] = torch.zeros(1)
    for mark in (first.__dict__ | first._values.__dict__).values():
        if isinstance(mark, set):
            mark.add(7)
    after = cut.make_jagged(torch.zeros(3), 1)
    theirs = torch.nested.nested_tensor_from_jagged(torch.zeros(3), first.offsets())
    assert _attributes(after) == _attributes(theirs)
    assert set(after._metadata_cache) == {"min_seqlen", "max_seqlen"}


def test_batches_of_the_same_lengths_share_a_cut_and_can_be_added():
    a, b = one_and_two(torch.ones(3)), one_and_two(torch.ones(3))
    assert a.offsets() is b.offsets()
    assert (a + b).values().tolist() == [2, 2, 2]


def test_offsets_that_somebody_wrote_into_are_not_used_again():
    taken = one_and_two(torch.ones(3))
    taken.offsets()[1] = 2
    assert one_and_two(torch.ones(3)).offsets().tolist() == [0, 1, 3]
    offsets_of_lengths(i8(4)).make_jagged(torch.ones(4), 1).offsets()[1] = 2
    assert offsets_of_lengths(i8(4)).make_jagged(torch.ones(4), 1).offsets().tolist() == [0, 4]


def test_offsets_that_are_shared_with_another_process_are_not_used_again():
    taken = one_and_two(torch.ones(3))
    taken.offsets().share_memory_()
    after = one_and_two(torch.ones(3))
    assert after.offsets() is not taken.offsets()
    assert not after.offsets().is_shared()


def test_what_came_under_inference_mode_can_be_trained_with_later():
    with torch.inference_mode():
        made = one_and_two(torch.ones(3, 2))
    assert not any(kept.is_inference() for kept in (made.offsets(), *made._metadata_cache.values()))
    weight = torch.ones(2, 2, requires_grad=True)
    torch.nn.functional.linear(one_and_two(torch.ones(3, 2)), weight).values().sum().backward()
    assert weight.grad.tolist() == [[3, 3], [3, 3]]


def test_many_rows_are_cut_anew_each_time():
    lengths = i8(*[1] * (KEPT_ROWS + 1))
    assert offsets_of_lengths(lengths) is not offsets_of_lengths(lengths)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_parts_are_checked_on_the_host_whatever_the_default_device_is(device: str) -> None:
    parts = jagged._parts()
    assert parts is not None
    with torch.device(device):
        assert jagged._makes_what_torch_makes(parts)


def test_parts_that_make_other_tensors_than_torch_are_not_used():
    parts = jagged._parts()
    keys = parts.keys.add(torch._C.DispatchKey.Functionalize)
    for changed in ({"keys": keys}, {"marks": ()}, {"marks": (*parts.marks, "_mark")}):
        assert not jagged._makes_what_torch_makes(parts._replace(**changed))


def test_the_bytes_of_a_tensor_are_those_of_its_values() -> None:
    values = torch.arange(12, dtype=torch.int32).view(6, 2)
    ragged = offsets_of_lengths(np.array([1, 2, 3]).tobytes()).make_jagged(values, 1)
    made_by_torch = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert [jagged.bytes_of(each) for each in (values, ragged, made_by_torch)] == [48, 48, 20]


def test_a_torch_that_has_other_parts(monkeypatch):
    monkeypatch.setattr(jagged, "_parts", lambda: None)
    for _ in range(2):
        made = one_and_two(torch.arange(3))
        assert [row.tolist() for row in made.unbind()] == [[0], [1, 2]]
        assert (made._maybe_min_seqlen, made._maybe_max_seqlen) == (1, 2)
        assert is_plain_jagged(made)
        assert jagged.bytes_of(made) == 24
        assert rows_of_jagged(made, 1, 2, {}).values().tolist() == [1, 2]


def test_rows_of_fields_that_are_equally_ragged_stay_so():
    cut = offsets_of_lengths(i8(3, 1, 2))
    a, b = cut.make_jagged(torch.arange(6), 1), cut.make_jagged(torch.arange(12).view(6, 2), 1)
    rows, others = rows_of_jagged(a, 1, 3, {}), rows_of_jagged(b, 1, 3, {})
    assert rows.offsets() is others.offsets()
    assert rows.offsets().tolist() == [0, 1, 3]
    assert (rows + rows).values().tolist() == [6, 8, 10]
    assert others.values().tolist() == [[6, 7], [8, 9], [10, 11]]
    rows.values()[0] = 7
    assert a.values().tolist() == [0, 1, 2, 7, 4, 5]  # they are views


@pytest.mark.parametrize("ragged", [1, 2])
def test_rows_on_a_device_are_cut_without_asking_it(ragged: int):
    """A device without values cannot be asked for offsets; the fields stay equally ragged."""
    shape, cut = ((6, 2), (2, 6))[ragged - 1], offsets_of_lengths(i8(3, 1, 2)).to_device(torch.device("meta"))
    a, b = (cut.make_jagged(torch.empty(shape, device="meta"), ragged) for _ in range(2))
    cuts = {}
    rows, others = rows_of_jagged(a, 1, 3, cuts), rows_of_jagged(b, 1, 3, cuts)
    assert rows.offsets() is others.offsets()
    assert host_offsets(rows).tolist() == [0, 1, 3]
    assert rows.values().shape[ragged - 1] == 3
    assert rows.values().device.type == rows.offsets().device.type == "meta"


def test_rows_of_what_is_in_a_graph():
    values = torch.ones(3, requires_grad=True)
    whole = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3]))
    assert is_plain_jagged(whole)
    assert rows_of_jagged(whole, 1, 2, {}).values().tolist() == [1, 1]
    narrow = torch.nested.nested_tensor_from_jagged(torch.ones(3), torch.tensor([0, 1, 3], dtype=torch.int32))
    assert rows_of_jagged(narrow, 0, 1, {}).values().tolist() == [1]


def test_no_rows():
    assert rows_of_jagged(offsets_of_lengths(i8(3, 1)).make_jagged(torch.ones(4), 1), 1, 1, {}).shape[0] == 0


def _i4(*numbers):
    return np.array(numbers, np.int32).tobytes()


def test_empty_rows_of_many_leading_elements_take_no_memory():
    """Rows of shape (2**28, 0), which could also be said by a descriptor of few bytes."""
    leading = 2**28
    spec = FieldSpec("x", "tensor", "float32", 2, False)
    block = Blocks(
        _i4(0), i8(0), i8(1), i8(64), _i4(2), _i4(0), _i4(0), [[spec]], [np.array([leading, 0], "<i8").tobytes()]
    )
    kind = FieldType("x", "tensor", "float32", 2, None, 2, False)
    reply = LookupReply(2, [kind], block, [Placement(["x"], _i4(0, 0), _i4(0, 1))])
    tracemalloc.start()
    try:
        td = gather(reply, lambda unit: np.zeros(64, "u1"), "jagged", allow_pickle=False)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [row.shape for row in td["x"].unbind()] == [(leading, 0)] * 2
    assert peak < 1 << 20
