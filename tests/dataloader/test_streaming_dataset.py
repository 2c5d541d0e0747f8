"""StreamingDataset over the simulated system: its client blocks in virtual time, so that waiting takes none."""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from device_driver import Driver
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from small_datasets import Build, small_dataset
from torch.utils.data import DataLoader, IterableDataset

from simulated import Start, numbers, ragged, table, take, values
from transfer_queue.client.data import device_copies
from transfer_queue.client.operations.fetch_operations import Readiness
from transfer_queue.dataloader import streaming_dataset
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset, chunk_batch_fn, default_fetch_batch_fn
from transfer_queue.errors import InvalidArgumentError, StorageKeyNotFoundError
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler import RankAwareSampler
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.testing import Client, Cluster

_partitions = itertools.count()


@pytest.fixture
def cluster(start: Start) -> Cluster:
    return start(seed=6, sampler=RankAwareSampler(), conf={"controller": {"polling_mode": True}})


@pytest.fixture
def dataset(b: Client) -> Build:
    """dataset(...): of partition "p", batches of 4 in micro-batches of 2, ending when all is consumed."""

    return lambda config=b, **more: small_dataset(config, **{"should_check_consumption_status": True, **more})


def sizes(items: Iterable[Any]) -> list[int]:
    return [len(meta) for _, meta in items]


class TestMicroBatches:
    @pytest.mark.parametrize(
        ("batch", "micro", "cuts"), [(4, 4, [4]), (5, 2, [2, 2, 1]), (7, 6, [6, 1]), (3, 1, [1] * 3)]
    )
    def test_cuts(self, a: Client, dataset: Build, batch: int, micro: int, cuts: list[int]) -> None:
        a.put(table(x=torch.arange(batch), y=torch.ones(batch)), partition_id="p")
        made = dataset(batch_size=batch, micro_batch_size=micro)
        assert isinstance(made, IterableDataset)
        items = list(made)
        assert (sizes(items), values(items)) == (cuts, list(range(batch)))
        for data, meta in items:
            assert list(data.keys()) == meta.field_names == ["x"]
            assert meta.global_indexes == data["x"].tolist()

    @pytest.mark.parametrize("there", [0, 4])
    def test_more_than_a_batch(self, a: Client, dataset: Build, there: int) -> None:
        if there:
            a.put(numbers(there), partition_id="p")
        stream = iter(dataset(micro_batch_size=5))
        with pytest.raises(ValueError, match=r"micro_batch_size \(5\)"):
            next(stream)

    @pytest.mark.design("a loader ends when its partition is sealed and no dealt batch for it remains")
    def test_the_remainder_after_a_seal_comes_as_it_is(self, a: Client, dataset: Build) -> None:
        a.put(numbers(9), partition_id="p")
        a.seal("p")
        items = list(dataset(batch_size=4, micro_batch_size=4, should_check_consumption_status=False))
        assert (sizes(items), values(items)) == ([4, 4, 1], list(range(9)))

    def test_a_custom_fetch_may_give_more_than_a_batch(self, a: Client, dataset: Build) -> None:
        a.put(numbers(6), partition_id="p")

        def fetch(**arguments: Any) -> Any:
            return default_fetch_batch_fn(**{**arguments, "batch_size": 6})

        assert sizes(list(dataset(batch_size=2, micro_batch_size=5, fetch_batch_fn=fetch))) == [5, 1]

    def test_a_custom_fetch_that_gives_less(self, a: Client, dataset: Build) -> None:
        a.put(numbers(2), partition_id="p")

        def fetch(**arguments: Any) -> Any:
            return default_fetch_batch_fn(**{**arguments, "batch_size": 2})

        assert sizes(list(dataset(batch_size=4, micro_batch_size=3, fetch_batch_fn=fetch))) == [2]
        with pytest.raises(ValueError, match="micro_batch_size"):
            list(dataset(batch_size=2, micro_batch_size=3, fetch_batch_fn=fetch, task_name="other"))

    def test_chunk_batch_fn(self, a: Client) -> None:
        meta = a.put(numbers(3), partition_id="p")
        data = a.get_data(meta)
        assert values(chunk_batch_fn(data, meta)) == [0, 1, 2]
        assert sizes(chunk_batch_fn(data, meta, micro_batch_size=2)) == [2, 1]
        assert isinstance(chunk_batch_fn(data, meta), list)
        for size in (0, 4):
            with pytest.raises(ValueError, match="micro_batch_size"):
                chunk_batch_fn(data, meta, size)


