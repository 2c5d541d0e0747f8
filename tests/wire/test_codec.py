"""Columns through a block and back: every kind of column, dtype, selection of rows and layout."""

import math

import msgspec
import numpy as np
import pytest
import torch
from carried_values import TORCH_DTYPES, Point, arrays, jagged, objects, pattern, same, same_tensor, tensors
from codec_arenas import Arenas, nbytes_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from simulated import rows_of
from transfer_queue.errors import InvalidArgumentError, ProtocolError, TransferQueueError, UncarriableValueError
from transfer_queue.messages.descriptors import FieldSpec, Placement
from transfer_queue.wire.blocks.encode import encode_columns, encode_row
from transfer_queue.wire.blocks.gather import gather
from transfer_queue.wire.buffers import copies
from transfer_queue.wire.buffers.block_layout import MIXED_RANK

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def through(column, rows=None, wanted=None, layout="jagged", in_table=True):
    """The column as it comes back; wanted: which rows."""
    rows = rows or (column.size(0) if isinstance(column, torch.Tensor) else len(column))
    if in_table and isinstance(column, list):
        column = NonTensorStack(*column)  # tensordict makes this of it, since 0.11
    fields = TensorDict({"x": column}, batch_size=[rows]) if in_table else {"x": column}
    block = encode_columns(fields, rows)
    assert block.nbytes == nbytes_of(block, rows)
    arena = Arenas()
    arena.write(block)
    reply = arena.reply([(0, slot) for slot in (wanted if wanted is not None else range(rows))])
    table = gather(reply, arena.memory, layout)
    assert isinstance(table, TensorDict)
    assert table.batch_size == torch.Size([reply.count])
    return table.get("x")


def same_rows(back, rows):
    return len(rows_of(back)) == len(rows) and all(map(same, rows_of(back), rows))


# Kinds of columns.

RAGGED = [torch.arange(n) for n in (3, 1, 4)]
TRANSPOSED = [torch.arange(2 * n).reshape(2, n) for n in (3, 1, 4)]
SEVERAL = [torch.arange(float(a * b)).reshape(a, b) for a, b in ((2, 3), (4, 1), (1, 2))]

TENSOR_COLUMNS = {
    "dense": (torch.arange(24).reshape(3, 2, 4), None),
    "scalars": (torch.arange(3.0), None),
    "strided view": (torch.arange(48).reshape(8, 6).t()[1::2], None),
    "expanded": (torch.arange(3)[:, None].expand(3, 5), None),
    "permuted": (torch.arange(60).reshape(3, 4, 5).permute(0, 2, 1), None),
    "jagged": (jagged(RAGGED), RAGGED),
    "jagged of equal rows": (jagged([torch.ones(2, 3)] * 3), [torch.ones(2, 3)] * 3),
    "jagged transposed": (jagged(TRANSPOSED, ragged=2), TRANSPOSED),
    "jagged narrowed": (torch.nested.narrow(torch.arange(12).reshape(3, 4), 1, torch.tensor([0, 1, 2]),
                                            torch.tensor([2, 3, 1]), layout=torch.jagged),
                        [torch.tensor([0, 1]), torch.tensor([5, 6, 7]), torch.tensor([10])]),
    "jagged from the middle": (torch.nested.nested_tensor_from_jagged(torch.arange(10), torch.tensor([2, 5, 5, 9])),
                               [torch.arange(2, 5), torch.arange(0), torch.arange(5, 9)]),
    "strided nested": (torch.nested.nested_tensor(SEVERAL), SEVERAL),
    "strided nested transposed": (torch.nested.nested_tensor(SEVERAL).transpose(1, 2), [r.t() for r in SEVERAL]),
    "stack of tensors": (NonTensorStack(*RAGGED), RAGGED),
    "stack of data": (NonTensorStack(*map(NonTensorData, RAGGED)), RAGGED),
    "list of tensors": (list(SEVERAL), SEVERAL),
    "repeated tensor": (NonTensorData(torch.arange(2), batch_size=[3]), [torch.arange(2)] * 3),
    "gradient": (torch.ones(3, 2, requires_grad=True), None),
    "jagged gradient": (jagged([torch.ones(2), torch.ones(1)]).requires_grad_(), [torch.ones(2), torch.ones(1)]),
    "parameter": (torch.nn.Parameter(torch.ones(3, 2)), None),
    "conjugate": (torch.tensor([1 + 2j, 3j, 4]).conj(), None),
    "negative": (torch.tensor([1 + 2j, 3j, 4]).conj().imag, None),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSOR_COLUMNS)
