"""The buffer for programs that put row by row."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from transfer_queue.client.buffered_puts import BufferedPuts
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.core.events.records import SamplesPut
from transfer_queue.errors import InvalidArgumentError, SealedError
from transfer_queue.testing import Client, Cluster


def buffered(client: Client, max_rows: int = 256, max_delay: float | None = None) -> BufferedPuts:
    return TransferQueueClient.buffered(client, max_rows, max_delay)  # type: ignore[arg-type]


def keys(client: Client, partition: str = "p") -> list[str]:
    return list(client.kv_list(partition).get(partition, {}))


def test_everything_is_published_at_the_end_of_the_block(a: Client, cluster: Cluster) -> None:
    with buffered(a, 10) as puts:
        for n in range(25):
            puts.kv_put(f"k{n}", "p", {"x": torch.tensor(n), "o": [n]}, {"n": n}, group_id=n // 2)
            assert len(keys(a)) == (n + 1) // 10 * 10
    assert keys(a) == [f"k{n}" for n in range(25)]
    assert a.kv_batch_get([f"k{n}" for n in range(25)], "p")["x"].tolist() == list(range(25))
    assert [tag["n"] for tag in a.kv_list("p")["p"].values()] == list(range(25))
    assert sum(isinstance(record, SamplesPut) for record in cluster.records) == 3


def test_a_second_put_of_a_sample_comes_after_the_first(a: Client) -> None:
    with buffered(a) as puts:
        for n in range(3):
            puts.kv_put("k", "p", {"x": torch.tensor(n)})
            puts.kv_put("k", "p", tag={"n": n})
    assert a.kv_list("p") == {"p": {"k": {"n": 2}}}
    assert a.kv_batch_get("k", "p")["x"].tolist() == [2]


def test_different_fields_partitions_and_large_values(a: Client) -> None:
    with buffered(a) as puts:
        puts.kv_put("a", "p", {"x": torch.zeros(3)})
        puts.kv_put("b", "p", {"x": torch.zeros(100_000)})
        puts.kv_put("c", "q", {"x": torch.zeros(3)})
        puts.kv_put("d", "p", {"y": "text"}, {"n": 1})
    assert sorted(keys(a)) == ["a", "b", "d"]
    assert keys(a, "q") == ["c"]
    assert a.kv_batch_get("b", "p", "x", layout="list")["x"][0].shape == (100_000,)


def test_an_error_names_the_rows(a: Client) -> None:
    a.kv_put("old", "sealed", {"x": torch.tensor(0)})
    a.seal("sealed")
    puts = buffered(a)
    for key in ("n0", "old", "n1"):
        puts.kv_put(key, "sealed", {"x": torch.tensor(7)})
    puts.kv_put("k", "p", {"x": torch.tensor(7)})
    with pytest.raises(SealedError, match="2 of the buffered puts failed: 'n0' of partition 'sealed', 'n1' of"):
        puts.__exit__(None, None, None)
    assert keys(a) == ["k"]
    assert a.kv_batch_get("old", "sealed")["x"].tolist() == [7]


def test_the_error_of_the_block_is_the_one_that_is_raised(a: Client) -> None:
    a.seal("p", create=True)
    puts = buffered(a)
    puts.kv_put("a", "p", {"x": torch.tensor(1)})
    puts.kv_put("b", "q", {"x": torch.tensor(1)})
    puts.__exit__(KeyError, KeyError("mine"), None)
    assert keys(a, "q") == ["b"]


def test_an_interrupt_loses_nothing(a: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    run, interrupts = a._run, [KeyboardInterrupt()]

    def interrupted(operation: Any) -> Any:
        if interrupts:
            operation.close()
            raise interrupts.pop()
        return run(operation)

    monkeypatch.setattr(a, "_run", interrupted)
    puts = buffered(a, 2)
    puts.kv_put("a", "p", {"x": torch.tensor(1)})
    with pytest.raises(KeyboardInterrupt):
        puts.kv_put("b", "p", {"x": torch.tensor(1)})
    puts.__exit__(None, None, None)
    assert keys(a) == ["a", "b"]


def test_a_put_is_published_after_the_delay(a: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    published = threading.Event()
    run = a._run

    def noting(operation: Any) -> Any:
        try:
            return run(operation)
        finally:
            published.set()

    monkeypatch.setattr(a, "_run", noting)
    with buffered(a, 100, 0.01) as puts:
        puts.kv_put("a", "p", {"x": torch.tensor(1)})
        assert published.wait(30)
        assert keys(a) == ["a"]


def test_wrong_use(a: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="max_rows"):
        buffered(a, 0)
    with buffered(a) as puts:
        with pytest.raises(InvalidArgumentError, match="neither"):
            puts.kv_put("a", "p")
        with pytest.raises(InvalidArgumentError, match="key"):
            puts.kv_put(3, "p", {"x": 1})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="has ended"):
        puts.kv_put("a", "p", {"x": 1})