class StandIn:
    """A client of a test, which has only the method that the loader needs with a custom fetch."""

    def await_ready(self, *arguments: Any, timeout: float) -> Readiness:
        return Readiness(ended=True, version=0)


def fetch_from_stand_in(*arguments: Any) -> Any:
    client, _, size, partition, _, _, number = arguments
    assert isinstance(client, StandIn)
    rows = torch.arange(size * number, size * number + size)
    return (table(x=rows), BatchMeta(rows.tolist(), partition)) if number < 2 else (None, BatchMeta())


class TestOwnClient:
    def test_a_subclass_fetches_with_the_client_that_it_creates(self, a: Client) -> None:
        a.put(numbers(4), partition_id="p")
        created = []

        class Own(StreamingDataset):
            def _create_client(self) -> None:
                created.append(self._tq_client)
                self._tq_client = a

        own = Own("no system", 2, 2, ["x"], "p", "t", 0, should_check_consumption_status=True)
        assert values(list(own)) == [0, 1, 2, 3]
        assert created == [None], "once, before the first fetch"

    def test_a_client_that_is_set_is_used(self, a: Client) -> None:
        a.put(numbers(2), partition_id="p")
        own = StreamingDataset("no system", 2, 2, ["x"], "p", "t", 0, should_check_consumption_status=True)
        own._tq_client = a
        assert values(list(own)) == [0, 1]

    def test_a_config_that_is_not_one_is_refused(self) -> None:
        with pytest.raises(InvalidArgumentError, match="config must be what init returned, a client, or None, got 'p'"):
            StreamingDataset("p", 2, 2, ["x"], "p", "t", 0).client()

    @pytest.mark.parametrize("is_async", [False, True])
    def test_a_method_that_a_client_has_of_its_own_is_called(
        self, a: Client, monkeypatch: pytest.MonkeyPatch, is_async: bool
    ) -> None:
        a.put(numbers(4), partition_id="p")
        fetched: list[list[int]] = []

        def await_data(*arguments: Any, **named: Any) -> Any:
            batch = Client.await_data(a, *arguments, **named)
            fetched.append(batch[1].global_indexes)
            return batch

        monkeypatch.setattr(a, "await_data", await_data)
        assert self.iterate(StreamingDataset(a, 2, 2, ["x"], "p", "t", 0, True), is_async) == [0, 1, 2, 3]
        assert [rows for rows in fetched if rows] == [[0, 1], [2, 3]]

    @pytest.mark.parametrize("is_async", [False, True])
    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_stand_in_needs_only_methods(self, workers: int, is_async: bool) -> None:
        class Own(StreamingDataset):
            def _create_client(self) -> None:
                stand_in: Any = StandIn()
                self._tq_client = stand_in

        own = Own("no system", 2, 2, ["x"], "p", "t", 0, fetch_batch_fn=fetch_from_stand_in)
        assert self.iterate(StreamingDataLoader(own, num_workers=workers), is_async) == [0, 1, 2, 3]

    def iterate(self, items: Any, is_async: bool) -> list[int]:
        async def collect() -> list[Any]:
            return [item async for item in items]

        return values(asyncio.run(collect()) if is_async else list(items))

    def test_a_copy_creates_a_client_of_its_own(self, a: Client) -> None:
        created: list[object] = []

        class Own(StreamingDataset):
            def _create_client(self) -> None:
                created.append(self)
                self._tq_client = a

        own = Own("no system", 2, 2, ["x"], "p", "t", 0)
        assert own.client() is own.client() is a
        twin = copy.copy(own)
        assert twin.client() is a
        assert created == [own, twin]


class TestEnds:
    def test_finite_though_everything_is_cleared_as_it_goes(self, a: Client, dataset: Build) -> None:
        a.put(numbers(8), partition_id="p")
        got = []
        for data, meta in dataset(micro_batch_size=4):
            got += data["x"].tolist()
            a.clear_samples(meta)
        assert got == list(range(8))
        assert a.check_consumption_status("train", "p")

    def test_a_seal_wakes_what_waits(self, a: Client, dataset: Build, cluster: Cluster) -> None:
        a.put(numbers(4), partition_id="p")
        cluster.later(0.5, lambda: a.seal("p"))
        assert values(list(dataset(should_check_consumption_status=False))) == list(range(4))
        assert cluster.clock.now == 0.5

    def test_a_sealed_partition_still_gets_fields(self, a: Client, dataset: Build, cluster: Cluster) -> None:
        meta = a.put(numbers(4, name="prompt"), partition_id="p")
        a.seal("p")
        cluster.later(0.5, lambda: a.put(numbers(4), meta))
        assert values(list(dataset(should_check_consumption_status=False))) == list(range(4))
        assert cluster.clock.now == 0.5

    @pytest.mark.parametrize("finite", [False, True])
    def test_a_replica_that_lags(self, a: Client, dataset: Build, finite: bool) -> None:
        a.put(numbers(8), partition_id="p")
        ahead, behind = (iter(dataset(should_check_consumption_status=finite)) for _ in range(2))
        assert values(take(behind, 1)) == [0, 1]
        a.seal("p")
        assert values(list(ahead)) == list(range(8))
        assert values(list(behind)) == list(range(2, 8))

    def test_endless(self, a: Client, dataset: Build, cluster: Cluster) -> None:
        stream = iter(dataset(should_check_consumption_status=False))
        for start in (0, 4, 8):
            cluster.later(20, lambda start=start: a.put(numbers(4, start), partition_id="p"))  # type: ignore[misc]
            assert values(take(stream, 2)) == list(range(start, start + 4))
        assert cluster.clock.now == 60