@pytest.mark.parametrize("in_table", [True, False])
def test_columns_of_tensors(name, in_table):
    column, rows = TENSOR_COLUMNS[name]
    if rows is None:
        rows = list(torch.as_tensor(column).detach().resolve_conj().resolve_neg().unbind(0))
    back = through(column, len(rows), in_table=in_table)
    assert isinstance(back, torch.Tensor)
    assert not back.requires_grad
    assert same_rows(back, rows)


def test_lists_of_numbers():
    """A TensorDict makes a tensor of them; in a mapping they are a value a row, as they are."""
    assert through([3, 1, 2]).tolist() == [3, 1, 2]
    back = through([3, 1.5, True], in_table=False)
    assert isinstance(back, NonTensorStack)
    assert same_rows(back, [3, 1.5, True])


OBJECT_COLUMNS = {
    "list of str": (["a", "", "ccc"], ["a", "", "ccc"]),
    "stack": (NonTensorStack("a", {"b": 1}, None), ["a", {"b": 1}, None]),
    "stack of data": (NonTensorStack(*map(NonTensorData, ("a", [1, 2], 3))), ["a", [1, 2], 3]),
    "stack of stacks": (NonTensorStack(*(NonTensorStack("a", i) for i in range(3))), [["a", i] for i in range(3)]),
    "data of a list": (NonTensorData(["a", 1, None], batch_size=[3]), ["a", 1, None]),
    "data of a shorter list": (NonTensorData([1, 2], batch_size=[3]), [[1, 2]] * 3),
    "data of one value": (NonTensorData({"a": 1}, batch_size=[3]), [{"a": 1}] * 3),
    "data of a str": (NonTensorData("abc", batch_size=[3]), ["abc"] * 3),
    "data of an array": (NonTensorData(np.array(["a", 1, None], object), batch_size=[3]), ["a", 1, None]),
    "str array": (np.array(["ä", "bcd", ""]), ["ä", "bcd", ""]),
    "bytes array": (np.array([b"a", b"bcd", b""]), [b"a", b"bcd", b""]),
    "object array": (np.array([None, "b", {"c": 1}], object), [None, "b", {"c": 1}]),
    "dates": (np.array(["2020", "2021", "NaT"], "M8[Y]"), list(np.array(["2020", "2021", "NaT"], "M8[Y]"))),
    "arrays": ([np.arange(n) for n in range(3)], [np.arange(n) for n in range(3)]),
    "mixed dtypes": (NonTensorStack(torch.ones(2), torch.arange(2), torch.ones(1)),
                     [torch.ones(2), torch.arange(2), torch.ones(1)]),
    "tensors and others": (NonTensorStack(torch.ones(2), None, "a"), [torch.ones(2), None, "a"]),
    "tables in a stack": (NonTensorStack(*(NonTensorData(TensorDict({"z": torch.ones(2)}, [2])) for _ in range(3))),
                          [TensorDict({"z": torch.ones(2)}, [2])] * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECT_COLUMNS)
@pytest.mark.parametrize("in_table", [True, False])
@pytest.mark.parametrize("wanted", [[0, 1, 2], [2, 0, 2], [1]], ids=str)
def test_columns_of_objects(name, in_table, wanted):
    column, rows = OBJECT_COLUMNS[name]
    back = through(column, 3, wanted, in_table=in_table)
    assert isinstance(back, NonTensorStack)
    assert same_rows(back, [rows[slot] for slot in wanted])


def test_items_of_a_column_of_objects():
    table = TensorDict({"x": through(["a", "b", "c"])}, batch_size=[3])
    assert type(table["x"]).__name__ == "LinkedList"
    assert (list(table["x"]), table["x"][1], table.get("x")[1].data) == (["a", "b", "c"], "b", "b")
    assert table[1:].get("x").tolist() == ["b", "c"]


def test_rows_of_a_lazy_stack():
    rows = [TensorDict({"x": torch.ones(n), "o": NonTensorData(n)}, []) for n in (2, 3)]
    block = encode_columns(LazyStackedTensorDict(*rows), 2)
    arena = Arenas()
    arena.write(block)
    table = gather(arena.reply(), arena.memory)
    assert [row.tolist() for row in rows_of(table["x"])] == [[1, 1], [1, 1, 1]]
    assert list(table["o"]) == [2, 3]


@pytest.mark.parametrize("column", [
    np.array([[1, 0], [1, 1]], kind) for kind in ("?", "u1", "i2", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")
] + [np.array([[1, 2], [3, 4]], ">i4"), np.arange(12).reshape(3, 4)[:, ::-2], np.broadcast_to(np.arange(3.0), (2, 3))],
    ids=lambda a: a.dtype.str)  # fmt: skip
@pytest.mark.parametrize("in_table", [True, False])
def test_numeric_arrays(column, in_table):
    column.flags.writeable = column.flags.writeable and not in_table
    native = column.astype(column.dtype.newbyteorder("="))
    back = through(native.copy() if in_table else column, len(column), in_table=in_table)
    assert same_rows(back, [torch.from_numpy(row.copy()) for row in native])


@given(st.lists(objects, min_size=1, max_size=5), st.data())
@settings(max_examples=80, deadline=None)
def test_any_objects(values, data):
    assume(not all(isinstance(value, torch.Tensor) for value in values))
    wanted = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=8))
    back = through(values, wanted=wanted, in_table=False)
    assert isinstance(back, NonTensorStack)
    assert same_rows(back, [values[slot] for slot in wanted])


