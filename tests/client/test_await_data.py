"""await_data: a batch with its values in one round trip, and what then happens to rows that change meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from simulated import Start, numbers, reply_on_its_way, rows_of, table
from transfer_queue.client.attachment import Attachment
from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.envelopes import AnyRequest
from transfer_queue.messages.queries import Lookup
from transfer_queue.sampler import RankAwareSampler
from transfer_queue.testing import Client, Cluster

LARGE = 1 << 17  # numbers of a row that has an extent of its own, which is free as soon as the row is cleared


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[AnyRequest]:
    """Claims and lookups, as they are made."""
    seen: list[AnyRequest] = []
    ask = Attachment.ask

    def spy(self: Attachment, request: AnyRequest, *arguments: Any, **more: Any) -> Any:
        if isinstance(request, (Claim, Lookup)):
            seen.append(request)
        return ask(self, request, *arguments, **more)

    monkeypatch.setattr(Attachment, "ask", spy)
    return seen


def kinds(asked: list[AnyRequest]) -> list[str]:
    return [type(request).__name__ for request in asked]


def test_one_round_trip(a: Client, b: Client, asked: list[AnyRequest]) -> None:
    a.put(numbers(6), partition_id="p")
    values, meta, ended = b.await_data(["x"], 4, "p", "t", timeout=1)
    assert (kinds(asked), ended) == (["Claim"], False)
    assert rows_of(values["x"]) == rows_of(a.get_data(meta)["x"])
    assert meta.global_indexes == [0, 1, 2, 3]


def test_it_waits(a: Client, b: Client, cluster: Cluster, asked: list[AnyRequest]) -> None:
    task = b.start(b.operations.await_data(["x"], 2, "p", "t", timeout=5))
    cluster.run()
    meta = a.put(numbers(2), partition_id="p")
    cluster.run()
    values, got, _ = task.result()
    assert kinds(asked) == ["Claim"]
    assert got.global_indexes == meta.global_indexes
    assert len(values) == 2


def test_nothing_comes(a: Client, asked: list[AnyRequest]) -> None:
    values, meta, ended = a.await_data(["x"], 2, "p", "t", timeout=0)
    assert (values, len(meta), ended) == (None, 0, False)
    a.put(numbers(1), partition_id="p")
    a.seal("p")
    values, meta, ended = a.await_data(["x"], 2, "p", "t", timeout=1)
    assert len(values) == len(meta) == 1
    values, meta, ended = a.await_data(["x"], 2, "p", "t", timeout=1)
    assert (values, len(meta), ended) == (None, 0, True)
    assert "Lookup" not in kinds(asked)


def test_fields_and_layout(a: Client) -> None:
    a.put(table(b=torch.ones(2, 3), a=torch.zeros(2, 3), c=torch.zeros(2)), partition_id="p")
    values, meta, _ = a.await_data(["b", "a"], 2, "p", "t", layout="dense", timeout=1)
    assert list(values.keys()) == meta.field_names == ["a", "b"]
    assert values["b"].tolist() == torch.ones(2, 3).tolist()


def test_under_a_lease(a: Client, asked: list[AnyRequest]) -> None:
    a.put(numbers(2), partition_id="p")
    values, meta, _ = a.await_data(["x"], 2, "p", "t", lease=5.0, timeout=1)
    assert kinds(asked) == ["Claim"]
    assert len(values) == 2
    assert a.ack(meta)


def test_space_that_was_used_again_is_looked_up(start: Start, asked: list[AnyRequest]) -> None:
    """Generations protect these places, too."""
    cluster = start(arena_bytes=2 << 20, seed=3)
    a, b = cluster.client("a"), cluster.client("b")
    meta = a.put(table(x=torch.full((1, LARGE), 1)), partition_id="p")
    with reply_on_its_way(cluster, b, b.operations.await_data(["x"], 1, "p", "t", timeout=5)) as task:
        a.put(table(x=torch.full((1, LARGE), 2)), meta)
        a.put(table(x=torch.full((1, LARGE), 3)), partition_id="q")  # takes the space of the first
    values, _, _ = task.result()
    assert kinds(asked)[-2:] == ["Claim", "Lookup"]
    assert set(values["x"].values().tolist()) == {2}


def test_cleared_with_its_space(start: Start) -> None:
    cluster = start(arena_bytes=2 << 20, seed=3)
    a, b = cluster.client("a"), cluster.client("b")
    meta = a.put(table(x=torch.full((1, LARGE), 1)), partition_id="p")
    with reply_on_its_way(cluster, b, b.operations.await_data(["x"], 1, "p", "t", timeout=5)) as task:
        a.clear_samples(meta)
        a.put(table(x=torch.full((1, LARGE), 3)), partition_id="q")
    with pytest.raises(StorageKeyNotFoundError, match="cleared"):
        task.result()


def test_values_are_those_of_the_deal(a: Client, b: Client, cluster: Cluster) -> None:
    """What is replaced while the reply is on its way, in a block that lives on, is as if it came a moment later."""
    meta = a.put(table(x=torch.tensor([1, 2])), partition_id="p")
    with reply_on_its_way(cluster, b, b.operations.await_data(["x"], 1, "p", "t", timeout=5)) as task:
        a.put(table(x=torch.tensor([7])), meta[:1])
    values, got, _ = task.result()
    assert values["x"].tolist() == [1]
    assert b.get_data(got)["x"].tolist() == [7]


def test_a_dealt_batch_of_which_rows_are_cleared(start: Start, asked: list[AnyRequest]) -> None:
    client = start(sampler=RankAwareSampler()).client("c")
    meta = client.put(numbers(2), partition_id="p")
    batch = (["x"], 2, "p", "t", {"dp_rank": 0, "batch_index": 0})
    first, _, _ = client.await_data(*batch, timeout=1)
    again, _, _ = client.await_data(*batch, timeout=1)
    assert rows_of(first["x"]) == rows_of(again["x"])
    assert kinds(asked) == ["Claim", "Claim"]
    client.clear_samples(meta[:1])
    with pytest.raises(StorageKeyNotFoundError, match="cleared"):
        client.await_data(*batch, timeout=1)
