"""Gets that wait at the same time: one lookup, one gather, and what each would have got alone."""

from __future__ import annotations

import dataclasses
import fractions
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from simulated import Start, rows_of, same
from store_in_memory import KIND, MemoryStore
from transfer_queue.client import reader
from transfer_queue.client.units import Units
from transfer_queue.errors import InvalidArgumentError, UncarriableValueError
from transfer_queue.messages.queries import Lookup, LookupReply
from transfer_queue.storage.arena.arena_views import is_view
from transfer_queue.testing import Client, Cluster
from transfer_queue.wire.blocks import gather


@pytest.fixture
def lookups(a: Client, monkeypatch: pytest.MonkeyPatch) -> list[Lookup]:
    """The lookups that client `a` makes."""
    made: list[Lookup] = []
    look_up = a.state.look_up

    def noting(request: Lookup, timeout: float | None) -> Any:
        made.append(request)
        return look_up(request, timeout)

    monkeypatch.setattr(a.operations._gets, "_look_up", noting)
    monkeypatch.setattr(a.state, "look_up", noting)
    return made


def get_all(cluster: Cluster, client: Client, wanted: list[tuple[Any, Any]], **options: Any) -> list[Any]:
    tasks = [client.start(client.operations.kv_batch_get(keys, "p", names, **options)) for keys, names in wanted]
    cluster.wait(lambda: all(task.done for task in tasks))
    return [task.error or task.result() for task in tasks]


def fill(client: Client, cluster: Cluster) -> None:
    rows = [{"x": torch.arange(n % 3), "y": torch.tensor(float(n)), "o": f"text {n}"} for n in range(12)]
    for n, fields in enumerate(rows[:4]):
        client.kv_put(f"k{n}", "p", fields)
    tasks = [client.start(client.operations.kv_put(f"k{n}", "p", rows[n])) for n in range(4, 12)]
    cluster.wait(lambda: all(task.done for task in tasks))


@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "list"}, {"layout": "padded"}, {"layout": "dense"}, {"shared": True}, {"copy": False}],
    ids=str,
)
def test_each_gets_its_own_rows(
    a: Client, b: Client, cluster: Cluster, lookups: list[Lookup], options: dict[str, Any]
) -> None:
    fill(b, cluster)
    wanted = [("k1", None), (["k5", "k2", "k5"], None), ("k11", ["y"]), (["k0", "k4"], None), ("k7", "y"), ("k3", None)]
    found = get_all(cluster, a, wanted, **options)
    assert len(lookups) == 4  # the first of each kind alone, then those that waited, of which one is the only one
    for (keys, names), got in zip(wanted, found, strict=True):
        if options == {"layout": "dense"} and keys == ["k0", "k4"]:
            with pytest.raises(InvalidArgumentError, match=re.escape(str(got))):
                b.kv_batch_get(keys, "p", names, **options)
            continue
        alone = b.kv_batch_get(keys, "p", names, **options)
        assert set(got.keys()) == set(alone.keys())
        for name in set(got.keys()):
            assert type(got[name]) is type(alone[name])
            assert getattr(got[name], "layout", None) == getattr(alone[name], "layout", None)
            assert same(rows_of(got[name]), rows_of(alone[name]))


def test_what_is_missing_concerns_only_its_own_get(a: Client, b: Client, cluster: Cluster) -> None:
    fill(b, cluster)
    b.kv_put("poor", "p", {"y": torch.tensor(1.0)})
    found = get_all(cluster, a, [("k1", None), ("unknown", None), ("k2", None), ("poor", None), ("k3", None)])
    assert isinstance(found[1], InvalidArgumentError)
    assert "'unknown'" in str(found[1])
    assert [set(found[at].keys()) for at in (0, 2, 3, 4)] == [{"x", "y", "o"}, {"x", "y", "o"}, {"y"}, {"x", "y", "o"}]
    assert [found[at]["y"].item() for at in (0, 2, 3, 4)] == [1.0, 2.0, 1.0, 3.0]


