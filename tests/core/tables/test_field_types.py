"""Types of fields: which values match, what is remembered, and when it is forgotten."""

from __future__ import annotations

import numpy as np
import pytest
from harness import OBJECT, Harness, tensor

from transfer_queue.core.state import serialization
from transfer_queue.core.tables.field_types import check_block
from transfer_queue.errors import CheckpointError, FieldTypeError, InvalidArgumentError, ProtocolError
from transfer_queue.messages.claims import Claim, ClaimReply
from transfer_queue.messages.descriptors import FieldSpec, FieldType, NewBlock
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.messages.queries import ShowRows


def type_of(h: Harness, name: str = "x") -> FieldType:
    (found,) = h.ask(ShowRows("p", [name])).fields
    return found


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (tensor("uint16"), tensor("int32"), "tensors of uint16.*tensors of int32.*torch.promote_types"),
        (tensor("float32"), OBJECT, "tensors of float32.*Python objects"),
        (OBJECT, tensor("bool"), "Python objects.*tensors of bool"),
    ],
)
@pytest.mark.parametrize("target", ["insert", "rows", "keys"])
def test_a_value_of_another_type_is_refused_and_changes_nothing(
    h: Harness, first: object, second: object, words: str, target: str
) -> None:
    h.put(2, {"x": first}, keys=["a", "b"])
    h.put(1, ("y",), rows=[0])
    before = h.state.snapshot()
    more = {"insert": {}, "rows": {"rows": [1]}, "keys": {"keys": ["new"], "tags": [{"n": 1}]}}[target]
    with pytest.raises(FieldTypeError, match=f"'x'.*{words}"):
        h.put(1, {"y": tensor(), "x": second}, **more)
    assert h.state.snapshot() == before


def test_a_type_is_forgotten_with_its_last_live_value(h: Harness) -> None:
    h.put(2, {"x": tensor("float32", (3,)), "y": tensor()})
    h.clear([0])
    with pytest.raises(FieldTypeError):
        h.put(1, {"x": OBJECT})
    h.clear([1])
    assert h.ask(ShowRows("p", ["x"])).fields == []
    h.put(1, {"x": tensor("int64", ())})
    assert type_of(h) == FieldType("x", "tensor", "int64", 0, [], 0, False)
    h.ask(ClearPartition("p"))
    h.put(1, {"x": OBJECT})
    assert type_of(h).kind == "object"


def test_a_field_may_have_several_dtypes(h: Harness) -> None:
    h.put(2, {"x": tensor("float32"), "y": tensor("bool", ())})
    h.put(2, {"x": tensor("int64"), "y": tensor("bool", ())})
    h.put(1, {"x": tensor("float32")}, rows=[2])
    assert type_of(h) == FieldType("x", "tensor", "float32", 1, [4], 0, False, ["float32", "int64"])
    assert type_of(h, "y").dtypes == []
    reply = h.ask(Claim("p", "t", ["x", "y"], 4))
    assert isinstance(reply, ClaimReply)
    assert {name: list(codes) for name, codes in reply.dtypes.items()} == {"x": [0, 0, 0, 1]}
    assert h.state.partitions["p"].fields["x"].describe() == "float32|int64[4]"


def test_the_reply_to_a_put_names_the_fields_of_several_dtypes(h: Harness) -> None:
    def told(dtype: str) -> object:
        return h.ask(h.publish(1, {"x": tensor(dtype), "y": tensor()})).dtypes

    assert [told(dtype) for dtype in ("int8", "int8")] == [{}, {}]
    assert [told(dtype) for dtype in ("bool", "bool", "int8")] == [{"x": ["int8", "bool"]}] * 3


def test_a_state_of_an_older_release_has_one_dtype_for_each_field(h: Harness) -> None:
    h.put(2, {"x": tensor("float32")})
    tree = serialization.save_state(h.state)
    del tree["partitions"]["p"]["dtypes"]
    assert serialization.load_untrusted(tree).snapshot() == h.state.snapshot()


@pytest.mark.parametrize("dtypes", [{}, {"x": ["int64", "int64"]}, {"x": ["int64", "float32"]}, {"y": ["int8"]}])
def test_a_state_with_wrong_dtypes_is_refused(h: Harness, dtypes: dict[str, list[str]]) -> None:
    h.put(2, {"x": tensor("float32")})
    h.put(2, {"x": tensor("int64")})
    tree = serialization.save_state(h.state)
    assert tree["partitions"]["p"]["dtypes"] == {"x": ["int64"]}
    tree["partitions"]["p"]["dtypes"] = dtypes
    with pytest.raises(CheckpointError):
        serialization.load_untrusted(tree)


def test_a_uniform_shape_is_known(h: Harness) -> None:
    h.put(2, {"x": tensor("float32", (3, 5))})
    h.put(2, {"x": tensor("float32", [(3, 5), (3, 5)])})
    assert type_of(h) == FieldType("x", "tensor", "float32", 2, [3, 5], 0, False)
    assert h.ask(Claim("p", "t", ["x"], 4)).shapes == {}


def test_a_dimension_that_once_differed_stays_marked(h: Harness) -> None:
    h.put(2, {"x": tensor("float32", (3, 5, 7))})
    h.put(1, {"x": tensor("float32", (3, 6, 7))})
    assert type_of(h) == FieldType("x", "tensor", "float32", 3, None, 0b010, False)
    h.put(2, {"x": tensor("float32", [(3, 5, 7), (3, 5, 8)])})
    assert type_of(h).differs == 0b110
    h.clear([2, 4])
    assert type_of(h).differs == 0b110, "a ragged dimension does not depend on the live rows"


