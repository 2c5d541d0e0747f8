"""Gets that wait at the same time: one lookup, and what each would have got alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from simulated import rows_of, same
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.queries import Lookup
from transfer_queue.testing import Client, Cluster


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


@pytest.mark.parametrize("layout", ["jagged", "list"])
def test_each_gets_its_own_rows(a: Client, b: Client, cluster: Cluster, lookups: list[Lookup], layout: str) -> None:
    fill(b, cluster)
    wanted = [("k1", None), (["k5", "k2", "k5"], None), ("k11", ["y"]), (["k0", "k4"], None), ("k7", "y"), ("k3", None)]
    found = get_all(cluster, a, wanted, layout=layout)
    assert len(lookups) == 4  # the first of each kind alone, then those that waited, of which one is the only one
    for (keys, names), got in zip(wanted, found, strict=True):
        alone = b.kv_batch_get(keys, "p", names, layout=layout)
        assert set(got.keys()) == set(alone.keys())
        for name in set(got.keys()):
            assert type(got[name]) is type(alone[name])
            assert same(rows_of(got[name]), rows_of(alone[name]))


def test_what_is_missing_concerns_only_its_own_get(a: Client, b: Client, cluster: Cluster) -> None:
    fill(b, cluster)
    b.kv_put("poor", "p", {"y": torch.tensor(1.0)})
    found = get_all(cluster, a, [("k1", None), ("unknown", None), ("k2", None), ("poor", None), ("k3", None)])
    assert isinstance(found[1], InvalidArgumentError)
    assert "'unknown'" in str(found[1])
    assert [set(found[at].keys()) for at in (0, 2, 3, 4)] == [{"x", "y", "o"}, {"x", "y", "o"}, {"y"}, {"x", "y", "o"}]
    assert [found[at]["y"].item() for at in (0, 2, 3, 4)] == [1.0, 2.0, 1.0, 3.0]


def test_a_get_with_a_limit_of_its_own_goes_alone(a: Client) -> None:
    request = Lookup("p", None, ["k"], None)
    assert a.operations._gets.call_for(request, 1.0) is None
    assert a.operations._gets.call_for(Lookup("p", None, ["k"] * 100, None), None) is None
