"""What does the traffic of published trainings take of a machine: of its controller, its memory, a trainer's time?

Rollout workers put answers at the rate of the training by the clock, so that a slow system shows as latency. Stages add
the reward (unless the rollout does), the log-probabilities of the reference, and the advantages; each trainer rank
reads a stream. All are processes that sleep instead of computing (`harness/replays.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.harness import replays
from benchmarks.harness.machine import Memcpy, cpu_seconds
from benchmarks.harness.replays import NEEDS, PRODUCERS, Replay, Report, Rows, replay_of, rows_of, warming
from benchmarks.harness.report import Row, Scale, against
from benchmarks.harness.systems import System, Worker, system, workers
from transfer_queue import interface as tq
from transfer_queue.config.environment import usable_cores
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset

QUESTION = "What does the traffic of published trainings take of a machine?"
NOTE = """A replay lasts ten seconds. A training is played whole, or in proportion on the named number of nodes (of the
16 of R1-Distill-Qwen-1.5B, one for each core). Lengths are log-normal with the published mean; where only a limit is
published, every answer has it, and the traffic is an upper bound. Answers end at random times. "put to yield" is from
the call of the last put of a sample, or from the request of its rank if that is later, until the rank has all its
fields. "late" is how much later than scheduled the puts of the rollout workers began: if it is not small, the machine
is overloaded."""
BANDWIDTH_BYTES = 64 << 20

CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Llama-3.1-8B", "in batches", {"ranks": 8, "batch": 64, "nodes": 128}),
    ("R1-Distill-Qwen-1.5B", "every 1,024 tokens", {"ranks": 8, "batch": 16, "nodes": min(16, usable_cores())}),
    ("Qwen3-32B", "answer by answer", {"ranks": 4, "batch": 4}),
    ("DeepSeek-R1-Zero, 660B", "answer by answer", {"ranks": 16, "batch": 2}),
)
"""Small samples at a high rate, long answers with their parts (the whole training has 16 nodes, which need as many
cores here), and two large models, one of them with many ranks."""


class Port:
    """Reaches our system."""

    def __init__(self, replay: Replay, partition: str) -> None:
        self._client, self._replay, self._partition, self._parts = tq.get_client(), replay, partition, 0

    def put_batch(self, rows: Rows) -> None:
        """Put new samples."""
        self._client.put(replays.columns(rows), partition_id=self._partition)

    def put_answer(self, number: int, answer: Rows, reward: Rows) -> None:
        """Put a new sample, then its reward, then its tag."""
        put, key = self._client.kv_put, str(number)
        put(key, self._partition, {name: row for name, (row,) in answer.items()}, {"status": "finished"})
        put(key, self._partition, {name: row for name, (row,) in reward.items()})
        put(key, self._partition, tag={"status": "scored"})

    def put_part(self, ids: torch.Tensor) -> None:
        """Put a row into a partition of parts, under a key of its own."""
        self._parts += 1
        self._client.kv_put(f"{os.getpid()}-{self._parts}", f"parts of {self._partition}", {"ids": ids})

    def add(self, handle: Any, name: str, rows: Rows) -> None:
        """Add a field."""
        self._client.put(replays.columns(rows), metadata=handle)

    def batches(self, task: str, rank: int) -> Iterator[tuple[Any, Any]]:
        """Yield the batches of a stream."""
        fields = [field for need in NEEDS[task] for field in (("ids", "logprobs") if need == "answer" else (need,))]
        batch = self._replay.batch
        dataset = StreamingDataset(None, batch, batch, fields, self._partition, task, rank, keep_batches=0)
        yield from StreamingDataLoader(dataset)

    def rows(self, data: Any) -> Rows:
        """Return the values of a batch."""
        return rows_of(data)


def play(act: Callable[..., Report], replay: Replay, partition: str, *arguments: Any) -> Report:
    """Run one process of a replay. Runs in a worker."""
    torch.set_num_threads(1)
    return act(replay, Port(replay, partition), *arguments)


def run(scale: Scale) -> list[Row]:
    """Replay each training, and then the same beside the peers."""
    count, seconds = scale.pick((len(CASES), 10.0), (3, 0.3))
    cases = [replay_of(training, style, seconds, **more) for training, style, more in CASES[:count]]
    memcpy, found = Memcpy(BANDWIDTH_BYTES), []
    with system() as queue, workers(PRODUCERS + 3 + max(replay.ranks for replay in cases), queue.address) as team:
        for replay in cases:
            measure(warming(replay), queue, team)
            bandwidth = BANDWIDTH_BYTES / min(memcpy.seconds() for _ in range(5)) / 1e6
            found.append((replay, bandwidth, measure(replay, queue, team)))
    return [row for each in found for row in _rows(scale, *each)]


def measure(replay: Replay, queue: System, team: list[Worker]) -> dict[str, float]:
    """Run a replay; return its figures, and the processor seconds of the controller for each second."""
    client, partition, controller = tq.get_client(), replay.name, [queue.pids["controller"]]
    client.create_partition(partition)
    begin, spent = time.monotonic() + 0.3, cpu_seconds(controller)
    idle = iter(team)
    producers, others = [next(idle) for _ in range(PRODUCERS)], []
    for number, worker in enumerate(producers):
        worker.begin(play, replays.roll_out, replay, partition, begin, number)
    roles = [(replays.add, name) for name in replay.tasks] + [(replays.train, rank) for rank in range(replay.ranks)]
    for worker, (act, which) in zip(idle, roles):
        worker.begin(play, act, replay, partition, which)
        others.append(worker)
    reports = [worker.result() for worker in producers]
    client.seal(partition)
    reports += [worker.result() for worker in others]
    found = replays.figures(replay, begin, reports)
    share = (cpu_seconds(controller) - spent) / found["seconds"]
    for name in client.get_partition_list():
        client.clear_partition(name)
    return found | {"controller": share}


def _rows(scale: Scale, replay: Replay, bandwidth: float, ours: dict[str, float]) -> list[Row]:
    peers = scale.ask_peers("replay", **asdict(replay))
    late = {"late_p99_ms": ours["late_p99_ms"], "samples": replay.samples}
    late |= {f"{name}_late_p99_ms": each["late_p99_ms"] for name, each in peers.items()}
    waits = [
        Row(f"{replay.name}: put to yield, {at}", ours[f"{at}_ms"], "ms", more=late,
            peers={name: each[f"{at}_ms"] for name, each in peers.items()})
        for at in ("p50", "p99")
    ]  # fmt: skip
    rate = {"samples_a_second": replay.samples / ours["seconds"]}
    return [
        *waits,
        Row(f"{replay.name}: controller", ours["controller"] * 100, "% of a core", more=rate),
        against(f"{replay.name}: bytes of puts and gets", "MB/s", ours["mb_a_second"], bandwidth, "memcpy"),
    ]