class TestWaiting:
    """The publish that completes a batch wakes it; meanwhile nobody asks."""

    @pytest.mark.parametrize("custom", [None, default_fetch_batch_fn])
    def test_wakes_at_once(
        self, a: Client, dataset: Build, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, custom: Any
    ) -> None:
        monkeypatch.setenv("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", "1000")
        a.put(numbers(3), partition_id="p")
        counted: list[float] = []
        cluster.later(28, lambda: counted.append(cluster.controller.context.measures.counters["requests"]))
        cluster.later(29, lambda: a.put(numbers(1, 3), partition_id="p"))  # before a wait is reported
        before = cluster.controller.context.measures.counters["requests"]
        stream = iter(dataset(should_check_consumption_status=False, fetch_batch_fn=custom))
        assert values(take(stream, 1)) == [0, 1]
        assert cluster.clock.now == 29
        assert counted[0] - before <= 4

    @pytest.mark.parametrize("is_set_by_code", [False, True])
    @pytest.mark.parametrize(("interval", "seconds", "most"), [(10, 95, 21), (0, 1, 29)], ids=["10 s", "no busy loop"])
    def test_asks_again_after_the_interval(
        self, a: Client, dataset: Build, cluster: Cluster, monkeypatch: pytest.MonkeyPatch,
        is_set_by_code: bool, interval: int, seconds: int, most: int,
    ) -> None:  # fmt: skip
        name = "TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL"
        if is_set_by_code:
            monkeypatch.setattr(streaming_dataset, name, interval)
        else:
            monkeypatch.setenv(name, str(interval))
        cluster.later(seconds, lambda: a.put(numbers(4), partition_id="p"))
        before = cluster.controller.context.measures.counters["requests"]
        next(iter(dataset(should_check_consumption_status=False)))
        assert cluster.clock.now == seconds
        assert cluster.controller.context.measures.counters["requests"] - before <= most

    def test_without_polling_mode(self, start: Start) -> None:
        """A custom fetch that waits and runs into its timeout has fetched nothing; it is asked again."""
        cluster = start(sampler=RankAwareSampler())
        client = cluster.client("c")
        cluster.later(200, lambda: client.put(numbers(4), partition_id="p"))
        for custom in (default_fetch_batch_fn, None):
            stream = iter(StreamingDataset(client, 4, 2, ["x"], "p", "t", 0, fetch_batch_fn=custom))
            assert values(take(stream, 2)) == [0, 1, 2, 3]
        assert cluster.clock.now == 200

    def test_a_fetch_that_refuses_what_is_ready_is_not_asked_all_the_time(
        self, a: Client, dataset: Build, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is asked once more at once, then once an interval."""
        monkeypatch.setenv("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", "10")
        a.put(numbers(4), partition_id="p")
        asked: list[float] = []

        def fetch(**arguments: Any) -> Any:
            asked.append(cluster.clock.now)
            return default_fetch_batch_fn(**arguments) if cluster.clock.now >= 30 else (None, BatchMeta())

        assert values(take(iter(dataset(fetch_batch_fn=fetch)), 2)) == [0, 1, 2, 3]
        assert asked == [0, 0, 10, 20, 30]

    def test_a_fetch_that_refuses_what_is_ready_is_asked_after_a_change(
        self, a: Client, dataset: Build, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", "600")
        meta = a.put(numbers(4), partition_id="p")
        cluster.later(3, lambda: a.put(numbers(4, name="y"), meta))
        asked: list[float] = []

        def fetch(**arguments: Any) -> Any:
            asked.append(cluster.clock.now)
            return default_fetch_batch_fn(**arguments) if len(asked) == 3 else (None, BatchMeta())

        assert values(take(iter(dataset(fetch_batch_fn=fetch)), 2)) == [0, 1, 2, 3]
        assert asked == [0, 0, 3]

    def test_a_users_sampler_that_gives_nothing_for_now(self, start: Start) -> None:
        class Fussy(BaseSampler):
            """Takes rows only once there are six."""

            def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
                rows = list(ready_indexes)[:batch_size] if len(ready_indexes) >= 6 else []
                return rows, rows

        cluster = start(sampler=Fussy())
        client = cluster.client("c")
        client.put(numbers(4), partition_id="p")
        cluster.later(30, lambda: client.put(numbers(2, 4), partition_id="p"))
        stream = iter(StreamingDataset(client, 4, 4, ["x"], "p", "t", 0))
        assert values(take(stream, 1)) == [0, 1, 2, 3]
        assert cluster.clock.now == 30


class TestReplay:
    def test_going_on_without_reset(self, a: Client, dataset: Build) -> None:
        a.put(numbers(4), partition_id="p")
        stream = dataset()
        assert values(list(stream)) == [0, 1, 2, 3]
        assert values(list(stream)) == []
        a.put(numbers(4, 4), partition_id="p")
        assert values(list(stream)) == [4, 5, 6, 7]

    def test_reset_in_the_middle(self, a: Client, dataset: Build) -> None:
        a.put(numbers(8), partition_id="p")
        stream = dataset()
        items = iter(stream)
        assert values(take(items, 3)) == [0, 1, 2, 3, 4, 5]
        stream.reset()
        assert values(list(items)) == list(range(8))

    def test_left_in_the_middle(self, a: Client, dataset: Build) -> None:
        """The next iteration goes on with the next item; so do several at once."""
        a.put(numbers(8), partition_id="p")
        stream = dataset()
        assert values(take(iter(stream), 1)) == [0, 1]
        one, other = iter(stream), iter(stream)
        assert values([next(one), next(other), next(one)]) == [2, 3, 4, 5, 6, 7]
        assert list(other) == []

    def test_step_in_the_middle(self, a: Client, dataset: Build) -> None:
        a.put(numbers(4), partition_id="p")
        a.put(numbers(4, 100), partition_id="q")
        stream = dataset()
        items = iter(stream)
        assert values(take(items, 1)) == [0, 1]
        stream.step("q")
        assert (stream.partition_id, stream.buffer, stream.batch_index) == ("q", [], 0)
        assert values(items) == [100, 101, 102, 103]

    @pytest.mark.parametrize(("keep", "replayed"), [(0, []), (1, [8]), (2, [4, 8]), (5, [0, 4, 8]), (None, [0, 4, 8])])
    def test_a_bounded_buffer(self, a: Client, dataset: Build, keep: int | None, replayed: list[int]) -> None:
        a.put(numbers(12), partition_id="p")
        stream = dataset(keep_batches=keep)
        assert values(stream) == list(range(12))
        assert [data["x"][0].item() for data, _ in stream.buffer] == replayed
        assert stream.batch_index == 3
        stream.reset()
        assert stream.batch_index == 3 - len(replayed)
        a.put(numbers(4, 12), partition_id="p")
        assert values(stream) == list(range(replayed[0] if replayed else 12, 16))
        assert stream.batch_index == 4

    def test_reset_in_the_middle_of_a_batch_that_is_not_kept(self, a: Client, dataset: Build) -> None:
        a.put(numbers(8), partition_id="p")
        stream = dataset(keep_batches=0)
        assert values(take(iter(stream), 3)) == [0, 1, 2, 3, 4, 5]
        stream.reset()
        assert values(stream) == [6, 7]

    def test_a_stream_lets_go_of_what_was_iterated(self, a: Client, dataset: Build) -> None:
        """Hundreds of batches through it, and no data or metadata of an earlier one is left."""
        stream = dataset(keep_batches=0, should_check_consumption_status=False)
        items = iter(stream)
        seen: list[weakref.ref[Any]] = []
        for number in range(300):
            a.put(numbers(4, 4 * number), partition_id="p")
            for _ in range(2):
                data, meta = next(items)
                seen += [weakref.ref(data), weakref.ref(data["x"]), weakref.ref(meta)]
                a.clear_samples(meta)
                del data, meta
            assert stream.buffer == []
        gc.collect()
        assert [reference for reference in seen if reference() is not None] == []


class TestState:
    def test_is_the_place(self, a: Client, dataset: Build) -> None:
        """It names the item that comes next: after the last one of a batch the next batch."""
        a.put(numbers(12), partition_id="p")
        stream = dataset()
        items = iter(stream)
        places = []
        for _ in range(5):
            places.append((stream.state_dict()["batch_index"], stream.state_dict()["items_given"]))
            next(items)
        stream.reset()
        places.append((stream.state_dict()["batch_index"], stream.state_dict()["items_given"]))
        assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 0)]

    @given(st.integers(1, 7), st.integers(0, 12), st.lists(st.integers(0, 4), min_size=1, max_size=4))
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
    def test_of_any_place(self, a: Client, dataset: Build, micro: int, count: int, made: list[int]) -> None:
        """Also where a function makes the items, none of some batches among them."""
        partition = f"p{next(_partitions)}"
        a.put(numbers(7 * len(made)), partition_id=partition)
        first_of = dict(zip(range(0, 7 * len(made), 7), made))

        def process(data: Any, meta: Any, micro_batch_size: int) -> Iterator[Any]:
            yield from ((data["x"][0].item(), i) for i in range(first_of[data["x"][0].item()]))

        for more in ({"process_batch_fn": process}, {"micro_batch_size": micro}):
            build = {"batch_size": 7, "partition_id": partition, **more}
            whole = [str(item) for item in dataset(task_name="a", **build)]
            stream = dataset(task_name="a", **build)
            before = [str(item) for item in take(iter(stream), count)]
            state = pickle.dumps(stream.state_dict())
            assert len(state) < 10_000
            again = dataset(task_name="a", **build)
            again.load_state_dict(pickle.loads(state))
            twin = pickle.loads(pickle.dumps(stream.state_dict()))
            assert again.state_dict() == twin
            assert before + [str(item) for item in again] == whole

    def test_another_partition(self, a: Client, dataset: Build) -> None:
        for partition, start in [("p", 0), ("q", 100)]:
            a.put(numbers(8, start), partition_id=partition)
        stream = dataset()
        stream.step("q")
        assert values(take(iter(stream), 2)) == [100, 101, 102, 103]
        again = dataset()
        again.load_state_dict(stream.state_dict())
        assert again.partition_id == "q"
        assert values(again) == [104, 105, 106, 107]

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            ({"dp_rank": 1}, "dp_rank 0, but here it is 1"),
            ({"task_name": "other"}, "task_name 'train', but here it is 'other'"),
            ({"micro_batch_size": 1}, "cut "),
            ({"max_tokens": 7}, "cut "),
        ],
    )
    def test_refused(self, a: Client, dataset: Build, more: dict[str, Any], words: str) -> None:
        a.put(numbers(8), partition_id="p")
        stream = dataset()
        next(iter(stream))
        with pytest.raises(InvalidArgumentError, match=words):
            dataset(**more).load_state_dict(stream.state_dict())
        with pytest.raises(InvalidArgumentError, match="version None, but here it is 2"):
            dataset().load_state_dict({})
        with pytest.raises(InvalidArgumentError, match="state_dict"):
            dataset().load_state_dict(None)  # type: ignore[arg-type]

    def test_between_batches_they_may_be_cut_otherwise(self, a: Client, dataset: Build) -> None:
        a.put(numbers(8), partition_id="p")
        stream = dataset()
        take(iter(stream), 2)
        again = dataset(micro_batch_size=1)
        again.load_state_dict(stream.state_dict())
        assert sizes(again) == [1] * 4


class TestFetchFunction:
    def test_by_keyword(self, a: Client, b: Client, dataset: Build) -> None:
        a.put(numbers(8), partition_id="p")
        calls: list[dict[str, Any]] = []

        def fetch(**arguments: Any) -> Any:
            calls.append({**arguments, "sampling_config": dict(arguments["sampling_config"])})
            assert calls[-1].pop("tq_client").name == b.name
            return default_fetch_batch_fn(**arguments)

        assert values(take(iter(dataset(fetch_batch_fn=fetch)), 4)) == list(range(8))
        assert calls == [
            {
                "data_fields": ["x"], "batch_size": 4, "partition_id": "p", "task_name": "train",
                "sampling_config": {"dp_rank": 0, "task_name": "train"}, "batch_index": number,
            }
            for number in range(2)
        ]  # fmt: skip

    @pytest.mark.parametrize("kind", ["by position alone", "with names of its own", "a callable object"])
    def test_may_have_any_signature(self, a: Client, dataset: Build, kind: str) -> None:
        def positional(client: Any, fields: Any, size: Any, where: Any, task: Any, config: Any, number: Any, /) -> Any:
            return default_fetch_batch_fn(client, fields, size, where, task, config, number)

        def renamed(client: Any, fields: Any, size: Any, where: Any, task: Any, config: Any, number: Any = 0) -> Any:
            return default_fetch_batch_fn(client, fields, size, where, task, config, number)

        class Fetch:
            def __call__(self, tq_client: Any, *rest: Any, **named: Any) -> Any:
                return default_fetch_batch_fn(tq_client, *rest, **named)

        a.put(numbers(4), partition_id="p")
        fetch = {"by position alone": positional, "with names of its own": renamed, "a callable object": Fetch()}[kind]
        assert values(dataset(fetch_batch_fn=fetch)) == [0, 1, 2, 3]

    def test_its_arguments_are_its_own(self, a: Client, dataset: Build) -> None:
        a.put(numbers(8), partition_id="p")

        def fetch(**arguments: Any) -> Any:
            result = default_fetch_batch_fn(**arguments)
            arguments["sampling_config"].clear()
            arguments["data_fields"].clear()
            return result

        stream = dataset(fetch_batch_fn=fetch)
        stream.sampling_config.clear()
        assert values(list(stream)) == list(range(8))
        assert stream.data_fields == ["x"]
        assert stream.sampling_config == {"dp_rank": 0, "task_name": "train"}

    def test_the_default_leaves_the_config(self, a: Client) -> None:
        a.put(numbers(4), partition_id="p")
        config = {"dp_rank": 0, "task_name": "train"}
        data, meta = default_fetch_batch_fn(a, ["x"], 4, "p", "train", config, 0)
        assert data is not None
        assert (data["x"].tolist(), len(meta), config) == ([0, 1, 2, 3], 4, {"dp_rank": 0, "task_name": "train"})
        data, meta = default_fetch_batch_fn(a, ["x"], 4, "p", "train", config, 1)
        assert (data, len(meta)) == (None, 0)


class TestProcessFunction:
    def test_items_are_untouched(self, a: Client, dataset: Build) -> None:
        a.put(numbers(4), partition_id="p")
        item, calls = object(), []

        def process(data: Any, meta: Any, micro_batch_size: int = 1) -> list[Any]:
            calls.append((data["x"].tolist(), len(meta), micro_batch_size))
            return ["text", None, (1, 2), item]

        assert list(dataset(process_batch_fn=process)) == ["text", None, (1, 2), item]
        assert calls == [([0, 1, 2, 3], 4, 2)]

    def test_a_generator_on_replay(self, a: Client, dataset: Build) -> None:
        a.put(numbers(4), partition_id="p")
        calls: list[int] = []

        def process(data: Any, meta: Any, micro_batch_size: int = 1) -> Iterator[int]:
            calls.append(1)
            yield from data["x"].tolist()

        stream = dataset(process_batch_fn=process)
        assert list(stream) == [0, 1, 2, 3]
        stream.reset()
        assert list(stream) == [0, 1, 2, 3]
        assert len(calls) == 2

    def test_it_may_cut_as_it_likes(self, a: Client, dataset: Build) -> None:
        a.put(numbers(4), partition_id="p")
        stream = dataset(micro_batch_size=99, process_batch_fn=lambda data, meta, micro_batch_size: [micro_batch_size])
        assert list(stream) == [99]


class TestDevice:
    """The device is the host, with a stand-in for its driver."""

    @pytest.mark.parametrize("more", [{}, {"max_tokens": 9, "length_field": "x"}, {"pack": True}])
    def test_items_are_the_same_on_a_device(
        self, a: Client, dataset: Build, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
    ) -> None:
        driver = Driver()
        monkeypatch.setattr(device_copies, "driver_of", lambda device: driver)
        columns = {"x": ragged(3, 5, 1, 4), "y": ragged(3, 5, 1, 4), "z": torch.arange(4)}
        a.put(table(**columns), partition_id="p")

        def items(task: str, **form: Any) -> list[Any]:
            return [data for data, _ in dataset(data_fields=list(columns), task_name=task, **more, **form)]

        here, there = items("here"), items("there", device="cpu")
        assert driver.gathered
        assert len(here) == len(there) > 0
        for item, other in zip(here, there, strict=True):
            assert set(item.keys()) == set(other.keys())
            assert all(same_column(item.get(name), other.get(name)) for name in item.keys())  # noqa: SIM118

    def test_the_buffer_keeps_none(self, dataset: Build) -> None:
        assert dataset(device="cpu").keep_batches == 0
        assert dataset(device="cpu", keep_batches=2).keep_batches == 2
        assert dataset().keep_batches is None


def same_column(column: Any, other: Any) -> bool:
    if isinstance(column, torch.Tensor):
        return all(map(torch.equal, column.unbind(0), other.unbind(0)))
    return bool(column == other)


class TestErrors:
    @pytest.mark.parametrize(
        ("more", "words"),
        [
            ({"micro_batch_size": 0}, "micro_batch_size"),
            ({"micro_batch_size": torch.ones(2)}, "micro_batch_size"),
            *(({"batch_size": wrong}, "batch_size") for wrong in (0, "2", 1.5)),
            *(({"data_fields": wrong}, "data_fields") for wrong in ([], "x", 5, [None])),
            *(({"dp_rank": wrong}, "dp_rank") for wrong in (-1, None, "0")),
            ({"keep_batches": 0.5}, "keep_batches"),
            ({"shared": 1}, "shared must be"),
            ({"shared": True, "fetch_batch_fn": default_fetch_batch_fn}, "pass shared=True to get_data there"),
            ({"device": "cpu", "fetch_batch_fn": default_fetch_batch_fn}, "pass device='cpu' to get_data there"),
            ({"device": "warp"}, "device 'warp' cannot be used"),
        ],
    )
    def test_at_construction(self, dataset: Build, more: dict[str, Any], words: str) -> None:
        with pytest.raises(InvalidArgumentError, match=words):
            dataset(**more)

    def test_a_device_and_workers(self, dataset: Build) -> None:
        with pytest.raises(InvalidArgumentError, match="to cpu itself; leave out num_workers, because"):
            StreamingDataLoader(dataset(device="cpu"), num_workers=1)
        with pytest.raises(InvalidArgumentError, match="to cpu itself; leave out pin_memory"):
            StreamingDataLoader(dataset(device="cpu"), pin_memory=True)
        with pytest.raises(InvalidArgumentError, match="does not work with worker processes"):
            next(iter(DataLoader(dataset(device="cpu"), batch_size=None, num_workers=1)))

    @pytest.mark.design("clearing part of a dealt batch: later callers get StorageKeyNotFoundError naming the rows")
    def test_rows_cleared_between_fetch_and_read(
        self, a: Client, b: Client, dataset: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        a.put(numbers(4), partition_id="p")
        read = b.get_data

        def late(meta: BatchMeta) -> Any:
            a.clear_samples(meta)
            return read(meta)

        monkeypatch.setattr(b, "get_data", late)
        with pytest.raises(StorageKeyNotFoundError):
            next(iter(dataset(fetch_batch_fn=default_fetch_batch_fn)))

    @pytest.mark.design("clearing part of a dealt batch: later callers get StorageKeyNotFoundError naming the rows")
    def test_rows_of_a_dealt_batch_that_are_cleared(self, a: Client, dataset: Build) -> None:
        meta = a.put(numbers(4), partition_id="p")
        next(iter(dataset()))
        a.clear_samples(meta[:1])
        with pytest.raises(StorageKeyNotFoundError, match="0"):
            next(iter(dataset()))


class TestConfig:
    def test_a_config_names_the_client(self, a: Client, dataset: Build, monkeypatch: pytest.MonkeyPatch) -> None:
        config = OmegaConf.create({"system": {"folder": "/nowhere"}})
        asked: list[Any] = []

        def client_of(given: Any) -> Client:
            asked.append(given)
            return a

        monkeypatch.setattr(streaming_dataset, "client_of", client_of)
        a.put(numbers(4), partition_id="p")
        assert values(list(dataset(config=config))) == [0, 1, 2, 3]
        assert asked[0] == asked[-1] == config
        assert values(list(dataset(config=None, task_name="other"))) == [0, 1, 2, 3]
        assert asked[-1] is None

    def test_pickles(self, a: Client, dataset: Build, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(streaming_dataset, "client_of", lambda config: a)
        a.put(numbers(4), partition_id="p")
        stream = dataset(config={"system": {"folder": "/nowhere"}}, fetch_batch_fn=default_fetch_batch_fn)
        twin = pickle.loads(pickle.dumps(stream))
        assert values(list(twin)) == [0, 1, 2, 3]


class Group:
    """The method that a process group and a device mesh have in common."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


class TestNumberOfRanks:
    @pytest.mark.parametrize("dp_size", [2, Group(2)])
    def test_a_rank_leaves_the_others_their_batches(self, a: Client, dataset: Build, dp_size: Any) -> None:
        a.put(numbers(12), partition_id="p")
        ranks = [dataset(batch_size=2, dp_rank=rank, dp_size=dp_size) for rank in range(2)]
        assert values(take(iter(ranks[0]), 3)) == [0, 1, 4, 5, 8, 9]
        assert values(take(iter(ranks[1]), 3)) == [2, 3, 6, 7, 10, 11]

    def test_is_passed_to_a_custom_fetch_only_if_it_was_given(self, a: Client, dataset: Build) -> None:
        a.put(numbers(4), partition_id="p")
        said = []

        def fetch(**arguments: Any) -> Any:
            said.append(arguments["sampling_config"])
            return default_fetch_batch_fn(**arguments)

        both = [dataset(batch_size=2, fetch_batch_fn=fetch, **more) for more in ({}, {"dp_size": 2, "task_name": "u"})]
        for stream in both:
            take(iter(stream), 1)
        assert said == [{"dp_rank": 0, "task_name": "train"}, {"dp_rank": 0, "task_name": "u", "dp_size": 2}]
        assert [stream.sampling_config for stream in both] == said

    def test_may_be_passed_to_any_sampler(self, start: Start, caplog: pytest.LogCaptureFixture) -> None:
        """A sampler that does not deal to ranks accepts it, like the rank, and ignores it."""
        client = start(conf={"strict": True}).client("c")
        client.put(numbers(4), partition_id="p")
        client.seal("p")
        assert values(StreamingDataset(client, 2, 2, ["x"], "p", "t", 0, dp_size=2)) == [0, 1, 2, 3]
        assert caplog.records == []

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            (
                {"dp_size": 0},
                "dp_size must be a positive number of dp_ranks, or a process group or device mesh of them, got 0",
            ),
            ({"dp_size": True}, "got True"),
            ({"dp_size": "2"}, "got '2'"),
            ({"dp_size": 2, "dp_rank": 2}, "dp_rank must be less than dp_size, got dp_rank 2 and dp_size 2"),
        ],
    )
    def test_that_is_not_possible_is_refused(self, dataset: Build, more: dict[str, Any], words: str) -> None:
        with pytest.raises(InvalidArgumentError, match=words):
            dataset(**more)


