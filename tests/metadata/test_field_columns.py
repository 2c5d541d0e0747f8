"""What `BatchMeta.add_fields` reads off columns of values."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from torch.overrides import TorchFunctionMode

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.metadata import BatchMeta

DTYPES = [torch.int64, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64]


def entry_of(column, rows, wrap=True):
    """The schema entry that a column of so many rows gets, inside a TensorDict or alone."""
    values = TensorDict({"f": column}, batch_size=rows) if wrap else {"f": column}
    meta = BatchMeta(range(rows), "p").add_fields(values)
    assert meta.is_ready
    assert meta.field_names == ["f"]
    return meta.field_schema["f"]


def assert_describes(entry, shapes, dtype):
    assert entry["dtype"] is dtype
    assert entry["is_non_tensor"] is False
    if len(set(shapes)) == 1:
        assert entry["is_nested"] is False
        assert entry["shape"] == torch.Size(shapes[0])
        assert "per_sample_shapes" not in entry
    else:
        assert entry["is_nested"] is True
        assert entry["shape"] is None
        assert entry["per_sample_shapes"] == [torch.Size(shape) for shape in shapes]


def assert_objects(entry):
    assert entry == {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}


def object_array(values):
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def jagged(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class TestTensors:
    @settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(0, 2), st.sampled_from(DTYPES))
    def test_one_ragged_dimension(self, lengths, inner, dtype):
        shapes = [(length, *[2] * inner) for length in lengths]
        rows = [torch.zeros(shape).to(dtype) for shape in shapes]
        size = len(rows)
        nested = torch.nested.nested_tensor_from_jagged(torch.cat(rows), torch.tensor([0, *np.cumsum(lengths)]))
        assert_describes(entry_of(nested, size), shapes, dtype)
        assert_describes(entry_of(nested, size, wrap=False), shapes, dtype)
        assert_describes(entry_of(rows, size, wrap=False), shapes, dtype)
        assert_describes(entry_of(tuple(rows), size, wrap=False), shapes, dtype)
        assert_describes(entry_of(object_array(rows), size, wrap=False), shapes, dtype)
        assert_describes(entry_of(NonTensorData(rows, batch_size=[size]), size), shapes, dtype)
        assert_describes(entry_of(NonTensorStack(*[NonTensorData(row) for row in rows]), size), shapes, dtype)
        if inner:
            shapes = [(2, length, *[2] * (inner - 1)) for length in lengths]
            assert_describes(entry_of(nested.transpose(1, 2), size, wrap=False), shapes, dtype)

    @settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.integers(0, 2).flatmap(lambda ndim: st.lists(st.tuples(*[st.integers(0, 3)] * ndim), min_size=1)))
    def test_strided_nested(self, shapes):
        nested = torch.nested.nested_tensor([torch.zeros(shape) for shape in shapes])
        assert_describes(entry_of(nested, len(shapes), wrap=False), shapes, torch.float32)

    def test_jagged_with_lengths(self):
        padded, starts, lengths = torch.zeros(3, 10, 4), torch.tensor([0, 1, 2]), torch.tensor([3, 2, 1])
        nested = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
        assert_describes(entry_of(nested, 3, wrap=False), [(3, 4), (2, 4), (1, 4)], torch.float32)

    @pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 3)])
    def test_dense(self, shape):
        assert_describes(entry_of(torch.zeros(2, *shape, dtype=torch.int8), 2), [shape] * 2, torch.int8)

    def test_rows_of_different_rank(self):
        shapes = [(2,), (1, 3), ()]
        meta = BatchMeta(range(3), "p").add_fields({"f": [torch.zeros(shape) for shape in shapes]})
        assert meta.select_samples([2, 1]).get_shapes("f") == [torch.Size([]), torch.Size([1, 3])]
        assert meta[:2].samples[1].fields["f"]["shape"] == torch.Size([1, 3])

    @pytest.mark.parametrize("dtype", ["int32", ">f4", "bool", "float16", "complex128"])
    def test_numeric_arrays(self, dtype):
        wanted = torch.from_numpy(np.zeros(1, np.dtype(dtype).newbyteorder("="))).dtype
        assert_describes(entry_of(np.zeros((2, 3), dtype), 2, wrap=False), [(3,)] * 2, wanted)
        assert_describes(entry_of(NonTensorData(np.zeros((2, 3), dtype), batch_size=[2]), 2), [(3,)] * 2, wanted)

    def test_one_tensor_for_every_row(self):
        assert_describes(entry_of(NonTensorData(torch.zeros(5), batch_size=[2]), 2), [(5,)] * 2, torch.float32)

    def test_rows_that_do_not_stack(self):
        lazy = LazyStackedTensorDict(*[TensorDict({"f": torch.zeros(n), "o": "a"}) for n in (2, 3)])
        meta = BatchMeta([0, 1], "p").add_fields(lazy)
        assert meta.get_shapes("f") == [(2,), (3,)]
        assert_objects(meta.field_schema["o"])

    def test_no_rows(self):
        columns = {
            "dense": torch.zeros(0, 3),
            "jagged": torch.nested.nested_tensor_from_jagged(torch.zeros(0, 2), torch.tensor([0])),
            "strided": torch.nested.nested_tensor([]),
            "list": [],
        }
        meta = BatchMeta().add_fields(columns)
        assert meta.field_names == sorted(columns)
        assert not any(entry["is_nested"] for entry in meta.field_schema.values())

    @pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
    def test_calls_do_not_grow_with_the_rows(self, layout):
        class Counting(TorchFunctionMode):
            calls = 0

            def __torch_function__(self, function, types, args=(), kwargs=None):
                self.calls += 1
                return function(*args, **(kwargs or {}))

        def calls(rows):
            values = [torch.zeros(row % 3) for row in range(rows)]
            columns = {"n": torch.nested.as_nested_tensor(values, layout=layout), "d": torch.zeros(rows, 2)}
            meta = BatchMeta(range(rows), "p")
            with Counting() as counting:
                meta.add_fields(columns)
            return counting.calls

        assert calls(10) == calls(500) > 0


class TestObjects:
    @pytest.mark.parametrize(
        "column",
        [
            NonTensorStack("a", None),
            NonTensorData("one", batch_size=[2]),
            NonTensorData(["a", "b"], batch_size=[2]),
            NonTensorData([1, 2, 3], batch_size=[2]),
            NonTensorData({"a": 1}, batch_size=[2]),
            TensorDict({"inner": torch.zeros(2)}, batch_size=2),
            np.array(["a", "b"]),
            np.array([b"a", b"b"]),
            np.array([{}, None], dtype=object),
        ],
        ids=repr,
    )
    def test_in_a_tensordict(self, column):
        assert_objects(entry_of(column, 2))

    @pytest.mark.parametrize(
        "column",
        [
            [1, 2],
            [torch.zeros(2), "a"],
            [torch.zeros(2), torch.zeros(2, dtype=torch.int8)],
            [np.zeros(2), np.zeros(2)],
            np.zeros(2, np.longdouble),
            np.zeros(2, "datetime64[s]"),
        ],
        ids=repr,
    )
    def test_alone(self, column):
        assert_objects(entry_of(column, 2, wrap=False))


class TestRefusals:
    @pytest.mark.parametrize(
        "column",
        [torch.zeros(3), torch.zeros(()), [1], "ab", 5, np.zeros(1), np.array(1), jagged([torch.zeros(1)] * 3)],
        ids=repr,
    )
    def test_another_number_of_rows(self, column):
        meta = BatchMeta([1, 2], "p")
        with pytest.raises(InvalidArgumentError, match="'b' does not match the batch: wanted 2 rows"):
            meta.add_fields({"a": torch.zeros(2), "b": column})
        assert meta.field_names == []
        assert not meta.is_ready

    @pytest.mark.parametrize("size", [[], [3]])
    def test_another_batch_size(self, size):
        with pytest.raises(InvalidArgumentError, match=r"wanted \[2\]"):
            BatchMeta([1, 2], "p").add_fields(TensorDict({}, batch_size=size))

    def test_no_columns(self):
        with pytest.raises(InvalidArgumentError, match="TensorDict or a dict"):
            BatchMeta([1], "p").add_fields([1])


def test_a_field_is_replaced():
    meta = BatchMeta([1, 2], "p").add_fields({"f": jagged([torch.zeros(1), torch.zeros(2)])})
    assert meta.get_shapes("f") == [(1,), (2,)]
    meta.add_fields({"f": torch.zeros(2, 3)})
    assert meta.get_shapes("f") == [(3,), (3,)]
    assert meta.field_schema["f"]["is_nested"] is False


def test_a_cut_of_a_nested_field_stays_nested():
    meta = BatchMeta([1, 2], "p").add_fields({"f": jagged([torch.zeros(1), torch.zeros(2)])})
    for part, length in zip(meta.chunk(2), (1, 2), strict=True):
        assert part.field_schema["f"]["is_nested"] is True
        assert part.field_schema["f"]["per_sample_shapes"] == [torch.Size([length])]
