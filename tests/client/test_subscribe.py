"""wait_for_change, subscribe and kv_list(where=), in virtual time."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from simulated import numbers
from transfer_queue.client.conversion.change_events import SampleChange
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.testing import Client, Cluster
from transfer_queue.wire.objects.object_values import DELETE

READY = {"status": "ready"}


class Point:
    """A value that only pickle carries."""

    def __init__(self, x: int) -> None:
        self.x = x


def kinds(events: list[SampleChange]) -> list[tuple[str | None, str]]:
    return [(event.key, event.kind) for event in events]


class TestWaitForChange:
    def test_tells_what_is_there_and_then_what_changes(self, a: Client, b: Client, cluster: Cluster) -> None:
        a.kv_batch_put(["k", "l"], "p", tags=[READY, {"status": "running"}])
        first = b.wait_for_change("p", where=READY)
        assert first
        assert (first.keys, first.global_indexes, first.tags) == (["k"], [0], [READY])
        assert (first.sealed, first.dropped, first.complete) == (False, False, True)
        cluster.later(7, lambda: a.kv_put("l", "p", tag=READY))
        second = b.wait_for_change("p", first.version, READY)
        assert (second.keys, second.global_indexes) == (["l"], [1])
        assert cluster.clock.now == 7
        assert second.versions == [second.version]
        assert second.version > first.version

    def test_a_wait_in_which_nothing_changed_is_false(self, a: Client, cluster: Cluster) -> None:
        nothing = a.wait_for_change("p", timeout=5)
        assert not nothing
        assert (nothing.version, nothing.keys, cluster.clock.now) == (-1, [], 5)
        a.kv_put("k", "p", tag={"status": "running"})
        later = a.wait_for_change("p", nothing.version, READY, timeout=0)
        assert not later
        assert later.version > 0
        assert cluster.clock.now == 5

    def test_waits_as_long_as_a_fetch_by_default(
        self, a: Client, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TQ_CONTROLLER_GET_METADATA_TIMEOUT", "11")
        assert not a.wait_for_change("p")
        assert cluster.clock.now == 11

    def test_tells_of_clears_seals_and_the_end(self, a: Client, b: Client) -> None:
        a.kv_batch_put(["k", "l"], "p", tags=[{}, {}])
        change = b.wait_for_change("p")
        a.kv_clear("k", "p")
        change = b.wait_for_change("p", change.version, READY)
        assert (change.cleared_keys, change.cleared_indexes, change.keys) == (["k"], [0], [])
        assert change.cleared_versions == [change.version]
        a.seal("p")
        change = b.wait_for_change("p", change.version)
        assert change
        assert change.sealed
        a.clear_partition("p")
        change = b.wait_for_change("p", change.version)
        assert change.dropped
        assert change.version == -1
        a.put(numbers(1), partition_id="p")
        assert b.wait_for_change("p", change.version).keys == [None]

    @pytest.mark.parametrize(
        ("value", "same", "other"),
        [
            (3, np.int64(3), 4), (3, torch.tensor(3.0), True), (True, True, 1), ("a", "a", "b"), (None, None, 0),
            ((1, 2), (1, 2), [1, 2]), ([1, (2,)], [1.0, (2,)], [1, 2]), (Point(1), Point(1), Point(2)),
            (np.arange(3), np.arange(3), [0, 1, 2]),
        ],
    )  # fmt: skip
    def test_equal_entries(self, a: Client, value: Any, same: Any, other: Any) -> None:
        a.kv_put("k", "p", tag={"v": value, "more": 1})
        assert a.wait_for_change("p", where={"v": same}, timeout=0).keys == ["k"]
        assert not a.wait_for_change("p", where={"v": other}, timeout=0)
        assert list(a.kv_list("p", where={"v": same})["p"]) == ["k"]
        assert a.kv_list("p", where={"v": other}) == {"p": {}}

    def test_tags_come_as_they_were_put(self, a: Client) -> None:
        a.kv_put("k", "p", tag={"t": (1, "x"), "p": {"q": b"z"}})
        assert a.wait_for_change("p").tags == [{"t": (1, "x"), "p": {"q": b"z"}}]

    @pytest.mark.parametrize("where", [[("a", 1)], "a", {1: 2}, {"a": DELETE}])
    def test_what_is_no_filter_is_refused(self, a: Client, where: Any) -> None:
        for ask in (
            lambda: a.wait_for_change("p", where=where),
            lambda: a.kv_list("p", where=where),
            lambda: a.subscribe("p", where),
            lambda: a.async_subscribe("p", where),
        ):
            with pytest.raises(InvalidArgumentError, match=r"where|tag entries"):
                ask()

    def test_other_arguments_that_cannot_be_right(self, a: Client) -> None:
        with pytest.raises(InvalidArgumentError, match="partition_id"):
            a.wait_for_change(3)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="partition_id"):
            a.subscribe(None)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="since"):
            a.wait_for_change("p", "newest")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="timeout"):
            a.wait_for_change("p", timeout=float("inf"))


class TestKVList:
    def test_of_one_or_all(self, a: Client) -> None:
        a.kv_batch_put(["k", "l"], "p", tags=[READY, {}])
        a.kv_put("m", "q", tag={"n": 1})
        assert a.kv_list(where=READY) == {"p": {"k": READY}, "q": {}}
        assert a.kv_list("p", where={}) == a.kv_list("p") == {"p": {"k": READY, "l": {}}}
        assert a.kv_list("r", where=READY) == {}
        assert asyncio.run(a.async_kv_list("p", where=READY)) == {"p": {"k": READY}}


class TestSubscribe:
    def test_events_in_order_until_the_partition_is_dropped(self, a: Client, b: Client, cluster: Cluster) -> None:
        a.kv_put("old", "p", tag=READY)
        for seconds, action in enumerate(
            [
                lambda: a.kv_put("new", "p", tag={"status": "running"}),
                lambda: a.kv_put("new", "p", tag=READY),
                lambda: a.kv_clear("old", "p"),
                lambda: a.kv_put("old", "p", tag={"status": "ready", "n": 2}),
                lambda: a.seal("p"),
                lambda: a.clear_partition("p"),
            ],
            start=100,  # beyond what one question waits
        ):
            cluster.later(seconds, action)
        events = list(b.subscribe("p", READY))
        assert kinds(events) == [("old", "changed"), ("new", "changed"), ("old", "cleared"), ("old", "changed")]
        assert [event.global_index for event in events] == [0, 1, 0, 2]
        assert events[-1].tag == {"status": "ready", "n": 2}
        assert [event.version for event in events] == sorted({event.version for event in events})
        assert cluster.clock.now == 105

    def test_what_happens_between_two_events_is_told_in_order(self, a: Client, b: Client) -> None:
        a.kv_batch_put(["k", "l"], "p", tags=[{"n": 1}, {"n": 1}])
        events = b.subscribe("p")
        assert [next(events).key, next(events).key] == ["k", "l"]
        a.kv_put("l", "p", tag={"n": 2})
        a.kv_clear("k", "p")
        a.kv_put("l", "p", tag={"n": 3})
        a.kv_put("k", "p", tag={"n": 4})
        assert [(e.key, e.kind, e.tag) for e in itertools.islice(events, 3)] == [
            ("k", "cleared", {}), ("l", "changed", {"n": 3}), ("k", "changed", {"n": 4}),
        ]  # fmt: skip

    def test_goes_on_from_an_event(self, a: Client, b: Client) -> None:
        a.kv_batch_put(["k", "l"], "p", tags=[{}, {}])
        a.kv_put("m", "p", tag={})
        events = b.subscribe("p")
        next(events)
        second = next(events)
        assert kinds(list(itertools.islice(b.subscribe("p", since=second.version - 1), 3))) == [
            ("k", "changed"), ("l", "changed"), ("m", "changed"),
        ]  # fmt: skip
        assert next(b.subscribe("p", since=second.version)).key == "m"

    def test_nothing_stays_at_the_server_when_the_loop_is_left(self, a: Client, b: Client, cluster: Cluster) -> None:
        a.kv_put("k", "p", tag={})
        for _ in b.subscribe("p"):
            break
        events = b.subscribe("p")
        next(events)
        assert not cluster.controller.state.waiting.by_waiter
        events.close()  # type: ignore[attr-defined]

    def test_a_gap_is_told(self, monkeypatch: pytest.MonkeyPatch, a: Client, b: Client) -> None:
        monkeypatch.setattr("transfer_queue.core.tables.changes.MAX_CLEARED", 2)
        keys = [f"k{i}" for i in range(4)]
        a.kv_batch_put(keys, "p", tags=[{} for _ in keys])
        events = b.subscribe("p")
        assert [next(events).key for _ in keys] == keys
        for key in keys[:3]:
            a.kv_clear(key, "p")
        gap = next(events)
        assert (gap.kind, gap.key, gap.global_index) == ("incomplete", None, -1)
        assert kinds([next(events), next(events)]) == [("k1", "cleared"), ("k2", "cleared")]

    def test_awaited(self, a: Client, b: Client, cluster: Cluster) -> None:
        cluster.later(3, lambda: a.kv_put("k", "p", tag=READY))
        cluster.later(99, lambda: a.clear_partition("p"))

        async def follow() -> list[SampleChange]:
            return [event async for event in b.async_subscribe("p", READY)]

        assert kinds(asyncio.run(follow())) == [("k", "changed")]
        assert cluster.clock.now == 99
