"""A field that holds tensors takes arrays and numbers as tensors; the first put decides what a field holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from simulated import rows_of, same, table
from transfer_queue.errors import FieldTypeError
from transfer_queue.messages.puts import Publish
from transfer_queue.metadata import BatchMeta
from transfer_queue.testing import Client, Cluster

F32 = torch.float32


def values_of(client: Client, keys: list[str], partition: str = "p") -> Any:
    return client.kv_batch_get(keys, partition)["x"]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (np.arange(3, dtype=np.float32), torch.arange(3.0)),
        (np.arange(3, dtype=">f4")[::-1], torch.tensor([2.0, 1.0, 0.0])),
        (np.array(2.5, np.float32), torch.tensor(2.5)),
        (np.float32(1.5), torch.tensor(1.5)),
        (1.5, torch.tensor(1.5)),
        (7, torch.tensor(7.0)),
        (True, torch.tensor(1.0)),
    ],
    ids=repr,
)
def test_a_field_of_tensors_takes_it_as_a_tensor(a: Client, b: Client, value: Any, wanted: torch.Tensor) -> None:
    a.kv_put("k", "p", {"x": torch.zeros(3)})
    b.kv_put("l", "p", {"x": value, "o": value})
    found = rows_of(values_of(a, ["k", "l"]))
    assert same(found[1], wanted)
    assert same(a.kv_batch_get("l", "p").get("o").tolist(), [value]), "a field without values stores what it gets"


@pytest.mark.parametrize(
    "column",
    [
        [1.0, 2.0],
        [np.float32(1.0), 2],
        NonTensorStack(1.0, 2.0),
        NonTensorData([1.0, 2.0], batch_size=[2]),
        np.array([1.0, 2.0], dtype=np.float32),
        [torch.tensor(1.0), 2.0],
        np.array([1.0, 2.0], dtype=object),
    ],
    ids=lambda column: type(column).__name__,
)
def test_whichever_put_brings_them(a: Client, column: Any) -> None:
    a.put(table(x=torch.zeros(2)), partition_id="p")
    a.kv_batch_put(["k", "l"], "p", {"x": column})
    assert same(values_of(a, ["k", "l"]), torch.tensor([1.0, 2.0]))
    meta = a.put({"x": column}, partition_id="p")  # type: ignore[arg-type]
    assert meta.field_schema["x"]["dtype"] == F32
    assert same(a.get_data(meta)["x"], torch.tensor([1.0, 2.0]))
    a.put({"x": column}, meta)  # type: ignore[arg-type]
    assert same(a.get_data(meta)["x"], torch.tensor([1.0, 2.0]))
    assert not meta.field_schema["x"]["is_non_tensor"]


def test_rows_of_several_partitions(a: Client) -> None:
    both = BatchMeta.concat([a.put(table(x=torch.zeros(2)), partition_id=p) for p in "pq"])
    a.put({"x": [1.0, 2.0, 3.0, 4.0]}, both)  # type: ignore[arg-type]
    assert same(a.get_data(both)["x"], torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert both.get_dtypes("x") == [F32] * 4


def test_numbers_take_the_dtype_of_the_field_where_they_fit_it(a: Client) -> None:
    a.kv_put("k", "p", {"x": torch.zeros((), dtype=torch.bfloat16), "n": torch.zeros((), dtype=torch.uint8)})
    a.kv_put("l", "p", {"x": 1.5, "n": 255})
    a.kv_put("m", "p", {"x": 1, "n": 256})
    meta = a.kv_retrieve_meta(["k", "l", "m"], "p")
    assert meta.get_dtypes("x") == [torch.bfloat16] * 3
    assert meta.get_dtypes("n") == [torch.uint8, torch.uint8, torch.int64]
    assert a.get_data(meta)["n"].tolist() == [0, 255, 256]


@pytest.mark.parametrize("number", [-(2**63) - 1, 2**64])
def test_an_integer_that_torch_cannot_hold_is_refused(a: Client, number: int) -> None:
    a.kv_batch_put(["x", "y"], "p", {"f": torch.zeros(2)})
    with pytest.raises(FieldTypeError, match="nothing was put"):
        a.kv_batch_put(["z"], "p", {"f": [number]})
    assert list(a.kv_list("p")["p"]) == ["x", "y"]


def test_a_value_that_is_not_a_number_is_refused_with_cause_and_remedy(a: Client, cluster: Cluster) -> None:
    a.kv_put("k", "p", {"x": torch.zeros(2)})
    leased = cluster.unit.table.leased
    for value in ("text", [1.0, 2.0], None, {"n": 1}, np.array(["s"]), 2**70):
        with pytest.raises(FieldTypeError, match=r"'x' holds tensors of float32 .* contains Python objects.*Put t"):
            a.kv_put("l", "p", {"x": value, "y": 1.0})
    assert a.kv_list("p") == {"p": {"k": {}}}
    assert cluster.unit.table.leased == leased


def test_a_field_of_objects_takes_no_tensors(a: Client) -> None:
    a.kv_put("k", "p", {"x": 1.0})
    with pytest.raises(FieldTypeError, match=r"'x' holds Python objects .* contains tensors of float32.*kv_put"):
        a.kv_put("l", "p", {"x": torch.tensor(1.0)})
    a.kv_put("l", "p", {"x": np.ones(2)})
    assert same(a.kv_batch_get(["k", "l"], "p").get("x").tolist(), [1.0, np.ones(2)])


class TestWhatAClientHasLearned:
    """A refused put is repeated, and later puts are not refused. Outdated knowledge of a client does no harm."""

    def publishes(self, a: Client, monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> list[Publish]:
        seen: list[Publish] = []
        handle = cluster.controller.handle

        def watched(client: str, peer: int, envelope: Any, now: float) -> Any:
            if isinstance(envelope.body, Publish):
                seen.append(envelope.body)
            return handle(client, peer, envelope, now)

        monkeypatch.setattr(cluster.controller, "handle", watched)
        return seen

    def test_one_refusal_for_all_puts(self, a: Client, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        a.kv_put("k", "p", {"x": torch.zeros(2)})
        seen = self.publishes(a, monkeypatch, cluster)
        for number in range(4):
            a.kv_put(str(number), "p", {"x": np.full(2, number, np.float32), "y": "text"})
        assert len(seen) == 5
        assert same(a.kv_batch_get(["3"], "p", "x", layout="dense")["x"], torch.full((1, 2), 3.0))

    def test_a_field_that_is_empty_again_stores_what_it_gets(self, a: Client, b: Client) -> None:
        a.kv_put("k", "p", {"x": torch.zeros(2)})
        a.kv_put("l", "p", {"x": np.ones(2)})
        b.kv_clear(["k", "l"], "p")
        a.kv_put("m", "p", {"x": np.ones(2)})
        assert same(a.kv_batch_get("m", "p").get("x").tolist(), [np.ones(2)])
        b.clear_partition("p")
        b.kv_put("n", "p", {"x": torch.zeros(2)})
        a.kv_put("o", "p", {"x": np.ones(2)})
        b.clear_partition("p")
        a.kv_put("q", "p", {"x": np.ones(2)})
        assert same(a.kv_batch_get("q", "p").get("x").tolist(), [np.ones(2)])

    def test_a_field_that_holds_objects_now_takes_them(self, a: Client, b: Client) -> None:
        a.kv_put("k", "p", {"x": torch.zeros(2)})
        a.kv_put("l", "p", {"x": 1.0})
        b.kv_clear(["k", "l"], "p")
        b.kv_put("m", "p", {"x": "text"})
        a.kv_put("n", "p", {"x": 1.0})
        assert a.kv_batch_get(["m", "n"], "p").get("x").tolist() == ["text", 1.0]


def test_a_tensordict_of_one_row(a: Client) -> None:
    a.kv_put("k", "p", {"x": torch.zeros(2)})
    a.kv_put("l", "p", TensorDict({"x": NonTensorStack(np.ones(2, np.float32))}, batch_size=[1]))
    assert same(rows_of(values_of(a, ["l"]))[0], torch.ones(2))
