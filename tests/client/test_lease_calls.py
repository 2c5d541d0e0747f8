"""Leases as clients have them: fetched, acknowledged, given back, renewed while somebody has the metadata."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_checkpoints import load, save

from simulated import Start, numbers
from transfer_queue.client.data.lease_renewal import Renewals, Renewer
from transfer_queue.errors import (
    BatchGoneError,
    InvalidArgumentError,
    StorageKeyNotFoundError,
    UnknownPartitionError,
    WaitTimeoutError,
)
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Renew
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.batch_columns import BatchLease
from transfer_queue.sampler import BaseSampler, RankAwareSampler
from transfer_queue.testing import Client, Cluster

RANK = {"dp_rank": 0, "batch_index": 0}


def fetch(client: Client, count: int = 2, **more: Any) -> BatchMeta:
    return client.get_meta(["x"], count, "p", task_name="t", **{"lease": 9.0, **more})


def consumed(client: Client) -> list[int]:
    _, column = client.get_consumption_status("t", "p")
    assert column is not None
    return column.tolist()


class TestAcks:
    def test_of_parts_and_cuts_and_of_other_processes(self, a: Client, b: Client) -> None:
        a.put(numbers(6), partition_id="p")
        meta = fetch(a, 6)
        first, second = meta.chunk(2)
        assert a.ack(first)
        assert consumed(a) == [1, 1, 1, 0, 0, 0]
        sent = pickle.loads(pickle.dumps(second.select_samples([2, 0])))
        assert b.ack(sent)
        assert consumed(a) == [1, 1, 1, 1, 0, 1]
        assert b.ack(meta[4].select_fields("x").copy())
        assert consumed(a) == [1] * 6

    def test_of_several_leases_at_once(self, a: Client, cluster: Cluster) -> None:
        a.put(numbers(6), partition_id="p")
        lost = fetch(a, 2)
        a.nack(lost)
        both = BatchMeta.concat([fetch(a, 2), fetch(a, 2)])
        assert both.deliveries == [2, 2, 1, 1]
        assert both.union(both).deliveries == [2, 2, 1, 1]
        assert a.ack(both[1:3])
        assert consumed(a) == [0, 1, 1, 0, 0, 0]
        assert a.ack(both)
        assert not a.ack(BatchMeta.concat([fetch(a, 2), lost])), "it does not count for all of it"
        assert consumed(a) == [1] * 6

    def test_of_a_batch_that_was_cleared_in_part(self, start: Start) -> None:
        """The batch has the same rows: the cleared ones have no delivery, the others are delivered again."""
        cluster = start(seed=1, sampler=RankAwareSampler())
        a, b = cluster.client("a"), cluster.client("b")
        a.put(numbers(3), partition_id="p")
        meta = fetch(a, 3, sampling_config=RANK)
        a.nack(meta)
        a.clear_samples(meta[1])
        again = fetch(b, 3, sampling_config=RANK)
        assert (again.global_indexes, again.deliveries) == (meta.global_indexes, [2, 0, 2])
        with pytest.raises(StorageKeyNotFoundError, match=r"1 of 3 samples .* are cleared .* \[1\]"):
            b.get_data(again)
        rest = again.select_samples([i for i, delivery in enumerate(again.deliveries) if delivery])
        assert b.get_data(rest)["x"].tolist() == [0, 2]
        assert b.ack(again)
        assert consumed(a)[0] == consumed(a)[-1] == 1
        a.clear_samples(rest)
        with pytest.raises(BatchGoneError):
            fetch(b, 3, sampling_config=RANK)

    def test_without_a_lease_count_for_nothing(self, a: Client) -> None:
        a.put(numbers(2), partition_id="p")
        meta = a.get_meta(["x"], 2, "p", task_name="t")
        assert (a.ack(meta), a.nack(meta), a.ack(BatchMeta())) == (False, False, False)
        assert meta.deliveries == [1, 1]
        with pytest.raises(InvalidArgumentError, match="must be a BatchMeta"):
            a.ack([0])  # type: ignore[arg-type]

    @pytest.mark.parametrize("lease", [0, -1, float("nan"), "long", 1e10])
    def test_a_lease_must_be_seconds(self, a: Client, lease: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="lease must be"):
            fetch(a, lease=lease)

    def test_awaitable(self, a: Client) -> None:
        async def program() -> bool:
            await a.async_put(numbers(2), partition_id="p")
            meta, ended = await a.async_await_batch(["x"], 2, "p", "t", lease=5.0)
            assert not ended
            return await a.async_nack(meta, delivered=False) and await a.async_ack(fetch(a))

        assert asyncio.run(program())


class TestRanks:
    @pytest.fixture
    def cluster(self, start: Start) -> Cluster:
        return start(seed=3, sampler=RankAwareSampler())

    def test_replicas(self, a: Client, b: Client) -> None:
        a.put(numbers(2), partition_id="p")
        one, two = (fetch(client, replicas=2, sampling_config=RANK) for client in (a, b))
        assert a.ack(one)
        assert consumed(a) == [0, 0]
        assert b.ack(two)
        assert consumed(a) == [1, 1]

    def test_that_are_gone(self, a: Client, b: Client) -> None:
        a.put(numbers(2), partition_id="p")
        lost = fetch(b, sampling_config=RANK)
        assert a.declare_rank_gone("p", "t", 0) == 2
        again = fetch(a, sampling_config={"dp_rank": 1, "batch_index": 0})
        assert again.global_indexes == lost.global_indexes
        assert not b.ack(lost)
        with pytest.raises(UnknownPartitionError):
            a.declare_rank_gone("none", "t", 0)
        with pytest.raises(InvalidArgumentError):
            a.declare_rank_gone("p", "t", -1)


class TestRenewal:
    def test_goes_on_while_somebody_has_the_metadata(self, a: Client, b: Client, cluster: Cluster) -> None:
        a.put(numbers(2), partition_id="p")
        meta = fetch(a)
        cluster.advance(100.0)
        part = meta[0]
        del meta
        cluster.advance(100.0)
        assert a.ack(part)
        del part
        with pytest.raises(WaitTimeoutError):
            fetch(b, 1, timeout=5.0)
        again = fetch(b, 1, timeout=9.0)
        assert again.deliveries == [2], "what nobody has any more runs out"

    def test_is_one_message_for_all(self, a: Client, cluster: Cluster) -> None:
        a.put(numbers(6), partition_id="p")
        kept = [fetch(a, 1, lease=3.0 + i) for i in range(6)]
        before = cluster.controller.context.measures.counters["requests"]
        cluster.advance(30.0)
        assert cluster.controller.context.measures.counters["requests"] - before <= 30
        assert a.ack(BatchMeta.concat(kept))
        before = cluster.controller.context.measures.counters["requests"]
        cluster.advance(30.0)
        assert cluster.controller.context.measures.counters["requests"] == before, "what is over is renewed no more"

    def test_of_what_others_have_taken_ends(self, a: Client, b: Client, cluster: Cluster) -> None:
        a.put(numbers(2), partition_id="p")
        meta = fetch(a)
        a.pause_renewals()
        again = fetch(b, timeout=20.0)
        a.pause_renewals(False)
        cluster.advance(30.0)
        assert a.state.renewals.next_deadline() is None
        assert not a.ack(meta)
        assert b.ack(again)

    def test_a_process_that_is_killed_renews_nothing(self, a: Client, b: Client) -> None:
        a.put(numbers(2), partition_id="p")
        meta = fetch(a)
        a.die()
        assert fetch(b, timeout=20.0).deliveries == [2, 2]
        assert meta.deliveries == [1, 1]

    def test_whoever_takes_the_metadata_over_renews_it(self, a: Client, b: Client, cluster: Cluster) -> None:
        a.put(numbers(2), partition_id="p")
        meta = pickle.loads(pickle.dumps(fetch(a)))
        for lease in meta._leases:
            b.state.renewals.add(lease)
        a.die()
        cluster.advance(100.0)
        assert b.ack(meta)


class Runs:
    """Stands in for a client: answers renewals at once."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, int]]] = []
        self.answered = threading.Event()
        self.held = True

    def run(self, operation: Any) -> None:
        for call in operation:
            assert isinstance(call.body, Renew)
            self.asked.append(call.body.leases)
            with contextlib.suppress(StopIteration):
                operation.send(Done([self.held] * len(call.body.leases)))
            self.answered.set()


