"""Replays of published trainings: their traffic by the clock, by processes that sleep instead of computing.

The module imports nothing of the package, so that other systems can be measured with the same replays.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.harness import payloads
from benchmarks.harness.report import quantiles
from benchmarks.harness.stages import score
from benchmarks.harness.trainings import STYLES, TRAININGS

PRODUCERS = 4
BUSY = 0.5
"""The part of the time in which a stage or a rank computes, if samples come at the published rate."""
STAGES = ("reward", "reference", "advantage")
UPDATE = "update"
NEEDS = {
    "reward": ("answer",), "reference": ("answer",), "advantage": ("reward", "reference"),
    UPDATE: ("answer", "reward", "reference", "advantage"),
}  # fmt: skip
"""What each task reads: the answer (ids and logprobs), and what stages have added."""

Rows = dict[str, list[torch.Tensor]]
"""The values of some samples by field."""


@dataclass(frozen=True)
class Replay:
    """Some seconds of a training. JSON can express it."""

    training: str
    style: str
    samples: int
    seconds: float
    tokens: int
    """The mean length of an answer. Lengths are log-normal, as those of `payloads.lengths`."""
    is_limit: bool
    """Whether all answers have this length, because no mean is published."""
    single: bool
    """Whether an answer is put when it ends, and then its reward and its tag; otherwise `batch` answers at a time."""
    stages: int
    batch: int
    """The samples of a batch of every task."""
    ranks: int
    part: int | None = None
    """The tokens of a part of an unfinished answer, which is put, too."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return the stages in their order; the last one makes the last put of a sample."""
        return STAGES[1 - self.stages :]

    @property
    def name(self) -> str:
        """Return the name for a row of a table."""
        return f"{self.training}, {self.style}, {self.ranks} ranks"

    def lengths(self) -> np.ndarray:
        """Return the tokens of each answer."""
        if self.is_limit:
            return np.full(self.samples, self.tokens)
        return payloads.lengths(self.samples, self.tokens, seed=0)

    def schedule(self, producer: int) -> list[tuple[float, list[int]]]:
        """Return (seconds after the start, samples) of the puts of one rollout worker; of a part, without samples.

        Answers end at random times, independently of each other. Parts belong also to answers that end after the
        replay, so that their times do not depend on those of the answers.
        """
        random = np.random.default_rng(0)
        ends = np.sort(random.uniform(0, self.seconds, self.samples)).tolist()
        rows = 1 if self.single else self.batch
        blocks = [list(range(self.samples))[first : first + rows] for first in range(0, self.samples, rows)]
        puts = [(ends[block[-1]], block) for block in blocks]
        parts = 0 if self.part is None else int((self.lengths() // self.part).sum())
        puts += [(at, []) for at in random.uniform(0, self.seconds, parts).tolist()]
        return sorted(puts[producer::PRODUCERS])

    def computing(self, samples: int, processes: int = 1) -> float:
        """Return the seconds that one of some processes computes for these samples."""
        return samples * processes * self.seconds / self.samples * BUSY

    def check(self, rows: Rows) -> list[int]:
        """Return the numbers of the samples. Raises AssertionError if a value differs from the one that was put."""
        lengths, numbers = self.lengths(), [int(ids[0]) for ids in rows["ids"]]
        wanted = answers(numbers, lengths)
        for name in STAGES:
            wanted[name] = added(name, wanted)
        for name, column in wanted.items():
            if not all(map(torch.equal, rows[name], column)) or len(rows[name]) != len(column):
                raise AssertionError(f"values of {name} of samples {numbers} differ from those of the put")
        return numbers


def replay_of(
    name: str, style_name: str, seconds: float, ranks: int, *, batch: int, nodes: float | None = None
) -> Replay:
    """Return a replay at the rate of a training, on its own nodes or in proportion on another number of them."""
    training = next(each for each in TRAININGS if each.name == name)
    style = next(each for each in STYLES if each.name == style_name)
    samples = max(2, round(training.samples_a_second(nodes) * seconds))
    name = name if nodes is None else f"{name} on {nodes:g} nodes"
    return Replay(
        name, style.name, samples, seconds, training.tokens, training.is_limit, style.single > 0, style.stages, batch,
        ranks, style.part,
    )  # fmt: skip


def warming(replay: Replay) -> Replay:
    """Return a short replay of small samples, in which every process works."""
    samples = 2 * replay.batch * max(replay.ranks, PRODUCERS)
    return replace(replay, samples=samples, seconds=0.3, tokens=64, part=None)


def answers(numbers: Sequence[int], lengths: np.ndarray) -> Rows:
    """Return the token ids of these samples, which identify them, and the log-probabilities."""
    ids = [torch.arange(number, number + int(lengths[number])) for number in numbers]
    return {"ids": ids, "logprobs": [each.float() for each in ids]}


def added(name: str, rows: Rows) -> list[torch.Tensor]:
    """Return the field that a stage adds."""
    if name == "reward":
        return [torch.tensor(score(ids)) for ids in rows["ids"]]
    if name == "reference":
        return [ids * 0.5 for ids in rows["ids"]]
    return [reward.expand_as(of_tokens).clone() for reward, of_tokens in zip(rows["reward"], rows["reference"])]


def columns(rows: Rows) -> TensorDict:
    """Return rows as a batch."""
    return TensorDict(
        {
            name: torch.stack(each) if name == "reward" else torch.nested.as_nested_tensor(each, layout=torch.jagged)
            for name, each in rows.items()
        },
        batch_size=[len(next(iter(rows.values())))],
    )


def rows_of(batch: Any) -> Rows:
    """Return a batch, which may also be a dict of lists, as rows."""
    return {str(name): list(column.unbind() if hasattr(column, "unbind") else column) for name, column in batch.items()}


def nbytes(rows: Rows) -> int:
    """Return the bytes of the values."""
    return sum(row.nbytes for each in rows.values() for row in each)


# ---------------------------------------------------------------- the processes


class Port(Protocol):
    """How a process of a replay reaches the system that is measured."""

    def put_batch(self, rows: Rows) -> None:
        """Put new samples."""

    def put_answer(self, number: int, answer: Rows, reward: Rows) -> None:
        """Put a new sample when it ends, and then its reward; each has one row."""

    def put_part(self, ids: torch.Tensor) -> None:
        """Put a part of an unfinished answer."""

    def add(self, handle: Any, name: str, rows: Rows) -> None:
        """Add a field to the samples of a batch."""

    def batches(self, task: str, rank: int) -> Iterator[tuple[Any, Any]]:
        """Yield (data, handle) of each batch that a task gets; `rows` makes rows of the data."""

    def rows(self, data: Any) -> Rows:
        """Return the values of a batch."""


@dataclass
class Report:
    """What a process has measured, by the monotonic clock."""

    late: list[float] = field(default_factory=list)
    """How much later than scheduled each put of a rollout worker began."""
    called: dict[int, float] = field(default_factory=dict)
    """When the last put of a sample was called."""
    used: list[tuple[int, float, float]] = field(default_factory=list)
    """A sample, when its rank asked for it, and when the rank had it."""
    moved: int = 0
    """The bytes of the values of all puts and gets."""


def roll_out(replay: Replay, port: Port, begin: float, producer: int) -> Report:
    """Put answers, and parts of them, by the clock."""
    report, lengths, part = Report(), replay.lengths(), torch.zeros(replay.part or 0, dtype=torch.int64)
    for at, numbers in replay.schedule(producer):
        rows = answers(numbers, lengths)
        reward = {"reward": added("reward", rows)} if replay.single and numbers else {}
        report.moved += nbytes(rows) + nbytes(reward) if numbers else part.nbytes
        time.sleep(max(0.0, begin + at - time.monotonic()))
        report.late.append(time.monotonic() - begin - at)
        if not numbers:
            port.put_part(part)
        elif replay.single:
            port.put_answer(numbers[0], rows, reward)
        else:
            port.put_batch(rows)
    return report


def add(replay: Replay, port: Port, name: str) -> Report:
    """Add a field to all samples."""
    report = Report()
    for data, handle in port.batches(name, 0):
        rows = port.rows(data)
        new = {name: added(name, rows)}
        report.moved += nbytes(rows) + nbytes(new)
        time.sleep(replay.computing(len(new[name])))
        called = time.monotonic()
        port.add(handle, name, new)
        if name == replay.tasks[-1]:
            report.called.update({int(row[0] * 2): called for row in rows["reference"]})
    return report


def train(replay: Replay, port: Port, rank: int) -> Report:
    """Get the batches of a rank, and compare every value."""
    report, asked = Report(), time.monotonic()
    for data, _ in port.batches(UPDATE, rank):
        came, rows = time.monotonic(), port.rows(data)
        report.used += [(number, asked, came) for number in replay.check(rows)]
        report.moved += nbytes(rows)
        time.sleep(replay.computing(len(rows["ids"]), replay.ranks))
        asked = time.monotonic()
    return report


def figures(replay: Replay, begin: float, reports: Sequence[Report]) -> dict[str, float]:
    """Return the figures of a replay.

    A sample is waited for from the call of its last put until its rank has it, without the time in which the rank
    still computes.
    """
    called = {number: at for report in reports for number, at in report.called.items()}
    used = [each for report in reports for each in report.used]
    if sorted(number for number, _, _ in used) != list(range(replay.samples)):
        raise AssertionError("the ranks have not received each sample once")
    waits = quantiles([came - max(called[number], asked) for number, asked, came in used])
    seconds = max(came for _, _, came in used) - begin
    late = quantiles([each for report in reports for each in report.late])
    moved = sum(report.moved for report in reports)
    return {
        "p50_ms": waits["p50"], "p99_ms": waits["p99"], "late_p99_ms": late["p99"], "seconds": seconds,
        "mb_a_second": moved / seconds / 1e6,
    }  # fmt: skip