def test_a_claim_returns_the_shape_of_each_row(h: Harness) -> None:
    h.put(2, {"x": tensor("float32", [(2,), (5,)])})
    h.put(3, {"y": tensor(), "x": tensor("float32", (4,))})
    h.put(1, {"x": tensor("float32", (9,))}, rows=[3])
    reply = h.ask(Claim("p", "t", ["x"], 5))
    assert isinstance(reply, ClaimReply)
    assert np.frombuffer(reply.shapes["x"], "<i8").tolist() == [2, 5, 4, 9, 4]


def test_a_claim_returns_shapes_of_several_dimensions(h: Harness) -> None:
    h.put(2, {"z": tensor("int8", [(1, 2), (3, 4)]), "x": tensor("float32", [(2, 3), (5, 6)])})
    reply = h.ask(Claim("p", "t", ["x", "z"], 2))
    assert np.frombuffer(reply.shapes["x"], "<i8").tolist() == [2, 3, 5, 6]
    assert np.frombuffer(reply.shapes["z"], "<i8").tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "second", [tensor("float32", (2, 2)), tensor("float32", [(1,), (2, 2)]), tensor("float32", ())]
)
def test_a_field_may_have_rows_of_mixed_rank(h: Harness, second: object) -> None:
    h.put(2, {"x": tensor("float32", (4,)), "y": tensor("bool", (1,))})
    h.put(2, {"x": second, "y": tensor("bool", (2,))})
    found = type_of(h)
    assert (found.mixed_rank, found.shape) == (True, None)
    reply = h.ask(Claim("p", "t", ["x", "y"], 4))
    assert set(reply.shapes) == {"y"}
    assert np.frombuffer(reply.shapes["y"], "<i8").tolist() == [1, 1, 2, 2]


def test_the_first_block_may_have_rows_of_mixed_rank(h: Harness) -> None:
    h.put(3, {"x": tensor("float32", [(1,), (2, 2), ()])})
    assert type_of(h).mixed_rank
    assert type_of(h).ndim == -1


def test_the_type_of_a_field_as_text(h: Harness) -> None:
    partition = h.state.partitions
    h.put(1, {"x": tensor("float32", (3, 4)), "o": OBJECT, "s": tensor("int64", ())})
    h.put(1, {"x": tensor("float32", (3, 5)), "m": tensor("bool", (1,))})
    h.put(1, {"m": tensor("bool", (1, 1))})
    words = {name: field.describe() for name, field in partition["p"].fields.items()}
    assert words == {"x": "float32[3, ?]", "o": "objects", "s": "int64[]", "m": "bool[mixed ranks]"}
    h.clear([0, 1, 2])
    assert partition["p"].fields["x"].describe() == "no values"


GOOD = FieldSpec("x", "tensor", "float32", 1, False)


def block(**changes: object) -> NewBlock:
    fields: dict[str, object] = {
        "unit": 0, "extent": 1, "offset": 64, "generation": 1, "nbytes": 8, "rows": 2, "schema": [GOOD],
        "dims": np.array([4], "<i8").tobytes(),
    }  # fmt: skip
    return NewBlock(**{**fields, **changes})  # type: ignore[arg-type]


def i8(*numbers: int) -> bytes:
    return np.array(numbers, "<i8").tobytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 3},
        {"rows": 0},
        {"schema": []},
        {"schema": [GOOD, GOOD], "dims": i8(4, 4)},
        {"schema": [FieldSpec("x", "pickle", "float32", 1, False)]},
        {"schema": [FieldSpec("x", "tensor", "float32", 65, False)]},
        {"schema": [FieldSpec("x", "tensor", "float32", -2, False)]},
        {"schema": [FieldSpec("x", "tensor", "float32", -1, True)], "dims": i8(1, 5, 2, 7)},
        {"schema": [FieldSpec("x", "tensor", "float32", -1, True)], "dims": i8(1, 5, 99)},
        {"schema": [FieldSpec("x", "tensor", "float32", 1, True)]},
        {"dims": b""},
        {"dims": b"1234"},
        {"dims": i8(4, 4)},
        {"dims": i8(-4)},
        {"offset": -1},
        {"nbytes": -1},
        {"unit": -1},
        {"extent": -1},
        {"generation": -1},
        {"generation": 1 << 63},
        {"offset": (1 << 64) - 1},
        {"nbytes": 1 << 62},
        {"extent": 1 << 63},
    ],
    ids=str,
)
def test_a_block_with_a_wrong_description_is_refused(h: Harness, changes: dict[str, object]) -> None:
    check_block(block(), 2)
    h.put(1, ("y",))
    before = h.state.snapshot()
    request = h.publish(2, None)
    with pytest.raises((InvalidArgumentError, ProtocolError)):
        h.ask(type(request)("p", 2, block=block(**changes), pre_allocate=0))
    assert h.state.snapshot() == before


def test_a_block_in_an_unknown_unit_is_refused(h: Harness) -> None:
    request = h.publish(2)
    with pytest.raises(InvalidArgumentError, match="storage unit 7 does not exist"):
        h.ask(type(request)("p", 2, block=block(unit=7), pre_allocate=0))
