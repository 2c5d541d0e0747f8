"""Gets by keys log a warning about what they leave out; puts of no rows do nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from simulated import numbers, ragged, table
from transfer_queue.metadata import BatchMeta, KVBatchMeta
from transfer_queue.testing import Client
from transfer_queue.wire.blocks.gather import stack_of

NO_ROWS: list[Any] = [
    TensorDict({"x": torch.zeros(0, 3)}, batch_size=[0]),
    TensorDict({"x": torch.zeros(0)}, batch_size=[0]),
    TensorDict({}, batch_size=[0]),
    {"x": []},
    {"x": torch.nested.nested_tensor([], layout=torch.strided)},
    {"x": torch.nested.nested_tensor_from_jagged(torch.zeros(0), torch.tensor([0]))},
]


@pytest.fixture
def keys(a: Client) -> list[str]:
    a.kv_batch_put(["k", "l", "m"], "p", table(x=torch.arange(3), y=ragged(1, 2, 3)))
    a.kv_put("k", "p", {"z": torch.tensor(1)})
    return ["k", "l", "m"]


class TestWhatAGetLeavesOut:
    def test_a_complete_answer_is_not_warned_about(self, a: Client, keys: list[str], caplog: Any) -> None:
        a.kv_batch_get("k", "p", ["x", "z"], missing="error")
        a.kv_batch_get(keys, "p", "x", missing="error")
        assert caplog.records == []

    def test_keys_and_fields_are_named_in_one_warning(self, a: Client, keys: list[str], caplog: Any) -> None:
        found = a.kv_batch_get(["k", "no", "l", "none"], "p", ["x", "z", "nowhere"])
        assert (found["x"].tolist(), set(found.keys())) == ([0, 1], {"x"})
        (record,) = caplog.records
        words = record.getMessage()
        for part in (
            "keys ['no', 'none']",
            "field 'z', which is missing in 1 of 2",
            "field 'nowhere', which is missing in 2 of 2",
            "missing='error'",
        ):
            assert part in words
        a.kv_batch_get(["k", "no", "l", "none"], "p", ["x", "z", "nowhere"])
        assert len(caplog.records) == 1

    def test_a_field_that_some_keys_have_is_named_when_none_was_selected(
        self, a: Client, keys: list[str], caplog: Any
    ) -> None:
        assert set(a.kv_batch_get(keys, "p").keys()) == {"x", "y"}
        assert "field 'z', which is missing in 2 of 3 rows" in caplog.text
        assert a.kv_batch_get(keys, "p", ["z"]).batch_size == torch.Size([0])

    @pytest.mark.parametrize(
        ("wanted", "select", "words"),
        [
            (["k", "no"], "x", r"keys \['no'\]"),
            (["k", "l"], ["x", "z"], "field 'z', which is missing in 1 of 2"),
            (["k", "l"], ["z"], "field 'z', which is missing in 1 of 2"),
            (["k", "l"], None, "field 'z', which is missing in 1 of 2"),
        ],
    )
    def test_an_error_instead(self, a: Client, keys: list[str], wanted: list[str], select: Any, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            a.kv_batch_get(wanted, "p", select, missing="error")

    def test_another_value_of_missing_is_refused(self, a: Client, keys: list[str]) -> None:
        with pytest.raises(ValueError, match=r"missing must be 'drop' or 'error', got 'raise'"):
            a.kv_batch_get(keys, "p", missing="raise")


class TestPutsOfNoRows:
    @pytest.mark.parametrize("data", NO_ROWS, ids=lambda data: str(type(data.get("x")).__name__))
    @pytest.mark.parametrize("more", [{}, {"tags": []}, {"group_ids": []}], ids=str)
    def test_of_new_samples(self, a: Client, data: Any, more: dict[str, Any]) -> None:
        meta = a.put(data, partition_id="p", **more)
        assert isinstance(meta, BatchMeta)
        assert (len(meta), meta.field_names) == (0, [])
        assert a.get_partition_list() == []

    @pytest.mark.parametrize("data", NO_ROWS, ids=lambda data: str(type(data.get("x")).__name__))
    def test_with_metadata(self, a: Client, data: Any) -> None:
        meta = a.put(numbers(2), partition_id="p").select_samples([])
        assert a.put(data, meta) is meta
        assert a.put(data, BatchMeta()) == BatchMeta() or len(a.put(data, BatchMeta())) == 0

    @pytest.mark.parametrize("data", [*NO_ROWS, {"x": stack_of([], 0)}, {}], ids=lambda d: str(list(d.keys())))
    @pytest.mark.parametrize("tags", [None, []])
    def test_by_keys(self, a: Client, data: Any, tags: Any) -> None:
        assert a.kv_batch_put([], "p", data, tags=tags) == KVBatchMeta([], [], "p", [])
        assert a.get_partition_list() == []

    def test_rows_without_keys_are_refused(self, a: Client) -> None:
        with pytest.raises(ValueError, match="no keys were given for the 2 rows"):
            a.kv_batch_put([], "p", numbers(2))
        with pytest.raises(ValueError, match="each of the 0 keys, got 1"):
            a.kv_batch_put([], "p", numbers(0), tags=[{}])
