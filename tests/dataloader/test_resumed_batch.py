"""A loader that continues from a state yields exactly what was not yielded before, whatever the sampler is."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import pickle
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_datasets import small_dataset
from tensordict import TensorDict

from simulated import Start, numbers, table, take, values
from transfer_queue.dataloader.lease_delivery import DELIVERIES
from transfer_queue.dataloader.streaming_dataset import StreamingDataset, default_fetch_batch_fn
from transfer_queue.errors import BatchGoneError, UnknownPartitionError
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler import GRPOGroupNSampler, PrioritySampler, RankAwareSampler, SequentialSampler
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.testing import Client, Cluster

Log = pytest.LogCaptureFixture
SAMPLERS: dict[str, Callable[[], BaseSampler]] = {
    "sequential": SequentialSampler,
    "priority": lambda: PrioritySampler("total_lengths"),
    "groups": lambda: GRPOGroupNSampler(n_samples_per_prompt=1),
    "ranks": RankAwareSampler,
}


def client_of(cluster: Cluster, name: str) -> Client:
    """The client of this name; a new one at the first call."""
    known = [client for client in cluster._clients if client.name == name]
    return known[0] if known else cluster.client(name)


def resumed(client: Client, state: dict[str, Any], **more: Any) -> StreamingDataset:
    """A dataset of another process that loads the state, which was saved as JSON."""
    dataset = small_dataset(client, **more)
    dataset.load_state_dict(json.loads(json.dumps(state)))
    return dataset


def filled_system(start: Start, sampler: BaseSampler, rows: int = 12) -> Cluster:
    """A system with numbered rows in a sealed partition."""
    cluster = start(seed=6, sampler=sampler)
    client = client_of(cluster, "a")
    client.put(numbers(rows), partition_id="p")
    client.seal("p")
    return cluster


def restart(cluster: Cluster, count: int, **more: Any) -> tuple[StreamingDataset, list[Any], StreamingDataset]:
    """A dataset, the items that were taken from it, and one of another process that continues from its state."""
    first = small_dataset(client_of(cluster, "b"), **more)
    before = take(first, count)
    return first, before, resumed(client_of(cluster, "c"), first.state_dict(), **more)


@pytest.fixture
def cluster(start: Start) -> Cluster:
    return start(seed=6, sampler=SequentialSampler())


@pytest.fixture
def filled(a: Client) -> None:
    a.put(numbers(12), partition_id="p")
    a.seal("p")


@pytest.fixture(params=[False, True])
def keyed(request: pytest.FixtureRequest) -> bool:
    """Whether the sampler keeps batches by number."""
    return bool(request.param)


@pytest.fixture
def either(keyed: bool, start: Start) -> Cluster:
    """A system whose sampler keeps no batches, or keeps them by number, with 12 rows."""
    return filled_system(start, RankAwareSampler() if keyed else SequentialSampler())


def process(data: Any, meta: Any, micro_batch_size: int) -> list[Any]:
    """Items of which nobody knows which rows they have."""
    return [(row, "item") for row in data["x"].tolist()]


class TestTheOpenBatch:
    @pytest.mark.parametrize("count", [1, 2, 3, 5])
    @pytest.mark.parametrize(
        "more",
        [
            {}, {"keep_batches": 0}, {"max_tokens": 1, "length_field": "x"}, {"should_check_consumption_status": True},
            {"shared": True}, {"copy": False}, {"device": "cpu"},
        ],
        ids=str,
    )  # fmt: skip
    def test_the_rest_is_yielded_and_nothing_twice(self, either: Cluster, count: int, more: dict[str, Any]) -> None:
        _, before, again = restart(either, count, **more)
        assert values(before) + values(again) == list(range(12))

    def test_opaque_items(self, either: Cluster) -> None:
        _, before, again = restart(either, 3, process_batch_fn=process)
        assert [row for row, _ in before + list(again)] == list(range(12))

    def test_packed_items(self, a: Client, b: Client) -> None:
        rows = [torch.full((n,), n) for n in (1, 2, 3, 4)]
        a.put(table(t=torch.nested.nested_tensor(rows, layout=torch.jagged)), partition_id="p")
        a.seal("p")
        how = {"data_fields": ["t"], "pack": True, "max_tokens": 4, "length_field": "t"}
        first = small_dataset(b, **how)
        before = take(first, 1)
        found = [data["t"].tolist() for data, _ in before + list(resumed(b, first.state_dict(), **how))]
        assert found == [[[1, 2, 2]], [[3, 3, 3]], [[4, 4, 4, 4]]]

    def test_values_and_tags_are_those_of_a_fetch(self, a: Client, b: Client) -> None:
        rows = [torch.zeros(n) for n in (1, 3, 2, 5)]
        data = TensorDict({"x": torch.arange(4), "o": [f"o{i}" for i in range(4)]}, batch_size=4)
        data["t"] = torch.nested.nested_tensor(rows, layout=torch.jagged)
        a.put(data, partition_id="p", tags=[{"n": i} for i in range(4)])
        first = small_dataset(b, data_fields=["x", "o", "t"], micro_batch_size=1)
        items = iter(first)
        next(items)
        state = first.state_dict()
        fetched, again = next(items), next(iter(resumed(b, state, data_fields=["x", "o", "t"], micro_batch_size=1)))
        (data, meta), (values_again, known) = fetched, again
        assert [data[name].tolist() for name in ("x", "o")] == [values_again[name].tolist() for name in ("x", "o")]
        assert data["t"].shape[0] == values_again["t"].shape[0]
        assert meta.get_all_custom_meta() == known.get_all_custom_meta() == [{"n": 1}]
        assert meta.field_schema == known.field_schema

    def test_a_fetch_function_is_called_with_a_client_whose_claims_return_these_rows(self, either: Cluster) -> None:
        def fetch(**arguments: Any) -> Any:
            data, meta = default_fetch_batch_fn(**arguments)
            return None if data is None else TensorDict({"x": data["x"] + 100}, batch_size=data.batch_size), meta

        _, before, again = restart(either, 3, fetch_batch_fn=fetch, should_check_consumption_status=True)
        assert values(before) + values(again) == list(range(100, 112))

    def test_a_fetch_function_that_joins_claims_of_two_partitions(self, a: Client, b: Client, filled: None) -> None:
        a.put(numbers(12, 100), partition_id="q")

        def fetch(tq_client: Any, data_fields: Any, task_name: str, **_: Any) -> Any:
            metas = [tq_client.get_meta(data_fields, 2, name, task_name=task_name, timeout=0.1) for name in "pq"]
            both = BatchMeta.concat([m[i : i + 1] for i in range(2) for m in metas])
            return tq_client.get_data(both), both

        first = small_dataset(b, fetch_batch_fn=fetch)
        before = values(take(first, 3))
        assert before == [0, 100, 1, 101, 2, 102]
        assert values(take(resumed(b, first.state_dict(), fetch_batch_fn=fetch), 3)) == [3, 103, 4, 104, 5, 105]

    def test_a_fetch_function_with_another_client_is_warned_about(
        self, a: Client, b: Client, filled: None, caplog: Log
    ) -> None:
        def fetch(tq_client: Any, **arguments: Any) -> Any:
            return default_fetch_batch_fn(tq_client=b, **arguments)

        first = small_dataset(b, fetch_batch_fn=fetch)
        take(first, 1)
        assert values(take(resumed(b, first.state_dict(), fetch_batch_fn=fetch), 1)) == [2, 3]
        assert "returned the samples [4, 5, 6, 7] instead of [0, 1, 2, 3]" in caplog.text

    def test_asynchronous_iteration(self, either: Cluster) -> None:
        async def rows(dataset: StreamingDataset, count: int) -> list[int]:
            found: list[Any] = []
            async for item in dataset:
                found.append(item)
                if len(found) == count:
                    break
            return values(found)

        first = small_dataset(client_of(either, "b"))
        before = asyncio.run(rows(first, 3))
        again = resumed(client_of(either, "c"), first.state_dict())
        assert before + asyncio.run(rows(again, 100)) == list(range(12))

    @pytest.mark.parametrize("twin", [copy.copy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
    def test_a_copy_yields_the_rest(
        self, cluster: Cluster, a: Client, filled: None, twin: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = small_dataset(a)
        before = values(take(first, 1))
        first.config = None
        monkeypatch.setattr(StreamingDataset, "_find_client", lambda self: client_of(cluster, "b"))
        other = twin(first)
        rest = values(take(other, 2))
        assert before + rest == [0, 1, 2, 3, 4, 5]

    @pytest.mark.parametrize("keep", [None, 0])
    def test_an_item_that_cannot_be_made_is_tried_again(self, a: Client, b: Client, filled: None, keep: Any) -> None:
        faults = [True]

        def fallible(data: Any, meta: Any, micro_batch_size: int) -> Any:
            for row in data["x"].tolist():
                if row == 2 and faults and faults.pop():
                    raise RuntimeError("a fault")
                yield row, "item"

        dataset = small_dataset(b, process_batch_fn=fallible, keep_batches=keep, delivery="at_least_once")
        items = iter(dataset)
        found = [next(items)[0], next(items)[0]]
        with pytest.raises(RuntimeError, match="a fault"):
            next(items)
        assert dataset.state_dict()["items_given"] == 2
        again = iter(dataset)
        found.append(next(again)[0])
        assert int(a.get_consumption_status("train", "p")[1].sum()) == 0
        assert found + [row for row, _ in again] == list(range(12))
        assert a.check_consumption_status("train", "p")


class TestGoneRows:
    def test_the_rest_of_the_rows_and_a_warning(self, either: Cluster, caplog: Log) -> None:
        a, first = client_of(either, "a"), small_dataset(client_of(either, "b"), micro_batch_size=1)
        items = iter(first)
        metas = [next(items)[1] for _ in range(2)]
        state = first.state_dict()
        metas.append(next(items)[1])
        a.clear_samples(BatchMeta.concat(metas[1:]))
        assert values(resumed(client_of(either, "c"), state, micro_batch_size=1)) == list(range(3, 12))
        assert "batch 0 of ['p'], whose samples [1, 2] were cleared" in caplog.text
        assert "1 of them had not been yielded yet" in caplog.text

    def test_all_rows(self, either: Cluster, caplog: Log) -> None:
        first = small_dataset(client_of(either, "b"))
        items = iter(first)
        metas = [next(items)[1]]
        state = first.state_dict()
        metas.append(next(items)[1])
        client_of(either, "a").clear_samples(BatchMeta.concat(metas))
        assert values(resumed(client_of(either, "c"), state)) == list(range(4, 12))
        assert "[0, 1, 2, 3]" in caplog.text

    def test_opaque_items_are_counted(self, either: Cluster, caplog: Log) -> None:
        first = small_dataset(client_of(either, "b"), process_batch_fn=process)
        take(first, 1)
        client = client_of(either, "a")
        everything = client.get_meta("x", 12, "p", mode="force_fetch")
        client.clear_samples(everything.select_samples([3]))
        again = resumed(client_of(either, "c"), first.state_dict(), process_batch_fn=process)
        assert [row for row, _ in again] == [1, 2, *range(4, 12)]
        assert "the first 1 items are skipped" in caplog.text

    def test_the_partition(self, either: Cluster) -> None:
        first = small_dataset(client_of(either, "b"))
        take(first, 1)
        client_of(either, "a").clear_partition("p")
        again = resumed(client_of(either, "c"), first.state_dict())
        with pytest.raises(UnknownPartitionError, match="in the middle of batch 0"):
            take(again, 1)
        assert again.state_dict() == first.state_dict()

    def test_rows_that_the_task_skips(self, start: Start, caplog: Log) -> None:
        """A sample that ends each process that works on it does not do so again after a load."""
        cluster = start(seed=2, sampler=SequentialSampler(), conf={"controller": {"max_deliveries": 1}})
        a, b = client_of(cluster, "a"), client_of(cluster, "b")
        a.put(numbers(8), partition_id="p")
        first = small_dataset(b, delivery="at_least_once")
        take(first, 1)
        b.die()
        cluster.advance(100.0)
        again = resumed(client_of(cluster, "c"), first.state_dict(), delivery="at_least_once")
        assert values(take(again, 2)) == [4, 5, 6, 7]
        assert "[0, 1, 2, 3]" in caplog.text


class TestLeases:
    def consumed(self, cluster: Cluster) -> int:
        return int(client_of(cluster, "a").get_consumption_status("train", "p")[1].sum())

    @pytest.mark.parametrize("is_over", [False, True])
    def test_the_open_batch_is_acknowledged_at_its_end(self, either: Cluster, keyed: bool, is_over: bool) -> None:
        b = client_of(either, "b")
        first = small_dataset(b, delivery="at_least_once")
        before = values(take(first, 1))
        b.die()
        if is_over:
            either.advance(100.0)
        again = iter(resumed(client_of(either, "c"), first.state_dict(), delivery="at_least_once"))
        assert before + values([next(again)]) == [0, 1, 2, 3]
        assert self.consumed(either) == 0
        either.advance(200.0)  # the lease is renewed
        rest = [next(again)]
        assert self.consumed(either) == (4 if keyed or not is_over else 0)
        rest += again
        assert values(rest) == ([0, 1, 2, 3] if is_over and not keyed else []) + list(range(4, 12))
        assert self.consumed(either) == 12

    def test_a_restarted_rank_acknowledges_only_what_was_trained_on(self, cluster: Cluster, a: Client) -> None:
        """Two ranks whose sampler keeps no batches, of which one is restarted in the middle of a batch."""
        a.put(numbers(16), partition_id="p")
        ranks = [small_dataset(client_of(cluster, f"r{n}"), dp_rank=n, delivery="at_least_once") for n in range(2)]
        seen = [values(take(rank, 1)) for rank in ranks]
        assert seen == [[0, 1], [4, 5]]
        client_of(cluster, "r1").die()
        state = ranks[1].state_dict()
        again = resumed(client_of(cluster, "s"), state, dp_rank=1, delivery="at_least_once")
        assert values(take(again, 2)) == [6, 7, 8, 9]
        assert a.get_consumption_status("train", "p")[1].nonzero().flatten().tolist() == [4, 5, 6, 7]

    def test_another_batch_under_the_number_is_not_acknowledged(self, start: Start, caplog: Log) -> None:
        cluster = start(seed=6, sampler=RankAwareSampler())
        a, b = client_of(cluster, "a"), client_of(cluster, "b")
        a.put(numbers(4), partition_id="p")
        first = small_dataset(b, delivery="at_least_once")
        take(first, 1)
        b.die()
        a.put(numbers(4, 4), partition_id="p")
        a.reset_consumption("p")
        a.get_meta("x", 4, "p", task_name="train", sampling_config={"dp_rank": 1, "batch_index": 0})
        a.get_meta("x", 4, "p", task_name="train", sampling_config={"dp_rank": 0, "batch_index": 0}, lease=1.0)
        cluster.advance(10.0)
        again = iter(resumed(client_of(cluster, "c"), first.state_dict(), delivery="at_least_once"))
        assert values([next(again)]) == [2, 3]
        a.put(numbers(4, 8), partition_id="p")
        assert values([next(again)]) == [8, 9]
        assert "has other samples than the loaded state says" in caplog.text
        assert int(a.get_consumption_status("train", "p")[1].sum()) == 4

    def test_a_token_of_another_epoch_is_not_used(self, cluster: Cluster, b: Client, filled: None) -> None:
        """After a checkpoint was loaded, a token of the state may be that of another client's lease."""
        first = small_dataset(b, delivery="at_least_once")
        take(first, 1)
        state = first.state_dict()
        again = resumed(client_of(cluster, "c"), {**state, "epoch": state["epoch"] + 1}, delivery="at_least_once")
        assert values(take(again, 2)) == [2, 3, 4, 5]
        assert self.consumed(cluster) == 0
        assert values(take(first, 3)) == [2, 3, 8, 9, 10, 11]

    def test_replicas_that_load_one_state_acknowledge_each_for_itself(self, start: Start) -> None:
        cluster = start(seed=6, sampler=RankAwareSampler())
        a, b = client_of(cluster, "a"), client_of(cluster, "b")
        a.create_partition("p", replicas=2)
        a.put(numbers(8), partition_id="p")
        first = small_dataset(b, delivery="at_least_once")
        take(first, 1)
        b.die()
        for name, count in (("c", 0), ("d", 4)):
            again = iter(resumed(client_of(cluster, name), first.state_dict(), delivery="at_least_once"))
            next(again), next(again)
            assert self.consumed(cluster) == count

    def test_a_load_in_the_same_process_keeps_the_lease(self, either: Cluster) -> None:
        dataset = small_dataset(client_of(either, "b"), delivery="at_least_once")
        before = values(take(dataset, 1))
        dataset.load_state_dict(dataset.state_dict())
        assert before + values(dataset) == list(range(12))
        assert self.consumed(either) == 12

    @pytest.mark.parametrize("count", [1, 2])
    def test_what_waits_to_be_freed_is_finished(self, start: Start, count: int) -> None:
        cluster = start(seed=6, sampler=SequentialSampler())
        a, b = client_of(cluster, "a"), client_of(cluster, "b")
        a.create_partition("p", free_when=["train"])
        a.put(numbers(8), partition_id="p")
        first = small_dataset(b)
        take(first, count)
        again = iter(resumed(client_of(cluster, "c"), first.state_dict()))
        cluster.run()  # what it has written arrives
        b.die()
        for _ in range(3 - count):
            next(again)
        assert a.status().partitions[0].rows == 4


