"""A large value in a tag causes one warning, which recommends a field, in whichever way the tag is put."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import transfer_queue as tq
from simulated import numbers
from transfer_queue.testing import Client

KIB = 1024


def put_with_metadata(a: Client, tag: Any) -> None:
    meta = a.put(numbers(2), partition_id="p")
    meta.update_custom_meta([{}, tag])
    a.put(numbers(2, name="y"), metadata=meta)


def replace_tags(a: Client, tag: Any) -> None:
    meta = a.put(numbers(2), partition_id="p")
    meta.update_custom_meta([{}, tag])
    a.set_custom_meta(meta)


WAYS: dict[str, Callable[[Client, Any], Any]] = {
    "kv_put": lambda a, tag: a.kv_put("k", "p", {"x": 1}, tag),
    "kv_put of a tag alone": lambda a, tag: a.kv_put("k", "p", tag=tag),
    "kv_batch_put": lambda a, tag: a.kv_batch_put(["k", "l"], "p", numbers(2), [{}, tag]),
    "kv_batch_put of many rows": lambda a, tag: a.kv_batch_put(list("abcdefghij"), "p", tags=[{"n": 1}] * 9 + [tag]),
    "kv_batch_put of the same names": lambda a, tag: a.kv_batch_put(list("abcdefghij"), "p", tags=[tag] * 10),
    "put": lambda a, tag: a.put(numbers(2), partition_id="p", tags=[{}, tag]),
    "put with metadata": put_with_metadata,
    "set_custom_meta": replace_tags,
    "kv_update": lambda a, tag: a.kv_update("k", "p", "x", lambda old: {"x": 1}, empty={"x": 0}, tag=tag),
}


def warnings_of(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if "tag entry" in record.getMessage()]


@pytest.mark.parametrize("way", WAYS)
def test_one_warning_for_each_entry(a: Client, way: str, caplog: Any) -> None:
    for count in (120_000, 130_000):
        WAYS[way](a, {"n": 1, "ids": list(range(count))})
        a.clear_partition("p")
    (words,) = warnings_of(caplog)
    assert "the tag entry 'ids' of a sample has a value of 457.6 KiB" in words
    assert "above 16.0 KiB" in words
    assert "Put such a value as a field (fields={'ids': ...})" in words
    WAYS[way](a, {"other": "x" * 17 * KIB})
    assert ["'other' of a sample has a value of 17.0 KiB" in words for words in warnings_of(caplog)] == [False, True]


@pytest.mark.parametrize("value", [
    "x" * (16 * KIB + 1), "ä" * (8 * KIB), b"x" * (16 * KIB + 1), {"a": ["x" * 16 * KIB]}, [2.5] * 2 * KIB,
    np.ones(2 * KIB), torch.ones(4 * KIB), tuple(range(100_000)),
], ids=lambda value: type(value).__name__)  # fmt: skip
@pytest.mark.parametrize("rows", [1, 9])
def test_values_of_every_kind(a: Client, value: Any, rows: int, caplog: Any) -> None:
    a.kv_batch_put([f"k{row}" for row in range(rows)], "p", tags=[{"v": value}] * rows)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("value", ["x" * 16_000, list(range(5000)), {"a": 1}, 5, 2.5, None, tq.DELETE, np.ones(1000)])
@pytest.mark.parametrize("rows", [1, 9, 300])
def test_smaller_values_are_not_warned_about(a: Client, value: Any, rows: int, caplog: Any) -> None:
    a.kv_batch_put(
        [f"k{row}" for row in range(rows)], "p", tags=[{"v": value, "row": f"{row}" * 99} for row in range(rows)]
    )
    assert warnings_of(caplog) == []
