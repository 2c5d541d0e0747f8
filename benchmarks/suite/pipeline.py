"""How long does a training step take whose stages stream, compared with the lower bound?

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


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    """Return rows of different lengths as one column."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def rollout(step: Step, seed: int, begin: float) -> None:
    """Put complete groups when they are finished."""
    client, partition = tq.get_client(), f"step-{seed}"
    for at, prompt in step.rolled_out(seed):
        answers = [step.answer(seed, prompt, member) for member in range(step.group)]
        time.sleep(max(0.0, begin + at - time.monotonic()))
        prompts = torch.full((step.group, PROMPT), prompt)
        columns = {"prompt": prompts, "answer": jagged(answers), "logprobs": jagged([a.float() for a in answers])}
        client.put(TensorDict(columns, batch_size=[step.group]), partition_id=partition)
    client.seal(partition)


def _stream(task: str, batch: int, fields: list[str], seed: int, rank: int = 0) -> Iterator[Any]:
    dataset = StreamingDataset(None, batch, batch, fields, f"step-{seed}", task, rank)
    return iter(StreamingDataLoader(dataset))


def add(step: Step, seed: int, name: str) -> None:
    """Add a score to each answer ("reward"), or a number to each token ("reference")."""
    client = tq.get_client()
    for data, meta in _stream(name, step.group, ["answer"], seed):
        answers = list(data["answer"].unbind())
        tokens = sum(map(len, answers))
        time.sleep(len(answers) * step.reward if name == "reward" else tokens * step.reference)
        column = torch.tensor([score(a) for a in answers]) if name == "reward" else jagged([a * 0.5 for a in answers])
        client.put(TensorDict({name: column}, batch_size=[len(answers)]), metadata=meta)


def update(step: Step, seed: int, rank: int) -> tuple[float, list[int]]:
    """Get micro-batches, and compare them at the end; return the time of the end, and the samples of this rank."""
    kept = []
    fields = ["prompt", "answer", "logprobs", "reward", "reference"]
    for data, _ in _stream("update", step.micro_batch, fields, seed, rank):
        kept.append(data)
        tokens = data["answer"].values().numel()
        time.sleep(tokens * step.update)
    end = time.monotonic()
    return end, [which for data in kept for which in _checked(step, seed, data)]


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
    took = []
    with (
        system({"controller": {"sampler": "RankAwareSampler"}}) as queue,
        workers(3 + step.ranks, queue.address) as team,
    ):
        for seed in range(steps + 1):
            seconds = measure_step(step, seed, team)
            tq.get_client().clear_partition(f"step-{seed}")
            if seed or steps == 1:
                took.append(seconds)
    seeds = range(steps + 1)[-len(took) :]
    ideal = statistics.median(step.ideal(seed) for seed in seeds) * 1e3
    ours = statistics.median(took) * 1e3
    peers = scale.ask_peers("pipeline", **asdict(step), steps=steps)
    name = f"a step of {step.prompts} prompts x {step.group}, {step.ranks} ranks x {step.micro_batches} micro-batches"
    return [against(name, "ms", ours, ideal, "ideal overlap", peers={who: each["ms"] for who, each in peers.items()})]


def measure_step(step: Step, seed: int, team: list[Any]) -> float:
    """Return the seconds from the start of the rollout to the end of the last rank.

    The samples stay in the partition "step-<seed>".
    """
    begin = time.monotonic() + 0.5
    team[0].begin(rollout, step, seed, begin)
    for worker, name in zip(team[1:3], ("reward", "reference")):
        worker.begin(add, step, seed, name)
    for rank, worker in enumerate(team[3:]):
        worker.begin(update, step, seed, rank)
    for worker in team[:3]:
        worker.result()
    found: list[tuple[float, list[int]]] = [worker.result() for worker in team[3:]]
    had = sorted(which for _, part in found for which in part)
    if had != list(range(step.samples)):
        raise AssertionError("the ranks have not received each sample once")
    return max(end for end, _ in found) - begin