@given(arrays)
@settings(max_examples=100, deadline=None)
def test_any_array_is_a_column(array):
    assume(array.ndim and len(array))
    back = through(array, len(array), in_table=False)
    if isinstance(back, torch.Tensor):
        native = array.astype(array.dtype.newbyteorder("="))
        assert same_rows(back, [torch.from_numpy(np.array(row)) for row in native])
    elif array.ndim == 1 and array.dtype.kind in "USO":
        assert rows_of(back) == array.tolist()
    else:
        assert same_rows(back, list(array))


# dtypes, shapes, selections.


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 3), (5, 0), (5, 2, 0, 1)], ids=str)
def test_every_dtype(dtype, shape):
    column = pattern(dtype, shape)
    wanted = [3, 0, 3, 4]
    assert same_rows(through(column), list(column.unbind(0)))
    assert same_rows(through(column, wanted=wanted), [column[slot] for slot in wanted])
    dense = through(column, wanted=wanted, layout="dense")
    assert dense.shape == (4, *shape[1:])
    assert same_rows(dense, [column[slot] for slot in wanted])


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_ragged_rows_of_every_dtype(dtype):
    rows = [pattern(dtype, (n, 2), seed=n) for n in (3, 0, 4)]
    back = through(rows, in_table=False)
    assert back.layout == torch.jagged
    assert same_rows(back, rows)
    turned = [pattern(dtype, (2, n), seed=n) for n in (3, 0, 4)]
    assert same_rows(through(turned, in_table=False), turned)
    several = [pattern(dtype, (n, n), seed=n) for n in (3, 1, 2)]
    assert same_rows(through(several, in_table=False), several)
    if dtype.itemsize > 1:
        assert same_rows(through([row.t() for row in several], in_table=False), [row.t() for row in several])


