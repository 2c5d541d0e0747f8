"""Values of tags: what servers can read stays itself, all else is opaque to them and comes back as it was."""

import msgspec
import numpy as np
import pytest
import torch
from carried_values import Point, objects, same
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.errors import ProtocolError, UncarriableValueError
from transfer_queue.messages.base import DELETE_CODE
from transfer_queue.wire.objects.object_values import DELETE, OBJECT_CODE, decode_tag_value, encode_tag_value

Ext = msgspec.msgpack.Ext


def over_the_wire(value, hops=2):
    """As a server without any hook passes it on."""
    for _ in range(hops):
        value = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    return value


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=8,
)


@given(plain)
@settings(deadline=None)
def test_plain_values_stay_themselves(value):
    assert same(encode_tag_value(value), value)
    assert same(over_the_wire(encode_tag_value(value)), value)
    assert same(decode_tag_value(over_the_wire(encode_tag_value(value))), value)


@given(objects.filter(lambda v: not isinstance(v, np.generic | np.ndarray | torch.Tensor | list | dict)))
@settings(max_examples=100, deadline=None)
def test_other_values_come_back(value):
    assert same(decode_tag_value(over_the_wire(encode_tag_value({"n": value}))), {"n": value})


@pytest.mark.parametrize("value", [(1, (2,)), {1, 2}, 2**70, {1: "a"}, "\ud800", {"\ud800": 1}, 1j, Point(1)], ids=repr)
def test_servers_see_opaque_values(value):
    tag = {"a": [value], "b": 1}
    encoded = over_the_wire(encode_tag_value(tag))
    assert type(encoded["a"][0]) is Ext
    assert encoded["a"][0].code == OBJECT_CODE
    assert encoded["b"] == 1
    assert same(decode_tag_value(encoded), tag)


@pytest.mark.parametrize(("scalar", "number"), [
    (np.int64(3), 3), (np.float32(0.5), 0.5), (np.bool_(True), True), (torch.tensor(4), 4), (torch.tensor(1.5), 1.5),
    (torch.tensor(True), True), (np.array(7), 7), (np.array(2.5), 2.5), (np.uint64(2**64 - 1), 2**64 - 1),
    (torch.tensor(0.5, dtype=torch.bfloat16), 0.5), (torch.tensor(1.0, requires_grad=True), 1.0),
])  # fmt: skip
def test_scalars_become_numbers(scalar, number):
    back = encode_tag_value({"n": [scalar]})["n"][0]
    assert (back, type(back)) == (number, type(number))


@pytest.mark.parametrize(
    "value",
    [
        np.arange(2), torch.ones(2), np.complex64(1j), np.datetime64("2020"), np.str_("a"), np.array([7]),
        np.array([[2.5]]), np.ones(1, bool), torch.tensor([1.5]), torch.tensor([[4]]), torch.tensor([True]),
    ],
)  # fmt: skip
def test_arrays_and_the_like_travel_as_they_are(value):
    assert same(decode_tag_value(over_the_wire(encode_tag_value(value))), value)


def test_delete():
    encoded = over_the_wire(encode_tag_value({"n": DELETE, "m": 1}))
    assert (encoded["n"].code, bytes(encoded["n"].data)) == (DELETE_CODE, b"")
    assert decode_tag_value(encoded) == {"n": DELETE, "m": 1}


def test_the_callers_tag_is_left_alone():
    inner = [np.int64(1)]
    tag = {"a": inner, "b": (1,)}
    encode_tag_value(tag)
    assert type(inner[0]) is np.int64
    assert tag == {"a": inner, "b": (1,)}


def test_pickle_is_refused_at_both_ends():
    with pytest.raises(UncarriableValueError):
        encode_tag_value({"a": Point(1)}, allow_pickle=False)
    with pytest.raises(UncarriableValueError):
        decode_tag_value(over_the_wire(encode_tag_value({"a": [Point(1)]})), allow_pickle=False)


def test_tag_that_contains_itself():
    tag = {}
    tag["self"] = tag
    with pytest.raises(UncarriableValueError):
        encode_tag_value(tag)


def test_unknown_code():
    with pytest.raises(ProtocolError, match="99"):
        decode_tag_value(Ext(99, b""))
