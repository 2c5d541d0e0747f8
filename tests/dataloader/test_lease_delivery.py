"""Delivery at least once: acknowledged by the process that iterates, when it asks for what follows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf
from small_datasets import Build
from torch.utils.data import DataLoader

import transfer_queue as tq
from simulated import Start, numbers, values
from transfer_queue.dataloader.lease_delivery import return_batches
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader, identity
from transfer_queue.dataloader.streaming_dataset import StreamingDataset
from transfer_queue.errors import BatchGoneError, InvalidArgumentError
from transfer_queue.sampler import RankAwareSampler, SequentialSampler
from transfer_queue.testing import Client, Cluster

ROWS, BATCH, MICRO = 12, 4, 2
_numbers = itertools.count()


def consumed(client: Any, partition: str = "p") -> int:
    _, column = client.get_consumption_status("train", partition)
    return int(column.sum())


def arguments(**more: Any) -> dict[str, Any]:
    return {
        "batch_size": BATCH, "micro_batch_size": MICRO, "data_fields": ["x"], "partition_id": "p",
        "task_name": "train", "dp_rank": 0, "delivery": "at_least_once", **more,
    }  # fmt: skip


class TestInOneProcess:
    """Over the simulated system, in virtual time."""

    @pytest.fixture
    def cluster(self, start: Start) -> Cluster:
        return start(seed=6, sampler=RankAwareSampler())

    @pytest.fixture
    def dataset(self, a: Client, b: Client) -> Build:
        a.put(numbers(ROWS), partition_id="p")
        a.seal("p")
        return lambda client=b, **more: StreamingDataset(client, **arguments(**more))

    def test_a_batch_is_acknowledged_with_the_first_item_after_it(self, a: Client, dataset: Build) -> None:
        items, seen = iter(dataset()), []
        for _ in range(ROWS // MICRO):
            next(items)
            seen.append(consumed(a))
        assert seen == [0, 0, 4, 4, 8, 8]
        assert list(items) == []
        assert consumed(a) == ROWS

    def test_a_state_after_a_batch_acknowledges_it_when_it_is_loaded(
        self, a: Client, b: Client, cluster: Cluster, dataset: Build
    ) -> None:
        made = dataset()
        items = iter(made)
        next(items), next(items)
        state = made.state_dict()
        assert (state["batch_index"], state["unacknowledged"]["rows"]) == (1, [0, 1, 2, 3])
        b.die()
        cluster.advance(100.0)
        again = dataset(cluster.client("c"))
        again.load_state_dict(state)
        assert values(itertools.islice(iter(again), 1)) == [4, 5]
        assert consumed(a) == 4
        assert "unacknowledged" not in again.state_dict()

    @pytest.mark.parametrize("is_over", [False, True])
    def test_a_state_acknowledges_by_its_own_lease_only(self, start: Start, is_over: bool) -> None:
        """If the lease is over, other clients may have the samples, and nobody acknowledges for them."""
        cluster = start(seed=6, sampler=SequentialSampler())
        a, b, c = (cluster.client(name) for name in "abc")
        a.put(numbers(ROWS), partition_id="p")
        made = StreamingDataset(b, **arguments())
        items = iter(made)
        next(items), next(items)
        state = made.state_dict()
        if is_over:
            b.die()
            cluster.advance(100.0)
            other = a.get_meta("x", 4, "p", task_name="train", lease=60.0)
            assert other.global_indexes == [0, 1, 2, 3]
        again = StreamingDataset(c, **arguments())
        again.load_state_dict(state)
        assert values(itertools.islice(iter(again), 1)) == [4, 5]
        assert consumed(a) == (0 if is_over else 4)

    def test_reset_replays_and_acknowledges_when_the_replay_is_through(self, a: Client, dataset: Build) -> None:
        made = dataset()
        items = iter(made)
        assert values(itertools.islice(items, 4)) == list(range(8))
        made.reset()
        assert values(itertools.islice(items, 4)) == list(range(8))
        assert consumed(a) == 4
        assert values(items) == list(range(8, ROWS))
        assert consumed(a) == ROWS

    def test_what_is_left_in_the_middle_goes_back(self, a: Client, start: Start) -> None:
        cluster = start(seed=6, sampler=SequentialSampler())
        a, b = cluster.client("a"), cluster.client("b")
        for partition in "pq":
            a.put(numbers(ROWS), partition_id=partition)
        made = StreamingDataset(b, **arguments())
        items = iter(made)
        next(items)
        made.step("q")
        again = a.get_meta(["x"], 4, "p", task_name="train")
        assert (again.global_indexes, again.deliveries) == ([0, 1, 2, 3], [1] * 4)
        next(items), next(items)
        made.step("p")
        assert consumed(a, "q") == 0
        next(items)
        assert consumed(a, "q") == 4, "what was through before is acknowledged"

    def test_a_fetch_function_may_lease_by_itself(self, a: Client, dataset: Build) -> None:
        def fetch(client: Any, fields: Any, size: int, partition: str, task: str, sampling: Any, number: int) -> Any:
            sampling = {**sampling, "batch_index": number, "partition_id": partition}
            meta = client.get_meta(fields, size, partition, task_name=task, sampling_config=sampling, lease=5.0)
            return client.get_data(meta), meta

        items = iter(dataset(fetch_batch_fn=fetch))
        next(items), next(items)
        assert consumed(a) == 0
        next(items)
        assert consumed(a) == 4

    @pytest.mark.parametrize("more", [{"delivery": "exactly_once"}, {"lease_seconds": 0}, {"lease_seconds": "long"}])
    def test_other_arguments_are_errors(self, dataset: Build, more: dict[str, Any]) -> None:
        with pytest.raises(InvalidArgumentError):
            dataset(**more)

    def test_handing_back_what_cannot_be_is_no_error(self, a: Client, b: Client, dataset: Build) -> None:
        meta = b.get_meta(["x"], 4, "p", task_name="train", sampling_config={"dp_rank": 0, "batch_index": 0}, lease=5)
        a.clear_partition("p")
        return_batches(b, [meta])
        assert not b.ack(meta)


@pytest.fixture(scope="module")
def system() -> Iterator[Any]:
    yield tq.init(OmegaConf.create({"controller": {"sampler": "SequentialSampler"}}))
    tq.close()


@pytest.fixture
def partition(system: Any) -> str:
    name = f"p{next(_numbers)}"
    tq.get_client().put(numbers(ROWS), partition_id=name)
    tq.get_client().seal(name)
    return name


WORKERS = pytest.mark.parametrize(("workers", "context"), [(1, "fork"), (2, "forkserver")])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning")
class TestWithWorkers:
    """Over a real system with a sampler that keeps nothing: what is not given must go back to be seen again."""

    def loader(
        self, system: Any, partition: str, workers: int, context: str | None, **more: Any
    ) -> StreamingDataLoader:
        dataset = StreamingDataset(system, **arguments(partition_id=partition, lease_seconds=60.0))
        return StreamingDataLoader(dataset, num_workers=workers, multiprocessing_context=context, **more)

    @WORKERS
    def test_workers_acknowledge_nothing(self, system: Any, partition: str, workers: int, context: Any) -> None:
        seen = []
        items = iter(self.loader(system, partition, workers, context))
        for data, _ in items:
            seen.append((data["x"].tolist(), consumed(tq.get_client(), partition)))
        assert seen == [([2 * i, 2 * i + 1], i // 2 * 4) for i in range(ROWS // MICRO)]
        assert consumed(tq.get_client(), partition) == ROWS

    @pytest.mark.parametrize("workers", [2, 3])
    def test_partitions_one_after_the_other(self, system: Any, workers: int) -> None:
        """No worker waits for the end of a partition while torch does not yet take a batch that has to be acknowledged.

        The worker of whom torch takes the first item of a partition is another one each time.
        """
        client = tq.get_client()
        names = [f"steps-{workers}-{step}" for step in range(8)]
        for step, name in enumerate(names):
            client.put(numbers(BATCH * (step % 4)), partition_id=name)
            client.seal(name, create=True)
        loader = self.loader(system, names[0], workers, "fork", persistent_workers=True)
        found = []
        for step, name in enumerate(names):
            loader.step(name)
            found.append(values(loader))
            assert consumed(client, name) == BATCH * (step % 4)
        assert found == [list(range(BATCH * (step % 4))) for step in range(8)]

    def test_what_was_not_given_goes_back_when_the_loader_goes(self, system: Any, partition: str) -> None:
        client = tq.get_client()
        loader = self.loader(system, partition, 2, "fork", prefetch_factor=2)
        items = iter(loader)
        next(items)
        # the workers have asked for all batches; those that they could be given are claimed
        while client.status().partitions[-1].tasks[0].claimed < ROWS:
            pass
        items.close()
        meta = client.get_meta(["x"], 8, partition, task_name="train", lease=60.0, timeout=30)
        assert client.get_data(meta)["x"].tolist() == list(range(4, ROWS))
        assert meta.deliveries == [1] * 8
        assert client.ack(meta)
        assert values(loader.dataset) == [2, 3], "the batch in the middle is still its own"
        assert client.check_consumption_status("train", partition)

    @pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 2), (2, 0)])
    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_a_restarted_loader_yields_the_rest(
        self, system: Any, partition: str, before: int, after: int, count: int
    ) -> None:
        first = self.loader(system, partition, before, "fork" if before else None)
        items = iter(first)
        seen = values(itertools.islice(items, count))
        state = json.loads(json.dumps(first.state_dict()))
        items.close()
        again = self.loader(system, partition, after, "fork" if after else None)
        again.load_state_dict(state)
        assert sorted(seen + values(again)) == list(range(ROWS))
        assert tq.get_client().check_consumption_status("train", partition)
        if count == 1:
            again.reset()
            assert sorted(values(again)) == list(range(ROWS))
        else:
            with pytest.raises(BatchGoneError, match="keeps no batches"):
                again.reset()

    def test_one_worker_of_a_plain_loader_continues_the_open_batch(self, system: Any, partition: str) -> None:
        dataset = StreamingDataset(system, **arguments(partition_id=partition, delivery="at_most_once"))
        seen = values(itertools.islice(iter(dataset), 1))
        plain = DataLoader(dataset, None, num_workers=2, collate_fn=identity, multiprocessing_context="fork")
        assert sorted(seen + values(plain)) == list(range(ROWS))

    def test_a_plain_loader_with_workers_is_refused(self, system: Any, partition: str) -> None:
        dataset = StreamingDataset(system, **arguments(partition_id=partition))
        with pytest.raises(InvalidArgumentError, match="StreamingDataLoader"):
            next(iter(DataLoader(dataset, batch_size=None, num_workers=1, collate_fn=identity)))
