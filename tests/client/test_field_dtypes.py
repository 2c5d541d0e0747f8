"""Rows of one field in several dtypes: what is accepted, returned, reported and refused."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from simulated import Start, ragged, rows_of, same, table
from transfer_queue.core.tables.fields import can_promote
from transfer_queue.errors import FieldTypeError
from transfer_queue.metadata import BatchMeta
from transfer_queue.testing import Client
from transfer_queue.wire.buffers.block_layout import ITEM_SIZES
from transfer_queue.wire.buffers.tensors import DTYPES

FLOATS, INTS = torch.tensor([1.5, 2.5]), torch.tensor([3, 2**40 + 1])


def mixed(client: Client, **more: Any) -> None:
    client.kv_batch_put(["a", "b"], "p", table(x=FLOATS))
    client.kv_batch_put(["c", "d"], "p", table(x=INTS))


def test_a_row_may_be_replaced_by_one_of_another_dtype(a: Client) -> None:
    a.kv_batch_put(["a", "b"], "p", table(x=FLOATS))
    a.kv_put("a", "p", {"x": torch.tensor(7)})
    assert same(a.kv_batch_get(["a", "b"], "p")["x"], torch.tensor([7.0, 2.5]))
    assert same(a.kv_batch_get("a", "p")["x"], torch.tensor([7]))


@pytest.mark.parametrize("layout", ["jagged", "dense", "padded", "list"])
def test_every_layout_promotes(a: Client, layout: str) -> None:
    first, second = torch.arange(6.0).view(2, 3), torch.arange(3, dtype=torch.int16).view(1, 3)
    a.kv_batch_put(["a", "b"], "p", table(x=first))
    a.kv_batch_put(["c"], "p", table(x=second))
    found = a.kv_batch_get(["a", "c", "b"], "p", layout=layout)["x"]
    assert [row.tolist() for row in rows_of(found)] == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
    assert {row.dtype for row in rows_of(found)} == {torch.float32}


def test_ragged_rows_and_rows_of_several_ranks_promote(a: Client) -> None:
    a.kv_batch_put(["a", "b", "c"], "p", table(x=ragged(2, 0, 3), y=ragged(1, 2, 1)))
    a.kv_batch_put(["d", "e"], "p", table(x=ragged(4, 1, dtype=torch.float64), y=torch.ones(2, 1, 1).double()))
    found = a.kv_batch_get(["e", "a", "d", "c", "b"], "p")
    assert found["x"].layout == torch.jagged
    assert [row.tolist() for row in rows_of(found["x"])] == [[2.0], [1.0, 1.0], [1.0] * 4, [3.0] * 3, []]
    assert found["x"].dtype == torch.float64
    rows = found.get("y").tolist()
    assert [(row.dtype, row.dim()) for row in rows] == [(torch.float64, rank) for rank in (2, 1, 2, 1, 1)]
    padded = a.kv_batch_get(["b", "d"], "p", "x", layout="padded")["x"]
    assert same(padded, torch.tensor([[0.0] * 4, [1.0] * 4], dtype=torch.float64))


def test_one_warning_a_field_and_client(a: Client, b: Client, caplog: pytest.LogCaptureFixture) -> None:
    mixed(a)
    a.kv_batch_put(["e"], "p", table(x=FLOATS[:1]))
    a.kv_batch_put(["f"], "q", table(x=FLOATS[:1]))
    a.kv_batch_put(["g"], "q", table(x=INTS[:1]))
    words = [record.getMessage() for record in caplog.records]
    assert len(words) == 1
    assert all(part in words[0] for part in ("field 'x'", "float32 and int64", "torch.promote_types"))
    for _ in range(2):
        b.put(table(x=INTS[:1]), partition_id="p")
    assert len(caplog.records) == 2


def test_metadata_has_the_dtype_of_each_row_and_of_a_get(a: Client) -> None:
    mixed(a)
    meta = a.get_meta(["x"], 4, "p", task_name="t")
    wide, narrow = torch.int64, torch.float32
    assert meta.field_schema["x"]["dtype"] == narrow
    assert meta.get_dtypes("x") == [narrow, narrow, wide, wide]
    assert [sample.fields["x"]["dtype"] for sample in meta.samples] == [narrow, narrow, wide, wide]
    parts = meta.chunk(2)
    assert [part.field_schema["x"]["dtype"] for part in parts] == [narrow, wide]
    assert [a.get_data(part)["x"].dtype for part in parts] == [narrow, wide]
    joined = BatchMeta.concat([parts[1], parts[0]])
    assert joined.get_dtypes("x") == [wide, wide, narrow, narrow]
    assert same(a.get_data(joined)["x"], torch.cat([INTS.float(), FLOATS]))
    assert pickle.loads(pickle.dumps(meta)).get_dtypes("x") == meta.get_dtypes("x")
    meta.reorder([2, 0, 1, 3])
    assert meta.get_dtypes("x") == [wide, narrow, narrow, wide]


def test_partitions_of_different_dtypes_are_read_together(a: Client) -> None:
    one = a.put(table(x=FLOATS), partition_id="p")
    other = a.put(table(x=INTS[:1]), partition_id="q")
    both = BatchMeta([*one.global_indexes, *other.global_indexes], ["p", "p", "q"], field_schema=one.field_schema)
    assert same(a.get_data(both)["x"], torch.tensor([1.5, 2.5, 3.0]))


def test_tensors_and_objects_do_not_mix(a: Client) -> None:
    mixed(a)
    with pytest.raises(FieldTypeError, match=r"tensors of float32.*Python objects"):
        a.kv_batch_put(["e"], "p", table(x=["text"]))
    a.kv_batch_put(["e"], "p", table(y=["text"]))
    with pytest.raises(FieldTypeError, match=r"Python objects.*tensors of int64"):
        a.kv_batch_put(["f"], "p", table(y=INTS[:1]))


def test_dtypes_that_torch_does_not_promote_are_refused(a: Client) -> None:
    a.kv_put("a", "p", {"x": torch.ones(2, dtype=torch.uint16)})
    with pytest.raises(FieldTypeError, match=r"tensors of uint16.*tensors of int32.*torch.promote_types has no dtype"):
        a.kv_put("b", "p", {"x": torch.ones(2, dtype=torch.int32)})
    a.kv_put("b", "p", {"x": torch.ones(2)})
    with pytest.raises(FieldTypeError, match=r"tensors of uint16.*tensors of int64"):
        a.kv_put("c", "p", {"x": torch.ones(2, dtype=torch.int64)})
    a.kv_put("a", "p", {"f": torch.ones(2).to(torch.float8_e4m3fn)})
    with pytest.raises(FieldTypeError, match=r"float8_e4m3fn.*float32"):
        a.kv_put("b", "p", {"f": torch.ones(2)})


def test_the_controller_knows_which_dtypes_torch_promotes() -> None:
    for one, other in itertools.combinations(sorted(DTYPES), 2):
        if can_promote(one, other):
            assert can_promote(other, one)
            assert torch.promote_types(DTYPES[one], DTYPES[other]) is not None
    numbers = ("bool", "uint8", "int8", "int64", "float16", "bfloat16", "float64", "complex64", "complex128")
    assert all(can_promote(one, other) for one in numbers for other in numbers)
    assert set(numbers) <= set(ITEM_SIZES)


NUMBERS = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float32, torch.complex64]
puts = st.lists(
    st.tuples(st.sampled_from(NUMBERS), st.lists(st.integers(0, 2), min_size=1, max_size=4)), min_size=1, max_size=5
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(puts, st.data())
def test_any_rows_of_any_dtypes(start: Start, blocks: list[tuple[torch.dtype, list[int]]], data: st.DataObject) -> None:
    client = start().client("a")
    rows: list[torch.Tensor] = []
    for dtype, lengths in blocks:
        values = [torch.full((n,), 1 + len(rows) + at).to(dtype) for at, n in enumerate(lengths)]
        nested = torch.nested.nested_tensor(values, layout=torch.jagged)
        keys = [str(len(rows) + at) for at in range(len(values))]
        client.kv_batch_put(keys, "p", TensorDict({"x": nested}, batch_size=[len(values)]))
        rows += values
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=8))
    dtype = rows[chosen[0]].dtype
    for number in chosen:
        dtype = torch.promote_types(dtype, rows[number].dtype)
    for layout in ("jagged", "list"):
        found = client.kv_batch_get([str(number) for number in chosen], "p", layout=layout)["x"]
        got = rows_of(found)
        assert all(same(row, rows[number].to(dtype)) for row, number in zip(got, chosen, strict=True))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (torch.ones(3), [1.0, "two", None], r"row 1 of the put \(key 'b'\), which has the type str"),
        (torch.ones(3), [{"k": 1}] * 3, r"row 0 of the put \(key 'a'\), which has the type dict"),
        (torch.ones(3), [None if row else torch.ones(2) for row in range(3)], "row 1 .* type NoneType"),
        (torch.ones(3, dtype=torch.uint16), [1, torch.tensor(1, dtype=torch.int32), 2], "row 1 .* type Tensor"),
        (torch.ones(3, dtype=torch.uint16), torch.ones(3, dtype=torch.int32), "row 0 .* type Tensor"),
        (["x", "y", "z"], torch.ones(3), "row 0 .* type Tensor"),
        (["x", "y", "z"], np.ones(3), "row 0 .* type ndarray"),
        (torch.ones(3), [torch.ones(1), *["long" * 5000] * 2], "row 1 .* type str"),
        (["x", "y", "z"], TensorDict({"i": torch.ones(3)}, batch_size=[3]), "row 0 .* type TensorDict"),
    ],
)
def test_the_first_value_that_does_not_match_is_named(a: Client, first: Any, second: Any, words: str) -> None:
    a.put({"x": first}, partition_id="p")  # type: ignore[arg-type]
    with pytest.raises(FieldTypeError, match=f"field 'x' holds .* The first value .* that of {words}\\.$"):
        a.kv_batch_put(["a", "b", "c"], "p", {"x": second})
    meta = a.put(table(y=torch.ones(3)), partition_id="p")
    with pytest.raises(FieldTypeError, match=r"that of the sample with global index [345], which has the type"):
        a.put({"x": second}, meta)  # type: ignore[arg-type]
    with pytest.raises(FieldTypeError, match=r"that of row [01] of the put, which has the type"):
        a.put({"x": second}, partition_id="p")  # type: ignore[arg-type]
    assert a.kv_list("p") == {"p": {}}


def test_the_row_of_one_sample_is_named(a: Client) -> None:
    a.kv_put("k", "p", {"x": torch.ones(())})
    with pytest.raises(FieldTypeError, match=r"row 0 of the put \(key 'l'\), which has the type str"):
        a.kv_put("l", "p", {"y": 1, "x": "text"})
