"""Types of fields: which values match, what is remembered, and when it is forgotten."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from harness import OBJECT, Harness, column, rows_of, tensor

from transfer_queue.core.state import serialization
from transfer_queue.core.tables.fields import FieldStats, check_block
from transfer_queue.errors import CheckpointError, FieldTypeError, InvalidArgumentError, ProtocolError
from transfer_queue.messages.claims import Claim, ClaimReply
from transfer_queue.messages.descriptors import FieldSpec, FieldType, NewBlock
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.messages.puts import Drop, Publish
from transfer_queue.messages.queries import Lookup, LookupReply, RetrieveMeta, ShowRows
from transfer_queue.messages.reports.unit_reports import RegisterUnit
from transfer_queue.testing.state_recount import check_invariants


def type_of(h: Harness, name: str = "x") -> FieldType:
    (found,) = h.ask(ShowRows("p", [name])).fields
    return found


def types_of(h: Harness, rows: list[int], names: Sequence[str] = ("x",)) -> list[FieldType]:
    found = h.look(Lookup("p", column(rows), fields=list(names)))
    assert isinstance(found, LookupReply)
    return found.types


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
    more = {"insert": {}, "rows": {"rows": [1]}, "keys": {"keys": ["new"], "tags": [{"n": 1}]}}[target]
    with h.refuses(FieldTypeError, f"'x'.*{words}"):
        h.put(1, {"y": tensor(), "x": second}, **more)


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
    assert [types_of(h, [row])[0] for row in range(3)] == [
        FieldType("x", "tensor", "float32", 1, [1], 0, False),
        FieldType("x", "tensor", "float32", 2, [2, 2], 0, False),
        FieldType("x", "tensor", "float32", 0, [], 0, False),
    ]


class TestRanks:
    """A rank is a part of the type of values that have it, and is forgotten with the last of them."""

    SCALAR = FieldType("x", "tensor", "float32", 0, [], 0, False)
    WAYS = ("clear", "replace", "replace by key", "drop", "free_when", "lose", "drop the partition")

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("odd_first", [False, True])
    def test_is_forgotten_with_its_last_row(self, h: Harness, way: str, odd_first: bool) -> None:
        h.create(free_when=["t"] if way == "free_when" else [])
        h.ask(RegisterUnit("unit1.sock", "/arena1"), "unit-1")
        scalars, odd = ({"x": tensor("float32", shape)} for shape in ((), (1, 1)))
        puts = [(2, scalars, ["a", "b"]), (1, odd, ["odd"])]
        rows = {}
        for count, put, keys in reversed(puts) if odd_first else puts:
            h.unit = int(put is odd)
            rows |= dict(zip(keys, h.put(count, put, keys=keys), strict=True))
        h.unit = 0
        assert type_of(h).mixed_rank
        assert types_of(h, [rows["odd"]]) == [FieldType("x", "tensor", "float32", 2, [1, 1], 0, False)]
        assert types_of(h, [rows["a"], rows["b"]]) == [self.SCALAR]
        assert types_of(h, list(rows.values()))[0].mixed_rank
        if way == "clear":
            h.clear([rows["odd"]])
        elif way == "replace":
            h.put(1, scalars, rows=[rows["odd"]])
        elif way == "replace by key":
            h.put(1, scalars, keys=["odd"])
        elif way == "drop":
            h.ask(Drop("p", rows=column([rows["odd"]]), reason="odd"))
        elif way == "free_when":
            leases = [h.lease(1) for _ in rows]
            assert h.ack(next(lease for lease in leases if rows_of(lease) == [rows["odd"]]))
        elif way == "lose":
            h.disconnect("unit-1")
            h.connect("unit-1")
            h.ask(RegisterUnit("unit1.sock", "/arena1", when="at noon", extents=b""), "unit-1")
        else:
            h.ask(ClearPartition("p"))
            h.put(2, scalars)
        assert type_of(h) == self.SCALAR
        assert h.state.partitions["p"].fields["x"].describe() == "float32[]"

    def test_what_differed_is_remembered_for_each_rank(self, h: Harness) -> None:
        """As long as one row has the rank, also in blocks whose rows differ in rank."""
        h.put(2, {"x": tensor("float32", [(1, 2), (3,)])})
        h.put(3, {"x": tensor("float32", [(1, 3), (4,), ()])})
        found = [(t.ndim, t.differs, t.shape) for row in (0, 1, 4) for t in types_of(h, [row])]
        assert found == [(2, 2, None), (1, 1, None), (0, 0, [])]
        h.clear([0])
        assert types_of(h, [2])[0].differs == 2
        h.clear([2])
        h.put(1, {"x": tensor("float32", (5, 5))})
        assert types_of(h, [5])[0] == FieldType("x", "tensor", "float32", 2, [5, 5], 0, False)

    def test_metadata_has_the_type_of_its_rows(self, h: Harness) -> None:
        h.put(2, {"x": tensor("float32", ()), "y": tensor("int8", ())}, keys=["a", "b"])
        h.put(2, {"x": tensor("float32", [(2,), (3, 1)]), "y": tensor("int8", ())}, keys=["c", "d"])
        for rows, mixed, ndim in [([0, 1], False, 0), ([2], False, 1), ([3], False, 2), ([2, 3], True, 0)]:
            (found, _) = types_of(h, rows, ["x", "y"])
            assert (found.mixed_rank, found.ndim) == (mixed, ndim)
            (shown, _) = h.ask(RetrieveMeta("p", ["abcd"[row] for row in rows])).fields
            assert shown == found

    def test_claims_that_are_met_together_get_the_types_of_their_own_rows(self, h: Harness) -> None:
        claims = [h.claim(1, wait=10.0, name=name) for name in "kl"]
        h.put(2, {"x": tensor("float32", [(), (2, 3)])})
        types = [h.result(claim, name).fields[0] for claim, name in zip(claims, "kl", strict=True)]
        assert [(t.mixed_rank, t.ndim, t.shape) for t in types] == [(False, 0, []), (False, 2, [2, 3])]

    def test_a_state_of_an_older_release_is_counted_when_it_is_loaded(self, h: Harness) -> None:
        h.put(3, {"x": tensor("float32", [(1,), (2, 2), ()]), "y": tensor()})
        h.put(2, {"x": tensor("float32", (3,))})
        h.put(2, {"y": tensor("float32", ())})
        tree = serialization.save_state(h.state)
        saved = tree["partitions"]["p"]
        assert set(saved.pop("field_ranks")) == {"x", "y"}
        at = [column.name for column in FieldStats.declared_columns()].index("ndim")
        saved["fields"]["x"][at], saved["fields"]["x"][at + 1] = -1, ()
        again = serialization.load_untrusted(tree)
        check_invariants(again)
        (x, y) = (again.partitions["p"].fields[name] for name in "xy")
        assert ({x.ndim, *x.further}, {y.ndim, *y.further}) == ({0, 1, 2}, {0, 1})
        assert (x.further.get(1) or (x.shape, x.differs))[1] == 1


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
    with h.refuses((InvalidArgumentError, ProtocolError)):
        h.ask(Publish("p", 2, block=block(**changes), pre_allocate=0))


def test_a_block_in_an_unknown_unit_is_refused(h: Harness) -> None:
    with pytest.raises(InvalidArgumentError, match="storage unit 7 does not exist"):
        h.ask(Publish("p", 2, block=block(unit=7), pre_allocate=0))
