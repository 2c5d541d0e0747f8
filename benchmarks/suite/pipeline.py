"""How long does a training step take whose stages stream, compared with the lower bound, and where is the time spent?

Rollout, reward, reference and four update ranks are processes. Rollout puts each prompt's answers when they are
finished; reward and reference add a field to each answer; each rank gets its micro-batches when they are complete. The
processes sleep instead of working (`harness/stages.py`). The lower bound is computed from the same work, as if passing
samples on took no time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.harness.report import Row, Scale, against
from benchmarks.harness.stages import PROMPT, Step, score
from benchmarks.harness.systems import system, workers
from transfer_queue import interface as tq
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset

QUESTION = "How long does a step of rollout, reward, reference and update take, compared with the lower bound?"
QUICK = Step(prompts=8, group=4, micro_batches=2, ranks=2, tokens=50, reward=1e-4)

Spent = dict[str, float]  # seconds: "wait" for samples and get them, "work", "put", and "end" (of the monotonic clock)


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    """Return rows of different lengths as one column."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class Clock:
    """Sums the time by kind of activity."""

    def __init__(self) -> None:
        self.spent: Spent = {"wait": 0.0, "work": 0.0, "put": 0.0}
        self._last = time.monotonic()

    def was(self, kind: str) -> None:
        """Count the time since the last call for this kind."""
        now = time.monotonic()
        self.spent[kind] += now - self._last
        self._last = now

    def ended(self) -> Spent:
        """Return all sums, and the time of the end."""
        return {**self.spent, "end": self._last}


def rollout(step: Step, seed: int, begin: float) -> Spent:
    """Put complete groups when they are finished."""
    client, partition = tq.get_client(), f"step-{seed}"
    time.sleep(max(0.0, begin - time.monotonic()))
    clock = Clock()
    for at, prompt in step.rolled_out(seed):
        answers = [step.answer(seed, prompt, member) for member in range(step.group)]
        time.sleep(max(0.0, begin + at - time.monotonic()))
        clock.was("work")
        prompts = torch.full((step.group, PROMPT), prompt)
        columns = {"prompt": prompts, "answer": jagged(answers), "logprobs": jagged([a.float() for a in answers])}
        client.put(TensorDict(columns, batch_size=[step.group]), partition_id=partition)
        clock.was("put")
    client.seal(partition)
    return clock.ended()


def _stream(task: str, batch: int, fields: list[str], seed: int, rank: int = 0) -> Iterator[Any]:
    dataset = StreamingDataset(None, batch, batch, fields, f"step-{seed}", task, rank)
    return iter(StreamingDataLoader(dataset))


def reward(step: Step, seed: int, begin: float) -> Spent:
    """Add a score to each answer."""
    return _adds(step, seed, begin, "reward")


def reference(step: Step, seed: int, begin: float) -> Spent:
    """Add a number to each token."""
    return _adds(step, seed, begin, "reference")


def _adds(step: Step, seed: int, begin: float, name: str) -> Spent:
    client = tq.get_client()
    time.sleep(max(0.0, begin - time.monotonic()))
    clock = Clock()
    for data, meta in _stream(name, step.group, ["answer"], seed):
        clock.was("wait")
        answers = list(data["answer"].unbind())
        tokens = sum(map(len, answers))
        time.sleep(len(answers) * step.reward if name == "reward" else tokens * step.reference)
        clock.was("work")
        column = torch.tensor([score(a) for a in answers]) if name == "reward" else jagged([a * 0.5 for a in answers])
        client.put(TensorDict({name: column}, batch_size=[len(answers)]), metadata=meta)
        clock.was("put")
    return clock.ended()