@given(st.lists(tensors, min_size=1, max_size=4))
@settings(max_examples=80, deadline=None)
def test_any_tensors_are_a_column(rows):
    back = through(rows, in_table=False)
    one_dtype = len({row.dtype for row in rows}) == 1
    mixed = len({row.dim() for row in rows}) > 1
    assert isinstance(back, torch.Tensor) == (one_dtype and not mixed)
    assert same_rows(back, rows)


def test_mixed_rank_in_one_block():
    rows = [torch.arange(3), torch.ones(2, 2, dtype=torch.int64), torch.tensor(7)]
    block = encode_columns({"x": rows}, 3)
    assert block.schema == [FieldSpec("x", "tensor", "int64", MIXED_RANK, True)]
    assert np.frombuffer(block.dims, np.int64).tolist() == [1, 3, 2, 2, 2, 0]
    assert same_rows(through(rows, in_table=False), rows)


@pytest.mark.parametrize(
    "path", [{}, {"CELLS_PER_ROW": 0}, {"RUN": 0}, {"HUGE": 0, "PARALLEL": 0, "PER_THREAD": 1, "_most": 8}], ids=str
)
@pytest.mark.parametrize("single", [True, False], ids=["blocks of one row", "one block"])
def test_many_scattered_rows(monkeypatch, path, single):
    """The vectorised paths, at a size where they are taken."""
    for name, value in path.items():
        monkeypatch.setattr(copies, name, value)
    random = np.random.default_rng(0)
    count = 700
    lengths = random.integers(0, 40, count)
    fields = {
        "even": torch.from_numpy(random.random((count, 16))),
        "odd": torch.from_numpy(random.integers(0, 99, (count, 7)).astype(np.int16)),
        "ragged": [torch.from_numpy(random.integers(0, 99, n).astype(np.int32)) for n in lengths],
        "text": ["x" * int(n) for n in lengths],
    }
    arenas = Arenas(size=1 << 16)
    if single:
        for row in range(count):
            arenas.write(encode_row({name: column[row] for name, column in fields.items()}))
        places = [(row, 0) for row in range(count)]
    else:
        arenas.write(encode_columns(fields, count))
        places = [(0, row) for row in range(count)]
    order = random.permutation(count)[:600].tolist()
    table = gather(arenas.reply([places[row] for row in order]), arenas.memory)
    for name, column in fields.items():
        assert same_rows(table.get(name), [column[row] for row in order])


def test_type_remembers_what_this_batch_does_not_show():
    """The ragged dimension, several of them, and rank come from the rows that ever were."""
    arenas = Arenas()
    arenas.write(encode_columns({"x": torch.zeros(2, 2, 3)}, 2))
    for other, check in [
        (torch.zeros(1, 2, 4), lambda x: (x.layout, x._ragged_idx) == (torch.jagged, 2)),
        (torch.zeros(1, 1, 4), lambda x: x.is_nested and x.layout == torch.strided),
        (torch.zeros(1, 1), lambda x: isinstance(x, NonTensorStack)),
    ]:
        table = gather(arenas.reply(ever=[encode_columns({"x": other}, 1)]), arenas.memory)
        assert check(table.get("x"))
        assert same_rows(table.get("x"), [torch.zeros(2, 3)] * 2)


def test_offsets_are_shared():
    rows = [torch.arange(n) for n in (3, 1, 4)]
    arenas = Arenas()
    arenas.write(encode_columns({"x": rows, "y": [r * 2 for r in rows], "z": [r[:1] for r in rows]}, 3))
    table = gather(arenas.reply(), arenas.memory)
    assert table["x"].offsets() is table["y"].offsets()
    assert table["x"].offsets() is not table["z"].offsets()
    assert [r.tolist() for r in (table["x"] + table["y"]).unbind(0)] == [(r * 3).tolist() for r in rows]


