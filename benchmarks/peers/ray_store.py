"""Measures Ray's object store as a driver uses it: `ray.put` here, `ray.get` in an actor, and a read of every page."""

from __future__ import annotations

import statistics
import time
from typing import Any

import ray
import torch
from ray.util.queue import Queue

from benchmarks.harness import payloads, queue_items, stages
from benchmarks.peers.answering import PROCESSES, serve, team, threads

TEAM: list[Any] = []


def touched(value: Any) -> int:
    """Read a byte of every page of every tensor in the value."""
    total = 0
    for name in payloads.names_of(value):
        tensor = value.get(name)
        if isinstance(tensor, torch.Tensor):
            tensor = tensor.values() if tensor.is_nested else tensor
            total += int(tensor.contiguous().view(-1).view(torch.uint8)[::4096].sum())
    return total


@ray.remote(num_cpus=0)
class Other:
    """Another process."""

    def ready(self) -> bool:
        """Return when the actor has started."""
        return True

    def get(self, refs: list[Any], case: dict[str, Any], seed: int) -> float:
        """Return the seconds of a get, and compare every byte."""
        start = time.perf_counter()
        value = ray.get(refs[0])
        touched(value)
        seconds = time.perf_counter() - start
        wrong = payloads.differences(value, payloads.Payload(**case), seed)
        assert not wrong, wrong
        return seconds

    def puts(self, seconds: float, clients: int) -> float:
        """Return the small puts per second of `clients` threads."""
        row = {"prompt": torch.arange(16), "score": torch.tensor(0.5), "mask": torch.ones(16)}
        until = time.monotonic() + seconds

        def one(_: int) -> float:
            kept: list[Any] = []
            while time.monotonic() < until:
                kept.append(ray.put({**row, "tag": {"n": len(kept)}}))
            return len(kept) / seconds

        return threads(one, clients)

    def reward(self, step: Any, batch: dict[str, Any]) -> torch.Tensor:
        """A stage."""
        time.sleep(step.samples * step.reward)
        return torch.tensor([stages.score(answer) for answer in batch["answer"]])

    def reference(self, step: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
        """A stage."""
        time.sleep(sum(map(len, batch["answer"])) * step.reference)
        return [answer * 0.5 for answer in batch["answer"]]

    def rollout(self, step: Any, seed: int) -> dict[str, Any]:
        """A stage."""
        begin, prompts, answers = time.monotonic(), [], []
        for at, prompt in step.rolled_out(seed):
            time.sleep(max(0.0, begin + at - time.monotonic()))
            answers += [step.answer(seed, prompt, member) for member in range(step.group)]
            prompts += [torch.full((stages.PROMPT,), prompt)] * step.group
        return {"prompt": prompts, "answer": answers, "logprobs": [answer.float() for answer in answers]}

    def update(self, step: Any, batch: dict[str, Any]) -> int:
        """Run a stage: all micro-batches of a rank."""
        for first in range(0, len(batch["answer"]), step.micro_batch):
            time.sleep(sum(map(len, batch["answer"][first : first + step.micro_batch])) * step.update)
        return len(batch["answer"])


def kv(rounds: int, **case: Any) -> dict[str, float]:
    """Return the milliseconds of a put and a get."""
    (other,), puts, gets = team(TEAM, Other, 1), [], []
    for seed in range(rounds + 1):
        batch = payloads.make(payloads.Payload(**case), seed)
        start = time.perf_counter()
        ref = ray.put(batch)
        puts.append(time.perf_counter() - start)
        gets.append(ray.get(other.get.remote([ref], case, seed)))
        del ref
    return {"put_ms": statistics.median(puts[1:]) * 1e3, "get_ms": statistics.median(gets[1:]) * 1e3}


def small(act: str, clients: int, seconds: float) -> dict[str, float] | None:
    """Return the small puts per second of some clients. Ray's store has no tags."""
    if act != "put":
        return None
    others = team(TEAM, Other, min(clients, PROCESSES))
    each = clients // len(others)
    ray.get([other.puts.remote(0.2, each) for other in others])
    rate = sum(ray.get([other.puts.remote(seconds, each) for other in others]))
    return {"a_second": rate}


def pipeline(steps: int, **case: Any) -> dict[str, float]:
    """Run a step that one process drives: stage after stage, each with all samples from the store."""
    step, took = stages.Step(**case), []
    others = team(TEAM, Other, 3 + step.ranks)
    for seed in range(steps + 1):
        start = time.perf_counter()
        batch = ray.get(others[0].rollout.remote(step, seed))
        ref = ray.put(batch)
        batch["reward"] = ray.get(others[1].reward.remote(step, ref))
        batch["reference"] = ray.get(others[2].reference.remote(step, ref))
        each = step.samples // step.ranks
        parts = [{k: v[r * each : (r + 1) * each] for k, v in batch.items()} for r in range(step.ranks)]
        refs = [ray.put(part) for part in parts]
        done = ray.get([other.update.remote(step, part) for other, part in zip(others[3:], refs)])
        took.append(time.perf_counter() - start)
        assert sum(done) == step.samples
    return {"ms": statistics.median(took[1:]) * 1e3}


def queue(kind: str, count: int) -> dict[str, float]:
    """Return the pairs of a put and a get per second of `ray.util.queue.Queue`."""
    made, item = Queue(), queue_items.item_of(kind)
    queue_items.pairs(made.put, made.get, item, 3)
    rate = queue_items.pairs(made.put, made.get, item, count)
    made.shutdown(force=True)
    return {"a_second": rate}


if __name__ == "__main__":
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=4 << 30)
    serve({"kv": kv, "small": small, "pipeline": pipeline, "queue": queue})
    ray.shutdown()
