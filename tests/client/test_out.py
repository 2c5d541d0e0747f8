"""Gets into tensors of the caller."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from simulated import numbers, ragged, table
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.testing import Client


def value(rows: int = 6) -> TensorDict:
    return table(
        x=torch.arange(rows * 4).view(rows, 4),
        y=torch.arange(rows).to(torch.bfloat16),
        object=[str(n) for n in range(rows)],
    )


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [2, 3], [5, 0, 3]])
@pytest.mark.parametrize("kind", [dict, TensorDict])
def test_tensors_are_filled_and_returned(a: Client, b: Client, rows: list[int], kind: Any) -> None:
    meta = a.put(value(), partition_id="p").select_samples(rows)
    given = {"x": torch.full((len(rows), 4), -1), "y": torch.zeros(len(rows), dtype=torch.bfloat16)}
    out = given if kind is dict else TensorDict(given, batch_size=len(rows))
    addresses = {name: out[name].data_ptr() for name in given}
    got = b.get_data(meta, out=out)
    assert set(got.keys()) == {"x", "y", "object"}
    assert got["x"].tolist() == out["x"].tolist() == [list(range(4 * row, 4 * row + 4)) for row in rows]
    assert got["y"].tolist() == rows
    assert got["object"].tolist() == [str(row) for row in rows]
    assert {name: got[name].data_ptr() for name in given} == addresses


def test_the_slice_of_a_buffer(a: Client, b: Client) -> None:
    put = a.kv_batch_put([str(n) for n in range(6)], "p", value())
    buffer = torch.full((10, 4), -1)
    b.kv_batch_get_by_meta(put, ["x"], out={"x": buffer[2:8]})
    assert buffer[:2].eq(-1).all()
    assert buffer[2:8].flatten().tolist() == list(range(24))
    assert buffer[8:].eq(-1).all()
    got = b.kv_batch_get(["3"], "p", ["x", "y"], out={"x": buffer[:1]})
    assert buffer[0].tolist() == [12, 13, 14, 15]
    assert got["y"].tolist() == [3]


def test_large_values_and_several_runs(a: Client, b: Client) -> None:
    big = torch.arange(3 << 19)
    metas = [a.put(table(x=(big + n)[None]), partition_id="p") for n in range(3)]
    out = torch.zeros(3, 3 << 19, dtype=torch.int64)
    b.get_data(tq.BatchMeta.concat(metas), out={"x": out})
    assert all(torch.equal(out[n], big + n) for n in range(3))
    b.get_data(metas[1], out={"x": out[:1]})
    assert torch.equal(out[0], big + 1)


def test_nested_tables(a: Client, b: Client) -> None:
    inner = TensorDict({"y": torch.arange(3)}, batch_size=3)
    meta = a.put(TensorDict({"inner": inner, "x": torch.zeros(3)}, batch_size=3), partition_id="p")
    out = {"inner": {"y": torch.zeros(3, dtype=torch.int64)}}
    got = b.get_data(meta, out=out)
    assert got["inner", "y"].tolist() == out["inner"]["y"].tolist() == [0, 1, 2]


def test_rows_of_several_dtypes(a: Client, b: Client) -> None:
    a.kv_batch_put(["a"], "p", {"x": torch.ones(1, dtype=torch.float32)})
    a.kv_batch_put(["b"], "p", {"x": torch.ones(1, dtype=torch.float64)})
    out = torch.zeros(2, dtype=torch.float64)
    b.kv_batch_get(["a", "b"], "p", out={"x": out})
    assert out.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ([torch.zeros(6, 4)], "must be a TensorDict or a dict of tensors, got a list"),
        ({1: torch.zeros(6)}, "names of fields"),
        ({"x": [0]}, "must be a plain tensor, got a list"),
        ({"x": ragged(1, 2)}, "must be a plain tensor, got a nested tensor"),
        ({"z": torch.zeros(6)}, r"has the fields \['z'\], which these samples do not have"),
        ({"object": torch.zeros(6)}, "has objects, not tensors"),
        ({"x": torch.zeros(6, 4)}, r"dtype int64 and shape \[6, 4\] for these samples, got float32 and \[6, 4\]"),
        ({"x": torch.zeros(6, 5, dtype=torch.int64)}, r"got int64 and \[6, 5\]"),
        ({"x": torch.zeros(5, 4, dtype=torch.int64)}, r"got int64 and \[5, 4\]"),
        ({"x": torch.zeros(4, 6, dtype=torch.int64).T}, "must be contiguous"),
        ({"y": torch.zeros(6, requires_grad=True)}, "requires a gradient"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(a: Client, b: Client, out: Any, words: str) -> None:
    meta = a.put(value(), partition_id="p")
    good = torch.full((6,), -1, dtype=torch.bfloat16)
    if isinstance(out, dict) and "y" not in out:
        out = {"y": good, **out}
    with pytest.raises(InvalidArgumentError, match=words):
        b.get_data(meta, out=out)
    assert good.eq(-1).all()


def test_ragged_rows_are_refused(a: Client, b: Client) -> None:
    meta = a.put(table(x=ragged(1, 2)), partition_id="p")
    with pytest.raises(InvalidArgumentError, match=r"rows must have one shape, got \[\(1,\), \(2,\)\]"):
        b.get_data(meta, out={"x": torch.zeros(2, 2)})


@pytest.mark.parametrize("more", [{"device": "cpu"}, {"copy": False}])
def test_other_ways_exclude_it(a: Client, more: dict[str, Any]) -> None:
    meta = a.put(numbers(2), partition_id="p")
    with pytest.raises(InvalidArgumentError, match="out= cannot be used with"):
        a.get_data(meta, out={"x": torch.zeros(2, dtype=torch.int64)}, **more)
