"""Checkpoints of a real system: saved under load, by savers that are killed, on full disks, and loaded again."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from server_processes import server_process
from transfer_queue.attachment import CURRENT
from transfer_queue.client.checkpoint import checkpoint_folder

CONTEXT = multiprocessing.get_context("fork")
WIDTH = 512
SEQUENTIAL = {"sampler": "SequentialSampler"}


def conf(units: int = 1) -> dict[str, Any]:
    storage = {"num_data_storage_units": units, "arena_bytes": 256 << 20}
    return {
        "system": {"name": "checkpoints"},
        "controller": {"polling_mode": True, "sampler": "RankAwareSampler"},
        "backend": {"SimpleStorage": storage},
    }


@pytest.fixture(scope="module")
def started() -> Iterator[None]:
    tq.init(conf(2))
    yield
    tq.close()


@pytest.fixture
def system(started: None) -> None:
    """An empty system: that of the test before, which may have started another one."""
    for partition in tq.get_client().get_partition_list():
        tq.get_client().clear_partition(partition)


def start_again(units: int) -> None:
    """Another system, without anything in it."""
    tq.close()
    tq.init(conf(units))


def rows(value: int, count: int = 4) -> TensorDict:
    """Rows that are full of one value: a torn one would be noticed."""
    return TensorDict({"x": torch.full((count, WIDTH), value)}, batch_size=[count])


def test_saved_under_load(system, tmp_path):
    """While producers replace, clear and put, every saved row has the bytes that its tag tells, in every save."""
    stop, saves = threading.Event(), 2

    def produce(name: str) -> None:
        draw, number = random.Random(name), 0
        while not stop.is_set():
            number += 1
            keys = [f"{name}{draw.randrange(24)}" for _ in range(4)]
            keys = list(dict.fromkeys(keys))
            tq.kv_batch_put(keys, "p", rows(number, len(keys)), tags=[{"value": number}] * len(keys))
            if draw.random() < 0.3:
                tq.kv_clear(keys[:2], "p")

    with ThreadPoolExecutor(2) as pool:
        producing = [pool.submit(produce, name) for name in "ab"]
        try:
            for number in range(saves):
                tq.save_checkpoint(tmp_path / str(number))
        finally:
            stop.set()
        for each in producing:
            each.result()
    for number in range(saves):
        start_again(1 + 2 * number)
        tq.load_checkpoint(tmp_path / str(number))
        tags = tq.kv_list("p").get("p", {})
        for key, tag in tags.items():
            assert tq.kv_batch_get([key], "p", "x")["x"].values().unique().tolist() == [tag["value"]]


def _save_and_die(folder: Path, step: int, ready: Any) -> None:
    """A new client saves, and kills itself at the step-th of the calls that change files."""
    torch.set_num_threads(1)
    left = step

    def counting(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        setattr(owner, name, counted)

    for owner, name in (
        (Path, "mkdir"), (Path, "rename"), (Path, "unlink"), (os, "fsync"), (os, "writev"), (os, "link"),
        (os, "unlink"), (os, "rmdir"), (os, "pwrite"), (checkpoint_folder, "_exchange"), (checkpoint_folder, "copy"),
    ):  # fmt: skip
        counting(owner, name)
    tq.save_checkpoint(folder)
    ready.put(step)
    tq.close()


def test_savers_that_are_killed(system, tmp_path):
    """At whatever step a saver dies, there is a whole checkpoint: the one before, or its own."""
    folder = tmp_path / "ck"
    tq.kv_batch_put(["old"], "p", rows(1, 1))
    tq.save_checkpoint(folder)
    tq.kv_batch_put(["new"], "p", rows(2, 1))
    done = CONTEXT.Queue()
    for step in (0, 2, 4, 6, 8, 11, 14, 17, 20, 23, 26, 30):
        saver = CONTEXT.Process(target=_save_and_die, args=(folder, step, done))
        saver.start()
        saver.join()
        tq.load_checkpoint(folder)
        keys = tq.kv_list("p")["p"]
        assert list(keys) in (["old"], ["old", "new"])
        for key in keys:
            assert tq.kv_batch_get([key], "p", "x")["x"].values().unique().tolist() == [1 if key == "old" else 2]
        if saver.exitcode == 0:
            break
        assert saver.exitcode == -signal.SIGKILL
        if "new" not in keys:
            tq.kv_batch_put(["new"], "p", rows(2, 1))
    assert step > 8
    tq.save_checkpoint(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]
    deadline = time.monotonic() + 20
    states = CURRENT.system.states  # type: ignore[union-attr]
    while any(states.iterdir()):  # the controller hears of the end of killed savers in its own time
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_clients_method_is_called_with_what_everybody_knows(system, tmp_path, monkeypatch):
    """Who replaces it, to count or to refuse, knows of no argument but the folder."""
    tq.kv_batch_put(["a"], "p", rows(1, 1))
    client, folder = tq.get_client(), tmp_path / "ck"
    save = client.save_storage_checkpoint

    def refusing(checkpoint_dir):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(client, "save_storage_checkpoint", refusing)
        with pytest.raises(OSError, match="the disk is gone"):
            tq.save_checkpoint(folder)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(client, "save_storage_checkpoint", lambda checkpoint_dir: save(checkpoint_dir))
    tq.save_checkpoint(folder)
    tq.kv_clear("a", "p")
    tq.load_checkpoint(folder)
    assert tq.kv_batch_get("a", "p").batch_size == torch.Size([1])


def test_loaders_go_on(system, tmp_path):
    """Saved in the middle of an epoch: in a new system loaders with their places go on with the rows that follow."""
    values = 48
    tq.get_client().put(TensorDict({"x": torch.arange(values)}, batch_size=[values]), partition_id="p")
    tq.get_client().seal("p")

    def loader(rank: int, place: Any = None) -> Any:
        dataset = tq.StreamingDataset(None, 6, 2, ["x"], "p", "train", rank, should_check_consumption_status=True)
        made = tq.StreamingDataLoader(dataset)
        if place is not None:
            made.load_state_dict(place)
        return made

    before, iterators, loaders = {0: [], 1: []}, {}, {rank: loader(rank) for rank in (0, 1)}
    for rank, each in loaders.items():
        iterators[rank] = iter(each)
        for _ in range(4 + rank):  # in the middle of a batch
            before[rank] += next(iterators[rank])[0]["x"].tolist()
    tq.save_checkpoint(tmp_path / "ck")
    places = {rank: each.state_dict() for rank, each in loaders.items()}
    del iterators, loaders
    start_again(1)
    tq.load_checkpoint(tmp_path / "ck")
    after = {rank: [row for data, _ in loader(rank, places[rank]) for row in data["x"].tolist()] for rank in (0, 1)}
    assert sorted(row for rank in (0, 1) for row in before[rank] + after[rank]) == list(range(values))


def test_a_partition_is_added_to_a_running_system(system, tmp_path):
    """Other clients work meanwhile and notice nothing; after a kill of the controller everything is still there."""
    tq.kv_batch_put(["a", "b"], "replay", rows(7, 2), tags=[{"n": 1}, {"n": 2}])
    tq.get_client().get_meta("x", 1, "replay", task_name="t", sampling_config=SEQUENTIAL)
    report = tq.save_checkpoint(tmp_path / "ck", partitions=["replay"], metadata={"step": 3})
    assert (report.samples, report.lost) == ({"replay": 2}, {})
    content = json.loads((tmp_path / "ck" / "metadata.json").read_text())
    assert content == {
        "storage_saved": True, "user_metadata": {"step": 3}, "lost": {}, "partitions": ["replay"],
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"contains only the partitions \['replay'\], so it cannot replace the system"):
        tq.load_checkpoint(tmp_path / "ck")
    start_again(1)
    kept = tq.get_client().put(rows(1), partition_id="p")
    stop, numbers = threading.Event(), []

    def work() -> None:
        while not stop.is_set() or not numbers:
            tq.kv_batch_put(["w"], "busy", rows(len(numbers), 1))
            numbers.append(tq.kv_batch_get(["w"], "busy", "x")["x"].values()[0].item())

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            assert tq.load_checkpoint(tmp_path / "ck", partitions="replay") == report
        finally:
            stop.set()
        working.result()
    assert numbers == list(range(len(numbers)))
    server_process("controller").kill()
    assert tq.kv_list("replay") == {"replay": {"a": {"n": 1}, "b": {"n": 2}}}
    assert tq.kv_batch_get(["a", "b"], "replay", "x")["x"].values().unique().tolist() == [7]
    assert tq.get_client().get_data(kept)["x"].values().unique().tolist() == [1]
    left = tq.get_client().get_meta("x", 1, "replay", task_name="t", sampling_config=SEQUENTIAL)
    assert left.size == 1
    assert tq.get_client().get_meta("x", 1, "replay", task_name="t", sampling_config=SEQUENTIAL).size == 0
    with pytest.raises(ValueError, match=r"already has samples with the keys \['a', 'b'\]"):
        tq.load_checkpoint(tmp_path / "ck", partitions="replay")
    with pytest.raises(RuntimeError, match=r"partition 'replya' does not exist \(did you mean 'replay'"):
        tq.save_checkpoint(tmp_path / "other", partitions="replya")
    assert not (tmp_path / "other").exists()
