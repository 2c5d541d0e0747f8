"""Measures Ray's object store as a driver uses it: `ray.put` here, `ray.get` in an actor, and a read of every page."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from typing import Any

import ray
import torch
from ray.util.queue import Queue
from tensordict import TensorDict

from benchmarks.harness import payloads, queue_items, replays, stages
from benchmarks.peers.answering import PROCESSES, serve, team, threads

TEAM: list[Any] = []
WAKEUPS = 10  # for each one of the other peer, which takes a second


def touched(value: Any) -> int:
    """Read a byte of every page of every tensor in the value."""
    total = 0
    for name in payloads.names_of(value):
        tensor = value.get(name)
        if isinstance(tensor, torch.Tensor):
            tensor = tensor.values() if tensor.is_nested else tensor
            total += int(tensor.contiguous().view(-1).view(torch.uint8)[::4096].sum())
    return total


class TaskQueues:
    """A queue for each task of a replay. An item is a dict of references to the objects of some samples, by name."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[Any]] = {name: asyncio.Queue() for name in replays.NEEDS}
        self._turns = {name: asyncio.Lock() for name in replays.NEEDS}
        self._parts: list[Any] = []

    async def put(self, task: str, item: dict[str, list[Any]] | None) -> None:
        """Put an item, or the end."""
        await self._queues[task].put(item)

    async def put_part(self, refs: list[Any]) -> None:
        """Keep the parts of an unfinished answer."""
        self._parts += refs

    async def take(self, task: str, count: int) -> list[dict[str, list[Any]]]:
        """Wait for this number of items, or for fewer at the end."""
        found: list[dict[str, list[Any]]] = []
        async with self._turns[task]:
            while len(found) < count:
                item = await self._queues[task].get()
                if item is None:
                    await self._queues[task].put(None)
                    break
                found.append(item)
        return found


class Port:
    """How a process of a replay reaches Ray's object store, and the actor that passes references on."""

    def __init__(self, replay: replays.Replay, queues: Any) -> None:
        self._replay, self._queues = replay, queues
        self._first, self._next = replay.tasks[0], dict(zip(replay.tasks, (*replay.tasks[1:], replays.UPDATE)))

    def put_batch(self, rows: replays.Rows) -> None:
        """Put new samples as one object."""
        self._pass(self._first, {"answer": [ray.put(replays.columns(rows))]})

    def put_answer(self, number: int, answer: replays.Rows, reward: replays.Rows) -> None:
        """Put a new sample and its reward. Ray's store has no tags."""
        self._pass(self._first, {"answer": [ray.put(answer)], "reward": [ray.put(reward)]})

    def put_part(self, ids: torch.Tensor) -> None:
        """Put a part of an unfinished answer."""
        ray.get(self._queues.put_part.remote([ray.put(ids)]))

    def add(self, handle: dict[str, list[Any]], name: str, rows: replays.Rows) -> None:
        """Pass the samples on with one more object."""
        self._pass(self._next[name], handle | {name: [ray.put(replays.columns(rows))]})

    def batches(self, task: str, rank: int) -> Iterator[tuple[Any, Any]]:
        """Yield the objects that a task reads, and all references."""
        count = self._replay.batch if self._replay.single and task == self._first else 1
        while True:
            items = ray.get(self._queues.take.remote(task, count))
            if not items:
                break
            refs = {name: [ref for item in items for ref in item[name]] for name in items[0]}
            yield ray.get([ref for name in replays.NEEDS[task] for ref in refs[name]]), refs
        if task in self._next:
            self._pass(self._next[task], None)

    def rows(self, data: list[Any]) -> replays.Rows:
        """Return the values of some objects."""
        found: replays.Rows = {}
        for each in data:
            for name, rows in replays.rows_of(each).items():
                found.setdefault(name, []).extend(rows)
        return found

    def _pass(self, task: str, item: dict[str, list[Any]] | None) -> None:
        ray.get(self._queues.put.remote(task, item))


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

    def view(self, refs: list[Any], case: dict[str, Any], seed: int) -> tuple[float, float]:
        """Return the seconds of a get of NumPy arrays, and of a read of a byte of every page; compare every byte."""
        start = time.perf_counter()
        value = ray.get(refs[0])
        got = time.perf_counter()
        for column in value.values():
            column.reshape(-1).view("uint8")[::4096].sum()
        read = time.perf_counter()
        payload = payloads.Payload(**case)
        tensors = TensorDict({name: torch.tensor(column) for name, column in value.items()}, batch_size=[payload.rows])
        wrong = payloads.differences(tensors, payload, seed)
        assert not wrong, wrong
        return got - start, read - got

    def waits(self, queue: Queue, batches: int) -> list[float]:
        """Return the time at which each batch arrived with its values, by the monotonic clock."""
        found = []
        for number in range(batches):
            (ref,) = queue.get()
            batch = ray.get(ref)
            found.append(time.monotonic())
            assert int(batch["y"][0]) == number
        return found

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

    def play(self, act: Any, queues: Any, case: replays.Replay, *arguments: Any) -> replays.Report:
        """Run one process of a replay."""
        torch.set_num_threads(1)
        report: replays.Report = act(case, Port(case, queues), *arguments)
        return report

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