def threads_of_renewers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "transfer_queue leases"]


class TestRenewer:
    """The thread; its clock stands until a test moves it."""

    @pytest.fixture
    def clock(self) -> list[float]:
        return [0.0]

    @pytest.fixture
    def made(self, clock: list[float]) -> Callable[[], tuple[Runs, Renewals, Renewer]]:
        def make() -> tuple[Runs, Renewals, Renewer]:
            runs, renewals = Runs(), Renewals(lambda: clock[0])
            return runs, renewals, Renewer(renewals, lambda: clock[0], runs.run)

        return make

    def lease(self, token: int = 1, seconds: float = 0.003) -> BatchLease:
        return BatchLease("p", token, seconds, np.array([0]), None)

    def test_is_there_while_there_is_something_to_renew(self, clock: list[float], made: Any) -> None:
        runs, renewals, renewer = made()
        assert threads_of_renewers() == []
        lease = self.lease()
        renewals.add(lease)
        (thread,) = threads_of_renewers()
        runs.held = False
        clock[0] = 1.0
        assert runs.answered.wait(20.0)
        thread.join(20.0)
        assert (thread.is_alive(), runs.asked) == (False, [[("p", 1)]])
        renewals.add(lease)
        assert len(threads_of_renewers()) == 1
        renewer.close(20.0)

    def test_ends_when_closed(self, made: Any) -> None:
        _, renewals, renewer = made()
        lease = self.lease(seconds=1000.0)
        renewals.add(lease)
        (thread,) = threads_of_renewers()
        renewer.close(20.0)
        assert not thread.is_alive()
        renewals.add(lease)
        assert threads_of_renewers() == []

    def test_keeps_neither_client_nor_lease_alive(self, made: Any) -> None:
        runs, renewals, _renewer = made()
        lease = self.lease()
        renewals.add(lease)
        (thread,) = threads_of_renewers()
        del lease
        gc.collect()
        thread.join(20.0)
        assert not thread.is_alive()
        lease = self.lease(2)
        renewals.add(lease)
        (thread,) = threads_of_renewers()
        del runs, renewals
        gc.collect()
        thread.join(20.0)
        assert not thread.is_alive()

    def test_what_is_kept_is_renewed_until_it_is_over(self, clock: list[float], made: Any) -> None:
        runs, renewals, renewer = made()
        renewals.add(self.lease(), keep=True)
        gc.collect()
        clock[0] = 1.0
        assert runs.answered.wait(20.0)
        assert renewals.next_deadline() == 1.001
        renewals.forget(1)
        assert renewals.next_deadline() is None
        renewer.close(20.0)


@pytest.mark.parametrize("sampler", [None, RankAwareSampler()])
def test_a_loaded_checkpoint_ends_leases(start: Start, tmp_path: Path, sampler: BaseSampler | None) -> None:
    cluster = start(sampler=sampler)
    a, b = cluster.client("a"), cluster.client("b")
    a.put(numbers(4), partition_id="p")
    before = fetch(a, 2, sampling_config=RANK)
    save(a, tmp_path / "saved")
    after = fetch(a, 2, sampling_config={"dp_rank": 1, "batch_index": 0})
    load(b, tmp_path / "saved")
    assert (a.ack(before), a.ack(after)) == (False, False)
    again = fetch(b, 2, sampling_config=RANK)
    assert (again.global_indexes, again.deliveries) == (before.global_indexes, [1, 1])
    assert not a.ack(after), "no lease of the loaded state has the token of an earlier one"
    assert b.ack(again)