class TestOlderStates:
    def old(self, dataset: StreamingDataset, digest: int | None = None) -> dict[str, Any]:
        state = dataset.state_dict()
        names = ("partition_id", "task_name", "dp_rank", "batch_index", "items_given", "cut", "worker")
        owed = {} if digest is None else {"unacknowledged": ["p", state["batch_index"] - 1, digest]}
        return {"version": 1, **{name: state[name] for name in names}, **owed}

    def test_between_batches(self, either: Cluster) -> None:
        first = small_dataset(client_of(either, "b"))
        before = values(take(first, 2))
        assert before + values(resumed(client_of(either, "c"), self.old(first))) == list(range(12))

    def test_in_the_middle_only_by_number(self, either: Cluster, keyed: bool) -> None:
        first = small_dataset(client_of(either, "b"))
        before = values(take(first, 1))
        again = resumed(client_of(either, "c"), self.old(first))
        if keyed:
            assert before + values(again) == list(range(12))
        else:
            with pytest.raises(BatchGoneError, match=r"in the middle of batch 0 by a release .* keeps no batches"):
                take(again, 1)
            assert values(small_dataset(client_of(either, "d"))) == list(range(4, 12)), "nothing was claimed"

    @pytest.mark.parametrize("device", [None, "cpu"])
    def test_a_batch_that_is_claimed_again_by_number_is_finished(self, start: Start, device: str | None) -> None:
        cluster = start(seed=6, sampler=RankAwareSampler())
        a, b = client_of(cluster, "a"), client_of(cluster, "b")
        a.create_partition("p", free_when=["train"])
        a.put(numbers(12), partition_id="p")
        first = small_dataset(b, device=device)
        take(first, 1)
        again = iter(resumed(b, self.old(first), device=device))
        take(again, 1)
        assert a.status().partitions[0].rows == 12
        take(again, 1)
        assert a.status().partitions[0].rows == 8

    @pytest.mark.parametrize("is_right", [False, True])
    def test_a_missing_acknowledgement(self, start: Start, is_right: bool) -> None:
        cluster = start(seed=6, sampler=RankAwareSampler())
        a, b = client_of(cluster, "a"), client_of(cluster, "b")
        a.put(numbers(8), partition_id="p")
        first = small_dataset(b, delivery="at_least_once")
        meta = take(first, 2)[0][1]
        digest = zlib.crc32(torch.arange(meta.global_indexes[0], meta.global_indexes[0] + 4).numpy().tobytes())
        state = self.old(first, digest if is_right else 1)
        b.die()
        again = resumed(client_of(cluster, "c"), state, delivery="at_least_once")
        assert again.state_dict()["unacknowledged"] == state["unacknowledged"]
        assert values(take(again, 1)) == [4, 5]
        assert int(a.get_consumption_status("train", "p")[1].sum()) == (4 if is_right else 0)


