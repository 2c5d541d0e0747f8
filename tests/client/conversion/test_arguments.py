"""Arguments that cannot be are errors of the tree, whatever their type, and hurt neither client nor servers."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from simulated import numbers
from transfer_queue import consumed_by
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.metadata import BatchMeta
from transfer_queue.testing import Client

HUGE = 10**30
SURROGATE = "\ud800"  # a str that has no UTF-8
MOST = (1 << 63) - 1

WRONG: list[tuple[str, Callable[[Client], Any]]] = [
    ("str that is no Unicode", lambda a: a.kv_list(SURROGATE)),
    ("key that is no Unicode", lambda a: a.kv_put(SURROGATE, "p", {"x": torch.ones(1)})),
    ("huge version", lambda a: a.wait_for_change("p", HUGE, timeout=0.1)),
    ("huge task", lambda a: a.get_consumption_status(HUGE, "p")),
    ("task of int", lambda a: a.get_meta(["x"], 1, "p", task_name=1)),
    ("consumption of int", lambda a: a.get_consumption_status(3, "p")),
    ("consumption of nobody", lambda a: a.check_consumption_status(None, "p")),
    ("reset of int", lambda a: a.reset_consumption("p", 3)),
    ("explain a task of int", lambda a: a.explain("p", task=3)),
    ("explain a key of int", lambda a: a.explain("p", key=3)),
    ("an object", lambda a: a.explain("p", key=object())),
    ("explain a key as an index", lambda a: a.explain("p", "a")),
    ("explain half an index", lambda a: a.explain("p", 0.5)),
    ("explain a huge index", lambda a: a.explain("p", HUGE)),
    ("finite that is no bool", lambda a: a.await_batch(["x"], 1, "p", "t", finite="no", timeout=0.1)),
    ("hold that is no bool", lambda a: a.await_data(["x"], 1, "p", "t", hold=2, timeout=0.1)),
    ("since that is no version", lambda a: a.await_ready(["x"], 1, "p", "t", since="now", timeout=0.1)),
    ("change since half a version", lambda a: a.wait_for_change("p", 0.5, timeout=0.1)),
    ("seal that may be", lambda a: a.seal("p", create="yes")),
    ("drain that may be", lambda a: a.drain_unit(0, undo=None)),
    ("producers of nobody", lambda a: a.create_partition("p", producers=None)),
    ("replicas of nothing", lambda a: a.create_partition("p", replicas=None)),
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
    ("a device that is not here", lambda a: a.kv_batch_get("k", "p", device="cuda:63")),
    ("a device of no kind", lambda a: a.get_data(BatchMeta(), device="abacus")),
    ("a device of int", lambda a: a.await_data("x", 1, "p", "t", device=HUGE)),
    ("a device without values", lambda a: a.kv_batch_get("k", "p", device="meta")),
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


class Name(str, enum.Enum):
    """Names as configurations have them: their str() is not what they say."""

    PARTITION = "p"
    TASK = "t"
    KEY = "k0"
    FIELD = "x"


class Own(str):
    """A str that is no plain one."""


@pytest.mark.parametrize("kind", [np.str_, Name, Own])
def test_every_kind_of_str_is_a_name(a: Client, kind: Callable[[str], Any]) -> None:
    p, t, k, x = map(kind, ("p", "t", "k0", "x"))
    meta = a.kv_batch_put([k], p, {x: torch.arange(1)}, [{x: 1}])
    assert [*map(type, meta.keys), *map(type, meta.fields or [])] == [str, str]
    assert a.kv_put(k, p, {x: torch.tensor(5)}, {x: 2}, group_id=7).keys == ["k0"]
    assert a.kv_batch_get(np.array(["k0"]) if kind is np.str_ else [k], p, x)["x"].tolist() == [5]
    assert a.kv_list(p) == {"p": {"k0": {"x": 2}}}
    found = a.get_meta([x], 1, p, task_name=t, sampling_config={x: np.float64(1), "n": np.int64(1)})
    assert found.global_indexes == [0]
    assert a.check_consumption_status(t, p)
    assert a.check_consumption_status("t", "p")
    assert a.reset_consumption(p, t)
    assert not a.check_consumption_status("t", "p")
    a.kv_clear(k, p)
    assert a.kv_list() == {"p": {}}


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64])
def test_seconds_of_numpy(a: Client, kind: Callable[[int], Any]) -> None:
    assert a.kv_list(timeout=kind(2)) == {}


def test_the_largest_numbers_do_not_end_status(a: Client) -> None:
    a.create_partition("p", group_size=MOST, max_staleness=MOST, rows_per_version=MOST)
    a.set_policy_version("p", MOST)
    a.want("p", MOST, "t")
    assert a.wanted("p", "t", most=MOST) == MOST
    (partition,) = a.status().partitions
    assert partition.policy.limit == MOST
    assert a.put(numbers(1), partition_id="p").size == 1


def test_a_warning_of_the_controller_is_logged_once(a: Client, caplog: pytest.LogCaptureFixture) -> None:
    a.kv_put("k", "train_0", {"x": 1})
    for _ in range(2):
        assert a.reset_consumption("tarin_0")
        assert a.drop("tarin_0", groups="g", reason="bad") == 0
        a.get_meta("x", 1, "train_0", task_name="t", sampling_config={"dp_rnk": 0}, timeout=0)
        a.reset_consumption("train_0")
    a.seal("train_0")
    a.seal("train_1", create=True)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert said[0] == "partition 'tarin_0' does not exist (did you mean 'train_0'?): reset_consumption has no effect"
    assert "drop has no effect" in said[1]
    assert "'dp_rnk'; did you mean 'dp_rank'" in said[2]
    a.seal("train_3")
    assert "seal(..., create=True)" in caplog.records[-1].getMessage()
