"""Loaders with worker processes over a real system: the same sequence, the place in the training process, the end."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import itertools
import multiprocessing
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from omegaconf import OmegaConf
from small_datasets import Build
from torch.utils.data import DataLoader, get_worker_info

import transfer_queue as tq
import warm
from server_processes import until
from simulated import numbers, take, values
from transfer_queue.dataloader import streaming_dataset
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader, identity
from transfer_queue.dataloader.streaming_dataset import StreamingDataset, default_fetch_batch_fn
from transfer_queue.dataloader.worker_channel import Channel

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning"),
]
ROWS, BATCH, MICRO = 22, 4, 2  # the sizes of `dataset`; the last batch is a remainder


@pytest.fixture(scope="module")
def system() -> Iterator[Any]:
    yield tq.init(OmegaConf.create({"controller": {"polling_mode": True, "sampler": "RankAwareSampler"}}))
    tq.close()


@pytest.fixture
def filled(system: Any, partition: str) -> str:
    """A sealed partition of ROWS rows."""
    return fill(partition)


@pytest.fixture(autouse=True)
def no_worker_is_left(system: Any) -> Iterator[None]:
    """Torch's workers end with their loader."""
    yield
    gc.collect()
    assert multiprocessing.active_children() == []


def fill(partition: str, start: int = 0) -> str:
    tq.get_client().put(numbers(ROWS, start), partition_id=partition)
    tq.get_client().seal(partition)
    return partition


