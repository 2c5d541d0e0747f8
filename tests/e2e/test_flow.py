"""Backpressure, refill and deadlock between real processes: everybody waits in the controller, nobody polls."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq

SECONDS = 60
CONTEXT = multiprocessing.get_context("fork")


@pytest.fixture(scope="module", autouse=True)
def system() -> Iterator[None]:
    storage = {"total_storage_size": 64, "num_data_storage_units": 1, "arena_bytes": 8 << 20}
    tq.init({
        "system": {"name": "flow"},
        "controller": {"polling_mode": True, "sampler": tq.GRPOGroupNSampler(2)},
        "backend": {"SimpleStorage": storage},
    })  # fmt: skip
    yield
    tq.close()


def rows(count: int, start: int = 0, name: str = "x", width: int = 1) -> TensorDict:
    return TensorDict({name: torch.arange(start, start + count).unsqueeze(1).repeat(1, width)}, batch_size=[count])


class Processes:
    """Functions run in processes of their own; `results` gives what each returned, by name."""

    def __init__(self) -> None:
        self.queue: Any = CONTEXT.Queue()
        self.running: dict[str, Any] = {}

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        def run() -> None:
            torch.set_num_threads(1)  # those of the parent do not outlive the fork, and would be waited for
            try:
                self.queue.put((function.__name__, function(*arguments)))
            except Exception as error:
                self.queue.put((function.__name__, error))
            tq.close()

        self.running[function.__name__] = process = CONTEXT.Process(target=run)
        process.start()

    def results(self) -> dict[str, Any]:
        found = dict(self.queue.get(timeout=SECONDS) for _ in self.running)
        for process in self.running.values():
            process.join(SECONDS)
            assert process.exitcode == 0
        for value in found.values():
            if isinstance(value, Exception):
                raise value
        return found


def test_admission_keeps_producers_near_the_policy():
    """The producer is held back before it generates; no sample is more than one version old when it is trained on."""
    client = tq.get_client()
    client.create_partition("policy", max_staleness=1, rows_per_version=4)

    def producer() -> int:
        mine = tq.get_client()
        for _ in range(10):
            meta = mine.get_meta(["x"], 2, "policy", mode="insert", timeout=SECONDS)
            version = mine.status().partitions[0].policy.version
            mine.put(rows(2, version, name="version"), meta)
        return mine.seal("policy") or 10

    def trainer() -> list[int]:
        mine = tq.get_client()
        staleness = []
        for version in range(5):
            meta = mine.get_meta(["version"], 4, "policy", task_name="train", timeout=SECONDS)
            staleness += [
                version - value for value in mine.get_data(meta, layout="dense")["version"].flatten().tolist()
            ]
            mine.set_policy_version("policy", version + 1)
        return staleness

    together = Processes()
    together.start(producer)
    together.start(trainer)
    # a row holds the version its producer has seen, and the one after it in the next row of the put
    assert all(-1 <= age <= 1 for age in together.results()["trainer"])
    client.clear_partition("policy")


@pytest.mark.parametrize("width", [1, 1 << 15], ids=["rows", "bytes"])
def test_a_deadlock_is_told_at_once(width: int):
    def producer() -> str:
        mine = tq.get_client()
        try:
            while True:
                mine.put(rows(4, width=width), partition_id="full", timeout=10 * SECONDS)
        except tq.DeadlockError as error:
            mine.seal("full")  # so that the trainer gets what there is
            return str(error)

    def trainer() -> int:
        return len(tq.get_client().get_meta(["x"], 100, "full", task_name="train", timeout=SECONDS))

    together = Processes()
    together.start(producer)
    together.start(trainer)
    found = together.results()
    assert "task 'train' waits for 100 samples with ['x'] in partition 'full'" in found["producer"]
    assert 0 < found["trainer"] < 100
    tq.get_client().clear_partition("full")