# Writable, independent.


@pytest.mark.parametrize("layout", ["jagged", "dense", "padded", "list"])
@pytest.mark.parametrize("wanted", [[0, 1], [0, 0], [1]], ids=str)
def test_results_are_writable_and_independent(layout, wanted):
    arenas = Arenas()
    arenas.write(encode_columns({"x": torch.zeros(2, 3), "s": torch.zeros(2), "o": [[np.zeros(2)], [1]]}, 2))
    reply = arenas.reply([(0, slot) for slot in wanted])
    table = gather(reply, arenas.memory, layout)
    first, *others = rows_of(table.get("x"))
    first.fill_(5)
    assert all(bool((other == 0).all()) for other in others)
    objects_of = rows_of(table.get("o"))
    objects_of[0].append("mine")
    assert "mine" not in [item for row in objects_of[1:] for item in row if isinstance(item, str)]
    again = gather(reply, arenas.memory, layout)
    assert all(bool((row == 0).all()) for row in rows_of(again.get("x")))
    assert len(rows_of(again.get("o"))[0]) == 1


def test_result_can_be_used_like_any_table():
    column = jagged([torch.arange(2), torch.arange(3), torch.arange(1)])
    arenas = Arenas()
    arenas.write(encode_columns({"r": column, "x": torch.arange(3), "o": ["a", "b", "c"]}, 3))
    table = gather(arenas.reply(), arenas.memory)
    part = table.exclude("r")[1:]  # torch cannot slice jagged tensors before 2.7
    assert (part["x"].tolist(), part.get("o").tolist()) == ([1, 2], ["b", "c"])
    if Version(torch.__version__) >= Version("2.7"):  # nor does it index one by a list
        assert [row.tolist() for row in rows_of(table[[2, 0]]["r"])] == [[0], [0, 1]]
    table["new"] = torch.ones(3)
    table["x"].add_(1)
    assert set(table.clone().keys()) == {"r", "x", "o", "new"}


# One row.


def test_row_of_every_kind():
    fields = {"t": torch.arange(6).reshape(2, 3).t(), "s": torch.tensor(2.5), "o": {"a": 1}, "n": None,
              "d": NonTensorData([1]), "a": np.arange(3), "l": [torch.ones(2)], "e": torch.empty(0, 4)}  # fmt: skip
    block = encode_row(fields)
    assert block.nbytes == nbytes_of(block, 1)
    arenas = Arenas()
    arenas.write(block)
    table = gather(arenas.reply(), arenas.memory)
    assert same_tensor(rows_of(table["t"])[0], fields["t"])
    assert same_tensor(rows_of(table["e"])[0], fields["e"])
    assert table["s"].tolist() == [2.5]
    for name, value in {**fields, "d": [1]}.items():
        if name in "onadl":
            assert same_rows(table.get(name), [value])


def test_row_and_batch_of_one_are_the_same_block():
    fields = {"t": torch.arange(3), "s": torch.tensor(2.5), "o": "abc"}
    row, batch = encode_row(fields), encode_columns({n: v[None] if n != "o" else [v] for n, v in fields.items()}, 1)
    assert (row.schema, row.dims, row.rows, row.nbytes) == (batch.schema, batch.dims, batch.rows, batch.nbytes)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensor_is_no_row(layout):
    with pytest.raises(ValueError, match="'x'"):
        encode_row({"x": torch.nested.nested_tensor([torch.ones(2)], layout=layout)})


# What is refused.


@pytest.mark.parametrize("column", [
    torch.zeros(2, 2), jagged([torch.ones(1)] * 4), torch.nested.nested_tensor([torch.ones(1)] * 4), ["a", "b"],
    np.zeros(2), np.array(["a"]), NonTensorStack("a", "b"), TensorDict({}, [2]), [torch.ones(1)] * 2,
], ids=lambda c: type(c).__name__)  # fmt: skip
def test_wrong_length(column):
    found = column.size(0) if isinstance(column, torch.Tensor) else len(column)
    with pytest.raises(ValueError, match=rf"(?s)(?=.*'bad')(?=.*\b3\b)(?=.*\b{found}\b)"):
        encode_columns({"good": torch.zeros(3), "bad": column}, 3)