class TestReset:
    @pytest.mark.parametrize("count", [2, 3, 6])
    @pytest.mark.parametrize("further", [0, 1, 2, 100])
    def test_by_number_the_whole_epoch_comes_again(self, start: Start, count: int, further: int) -> None:
        _, before, again = restart(filled_system(start, RankAwareSampler()), count)
        seen = values(before) + values(take(again, further))
        assert seen == list(range(len(seen)))
        for part in (3, 100, 100):
            again.reset()
            assert values(take(again, part)) == list(range(min(12, 2 * part)))

    @pytest.mark.parametrize("further", [0, 1, 100])
    def test_without_numbers_it_is_an_error(self, start: Start, further: int) -> None:
        _, _, again = restart(filled_system(start, SequentialSampler()), 3)
        seen = values(take(again, further))
        with pytest.raises(BatchGoneError, match=r"does not have the batches from 0 to [01], .* keeps no batches"):
            again.reset()
        assert seen + values(again) == list(range(6, 12)), "the position did not change"

    @pytest.mark.parametrize("further", [0, 1, 100])
    def test_in_the_first_batch_the_buffer_has_everything(self, either: Cluster, further: int) -> None:
        _, _, again = restart(either, 1)
        take(again, further)
        again.reset()
        assert values(again) == list(range(12))
        again.reset()
        assert values(again) == list(range(12))

    def test_a_batch_that_was_cleared_is_an_error(self, start: Start) -> None:
        cluster = filled_system(start, RankAwareSampler())
        a = client_of(cluster, "a")
        meta = a.get_meta("x", None, "p", mode="force_fetch")
        first, _, again = restart(cluster, 4)
        a.clear_samples(meta[4:8])
        again.reset()
        items = iter(again)
        assert values([next(items), next(items)]) == [0, 1, 2, 3]
        with pytest.raises(BatchGoneError, match="rows were cleared"):
            next(items)
        a.clear_samples(meta[:4])
        with pytest.raises(BatchGoneError, match=r"from 0 to 1, .* rows were cleared"):
            resumed(client_of(cluster, "d"), first.state_dict()).reset()

    @pytest.mark.parametrize("keep", [0, 1, 2, 3])
    @pytest.mark.parametrize("count", [2, 4])
    def test_keep_batches_is_the_limit_as_without_a_load(self, start: Start, keep: int, count: int) -> None:
        first, _, again = restart(filled_system(start, RankAwareSampler()), count, keep_batches=keep)
        take(again, 4 - count)
        for dataset in (again, first):
            take(dataset, 4 - count if dataset is first else 0)
            dataset.reset()
        assert values(again) == values(first)

    def test_a_state_of_a_second_epoch(self, either: Cluster, keyed: bool) -> None:
        """In the middle of a replay: the next batches of the replay come, or an error, and never fewer."""
        first = small_dataset(client_of(either, "b"))
        assert len(list(first)) == 6
        first.reset()
        take(first, 1)
        again = iter(resumed(client_of(either, "c"), first.state_dict()))
        assert values([next(again)]) == [2, 3]
        if keyed:
            assert values(again) == list(range(4, 12))
        else:
            with pytest.raises(BatchGoneError, match="keeps no batches"):
                next(again)

    def test_a_fetch_function_claims_batches_again_only(self, start: Start) -> None:
        _, _, again = restart(filled_system(start, SequentialSampler()), 2, fetch_batch_fn=default_fetch_batch_fn)
        again.reset()
        with pytest.raises(BatchGoneError, match="keeps no batches"):
            take(again, 1)

    def test_under_leases(self, start: Start) -> None:
        cluster = filled_system(start, RankAwareSampler())
        first = small_dataset(client_of(cluster, "b"), delivery="at_least_once")
        take(first, 3)
        client_of(cluster, "b").die()
        again = resumed(client_of(cluster, "c"), first.state_dict(), delivery="at_least_once")
        take(again, 1)
        for _ in range(2):
            again.reset()
            assert values(again) == list(range(12))
        assert client_of(cluster, "a").check_consumption_status("train", "p")