class TestLongWaits:
    @pytest.mark.parametrize("custom", [False, True])
    def test_are_reported_at_doubling_intervals(
        self, cluster: Cluster, a: Client, dataset: Build, caplog: pytest.LogCaptureFixture, custom: bool
    ) -> None:
        """The log of the rank that waits names the rank that is ahead, and says why it waits."""
        a.put(numbers(4), partition_id="p")
        more = {"fetch_batch_fn": default_fetch_batch_fn} if custom else {}
        ahead = dataset(should_check_consumption_status=False, **more)
        behind = dataset(should_check_consumption_status=False, dp_rank=1, **more)
        take(iter(ahead), 2)
        cluster.later(130.0, lambda: a.start(a.operations.put(numbers(4, 4), partition_id="p")))
        assert values(take(iter(behind), 2)) == [4, 5, 6, 7]
        reported = [record.getMessage() for record in caplog.records if "Still waiting" in record.getMessage()]
        seconds = [float(words.split()[3]) for words in reported]
        assert len(seconds) == 3
        assert all(due <= found < due + 3 for due, found in zip((30, 60, 120), seconds, strict=True))
        assert "waits for 4 samples with fields ['x'] in partition 'p' (batch 0 of dp_rank 1)" in reported[0]
        assert "dp_rank 0 (1 batch)" in reported[0]
        assert "train waits 100 % of the time for `x`" in reported[0].splitlines()[-1]  # the verdict
        assert reported[1].splitlines()[-1].startswith("Stopped: nothing was dealt for ")

    def test_are_reported_once_where_requests_wait_longer_than_that(
        self,
        cluster: Cluster,
        a: Client,
        dataset: Build,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A loader that looks about every 100 s: its client must not report each request as a wait of 30 s."""
        monkeypatch.setenv("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", "100")
        a.put(numbers(4), partition_id="p")
        iterator = iter(dataset(should_check_consumption_status=False))
        assert values(take(iterator, 2)) == [0, 1, 2, 3]
        cluster.later(500.0, lambda: a.start(a.operations.put(numbers(4, 4), partition_id="p")))
        assert values(take(iterator, 2)) == [4, 5, 6, 7]
        reported = [record.getMessage() for record in caplog.records if "Still waiting" in record.getMessage()]
        seconds = [float(words.split()[3]) for words in reported]
        assert len(seconds) == 5
        assert all(due <= found < due + 31 for due, found in zip((30, 60, 120, 240, 480), seconds, strict=True))
