"""Summarizes the events of all processes for the view and the report."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from settings import TRAINER_RANKS, Settings

Event = dict[str, Any]


@dataclass
class Figures:
    """The figures of a run; grows with every event."""

    settings: Settings
    events: list[Event] = field(default_factory=list)
    """The events of GRPO, without the warm-up."""
    warmup_steps: int = 0
    warmup_accuracy: float = 0.0
    version: int = 0
    """The newest version of the policy: updates done."""
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
            if event["stage"] == "warm-up":
                self.warmup_steps, self.warmup_accuracy = event["step"], event["accuracy"]
                continue
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
                self.finished = self.finished or event["last"]

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

    def imbalance(self) -> dict[str, float]:
        """Return by what share the rank with most tokens exceeds the mean, averaged over the steps.

        "balanced" is for the batches that SeqlenBalancedSampler dealt; "in_order" is for the same samples, dealt to the
        ranks in turn, in order of arrival.
        """
        dealt: defaultdict[int, defaultdict[str, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for event in self.events:
            if event["stage"] == "train":
                pairs = zip(event["indexes"], event["lengths"], strict=True)
                dealt[event["step"]][event["worker"]] += pairs
        whole = [ranks for ranks in dealt.values() if sum(map(len, ranks.values())) == self.settings.samples]
        balanced = [excess([sum(n for _, n in mine) for mine in ranks.values()]) for ranks in whole]
        in_order = [excess(self._in_turn([pair for mine in ranks.values() for pair in mine])) for ranks in whole]
        return {"balanced": mean(balanced), "in_order": mean(in_order)}

    def _in_turn(self, samples: Sequence[tuple[int, int]]) -> list[int]:
        lengths, size = [n for _, n in sorted(samples)], self.settings.rank_batch
        batches = [sum(lengths[start : start + size]) for start in range(0, len(lengths), size)]
        return [sum(batches[rank::TRAINER_RANKS]) for rank in range(TRAINER_RANKS)]


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 if there are no values."""
    return sum(values) / len(values) if values else 0.0


def excess(tokens: Sequence[int]) -> float:
    """Return by how much the largest value exceeds the mean, as a share of the mean."""
    return max(tokens) / mean(tokens) - 1