def test_wrong_batch_size():
    with pytest.raises(ValueError, match=r"'x'.*must have 3 rows, got 2"):
        encode_columns(TensorDict({"x": NonTensorData("a")}, batch_size=[2]), 3)


@pytest.mark.parametrize("column", ["abc", 5, None, torch.tensor(1), np.array(1), {1, 2}], ids=repr)
def test_what_is_no_column(column):
    with pytest.raises(InvalidArgumentError, match="'x'"):
        encode_columns({"x": column}, 3)
    with pytest.raises(InvalidArgumentError):
        encode_columns([column], 3)
    with pytest.raises(InvalidArgumentError, match="name"):
        encode_columns({7: torch.zeros(3)}, 3)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("make", [
    lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), lambda: torch.ones(2).to_sparse(),
    lambda: torch.ones(2, device="meta"),
], ids=["quantized", "sparse", "meta"])  # fmt: skip
def test_tensors_without_plain_memory(make):
    tensor = make()
    for encode in (lambda: encode_columns({"bad": tensor}, 2), lambda: encode_row({"bad": tensor}),
                   lambda: encode_columns({"bad": [tensor, tensor]}, 2)):  # fmt: skip
        with pytest.raises(UncarriableValueError, match=r"'bad', row 0.*Tensor"):
            encode()


def test_fake_tensor_is_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    with pytest.raises(UncarriableValueError, match="'bad'"):
        encode_row({"bad": fake})


def test_object_that_cannot_be_carried():
    with pytest.raises(TypeError, match=r"'bad', row 2.*function"):
        encode_columns({"bad": ["a", "b", lambda: 0]}, 3)
    with pytest.raises(TypeError, match=r"'bad', row 1.*Point.*pickle"):
        encode_columns({"bad": ["a", Point(1)]}, 2, allow_pickle=False)


def test_pickle_is_refused_by_the_reader():
    arenas = Arenas()
    arenas.write(encode_columns({"x": ["a", Point(1)]}, 2))
    with pytest.raises(UncarriableValueError, match=r"'x', row 1.*allow_pickle"):
        gather(arenas.reply(), arenas.memory, allow_pickle=False)


def test_memory_that_does_not_fit():
    block = encode_row({"x": torch.ones(100)})
    for memory in (bytearray(10), bytes(1000), np.zeros(2000, np.uint8)[::2]):
        with pytest.raises(ValueError, match="contiguous writable bytes, got an array"):
            block.write_into(memory)
    memory = bytearray(block.nbytes)
    block.write_into(memoryview(memory))
    assert memory[:4] == np.float32(1).tobytes()


def test_nothing_is_written_beyond_the_block():
    memory = np.full(4096, 7, np.uint8)
    block = encode_columns({"x": torch.zeros(3, 5), "o": ["a", "b", "c"], "s": torch.zeros(5, 3).t()[:3]}, 3)
    block.write_into(memory[64:])
    assert bool((memory[:64] == 7).all())
    assert bool((memory[64 + block.nbytes :] == 7).all())


def test_no_rows():
    """A batch of nothing."""
    block = encode_columns({"x": torch.zeros(0, 3), "s": torch.zeros(0), "o": []}, 0)
    assert (block.rows, block.nbytes) == (0, 0)
    arenas = Arenas()
    arenas.write(encode_columns({"x": torch.zeros(2, 3), "s": torch.zeros(2), "o": ["a", "b"]}, 2))
    for layout, shape in (("jagged", None), ("dense", (0, 3)), ("padded", (0, 3)), ("list", None)):
        table = gather(arenas.reply([]), arenas.memory, layout)
        assert table.batch_size == torch.Size([0])
        assert [len(rows_of(table.get(name))) for name in "xso"] == [0, 0, 0]
        if shape:
            assert table["x"].shape == shape