def update(step: Step, seed: int, begin: float, rank: int) -> tuple[Spent, list[int]]:
    """Get micro-batches, and compare them at the end; also return the samples of this rank."""
    time.sleep(max(0.0, begin - time.monotonic()))
    clock, kept = Clock(), []
    fields = ["prompt", "answer", "logprobs", "reward", "reference"]
    for data, _ in _stream("update", step.micro_batch, fields, seed, rank):
        clock.was("wait")
        kept.append(data)
        tokens = data["answer"].values().numel()
        time.sleep(tokens * step.update)
        clock.was("work")
    spent = clock.ended()
    return spent, [which for data in kept for which in _checked(step, seed, data)]


def _checked(step: Step, seed: int, data: TensorDict) -> list[int]:
    """Return the numbers of the samples. Raises AssertionError if a value differs from the one that was put."""
    lengths, had = step.lengths(seed), []
    columns = (list(data[name].unbind()) for name in ("prompt", "answer", "logprobs", "reward", "reference"))
    for prompt, answer, logprobs, given, known in zip(*columns, strict=True):
        which = int(answer[0])
        same = (
            int(prompt[0]) == which // step.group
            and len(answer) == lengths[which // step.group, which % step.group]
            and torch.equal(logprobs, answer.float())
            and torch.equal(known, answer * 0.5)
            and float(given) == float(torch.tensor(score(answer)))
        )
        if not same:
            raise AssertionError(f"the values of sample {which} differ from those of the put")
        had.append(which)
    return had


def run(scale: Scale) -> list[Row]:
    """Run some steps, after a warm-up step."""
    step, steps = scale.pick((Step(), 6), (QUICK, 1))
    took, spent = [], []
    with (
        system({"controller": {"sampler": "RankAwareSampler"}}) as queue,
        workers(3 + step.ranks, queue.address) as team,
    ):
        for seed in range(steps + 1):
            seconds, found = measure_step(step, seed, team)
            tq.get_client().clear_partition(f"step-{seed}")
            if seed or steps == 1:
                took.append(seconds)
                spent.append(found)
    seeds = range(steps + 1)[-len(took) :]
    ideal = statistics.median(step.ideal(seed) for seed in seeds) * 1e3
    in_turn = statistics.median(step.in_turn(seed) for seed in seeds) * 1e3
    ours = statistics.median(took) * 1e3
    peers = scale.ask_peers("pipeline", **asdict(step), steps=steps)
    name = f"a step of {step.prompts} prompts x {step.group}, {step.ranks} ranks x {step.micro_batches} micro-batches"
    rows = [
        against(name, "ms", ours, ideal, "ideal overlap", peers={who: each["ms"] for who, each in peers.items()}),
        against(f"{name}, beside stages in turn", "ms", ours, in_turn, "stages in turn, passed on for nothing"),
    ]
    for stage in spent[0]:
        figures = {
            kind: statistics.median(each[stage][kind] for each in spent) * 1e3 for kind in ("wait", "work", "put")
        }
        rows.append(
            Row(f"of it {stage}: put", figures.pop("put"), "ms", more={f"{k}_ms": v for k, v in figures.items()})
        )
    return rows


def measure_step(step: Step, seed: int, team: list[Any]) -> tuple[float, dict[str, Spent]]:
    """Return the seconds from the start of the rollout to the end of the last rank, and the times of each stage.

    The samples stay in the partition "step-<seed>".
    """
    begin = time.monotonic() + 0.5
    for worker, stage in zip(team, (rollout, reward, reference)):
        worker.begin(stage, step, seed, begin)
    for rank, worker in enumerate(team[3:]):
        worker.begin(update, step, seed, begin, rank)
    spent = {name: worker.result() for name, worker in zip(("rollout", "reward", "reference"), team)}
    found = [worker.result() for worker in team[3:]]
    had = sorted(which for _, part in found for which in part)
    if had != list(range(step.samples)):
        raise AssertionError("the ranks have not received each sample once")
    end = max(each["end"] for each, _ in found)
    spent["update (mean rank)"] = {k: statistics.mean(each[k] for each, _ in found) for k in found[0][0]}
    return end - begin, spent
