"""Snapshots of partitions: pages of rows, each of one moment; and a sampler that replaces another one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Harness, column, tensor

from transfer_queue.core.queries import partition_view
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.messages.puts import ClearKeys, Publish
from transfer_queue.messages.queries import SnapshotReply, TakeSnapshot
from transfer_queue.sampler import BaseSampler, PrioritySampler, SequentialSampler


def rows(page: SnapshotReply) -> list[int]:
    return list(np.frombuffer(page.rows, "i8").tolist())


def put(h: Harness, keys: list[str], fields: tuple[str, ...] = ("x",)) -> None:
    tags = [{"k": key} for key in keys]
    h.ask(h.publish(len(keys), {name: tensor() for name in fields}, keys=keys, tags=tags))


def test_one_page() -> None:
    h = Harness()
    put(h, ["a", "b"], ("x", "y"))
    put(h, ["c"])
    h.ask(ClearKeys("p", ["b"]))
    h.dealt(1)
    page = h.look(TakeSnapshot("p"))
    assert (page.known, rows(page), page.fields, page.keys, page.start) == (True, [0, 2], ["x", "y"], ["a", "c"], None)
    assert np.frombuffer(page.produced, "i1").reshape(2, 2).tolist() == [[1, 1], [1, 0]]
    assert {task: list(column) for task, column in page.consumed.items()} == {"t": [1, 0]}
    assert page.tags == [{"k": "a"}, {"k": "c"}]


def test_a_snapshot_of_an_unknown_partition_or_without_keys() -> None:
    h = Harness()
    assert not h.look(TakeSnapshot("p")).known
    h.ask(h.publish(1, {"x": tensor()}))
    page = h.look(TakeSnapshot("p"))
    assert (page.known, page.keys, page.tags, page.consumed) == (True, None, None, {})


def test_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows come once, ascending, whatever is cleared in between; a partition created again is another one."""
    monkeypatch.setattr(partition_view, "SNAPSHOT_ROWS", 3)
    h = Harness()
    keys = [f"k{number}" for number in range(8)]
    put(h, keys)
    first = h.look(TakeSnapshot("p"))
    h.ask(ClearKeys("p", ["k1", "k3"]))
    second = h.look(TakeSnapshot("p", first.made, first.start))
    third = h.look(TakeSnapshot("p", first.made, second.start))
    assert [rows(page) for page in (first, second, third)] == [[0, 1, 2], [4, 5, 6], [7]]
    assert third.start is None
    h.ask(ClearPartition("p"))
    put(h, keys)
    assert not h.look(TakeSnapshot("p", first.made, first.start)).known
    assert h.look(TakeSnapshot("p")).known


class LastFirst(BaseSampler):
    """A user's sampler."""

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        chosen = list(reversed(list(ready_indexes)))[:batch_size]
        return chosen, chosen


class Nothing(BaseSampler):
    """A sampler that never deals anything."""

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        return [], []


def test_a_new_sampler_deals_all_later_batches() -> None:
    """The new sampler may read tags that the partition did not keep in columns before."""
    h = Harness()
    put(h, ["a", "b", "c"])
    assert h.dealt(1) == [0]
    h.take(h.controller.use_sampler(LastFirst()))
    assert h.dealt(1) == [2]
    h.take(h.controller.use_sampler(PrioritySampler("score")))
    tags = [{"score": score} for score in (1.0, 3.0, 2.0)]
    h.ask(h.publish(3, {"x": tensor()}, "q", keys=["d", "e", "f"], tags=tags))
    assert h.dealt(2, partition="q") == [4, 5]
    for row, score in enumerate((5.0, 7.0, 6.0)):
        h.ask(Publish("p", 1, rows=column([row]), tags=[{"score": score}]))
    assert h.dealt(2, "other") == [1, 2]


def test_waiting_claims_are_decided_again_by_the_new_sampler() -> None:
    """The new sampler may deal rows that the old one did not deal."""
    h = Harness(Nothing())
    put(h, ["a"])
    waiting = h.claim(1, wait=10.0)
    assert h.parked(waiting, "r")
    h.take(h.controller.use_sampler(SequentialSampler()))
    assert h.got(waiting) == [0]