def test_unknown_layout():
    arenas = Arenas()
    arenas.write(encode_row({"x": torch.ones(1)}))
    with pytest.raises(ValueError, match="jagged, dense, padded, list"):
        gather(arenas.reply(), arenas.memory, "ragged")


# Bytes that change, replies that lie.


@given(st.binary(min_size=8, max_size=40), st.integers(0, 400))
@settings(max_examples=150, deadline=None)
def test_memory_overwritten_by_another(garbage, position):
    """A result (of whatever values) or an error of the tree."""
    arenas = Arenas(size=1024)
    fields = {"x": torch.arange(6).reshape(3, 2), "r": [torch.arange(n) for n in (1, 0, 3)],
              "o": [{"a": np.arange(3)}, ("b", 2**70), torch.ones(2)]}  # fmt: skip
    block = encode_columns(fields, 3, allow_pickle=False)
    arenas.write(block)
    arenas.memories[0][position : position + len(garbage)] = list(garbage[: 1024 - position])
    try:
        table = gather(arenas.reply(), arenas.memory, allow_pickle=False)
    except TransferQueueError:
        return
    assert [len(row) for row in rows_of(table["r"])] == [1, 0, 3]


def test_torn_object_is_a_protocol_error():
    arenas = Arenas()
    arenas.write(encode_columns({"x": [["a"], ["b"]]}, 2))
    arenas.memories[0][:] = 0xFF
    with pytest.raises(ProtocolError, match="'x', row 0"):
        gather(arenas.reply(), arenas.memory)


def lying(reply, **changes):
    """The reply with other columns of its blocks, placements or types."""
    blocks = {name: getattr(reply.blocks, name) for name in reply.blocks.__struct_fields__}
    parts = {"count": reply.count, "types": reply.types, "placements": reply.placements}
    for name, value in changes.items():
        (blocks if name in blocks else parts)[name] = value
    return type(reply)(blocks=type(reply.blocks)(**blocks), **parts)


def i8(*numbers):
    return np.array(numbers, "<i8").tobytes()


def i4(*numbers):
    return np.array(numbers, "<i4").tobytes()