def arrays(rounds: int, **case: Any) -> dict[str, float]:
    """Return the milliseconds of a put of NumPy arrays, of a get, which copies nothing, and of the first read."""
    (other,), puts, views = team(TEAM, Other, 1), [], []
    for seed in range(rounds + 1):
        batch = payloads.make(payloads.Payload(**case), seed)
        columns = {name: batch.get(name).numpy() for name in payloads.names_of(batch)}
        start = time.perf_counter()
        ref = ray.put(columns)
        puts.append(time.perf_counter() - start)
        views.append(ray.get(other.view.remote([ref], case, seed)))
        del ref
    got, read = (statistics.median(each) * 1e3 for each in zip(*views[1:]))
    return {"put_ms": statistics.median(puts[1:]) * 1e3, "view_ms": got, "read_ms": read}


def wakeup(rows: int, batches: int) -> dict[str, float]:
    """Return the milliseconds until a trainer, which waits in the get of a queue for a reference, has the values."""
    (other,), queue, batches = team(TEAM, Other, 1), Queue(), batches * WAKEUPS
    promise = other.waits.remote(queue, batches)
    called, returned = [], []
    for number in range(batches):
        time.sleep(0.02)  # the trainer waits again
        values = {"x": torch.zeros(rows, 64), "y": torch.full((rows,), number)}
        batch = TensorDict(values, batch_size=[rows])
        called.append(time.monotonic())
        queue.put([ray.put(batch)])
        returned.append(time.monotonic())
    came = ray.get(promise)
    queue.shutdown(force=True)
    after = [max(0.0, at - back) * 1e3 for at, back in zip(came, returned)]
    whole = [(at - begin) * 1e3 for at, begin in zip(came, called)]
    return {"median_ms": statistics.median(after[1:]), "from_call_ms": statistics.median(whole[1:])}


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


def replay(**case: Any) -> dict[str, float]:
    """Return the figures of a replay, after a short one."""
    whole = replays.Replay(**case)
    _replay(replays.warming(whole))
    return _replay(whole)


def _replay(case: replays.Replay) -> dict[str, float]:
    roles = [(replays.add, name) for name in case.tasks] + [(replays.train, rank) for rank in range(case.ranks)]
    others = team(TEAM, Other, replays.PRODUCERS + len(roles))
    queues: Any = ray.remote(num_cpus=0)(TaskQueues).remote()
    ray.get(queues.put_part.remote([]))  # it has started
    done = [other.play.remote(act, queues, case, which) for other, (act, which) in zip(others, roles)]
    begin = time.monotonic() + 0.3
    producers = enumerate(others[len(roles) :])
    reports = ray.get([other.play.remote(replays.roll_out, queues, case, begin, which) for which, other in producers])
    ray.get(queues.put.remote(case.tasks[0], None))
    return replays.figures(case, begin, reports + ray.get(done))


def queue(kind: str, count: int) -> dict[str, float]:
    """Return the pairs of a put and a get per second of `ray.util.queue.Queue`."""
    made, item = Queue(), queue_items.item_of(kind)
    queue_items.pairs(made.put, made.get, item, 3)
    rate = queue_items.pairs(made.put, made.get, item, count)
    made.shutdown(force=True)
    return {"a_second": rate}


if __name__ == "__main__":
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=4 << 30)
    serve({
        "kv": kv, "arrays": arrays, "wakeup": wakeup, "small": small, "pipeline": pipeline, "queue": queue,
        "replay": replay,
    })  # fmt: skip
    ray.shutdown()
