"""Arguments that cannot be are errors of the tree, whatever their type, and hurt neither client nor servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from simulated import numbers
from transfer_queue import StreamingDataset, consumed_by
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.testing import Client

HUGE = 10**30
SURROGATE = "\ud800"  # a str that has no UTF-8
MOST = (1 << 63) - 1

WRONG: list[tuple[str, Callable[[Client], Any]]] = [
    ("str that is no Unicode", lambda a: a.kv_list(SURROGATE)),
    ("key that is no Unicode", lambda a: a.kv_put(SURROGATE, "p", {"x": torch.ones(1)})),
    ("huge version", lambda a: a.wait_for_change("p", HUGE, timeout=0.1)),
    ("huge task", lambda a: a.get_consumption_status(HUGE, "p")),
    ("an object", lambda a: a.explain("p", key=object())),
    ("huge timeout", lambda a: a.kv_list(timeout=HUGE)),
    ("huge wait", lambda a: a.get_meta(["x"], 1, "p", task_name="t", timeout=1e10)),
    ("scalar fields", lambda a: a.get_meta(torch.tensor(5), 1, "p", task_name="t")),
    ("scalar keys", lambda a: a.kv_clear(torch.tensor(5), "p")),
    ("huge index", lambda a: a.kv_retrieve_keys([HUGE], "p")),
    ("no index", lambda a: a.kv_retrieve_keys(None, "p")),
    ("index of str", lambda a: a.kv_retrieve_keys([""], "p")),
    ("no columns", lambda a: a.put({1: 2}, partition_id="p")),
    ("no parser", lambda a: a.put(numbers(1), partition_id="p", data_parser=-1)),
    ("tags of int", lambda a: a.kv_batch_put(["k"], "p", tags=3)),
    ("scalar groups", lambda a: a.put(numbers(1), partition_id="p", group_ids=torch.tensor(5))),
    ("no tasks", lambda a: a.create_partition("p", free_when=consumed_by[None])),
    ("keep_seconds", lambda a: a.create_partition("p", keep_seconds=HUGE)),
]


@pytest.mark.parametrize("call", [call for _, call in WRONG], ids=[name for name, _ in WRONG])
def test_it_says_what_was_wanted(a: Client, call: Callable[[Client], Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        call(a)
    assert a.get_partition_list() == []
    assert a.put(numbers(2), partition_id="p").size == 2, "the client works on"


def test_numbers_of_numpy_and_torch_are_numbers(a: Client) -> None:
    assert a.create_partition("p", group_size=np.int64(2), keep_rows=torch.tensor(4))
    assert a.put(numbers(2), partition_id="p", group_ids=[0, 0]).size == 2
    assert a.kv_retrieve_keys(np.array([1, 0]), "p") == a.kv_retrieve_keys(range(2), "p") == [None, None]
    assert a.kv_retrieve_keys(np.int64(1), "p") == [None]


def test_the_largest_numbers_do_not_end_status(a: Client) -> None:
    a.create_partition("p", group_size=MOST, max_staleness=MOST, rows_per_version=MOST)
    a.set_policy_version("p", MOST)
    a.want("p", MOST, "t")
    assert a.wanted("p", "t", most=MOST) == MOST
    (partition,) = a.status().partitions
    assert partition.policy.limit == MOST
    assert a.put(numbers(1), partition_id="p").size == 1


def test_datasets(a: Client) -> None:
    good: dict[str, Any] = {
        "config": a, "batch_size": 2, "micro_batch_size": 1, "data_fields": ["x"], "partition_id": "p",
        "task_name": "t", "dp_rank": 0,
    }  # fmt: skip
    wrong: list[tuple[str, Any]] = [
        ("batch_size", "2"), ("batch_size", 1.5), ("micro_batch_size", torch.ones(2)), ("data_fields", 5),
        ("data_fields", [None]), ("data_fields", []), ("dp_rank", None), ("dp_rank", "0"), ("keep_batches", 0.5),
    ]  # fmt: skip
    for name, value in wrong:
        with pytest.raises(InvalidArgumentError, match=name):
            StreamingDataset(**{**good, name: value})
    with pytest.raises(InvalidArgumentError, match="state_dict"):
        StreamingDataset(**good).load_state_dict(None)  # type: ignore[arg-type]
