"""The same training without a queue: one driver calls stage after stage, and all data passes through it.

This is the classic synchronous loop: all answers, then all rewards, then all reference log-probabilities, then the
update. A stage begins when the one before it has returned everything. Processes, computations and waits for sandboxes
are those of `rollout.py`, `scoring.py` and `trainer.py`.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

import task
from events import Publish, work
from model import Transformer, flatten, load
from objective import answer_logprobs, jagged
from processes import GRACE, Processes, WorkerError
from prompts import prompts_of
from ranks import meet
from rollout import columns
from sampling import generate
from scoring import BATCH, score
from settings import ANSWERS, ROLLOUT_WORKERS, SANDBOXES, TRAINER_RANKS, Settings
from trainer import MICRO_BATCH, Learner

TICK = 0.05
"""Seconds between two calls of `wait`."""
Rows = dict[str, list[Any]]
"""Samples by field: a list of as many values as there are samples."""
RAGGED = ("tokens", "logprobs", "reference_logprobs")
"""The fields whose values are tensors of different lengths."""
Stage = Callable[..., Any]
"""Called with a function that publishes events, and with the driver's arguments; returns the result of the stage."""


class Driver:
    """Calls the workers of all stages, and holds all data between them."""

    def __init__(self, settings: Settings, processes: Processes, weights: np.ndarray, wait: Callable[[], None]) -> None:
        """Start the workers. `wait` is called repeatedly while a stage works."""
        self._settings, self._processes, self._wait = settings, processes, wait
        self._rollouts = [self._start(f"rollout {number}", answering) for number in range(ROLLOUT_WORKERS)]
        self._reward = [self._start("reward", rewarding)]
        self._reference = [self._start("reference", referring, weights)]
        self._trainers = [self._start(f"trainer {rank}", training, rank, weights) for rank in range(TRAINER_RANKS)]
        self.weights = torch.from_numpy(weights)
        """The newest weights of the policy."""
        self.events: list[dict[str, Any]] = []
        """The work of the last step."""

    def step(self, step: int) -> None:
        """Do one step of the training."""
        self.events = []
        prompts = prompts_of(self._settings, step)
        shares = [prompts[worker::ROLLOUT_WORKERS] for worker in range(ROLLOUT_WORKERS)]
        answers = self._call(self._rollouts, [(step, self.weights, share) for share in shares])
        rows = {name: [value for each in answers for value in each[name]] for name in answers[0]}
        (rows["advantage"],) = self._call(self._reward, [(step, rows["prompt"], rows["answer"])])
        (logprobs,) = self._call(self._reference, [(step, jagged(rows["tokens"]), list(map(len, rows["logprobs"])))])
        rows["reference_logprobs"] = list(logprobs.unbind())
        size = self._settings.samples // TRAINER_RANKS
        batches = [micro_batches(rows, range(rank * size, (rank + 1) * size)) for rank in range(TRAINER_RANKS)]
        self.weights = self._call(self._trainers, [(step, batch) for batch in batches])[0]

    def _start(self, name: str, make: Callable[..., Stage], *arguments: Any) -> Connection:
        pipe, end = multiprocessing.Pipe()
        self._processes.start(name, serve, end, make, *arguments)
        end.close()
        return pipe

    def _call(self, workers: Sequence[Connection], requests: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send each worker its request; return the results when all have arrived."""
        results = []
        try:
            for worker, request in zip(workers, requests, strict=True):
                worker.send_bytes(pickle.dumps(request))
            for worker in workers:
                while not worker.poll(TICK):
                    self._wait()
                result, events = pickle.loads(worker.recv_bytes())
                results.append(result)
                self.events += events
        except (EOFError, OSError):
            self._processes.watch(GRACE, expendable="none")  # raises the error of the worker that has ended
            raise WorkerError("a worker of the driver has closed its pipe") from None
        return results


def micro_batches(rows: Rows, share: range) -> list[dict[str, Any]]:
    """Return a share of the samples, as they arrived, in the batches that one process trains on."""
    batches = []
    for start in range(share.start, share.stop, MICRO_BATCH):
        part = range(start, min(start + MICRO_BATCH, share.stop))
        batch: dict[str, Any] = {name: jagged(rows[name][part.start : part.stop]) for name in RAGGED}
        batches.append(batch | {"advantage": rows["advantage"][part.start : part.stop], "indexes": list(part)})
    return batches


def serve(settings: Settings, name: str, pipe: Connection, make: Callable[..., Stage], *arguments: Any) -> None:
    """Run a stage in a worker: answer the calls of the driver until it ends."""
    stage = make(settings, name, *arguments)
    while True:
        try:
            request = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        events: list[dict[str, Any]] = []
        result = stage(events.append, *request)
        pipe.send_bytes(pickle.dumps((result, events)))


def answering(settings: Settings, name: str) -> Stage:
    """Return the stage that generates answers."""
    model = Transformer(len(task.ALPHABET)).eval()

    def answer(publish: Publish, step: int, weights: Tensor, prompts: list[str]) -> Rows:
        rows: Rows = defaultdict(list)
        with work("rollout", name, publish) as event:
            load(model, weights)
            for position, answers in generate(model, prompts, ANSWERS):
                for field, values in columns(prompts[position], answers).items():
                    rows[field] += values
            event |= {"step": step, "samples": len(prompts) * ANSWERS}
        return dict(rows)

    return answer


def rewarding(settings: Settings, name: str) -> Stage:
    """Return the stage that scores all groups, as many at a time as there are sandboxes."""
    sandboxes = ThreadPoolExecutor(SANDBOXES)

    def reward(publish: Publish, step: int, prompts: list[str], answers: list[str]) -> Tensor:
        def score_group(start: int) -> Tensor:
            with work("reward", name, publish) as event:
                group = slice(start, start + ANSWERS)
                return score(settings, step, prompts[group], answers[group], event)

        return torch.cat(list(sandboxes.map(score_group, range(0, len(prompts), ANSWERS))))

    return reward


def referring(settings: Settings, name: str, weights: np.ndarray) -> Stage:
    """Return the stage that computes the log-probabilities of the reference model."""
    model = Transformer(len(task.ALPHABET)).eval()
    load(model, torch.from_numpy(weights.copy()))

    @torch.no_grad()
    def refer(publish: Publish, step: int, tokens: Tensor, answer_lengths: list[int]) -> Tensor:
        rows, logprobs = tokens.unbind(), []
        for start in range(0, len(rows), BATCH):
            with work("reference", name, publish) as event:
                part = slice(start, start + BATCH)
                logprobs += answer_logprobs(model, rows[part], answer_lengths[part])
                event |= {"step": step, "samples": len(rows[part])}
        return jagged(logprobs)

    return refer


def training(settings: Settings, name: str, rank: int, weights: np.ndarray) -> Stage:
    """Return the stage that trains one rank on its share and returns the new weights."""
    learner = Learner(settings, rank, weights)

    def train(publish: Publish, step: int, batches: list[dict[str, Any]]) -> Tensor | None:
        for batch in batches:
            with work("train", name, publish) as event:
                learner.add(batch)
                lengths = batch["tokens"].offsets().diff().tolist()
                event |= {"step": step, "samples": len(lengths), "indexes": batch["indexes"], "lengths": lengths}
                event |= {"staleness": [0] * len(lengths)}
        meet()
        with work("update", name, publish) as event:
            event |= learner.update(step)
        return flatten(learner.model) if rank == 0 else None

    return train
