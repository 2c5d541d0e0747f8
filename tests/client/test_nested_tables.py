"""A TensorDict in a TensorDict: its leaves are fields of their own, and it comes back as it was put."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from simulated import numbers, ragged, rows_of, same, table
from transfer_queue.errors import FieldTypeError, StorageKeyNotFoundError, UncarriableValueError
from transfer_queue.metadata import BatchMeta
from transfer_queue.testing import Client
from transfer_queue.wire.blocks.gather import stack_of


def nested(rows: int = 2, start: int = 0) -> TensorDict:
    numbers = torch.arange(start, start + rows)
    inner = TensorDict({"w": numbers.float(), "s": NonTensorStack(*map(str, range(rows)))}, batch_size=[rows])
    x = TensorDict({"y": numbers.unsqueeze(1), "inner": inner}, batch_size=[rows])
    return TensorDict({"x": x, "flat": numbers}, batch_size=[rows])


LEAVES = ["flat", "x", "x::inner", "x::inner::s", "x::inner::w", "x::y"]


def check(found: TensorDict, rows: list[int]) -> None:
    assert set(found.keys()) == {"x", "flat"}
    assert isinstance(found["x"], TensorDict)
    assert found["x"].batch_size == found["x", "inner"].batch_size == torch.Size([len(rows)])
    assert [row.tolist() for row in rows_of(found["x", "y"])] == [[row] for row in rows]
    assert found["x", "inner", "w"].tolist() == rows
    assert found["flat"].tolist() == rows


@pytest.mark.parametrize("layout", ["jagged", "dense", "padded", "list"])
def test_it_comes_back_as_it_was_put(a: Client, b: Client, layout: str) -> None:
    meta = a.kv_batch_put(["k", "l"], "p", nested())
    assert meta.fields == LEAVES
    found = b.kv_batch_get(["k", "l"], "p", layout=layout)
    assert found["x", "inner"].get("s").tolist() == ["0", "1"]
    if layout in ("jagged", "dense"):
        check(found, [0, 1])
    a.kv_put("m", "p", nested(1, 7))
    check(b.kv_batch_get(["m", "k", "m", "l"], "p"), [7, 0, 7, 1])


def test_by_metadata(a: Client) -> None:
    meta = a.put(nested(3), partition_id="p")
    assert meta.field_names == LEAVES
    check(a.get_data(meta), [0, 1, 2])
    assert meta.field_schema["x"]["is_tensordict"]
    check(a.get_data(meta[0:0]), [])
    fetched = a.get_meta(["x", "flat"], 2, "p", task_name="t")
    assert fetched.field_names == ["flat", "x"]
    check(a.get_data(fetched), [0, 1])
    both = BatchMeta.concat([meta, a.put(nested(1, 5), partition_id="q")])
    check(a.get_data(both), [0, 1, 2, 5])
    a.put(TensorDict({"more": nested(4)["x"]}, batch_size=[4]), both)
    assert a.get_data(both)["more", "inner", "w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_over_two_partitions_with_columns_that_torch_does_not_index(a: Client, depth: int) -> None:
    shapes = [(2, 3), (4, 2), (1, 1), (0, 2)]
    columns = {
        "s": [torch.full(shape, float(row)) for row, shape in enumerate(shapes)],
        "j": [torch.full((2, length), float(length)) for length in (1, 0, 2, 3)],
        "o": [None, "a", {"k": 1}, torch.ones(2)],
        "d": list(torch.arange(4)),
    }
    inner = table(
        s=torch.nested.as_nested_tensor(columns["s"], layout=torch.strided),
        j=torch.nested.as_nested_tensor(columns["j"], layout=torch.jagged),
        o=stack_of(columns["o"], 4),
        d=torch.arange(4),
    )
    data = inner
    for _ in range(depth):
        data = table(t=data)
    one, two = (a.put(numbers(2), partition_id=partition) for partition in "pq")
    both = BatchMeta.concat([one, two])
    both.reorder([2, 0, 3, 1])
    a.put(data, both)
    found = a.get_data(both.select_fields(list(map(str, data.keys()))))
    for _ in range(depth):
        found = found["t"]
    for name, rows in columns.items():
        assert all(map(same, rows_of(found.get(name)), rows)), name


def test_what_is_selected(a: Client) -> None:
    a.kv_batch_put(["k", "l"], "p", nested())
    for select, leaves in (
        ("x", {"y", "inner"}),
        ([("x", "y")], {"y"}),
        (["x::y"], {"y"}),
        ([("x", "inner")], {"inner"}),
        ([("x", "inner", "w"), "x::y"], {"inner", "y"}),
    ):
        found: Any = a.kv_batch_get(["k", "l"], "p", select, missing="error")
        assert (set(found.keys()), set(found["x"].keys())) == ({"x"}, leaves)
    found = a.kv_batch_get(["k", "l"], "p", [("x", "inner", "w")])
    assert found["x", "inner"].keys() == {"w"}


def test_each_leaf_is_ready_by_itself(a: Client) -> None:
    meta = a.put(table(flat=torch.arange(2)), partition_id="p")
    a.put(TensorDict({"x": TensorDict({"y": torch.arange(2)}, batch_size=[2])}, batch_size=[2]), meta)
    assert a.get_meta([("x", "y")], 2, "p", task_name="t").field_names == ["x::y"]
    assert a.check_production_status(["x", "x::y"], "p")
    assert not a.check_production_status(["x::z"], "p")
    first = meta.select_samples([0])
    a.put(TensorDict({"x": TensorDict({"z": ragged(3)}, batch_size=[1])}, batch_size=[1]), first)
    assert set(a.get_data(first)["x"].keys()) == {"y", "z"}
    assert set(a.get_data(meta)["x"].keys()) == {"y"}, "a leaf that some rows lack is left out"
    wanted = a.get_meta(["x"], 2, "p", task_name="u")
    wanted.add_fields(TensorDict({"x::z": torch.zeros(2)}, batch_size=[2]))
    with pytest.raises(StorageKeyNotFoundError, match="x::z"):
        a.get_data(wanted)


def test_another_kind_is_refused(a: Client) -> None:
    a.kv_batch_put(["k", "l"], "p", nested())
    with pytest.raises(FieldTypeError, match=r"'x' holds nested TensorDicts .* contains tensors of int64"):
        a.kv_batch_put(["m"], "p", table(x=torch.arange(1)))
    with pytest.raises(FieldTypeError, match=r"'flat' holds tensors of int64 .* contains nested TensorDicts"):
        a.kv_batch_put(["m"], "p", TensorDict({"flat": nested(1)["x"]}, batch_size=[1]))


def test_a_flat_name_with_the_separator_stays_flat(a: Client) -> None:
    a.kv_put("k", "p", {"u::v": torch.tensor(1)})
    assert a.kv_batch_get("k", "p")["u::v"].tolist() == [1]


def test_rows_that_are_stacked_lazily(a: Client) -> None:
    rows = lazy_stack([nested(2)[0], nested(2)[1]])
    a.kv_batch_put(["k", "l"], "p", rows)
    check(a.kv_batch_get(["k", "l"], "p"), [0, 1])


def test_a_data_parser_gets_it_unchanged(a: Client) -> None:
    a.kv_batch_put(["k", "l"], "p", nested(), data_parser=lambda columns: columns)
    check(a.kv_batch_get(["k", "l"], "p"), [0, 1])


def test_a_table_without_fields(a: Client) -> None:
    a.kv_batch_put(["k"], "p", TensorDict({"x": TensorDict({}, batch_size=[1])}, batch_size=[1]))
    assert a.kv_batch_get("k", "p")["x"].batch_size == torch.Size([1])


def test_lost_lengths_of_a_nested_field_are_refused(a: Client) -> None:
    starts, lengths = torch.tensor([0, 1]), torch.tensor([2, 1])
    rows = torch.nested.narrow(torch.arange(4).view(2, 2), 1, starts, lengths, layout=torch.jagged)
    for name, fields in {"x": {"x": rows}, "x::y": {"x": TensorDict({"y": rows}, batch_size=[2])}}.items():
        given = TensorDict(fields, batch_size=[2])
        for put in (
            lambda given=given: a.put(given, partition_id="p"),
            lambda given=given: a.kv_batch_put(["k", "l"], "p", given),
            lambda given=given: a.kv_batch_put(["k", "l"], "p", given, data_parser=lambda columns: columns),
        ):
            with pytest.raises(UncarriableValueError, match=f"field '{name}'.*pytorch/issues/196708"):
                put()
    assert a.kv_list() == {}
