"""Summarizes the events of one run, through the driver or through the queue, for the view and the report."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from settings import ROLLOUT_WORKERS, TRAINER_RANKS, Settings

Event = dict[str, Any]
WORKERS = [
    *(f"rollout {number}" for number in range(ROLLOUT_WORKERS)), "reward", "reference",
    *(f"trainer {rank}" for rank in range(TRAINER_RANKS)),
]  # fmt: skip
"""The workers of a run, in the order in which the view and the report show them."""


class Piece(NamedTuple):
    """A time in which a worker had work: it computed, or its samples were in a sandbox."""

    worker: str
    stage: str
    """The stage; "sandbox" for the wait for a sandbox."""
    start: float
    """Seconds since the epoch."""
    end: float

    def within(self, start: float, end: float) -> Piece:
        """Return the part of it between two moments; its length is 0 if they do not overlap."""
        return self._replace(start=min(max(self.start, start), end), end=max(min(self.end, end), start))


@dataclass
class Figures:
    """The figures of one run; grows with every event."""

    settings: Settings
    title: str = ""
    events: list[Event] = field(default_factory=list)
    accuracies: dict[int, float] = field(default_factory=dict)
    """Version -> held-out accuracy of its weights."""
    killed: list[str] = field(default_factory=list)
    """Workers that were killed from outside."""
    put_again: int = 0
    """Prompts that were put a second time."""
    version: int = 0
    """The newest version of the policy: updates done."""
    updates: dict[int, float] = field(default_factory=dict)
    """Version -> when it was published, in seconds since the epoch."""
    finished: bool = False
    """Whether the last update is done."""
    scored: int = 0
    """Samples that have their reward."""
    trained: int = 0
    """Samples that were trained on."""
    rewards: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The rewards of the samples, by step."""
    correct: defaultdict[int, list[bool]] = field(default_factory=lambda: defaultdict(list))
    answer_lengths: Counter[int] = field(default_factory=Counter)
    """Characters of an answer -> how many answers."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of versions behind -> number of samples that were trained on with that staleness."""

    def add(self, events: Iterable[Event]) -> None:
        """Add events."""
        for event in events:
            self.events.append(event)
            if event["stage"] == "reward":
                self.scored += event["samples"]
                self.rewards[event["step"]] += event["reward"]
                self.correct[event["step"]] += event["correct"]
                self.answer_lengths.update(event["answer_lengths"])
            elif event["stage"] == "train":
                self.trained += event["samples"]
                self.staleness.update(event["staleness"])
            elif "version" in event and event["stage"] == "update":
                self.version = max(self.version, event["version"])
                self.updates[event["version"]] = event["end"]
                self.finished = self.finished or event["last"]

    @property
    def accuracy(self) -> float:
        """Return the held-out accuracy at the end."""
        return self.accuracies.get(self.version, 0.0)

    def measured(self) -> list[tuple[int, float, float]]:
        """Return (version, seconds from the start of the run to its update, held-out accuracy) in order."""
        begin = self.moment(0)
        return [
            (version, self.moment(version) - begin, self.accuracies[version]) for version in sorted(self.accuracies)
        ]

    def mean_staleness(self) -> float:
        """Return the mean number of versions that a sample was behind in training."""
        return sum(lag * count for lag, count in self.staleness.items()) / max(sum(self.staleness.values()), 1)

    def by_step(self, values: dict[int, Any]) -> list[float]:
        """Return the mean of each complete step."""
        return [mean(values[step]) for step in sorted(values) if len(values[step]) == self.settings.samples]

    def recent(self, values: dict[int, Any], steps: int = 10) -> float:
        """Return the mean over the last steps."""
        last = self.by_step(values)[-steps:]
        return mean(last) if last else 0.0

    def seconds(self, kind: str) -> dict[str, float]:
        """Return for each stage the seconds that its processes worked ("busy") or computed ("cpu")."""
        total: dict[str, float] = defaultdict(float)
        for event in self.events:
            total[event["stage"]] += event["end"] - event["start"] if kind == "busy" else event["cpu"]
        return dict(total)

    def wall(self) -> float:
        """Return the seconds from the start of the first event to the end of the last one."""
        if not self.events:
            return 0.0
        return max(event["end"] for event in self.events) - min(event["start"] for event in self.events)

    def pieces(self, since: float = 0.0) -> list[Piece]:
        """Return the times of work that ended after a moment."""
        found = []
        for event in self.events:
            if event["end"] < since:
                continue
            computing = event["start"] + event.get("sandbox", 0.0)
            if computing > event["start"]:
                found.append(Piece(event["worker"], "sandbox", event["start"], computing))
            found.append(Piece(event["worker"], event["stage"], computing, event["end"]))
        return found

    def idle(self) -> float:
        """Return the share of the workers' time, from the first event to the last, in which they had no work."""
        total = len(WORKERS) * self.wall()
        return 1 - sum(busy_seconds(self.pieces()).values()) / total if total else 0.0

    def moment(self, version: int) -> float:
        """Return when a version of the policy was published; for version 0, when the run began."""
        return self.updates[version] if version else min(event["start"] for event in self.events)

    def seconds_per_step(self) -> float:
        """Return the seconds from the start to the end of the training for each step."""
        return self.wall() / max(self.version, 1)

    def tokens(self) -> int:
        """Return the number of tokens that were generated."""
        return sum(length * count for length, count in self.answer_lengths.items())

    def imbalance(self) -> dict[str, float]:
        """Return by what share the rank with most tokens exceeds the mean, averaged over the steps.

        "balanced" is for the batches that SeqlenBalancedSampler dealt; "in_order" is for the same samples, dealt to the
        ranks in turn, in order of arrival.
        """
        return {dealt: mean([excess(tokens) for tokens in steps]) for dealt, steps in self.rank_tokens().items()}

    def rank_tokens(self) -> dict[str, list[list[int]]]:
        """Return the tokens of each rank in each complete step: "balanced" and "in_order", as `imbalance` has them."""
        dealt: defaultdict[int, defaultdict[str, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for event in self.events:
            if event["stage"] == "train":
                pairs = zip(event["indexes"], event["lengths"], strict=True)
                dealt[event["step"]][event["worker"]] += pairs
        complete = [ranks for ranks in dealt.values() if sum(map(len, ranks.values())) == self.settings.samples]
        return {
            "balanced": [[sum(n for _, n in ranks[name]) for name in sorted(ranks)] for ranks in complete],
            "in_order": [self._in_turn([pair for mine in ranks.values() for pair in mine]) for ranks in complete],
        }

    def _in_turn(self, samples: Sequence[tuple[int, int]]) -> list[int]:
        lengths, size = [n for _, n in sorted(samples)], self.settings.rank_batch
        batches = [sum(lengths[start : start + size]) for start in range(0, len(lengths), size)]
        return [sum(batches[rank::TRAINER_RANKS]) for rank in range(TRAINER_RANKS)]


def without_overlaps(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces by start, without overlaps: a worker can wait for several sandboxes."""
    until: dict[str, float] = defaultdict(float)
    found = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.end > until[piece.worker]:
            found.append(piece._replace(start=max(piece.start, until[piece.worker])))
            until[piece.worker] = piece.end
    return found


def busy_seconds(pieces: Iterable[Piece]) -> dict[str, float]:
    """Return the seconds in which each worker has work."""
    seconds: dict[str, float] = defaultdict(float)
    for piece in without_overlaps(pieces):
        seconds[piece.worker] += piece.end - piece.start
    return seconds


def counted(steps: int) -> str:
    """Return the number of steps in words."""
    return f"{steps} steps" if steps > 1 else "a step"


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 if there are no values."""
    return sum(values) / len(values) if values else 0.0


def excess(tokens: Sequence[int]) -> float:
    """Return by how much the largest value exceeds the mean, as a share of the mean."""
    return max(tokens) / mean(tokens) - 1