def shown(items: Any) -> list[tuple[list[int], list[int], list[str]]]:
    """Micro-batches by value."""
    return [(data["x"].tolist(), meta.global_indexes, meta.field_names) for data, meta in items]


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_a_batch_that_are_stored_once_share_memory(
    system: Any, partition: str, dataset: Build, workers: int
) -> None:
    """In the batch, and in each micro-batch: also after the way from a worker."""
    images = [torch.full((100, 100), number) for number in range(4)]
    pixels = [images[row // 2] for row in range(8)]
    tq.get_client().kv_batch_put([f"{partition}-{row}" for row in range(8)], partition, {"x": pixels})
    tq.get_client().seal(partition)
    loader = StreamingDataLoader(dataset(micro_batch_size=4, shared=True), num_workers=workers)
    items = [data["x"].tolist() for data, _ in loader]
    assert [int(row[0, 0]) for item in items for row in item] == [row // 2 for row in range(8)]
    for item in items:
        assert len({row.data_ptr() for row in item}) == 2
        item[0].fill_(9)
        assert int(item[1][0, 0]) == 9
    own = StreamingDataLoader(dataset(micro_batch_size=4, task_name="own"), num_workers=workers)
    assert len({row.data_ptr() for data, _ in own for row in data["x"].unbind()}) == 8


WAYS = [
    {"num_workers": count, "persistent_workers": persistent, "prefetch_factor": ahead}
    for count, persistent, ahead in [(1, False, None), (2, True, 3), (2, False, 2)]
]
# Their dataset travels pickled, as it does to spawned ones.
FRESH = [{"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1, "multiprocessing_context": "forkserver"}]


class TestSequence:
    @pytest.mark.parametrize("way", [*WAYS, *FRESH], ids=str)
    def test_is_the_same_with_any_number_of_workers(self, dataset: Build, filled: str, way: dict[str, Any]) -> None:
        """Iterated to the end, replayed, left in the middle and taken up again, moved to another partition."""
        warm.context()
        other = fill(filled + "b", 100)
        told = []
        for more in ({}, way):
            loader = StreamingDataLoader(dataset(), **more)
            told.append([shown(loader)])
            told[-1].append(shown(loader))
            loader.reset()
            told[-1].append(shown(take(loader, 3)))
            told[-1].append(shown(loader))
            loader.step(other)
            told[-1].append(shown(take(loader, 4)))
            loader.reset()
            told[-1].append(shown(take(loader, 7)))
            told[-1].append(shown(loader))
            told[-1].append([shown([batch]) for batch in loader.get_buffer()])
            told[-1].append(loader.dataset.batch_index)
            del loader
        assert told[0] == told[1]
        assert [value for rows, _, _ in told[0][0] for value in rows] == list(range(ROWS))
        assert told[0][1] == []

    def test_batches_are_asked_for_in_turn(self, dataset: Build, filled: str) -> None:
        """Else a batch would hold other rows where the worker of a later one comes first."""
        later = multiprocessing.get_context("fork").Event()

        def fetch(**arguments: Any) -> Any:
            worker = get_worker_info()
            assert worker is not None
            if worker.id == 1:
                later.set()
            elif arguments["batch_index"] == 0:
                later.wait(0.3)
            return default_fetch_batch_fn(**arguments)

        assert values(StreamingDataLoader(dataset(fetch_batch_fn=fetch), num_workers=2)) == list(range(ROWS))

    def test_workers_fetch_no_batch_that_the_buffer_replays(self, dataset: Build, filled: str, tmp_path: Path) -> None:
        """The consumer of the replay may be slow: a batch that was not kept cannot be fetched again."""
        fetched = tmp_path / "fetched"

        def fetch(**arguments: Any) -> Any:
            with open(fetched, "a") as file:
                file.write(f"{arguments['batch_index']} ")
            return default_fetch_batch_fn(**arguments)

        loader = StreamingDataLoader(dataset(fetch_batch_fn=fetch), num_workers=1)
        assert values(loader) == list(range(ROWS))
        fetched.write_text("")
        loader.reset()
        items = iter(loader)
        first = values(take(items, 1))
        until(lambda: fetched.read_text().split())
        assert set(map(int, fetched.read_text().split())) == {len(loader.get_buffer())}
        assert first + values(items) == list(range(ROWS))

    def test_rows_that_come_one_by_one(self, dataset: Build, partition: str) -> None:
        def produce() -> None:
            for row in range(ROWS):
                tq.get_client().put(numbers(1, row), partition_id=partition)
            tq.get_client().seal(partition)

        loader = StreamingDataLoader(dataset(), num_workers=3)
        received = iter(loader)
        producer = threading.Thread(target=produce)
        producer.start()
        assert values(received) == list(range(ROWS))
        producer.join()

    def test_the_end_is_the_same_for_all_workers(self, dataset: Build, partition: str) -> None:
        """Once one was told that nothing comes, no other asks for a later batch, though rows may have come."""
        tq.get_client().put(numbers(4), partition_id=partition)
        loader = StreamingDataLoader(
            dataset(should_check_consumption_status=True), num_workers=2, persistent_workers=True
        )
        assert values(loader) == [0, 1, 2, 3]
        tq.get_client().put(numbers(8, 4), partition_id=partition)
        assert values(loader) == list(range(4, 12))

    def test_functions_are_called_in_workers_and_on_replay_here(self, dataset: Build, filled: str) -> None:
        def process(data: Any, meta: Any, micro_batch_size: int) -> Iterator[Any]:
            yield os.getpid()
            yield data["x"].tolist()

        loader = StreamingDataLoader(
            dataset(process_batch_fn=process), num_workers=1, collate_fn=lambda item: (item, os.getpid())
        )
        items = list(loader)
        assert [item for item, _ in items[1::2]] == [list(range(i, min(i + 4, ROWS))) for i in range(0, ROWS, 4)]
        assert {pid for _, pid in items} == {pid for pid, _ in items[::2]} != {os.getpid()}
        loader.reset()
        assert {pid for _, pid in loader} == {os.getpid()}

    def test_a_fault_reaches_the_caller_and_the_place_stays(self, dataset: Build, filled: str) -> None:
        def process(data: Any, meta: Any, micro_batch_size: int) -> list[Any]:
            if 4 in data["x"]:
                raise LookupError("a fault of mine")
            return data["x"].tolist()

        for workers in (0, 2):
            loader = StreamingDataLoader(
                dataset(process_batch_fn=process), num_workers=workers, persistent_workers=workers > 0
            )
            for expected in ([0, 1, 2, 3], []):
                items = iter(loader)
                assert take(items, len(expected)) == expected
                with pytest.raises(LookupError, match="a fault of mine"):
                    next(items)
            assert loader.state_dict()["batch_index"] == 1


class TestPlace:
    """Of the process that iterates, whatever workers have fetched ahead."""

    # Every count with and without workers that are ahead; every way with a batch left in the middle and at the end.
    @pytest.mark.parametrize(
        ("way", "count"),
        [(way, count) for way in ({}, *WAYS) for count in (0, 1, 3, 4, 11) if way in ({}, WAYS[1]) or count in (3, 11)],
        ids=str,
    )
    def test_a_restarted_rank_goes_on(self, dataset: Build, filled: str, way: dict[str, Any], count: int) -> None:
        first = StreamingDataLoader(dataset(task_name="same"), **way)
        before = values(take(first, count)) if count else []
        state = pickle.dumps(first.state_dict())
        assert len(state) < 10_000
        del first
        again = StreamingDataLoader(dataset(task_name="same"), num_workers=2)
        again.load_state_dict(pickle.loads(state))
        assert before + values(again) == list(range(ROWS))

    @pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, True)])
    def test_reset_after_a_load_replays_the_whole_epoch(
        self, dataset: Build, filled: str, workers: int, persistent: bool
    ) -> None:
        first = StreamingDataLoader(dataset(task_name="same"))
        take(first, 5)
        again = StreamingDataLoader(dataset(task_name="same"), num_workers=workers, persistent_workers=persistent)
        again.load_state_dict(first.state_dict())
        assert values(take(again, 2)) == [10, 11, 12, 13]
        for count in (3, 100, 100):
            again.reset()
            assert values(take(again, count)) == list(range(min(ROWS, 2 * count)))

    @pytest.mark.parametrize("persistent", [False, True])
    def test_loaded_while_workers_are_ahead(self, dataset: Build, filled: str, persistent: bool) -> None:
        loader = StreamingDataLoader(dataset(), num_workers=2, persistent_workers=persistent)
        items = iter(loader)
        assert values(take(items, 3)) == list(range(6))
        state = loader.state_dict()
        assert values(take(items, 4)) == list(range(6, 14))
        loader.load_state_dict(state)
        assert values(items) == list(range(6, ROWS))

    def test_step_while_workers_wait_for_rows(self, dataset: Build, filled: str) -> None:
        """Persistent workers leave the partition in which nothing comes."""
        loader = StreamingDataLoader(dataset(partition_id=filled + "empty"), num_workers=2, persistent_workers=True)
        iter(loader)
        loader.step(filled)
        assert values(loader) == list(range(ROWS))
        for _ in range(3000):  # more than a pipe would hold
            loader.step(filled + "empty")
        loader.step(filled)
        assert values(loader) == list(range(ROWS))

    def test_step_from_another_thread(self, dataset: Build, filled: str) -> None:
        loader = StreamingDataLoader(dataset(partition_id=filled + "empty"), num_workers=2, persistent_workers=True)
        found: list[int] = []
        waiting = threading.Thread(target=lambda items: found.extend(values(items)), args=(iter(loader),))
        waiting.start()
        loader.step(filled)
        waiting.join(300)
        assert found == list(range(ROWS))

    def test_step_from_another_thread_just_before_one_waits(
        self, monkeypatch: pytest.MonkeyPatch, dataset: Build, partition: str, filled: str
    ) -> None:
        """The thread has read the position of the dataset, and does not wait yet."""
        empty = partition + "empty"
        loader = StreamingDataLoader(dataset(partition_id=empty), num_workers=2, persistent_workers=True)
        found: list[int] = []
        waiting = threading.Thread(target=lambda items: found.extend(values(items)), args=(iter(loader),))
        want = Channel.send_wanted
        steps = iter([filled])

        def step_before(channel: Channel, version: int, number: int) -> None:
            for other in steps:
                another = threading.Thread(target=loader.step, args=(other,))
                another.start()
                another.join()
            want(channel, version, number)

        monkeypatch.setattr(Channel, "send_wanted", step_before)
        waiting.start()
        waiting.join(60)
        came = list(found)
        tq.get_client().seal(empty, create=True)  # ends all waits, even if the test has failed
        assert came == list(range(ROWS))

    @pytest.mark.parametrize("batches", [0, 1, 2, 4])
    def test_partitions_of_which_some_workers_have_more_batches(
        self, dataset: Build, partition: str, batches: int
    ) -> None:
        """Torch takes items of the workers in turn, also of one that has no more batch for the partition."""
        loader = StreamingDataLoader(dataset(), num_workers=3, persistent_workers=True)
        for step in range(6):
            place = f"{partition}-{step}"
            tq.get_client().create_partition(place)
            tq.get_client().put(numbers(batches * BATCH), partition_id=place)
            tq.get_client().seal(place)
            loader.step(place)
            assert values(loader) == list(range(batches * BATCH))

    def test_more_partitions_than_a_pipe_has_space_for(
        self, monkeypatch: pytest.MonkeyPatch, dataset: Build, partition: str
    ) -> None:
        """Each has one batch, so that the third worker never asks for any."""
        create = Channel.__init__

        def create_narrow(channel: Channel, workers: int) -> None:
            create(channel, workers)
            for _, pipe in (*channel.orders, *channel.turns, *channel.places):
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)

        monkeypatch.setattr(Channel, "__init__", create_narrow)
        client, found, steps = tq.get_client(), [], 150
        for step in range(steps):
            client.put(numbers(MICRO, step * MICRO), partition_id=f"{partition}-{step}")
            client.seal(f"{partition}-{step}")
        loader = StreamingDataLoader(dataset(), num_workers=3, persistent_workers=True)
        for step in range(steps):
            loader.step(f"{partition}-{step}")
            found += values(loader)
        assert found == list(range(steps * MICRO))


class TestRanks:
    """A fixed number of rows, and workers that would fetch all of them for the first rank."""

    def test_a_known_number_of_ranks(self, dataset: Build, partition: str) -> None:
        tq.get_client().put(numbers(16), partition_id=partition)
        ranks = [dataset(dp_rank=rank, dp_size=2, task_name="train") for rank in range(2)]
        got = [values(take(StreamingDataLoader(rank, num_workers=2), 4)) for rank in ranks]
        assert got == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]

    def test_an_unknown_number_of_ranks_in_step(self, dataset: Build, partition: str) -> None:
        """As in training, each rank needs a batch after all ranks had the one before."""
        tq.get_client().put(numbers(16), partition_id=partition)
        loaders = [StreamingDataLoader(dataset(dp_rank=rank, task_name="train"), num_workers=2) for rank in range(2)]
        streams = [iter(loader) for loader in loaders]
        got = [values(take(stream, 2)) for _ in range(2) for stream in streams]
        assert sorted(itertools.chain(*got)) == list(range(16))

    def test_the_number_that_torch_distributed_has(self, system: Any, partition: str, tmp_path: Path) -> None:
        """Four processes, of which two each are replicas of one rank."""
        tq.get_client().put(numbers(16), partition_id=partition)
        order = warm.context().Barrier(4)
        pipes = [warm.context().Pipe() for _ in range(4)]
        processes = [
            warm.process(read_as_rank, system, partition, str(tmp_path / "world"), number, order, pipe[1], daemon=False)
            for number, pipe in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        try:
            for pipe, _ in pipes:
                assert pipe.poll(120), "a process has got no batch, or has died"
            got = [pipe.recv() for pipe, _ in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        assert got == [[0, 1, 2, 3, 8, 9, 10, 11]] * 2 + [[4, 5, 6, 7, 12, 13, 14, 15]] * 2


def read_as_rank(config: Any, partition: str, world: str, number: int, order: Any, pipe: Any) -> None:
    """One process of four: rank 0 reads its two batches before rank 1 asks for any."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{world}", rank=number, world_size=4)
    rank = number // 2
    dataset = StreamingDataset(config, BATCH, MICRO, ["x"], partition, "train", rank)
    loader = StreamingDataLoader(dataset, num_workers=2, multiprocessing_context="fork")
    if rank:
        order.wait()
    found = values(take(loader, 4))
    if not rank:
        order.wait()
    pipe.send(found)
    torch.distributed.destroy_process_group()


class TestEnd:
    def started(self, dataset: Build, **more: Any) -> tuple[Any, Any]:
        loader = StreamingDataLoader(dataset(), num_workers=2, **more)
        return loader, iter(loader)

    @pytest.mark.parametrize("persistent", [False, True])
    def test_workers_that_wait_for_rows_end_by_themselves(
        self, dataset: Build, partition: str, monkeypatch: pytest.MonkeyPatch, persistent: bool
    ) -> None:
        """Torch need not end them by force, which it does after its 5 seconds."""
        by_force: list[Any] = []
        monkeypatch.setattr(multiprocessing.process.BaseProcess, "terminate", by_force.append)
        monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 20.0)
        tq.get_client().put(numbers(4), partition_id=partition)
        loader, items = self.started(dataset, persistent_workers=persistent)
        assert values(take(items, 2)) == [0, 1, 2, 3]
        workers = multiprocessing.active_children()
        assert len(workers) == 2
        del loader, items
        assert [worker.exitcode for worker in workers] == [0, 0]
        assert by_force == []

    def test_workers_in_a_function_that_waits(
        self, dataset: Build, monkeypatch: pytest.MonkeyPatch, partition: str
    ) -> None:
        by_force: list[Any] = []
        monkeypatch.setattr(multiprocessing.process.BaseProcess, "terminate", by_force.append)
        monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 20.0)
        never = multiprocessing.get_context("fork").Event()
        waits = multiprocessing.get_context("fork").Event()

        def fetch(**arguments: Any) -> Any:
            waits.set()
            never.wait()

        loader = StreamingDataLoader(dataset(fetch_batch_fn=fetch), num_workers=1)
        items = iter(loader)
        assert waits.wait(300)
        workers = multiprocessing.active_children()
        del loader, items
        assert [worker.exitcode for worker in workers] == [0]
        assert by_force == []

    def test_a_claim_that_nobody_waits_for_is_withdrawn(self, dataset: Build, partition: str) -> None:
        """The rows that come after the loader's end are another's."""
        tq.get_client().put(numbers(4), partition_id=partition)
        loader, items = self.started(dataset)
        assert values(take(items, 2)) == [0, 1, 2, 3]
        task = loader.dataset.task_name
        del loader, items
        tq.get_client().put(numbers(8), partition_id=partition)
        assert tq.get_client().get_consumption_status(task, partition)[1].tolist() == [1] * 4 + [0] * 8

    def test_no_worker_is_left_when_a_loader_has_ended_though_torch_gave_up_waiting(
        self, monkeypatch: pytest.MonkeyPatch, dataset: Build, filled: str
    ) -> None:
        """Spawned workers take seconds to end on a busy machine; torch then terminates them, and goes on at once."""
        loader = StreamingDataLoader(dataset(), num_workers=2)
        items = iter(loader)
        next(items)
        monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.0)
        items.close()
        assert multiprocessing.active_children() == []

    @pytest.mark.parametrize(("method", "count"), [("fork", 2), ("spawn", 1)])
    def test_a_killed_loaders_workers_end(self, system: Any, method: str, count: int, partition: str) -> None:
        pipe, theirs = multiprocessing.Pipe()
        process = warm.process(load_for_ever, partition, method, count, theirs, daemon=False)
        process.start()
        theirs.close()
        assert pipe.poll(300)
        workers = pipe.recv()
        assert len(workers) == count
        found = [psutil.Process(pid) for pid in workers]
        process.kill()
        process.join()
        _, alive = psutil.wait_procs(found, timeout=300)
        assert alive == []

    def test_a_script_ends_quietly_in_the_middle(self, filled: str) -> None:
        done = warm.run_program(leave_loaders, filled)
        assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1]\n" * 2, "")


LEFT: list[Any] = []  # loaders that are alive when the interpreter ends


def leave_loaders() -> int:
    """A script that ends as those of an interpreter do, unlike processes of multiprocessing."""
    warnings.simplefilter("ignore")
    for persistent in (False, True):
        dataset = StreamingDataset(None, 4, 2, ["x"], sys.argv[1], f"t{persistent}", 0)
        loader = StreamingDataLoader(
            dataset, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
        )
        LEFT.append(iter(loader))
        print(next(LEFT[-1])[0]["x"].tolist())
    ctypes.pythonapi.Py_Exit(0)
    return 1


def load_for_ever(partition: str, method: str, workers: int, pipe: Any) -> None:
    """Gives the ids of the workers, which wait for a batch that never comes."""
    dataset = StreamingDataset(None, BATCH, MICRO, ["x"], partition, "t", 0)
    loader = StreamingDataLoader(dataset, num_workers=workers, multiprocessing_context=method)
    items = iter(loader)
    pipe.send([child.pid for child in multiprocessing.active_children()])
    next(items)


class TestPlainLoader:
    """A DataLoader of torch's: each worker has a place of its own."""

    @pytest.mark.parametrize("workers", [0, 1, 2])
    def test_shares_the_batches(self, dataset: Build, filled: str, workers: int) -> None:
        loader = DataLoader(dataset(), batch_size=None, num_workers=workers, collate_fn=identity)
        items = list(loader)
        assert {len(meta) for _, meta in items} == {MICRO}
        assert sorted(values(items)) == list(range(ROWS))

    @pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
    @pytest.mark.parametrize("way", [{}, WAYS[1]], ids=str)
    def test_stateful(self, dataset: Build, filled: str, way: dict[str, Any]) -> None:
        """torchdata's own loader: the dataset's state travels in it, from each worker."""
        stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

        def loader() -> Any:
            stream = dataset(task_name="same")
            return stateful.StatefulDataLoader(stream, batch_size=None, collate_fn=identity, **way)

        whole = values(loader())
        assert sorted(whole) == list(range(ROWS))
        for count in (0, 3, 9):
            first = loader()
            before = values(take(first, count)) if count else []
            state = pickle.dumps(first.state_dict())
            assert len(state) < 10_000
            del first
            again = loader()
            again.load_state_dict(pickle.loads(state))
            assert before + values(again) == whole

    def test_an_orphan_ends(self, monkeypatch: pytest.MonkeyPatch, dataset: Build, partition: str) -> None:
        """The worker of a loader whose process was killed does not wait for ever."""

        class Gone:
            def is_alive(self) -> bool:
                return False

        monkeypatch.setenv("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", "0.05")
        monkeypatch.setattr(streaming_dataset, "get_worker_info", lambda: type("Info", (), {"id": 0, "num_workers": 1}))
        monkeypatch.setattr(multiprocessing, "parent_process", Gone)
        assert list(dataset()) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_freed_when_the_training_process_asks_for_the_item_after_their_batch(
    partition: str, dataset: Build, workers: int
) -> None:
    """What workers have fetched ahead is not freed before the process that trains is through with it."""
    client = tq.get_client()
    client.create_partition(partition, free_when=tq.consumed_by["train"])
    fill(partition)
    loader = StreamingDataLoader(dataset(task_name="train", keep_batches=0), num_workers=workers)
    seen = 0
    for data, meta in loader:
        assert client.get_data(meta)["x"].shape[0] == len(data), "rows of the batch under way can be read"
        seen += len(meta)
        (progress,) = [p for p in client.status().partitions if p.name == partition]
        whole = (seen - 1) // BATCH * BATCH  # rows of the batches before this one
        assert progress.freed == whole
        assert progress.rows == ROWS - whole
    assert seen == ROWS
    assert [p.rows for p in client.status().partitions if p.name == partition] == [0]
    del loader