MOVES = ("take", "load", "expire", "clear")


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    size, sampler, delivery = (
        draw(st.integers(1, 5)),
        draw(st.sampled_from(sorted(SAMPLERS))),
        draw(st.sampled_from(DELIVERIES)),
    )
    alone = sampler in ("groups", "ranks") or delivery == "at_least_once"  # a rank would wait for what another one has
    return {
        "rows": draw(st.integers(0, 17)), "batch_size": size, "micro_batch_size": draw(st.integers(1, size)),
        "max_tokens": draw(st.sampled_from([None, 1, 5])), "ranks": 1 if alone else draw(st.integers(1, 3)),
        "sampler": sampler, "delivery": delivery,
        "moves": draw(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 4)), max_size=9)),
    }  # fmt: skip


@given(runs())
@settings(deadline=None, max_examples=60)
@example(
    {
        "rows": 8, "batch_size": 4, "micro_batch_size": 2, "max_tokens": None, "ranks": 1, "sampler": "sequential",
        "delivery": "at_most_once", "moves": [("take", 1), ("load", 0)],
    }
)  # fmt: skip
@example(
    {
        "rows": 11, "batch_size": 4, "micro_batch_size": 2, "max_tokens": 1, "ranks": 1, "sampler": "ranks",
        "delivery": "at_least_once",
        "moves": [("take", 2), ("load", 0), ("clear", 3), ("take", 1), ("expire", 4)],
    }
)  # fmt: skip
def test_everything_that_exists_is_yielded_and_nothing_twice(tmp_path_factory: Any, run: dict[str, Any]) -> None:
    """Whatever is taken, saved, loaded and cleared.

    A sample may come twice only if its lease ended, with at_least_once.
    """
    how = {name: run[name] for name in ("batch_size", "micro_batch_size", "max_tokens", "delivery")}
    ranks, seen, cleared, is_over = run["ranks"], [], set(), False
    with Cluster(tmp_path_factory.mktemp("arena"), seed=1, sampler=SAMPLERS[run["sampler"]]()) as cluster:
        names = (f"c{number}" for number in itertools.count())
        a = client_of(cluster, "a")
        meta = (
            a.put(numbers(run["rows"]), partition_id="p", tags=[{"total_lengths": 1}] * run["rows"])
            if run["rows"]
            else None
        )
        a.seal("p", create=True)

        def made(rank: int) -> tuple[Client, StreamingDataset]:
            client = cluster.client(next(names))
            return client, small_dataset(client, **how, dp_rank=rank)

        at = [made(rank) for rank in range(ranks)]
        for number, (move, count) in enumerate(run["moves"]):
            rank = number % ranks
            client, dataset = at[rank]
            if move == "take":
                seen += values(take(dataset, count))
            elif move == "clear" and meta is not None:
                chosen = [at for at in range(run["rows"]) if at % 5 == count]
                a.clear_samples(meta.select_samples(chosen))
                cleared.update(chosen)
            elif move in ("load", "expire"):
                state = json.loads(json.dumps(dataset.state_dict()))
                cluster.run()  # what it has written arrives
                client.die()
                if move == "expire":
                    is_over = True
                    cluster.advance(100.0)
                at[rank] = made(rank)
                at[rank][1].load_state_dict(state)
        for _, dataset in at:
            seen += values(dataset)
        if not (is_over and run["delivery"] == "at_least_once"):
            assert len(seen) == len(set(seen))
        assert set(range(run["rows"])) - cleared <= set(seen)