@pytest.mark.parametrize(("count", "options"), [(1, {"timeout": 1.0}), (100, {})], ids=["a timeout", "many keys"])
def test_a_get_with_a_limit_of_its_own_goes_alone(
    a: Client, b: Client, cluster: Cluster, lookups: list[Lookup], count: int, options: dict[str, Any]
) -> None:
    fill(b, cluster)
    get_all(cluster, a, [(["k1"] * count, None)] * 4, **options)
    assert [len(lookup.keys or ()) for lookup in lookups] == [count] * 4


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each gather."""
    counts: list[int] = []

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def count(reply: LookupReply, *arguments: Any, **more: Any) -> Any:
            counts.append(reply.count)
            return function(reply, *arguments, **more)

        return count

    for function in (gather.gather, gather.gather_each):
        monkeypatch.setattr(reader, function.__name__, counting(function))
    return counts


def test_those_that_travel_together_are_gathered_together(
    a: Client, b: Client, cluster: Cluster, gathers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(b, cluster)
    wanted = [(f"k{n}", None) for n in range(8)]
    first = get_all(cluster, a, wanted)
    assert gathers == [1, 7]
    gathers.clear()
    monkeypatch.setattr(gather, "MAX_AT_ONCE", 10)
    again = get_all(cluster, a, wanted)
    assert gathers == [1, 7, *[1] * 7]
    for one, other in zip(first, again, strict=True):
        assert all(same(rows_of(one[name]), rows_of(other[name])) for name in ("x", "y", "o"))


@pytest.mark.parametrize("layout", ["unknown", ["jagged"]])
def test_an_unknown_layout_is_an_error_of_each(a: Client, b: Client, cluster: Cluster, layout: Any) -> None:
    fill(b, cluster)
    for outcome in get_all(cluster, a, [(f"k{n}", None) for n in range(4)], layout=layout):
        assert isinstance(outcome, InvalidArgumentError)
        assert str(outcome).startswith("layout must be one of jagged")


def test_no_two_share_memory(a: Client, b: Client, cluster: Cluster) -> None:
    b.kv_batch_put(["k", "other"], "p", {"x": torch.arange(4).view(2, 2), "y": torch.tensor([5.0, 6.0])})
    wanted = [(["k"], None), (["k"], None), (["k", "k"], None), (["k"], None), (["other", "k"], None)]
    tables = get_all(cluster, a, wanted)
    for table in tables:
        rows = [rows_of(table["x"])[-1].tolist(), table["y"][-1].item()]
        assert rows == [[0, 1], 5.0]
        table["x"].values().untyped_storage().fill_(255)
        table["y"].untyped_storage().fill_(255)


def test_an_object_that_cannot_be_decoded_concerns_only_its_own_get(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start()
    a, b = cluster.client("a"), cluster.client("b")
    for n in range(4):
        b.kv_put(f"k{n}", "p", {"o": fractions.Fraction(1, 2) if n == 2 else f"text {n}"})
    a.get_partition_list()  # the client learns its settings
    monkeypatch.setattr(a.state, "_settings", dataclasses.replace(a.state.settings, allow_pickle=False))
    outcomes = get_all(cluster, a, [(f"k{n}", None) for n in range(4)])
    assert isinstance(outcomes.pop(2), UncarriableValueError)
    assert [table["o"].tolist() for table in outcomes] == [["text 0"], ["text 1"], ["text 3"]]


def test_fields_of_several_dtypes(a: Client, b: Client, cluster: Cluster) -> None:
    for n in range(6):
        b.kv_put(f"k{n}", "p", {"x": torch.full((2,), n, dtype=(torch.int32, torch.float32)[n % 2])})
    tables = get_all(cluster, a, [(["k0", "k1"], None), ("k1", None), ("k2", None), (["k3", "k4"], None), ("k5", None)])
    dtypes = [table["x"].dtype for table in tables]
    assert dtypes == [torch.float32, torch.float32, torch.int32, torch.float32, torch.float32]
    assert [table["x"].values().tolist()[-1] for table in tables] == [1, 1, 2, 4, 5]


def test_rows_of_one_rank_beside_those_of_others(a: Client, b: Client, cluster: Cluster) -> None:
    for n in range(6):
        b.kv_put(f"k{n}", "p", {"x": torch.full((2,) * (n % 3), n)})
    wanted = [("k1", None), ("k0", None), ("k1", None), (["k1", "k4"], None), (["k2", "k3"], None), ("k5", None)]
    for (keys, _), got in zip(wanted, get_all(cluster, a, wanted), strict=True):
        alone = b.kv_batch_get(keys, "p")["x"]
        assert type(got["x"]) is type(alone)
        assert same(rows_of(got["x"]), rows_of(alone))


def test_rows_without_bytes_share_nothing(a: Client, b: Client, cluster: Cluster) -> None:
    keys = [f"k{n}" for n in range(6)]
    b.kv_batch_put(keys, "p", {"x": torch.zeros(6, 2, 0)})
    wanted = [(keys[n : n + 2], None) for n in range(5)]
    for got in [*get_all(cluster, a, wanted, shared=True), b.kv_batch_get(["k1", "k0"], "p", shared=True)]:
        assert got["x"].layout == torch.jagged
        assert [row.shape for row in got["x"].unbind()] == [(2, 0), (2, 0)]


def test_a_partition_that_is_no_name_is_an_error_of_its_own_get(a: Client, b: Client, cluster: Cluster) -> None:
    fill(b, cluster)
    partitions: list[Any] = ["p", "p", ["p"], "p", {}]
    tasks = [a.start(a.operations.kv_batch_get("k5", partition)) for partition in partitions]
    cluster.wait(lambda: all(task.done for task in tasks))
    assert [type(task.error) for task in tasks] == [
        type(None), type(None), InvalidArgumentError, type(None), InvalidArgumentError
    ]  # fmt: skip


def test_views_and_tensors_of_the_caller(a: Client, b: Client, cluster: Cluster) -> None:
    fill(b, cluster)
    views = get_all(cluster, a, [(f"k{n}", "y") for n in range(6)], copy=False)
    assert all(is_view(table["y"]) for table in views)
    out = {"y": torch.zeros(1)}
    tasks = [
        a.start(a.operations.kv_batch_get(f"k{n}", "p", "y", out=out if n == 2 else {"y": torch.zeros(1)}))
        for n in range(6)
    ]
    cluster.wait(lambda: all(task.done for task in tasks))
    assert [task.result()["y"].item() for task in tasks] == list(range(6))
    assert tasks[2].result()["y"].data_ptr() == out["y"].data_ptr()


def test_values_of_an_external_store(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    arenas: list[int] = []
    memory = Units.memory

    def noting(units: Units, unit: int) -> Any:
        arenas.append(unit)
        return memory(units, unit)

    monkeypatch.setattr(Units, "memory", noting)
    MemoryStore.objects.clear()
    cluster = start(conf={"backend": {"fields": {"x": KIND}}})
    a, b = cluster.client("a"), cluster.client("b")
    for n in range(6):
        b.kv_put(f"k{n}", "p", {"x": torch.tensor(n), "y": torch.tensor(-n)})
    tables = get_all(cluster, a, [(f"k{n}", None) for n in range(6)])
    assert [(table["x"].item(), table["y"].item()) for table in tables] == [(n, -n) for n in range(6)]
    assert set(arenas) <= {unit for unit in a.state.units.known if not a.state.units.is_elsewhere(unit)}