def two_rows(blocks):
    """Two rows of a field, in one block or in two of one row."""
    arenas = Arenas(size=1024)
    for _ in range(blocks):
        arenas.write(encode_columns({"x": torch.ones(2 // blocks, 3)}, 2 // blocks))
    return arenas


@pytest.mark.parametrize(("blocks", "altered"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("changes", [
    {"offset": 1 << 40}, {"offset": -64}, {"nbytes": 1 << 40}, {"nbytes": -1}, {"nbytes": 8}, {"nbytes": 0},
    {"offset": 2**63 - 64}, {"rows": 100}, {"rows": -1}, {"rows": 0}, {"schema": 3}, {"dims": 3}, {"count": 7},
    {"dims_values": [i8(1 << 40)]}, {"dims_values": [b"123"]}, {"dims_values": [i8(1, 2)]},
    {"placements": []}, {"offset": b""}, {"nbytes": i8(64)[:-1]}, {"unit": b""},
    {"schemas": [[FieldSpec("y", "tensor", "float32", 1, False)]]},
    {"schemas": [[FieldSpec("x", "tensor", "float64", 1, False)]]}, {"schemas": [[]]},
], ids=lambda c: next(iter(c)))  # fmt: skip
def test_reply_that_lies(changes, blocks, altered):
    """Numbers take the place of those of the last block, or of both."""
    arenas = two_rows(blocks)
    reply = arenas.reply()
    ((name, value),) = changes.items()
    if isinstance(value, int) and name != "count":
        pack = i8 if name in ("offset", "nbytes") else i4
        value = getattr(reply.blocks, name)[: len(pack(0)) * (blocks - altered)] + pack(value) * altered
    with pytest.raises(ProtocolError):
        gather(lying(reply, **{name: value}), arenas.memory)


END = 99  # stands for the number of blocks, or of the rows of a block


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(("block", "slot"), [
    ((0, END), (0, 0)), ((0, -1), (0, 0)), ((7, 7), (0, 0)), ((-1, -1), (0, 0)), ((0, 0), (0, END)), ((0, 0), (-1, 0)),
    ((0, 0), (0, -1)), ((0, 0), (3, 4)), ((0, 0), (2**31 - 1, 0)), ((), (0, 0)), ((0, 0), ()), ((0,), (0,)),
])  # fmt: skip
def test_placement_that_lies(block, slot, blocks):
    arenas = two_rows(blocks)
    reply = arenas.reply()
    block, slot = ([end if number == END else number for number in column]
                   for column, end in ((block, blocks), (slot, 2 // blocks)))  # fmt: skip
    with pytest.raises(ProtocolError):
        gather(lying(reply, placements=[Placement(["x"], i4(*block), i4(*slot))]), arenas.memory)
    with pytest.raises(ProtocolError):
        gather(lying(reply, placements=[msgspec.structs.replace(reply.placements[0], fields=["y"])]), arenas.memory)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("bent", [
    {"dtype": "float64"}, {"dtype": "int32"}, {"dtype": "float99"}, {"ndim": 2}, {"ndim": 0},
    {"kind": "object", "dtype": "object"}, {"kind": "nested"}, {"name": "y"},
], ids=str)  # fmt: skip
def test_type_that_lies(bent, blocks):
    arenas = two_rows(blocks)
    reply = arenas.reply()
    with pytest.raises(ProtocolError):
        gather(lying(reply, types=[msgspec.structs.replace(reply.types[0], **bent)]), arenas.memory)


def test_type_that_lies_about_ragged_rows():
    arenas = Arenas(size=1024)
    arenas.write(encode_columns({"x": [torch.ones(2, 3), torch.ones(1, 3)]}, 2))
    reply = arenas.reply()
    for ndim, differs, dtype in ((2, 2, "float32"), (1, 0, "float32"), (0, 0, "float32"), (2, 1, "float99")):
        wrong = msgspec.structs.replace(reply.types[0], dtype=dtype, ndim=ndim, shape=None, differs=differs)
        with pytest.raises(ProtocolError):
            gather(lying(reply, types=[wrong]), arenas.memory)


@pytest.mark.parametrize("layout", ["jagged", "dense"])
def test_repeated_rows_of_several_blocks_have_memory_of_their_own(layout):
    arenas = Arenas()
    for number in range(3):
        arenas.write(encode_columns({"x": torch.full((1, 3), number), "y": torch.full((1,), number)}, 1))
    reply = arenas.reply([(1, 0), (1, 0), (2, 0)])
    table = gather(reply, arenas.memory, layout)
    rows_of(table["x"])[0].fill_(-1)
    table["y"][0] = -1
    assert [row.tolist() for row in rows_of(table["x"])] == [[-1] * 3, [1] * 3, [2] * 3]
    assert table["y"].tolist() == [-1, 1, 2]
    assert gather(reply, arenas.memory, layout)["y"].tolist() == [1, 1, 2]


def test_large_batch():
    """Through huge pages and two threads."""
    column = torch.arange(3 << 20, dtype=torch.int64).reshape(3, 1024, 1024)
    arenas = Arenas(size=1 << 25)
    arenas.write(encode_columns({"x": column, "t": column.transpose(1, 2)}, 3))
    table = gather(arenas.reply(), arenas.memory)
    assert torch.equal(table["x"].values(), column.reshape(-1, 1024))
    assert torch.equal(table["t"].values(), column.transpose(1, 2).reshape(-1, 1024))
    assert math.prod(table["x"].values().shape) == column.numel()
