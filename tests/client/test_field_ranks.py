"""Rows of one field in several ranks: only a get that returns rows of several ranks has another container."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from simulated import ragged, same, table
from transfer_queue.metadata import BatchMeta
from transfer_queue.testing import Client

SCALARS = torch.tensor([1.5, 2.5, 3.5])
ODD = torch.ones(1, 1)


@pytest.fixture(autouse=True)
def records(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    return caplog


def put(client: Client, *, odd_first: bool = False) -> None:
    """Three scalars r0 to r2 and the matrix r3 in field r; the ranks of o differ within one block; rows of j differ."""
    puts = [
        lambda: client.kv_batch_put(["r0", "r1", "r2"], "p", table(r=SCALARS, j=ragged(1, 2, 3))),
        lambda: client.kv_put("r3", "p", {"r": ODD, "j": torch.ones(2, 2)}),
    ]
    for each in reversed(puts) if odd_first else puts:
        each()
    client.kv_batch_put(
        [f"r{row}" for row in range(4)], "p",
        table(o=NonTensorStack(torch.tensor(1.0), torch.ones(2), torch.tensor(3.0), torch.ones(3))),
    )  # fmt: skip


def by_keys(client: Client, keys: list[str], **more: Any) -> TensorDict:
    return client.kv_batch_get(keys, "p", **more)


def by_metadata(client: Client, keys: list[str], **more: Any) -> TensorDict:
    return client.get_data(client.kv_retrieve_meta(keys, "p"), **more)


def by_part_of_metadata(client: Client, keys: list[str], **more: Any) -> TensorDict:
    meta = client.kv_retrieve_meta(["r0", "r1", "r2", "r3"], "p")
    return client.get_data(meta.select_samples([int(key[1]) for key in keys]), **more)


def by_kv_metadata(client: Client, keys: list[str], **more: Any) -> TensorDict:
    meta = client.kv_batch_put(keys, "p", tags=[{"n": 1}] * len(keys))
    return client.kv_batch_get_by_meta(meta, **more)


def as_views(client: Client, keys: list[str], **more: Any) -> TensorDict:
    return client.kv_batch_get(keys, "p", copy=False, **more)


def to_a_device(client: Client, keys: list[str], **more: Any) -> TensorDict:
    return client.kv_batch_get(keys, "p", device="cpu", **more)


WAYS = [by_keys, by_metadata, by_part_of_metadata, by_kv_metadata, as_views, to_a_device]
Way = Callable[..., TensorDict]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("odd_first", [False, True])
def test_a_get_has_the_type_of_the_rows_that_it_returns(
    a: Client, b: Client, caplog: pytest.LogCaptureFixture, way: Way, odd_first: bool
) -> None:
    put(a, odd_first=odd_first)
    caplog.clear()
    scalars = way(b, ["r2", "r0"])
    assert same(scalars["r"], SCALARS[[2, 0]])
    assert same(scalars["o"], torch.tensor([3.0, 1.0]))
    assert (scalars["j"].layout, scalars["j"]._ragged_idx) == (torch.jagged, 1)
    odd = way(b, ["r3"])
    assert (odd["r"].layout, odd["r"].shape[0], odd["r"].dim()) == (torch.jagged, 1, 3)
    assert same(odd["r"].unbind()[0], ODD)
    assert [tuple(row.shape) for row in odd["o"].unbind()] == [(3,)]
    assert [tuple(row.shape) for row in way(b, ["r3", "r1"])["o"].unbind()] == [(3,), (2,)]
    names = {record.getMessage().split("'")[1] for record in caplog.records}
    assert names == {"r", "j"}, "the last get returned rows of both ranks"
    caplog.clear()
    for _ in range(2):
        both = way(b, ["r3", "r0", "r1"])
    for name, shapes in [("r", [(1, 1), (), ()]), ("o", [(3,), (), (2,)]), ("j", [(2, 2), (1,), (2,)])]:
        column = both.get(name)
        assert isinstance(column, NonTensorStack)
        assert [tuple(row.shape) for row in column.tolist()] == shapes
    (record,) = caplog.records
    assert "field 'o' of partition 'p': the rows of a get differ in their number of dimensions" in record.getMessage()


def test_other_layouts_are_not_warned_about(a: Client, caplog: pytest.LogCaptureFixture) -> None:
    put(a)
    whole = by_keys(a, ["r0", "r3"], layout="list")
    assert [tuple(row.shape) for row in whole.get("r").tolist()] == [(), (1, 1)]
    for layout in ("dense", "padded"):
        with pytest.raises(ValueError, match=r"'[roj]'"):
            by_keys(a, ["r0", "r3"], layout=layout)
        assert by_keys(a, ["r3", "r3"], layout=layout)["r"].shape == (2, 1, 1)
        assert same(by_keys(a, ["r1"], layout=layout, select_fields=["r"])["r"], SCALARS[1:2])
    assert caplog.records == []


def test_the_callers_tensors(a: Client) -> None:
    put(a)
    out = {"r": torch.zeros(3), "o": torch.zeros(2)}
    by_keys(a, ["r0", "r1", "r2"], select_fields=["r"], out={"r": out["r"]})
    by_keys(a, ["r0", "r2"], select_fields=["o"], out={"o": out["o"]})
    assert (out["r"].tolist(), out["o"].tolist()) == ([1.5, 2.5, 3.5], [1.0, 3.0])


def test_samples_of_several_partitions(a: Client) -> None:
    put(a)
    other = a.put(table(r=SCALARS, x=torch.arange(3)), partition_id="q")
    both = BatchMeta.concat([a.kv_retrieve_meta(["r1", "r3"], "p").select_fields(["r"]), other.select_fields(["r"])])
    assert same(a.get_data(both.select_samples([4, 0, 2]))["r"], SCALARS[[2, 1, 0]])
    assert [tuple(row.shape) for row in a.get_data(both).get("r").tolist()] == [(), (1, 1), (), (), ()]
