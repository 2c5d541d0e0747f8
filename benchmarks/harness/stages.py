"""The synthetic training step of `pipeline`: the time of each stage for its samples, and the lower bound of a step.

A stage sleeps instead of computing: it stands for an accelerator, and leaves the processors to the system that passes
the samples on. The module imports nothing of this package, so that other systems can be measured with the same step.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch

PROMPT = 200  # tokens


@dataclass(frozen=True)
class Step:
    """A training step."""

    prompts: int = 64
    group: int = 8
    """The number of answers to each prompt."""
    micro_batches: int = 4
    """The number of micro-batches of each rank."""
    ranks: int = 4
    tokens: int = 1000
    """The mean number of tokens of an answer."""
    rollout: float = 3e-4
    """Seconds for each token."""
    reward: float = 1e-3
    """Seconds for each sample."""
    reference: float = 1e-6
    """Seconds for each token."""
    update: float = 4e-6
    """Seconds for each token."""

    @property
    def samples(self) -> int:
        """Return the number of samples of the step."""
        return self.prompts * self.group

    @property
    def micro_batch(self) -> int:
        """Return the number of samples of a micro-batch."""
        return self.samples // (self.micro_batches * self.ranks)

    def lengths(self, seed: int) -> np.ndarray:
        """Return the tokens of each answer, log-normal; int64 [prompts, group]."""
        drawn = np.exp(np.random.default_rng(seed).normal(0, 0.7, (self.prompts, self.group)))
        return np.maximum(1, drawn * (self.tokens / drawn.mean())).astype(np.int64)  # type: ignore[no-any-return]

    def rolled_out(self, seed: int) -> list[tuple[float, int]]:
        """Return (seconds after the start, prompt) in the order in which complete groups are ready."""
        done = self.lengths(seed).max(axis=1) * self.rollout
        return sorted((float(at), prompt) for prompt, at in enumerate(done))

    def answer(self, seed: int, prompt: int, member: int) -> torch.Tensor:
        """Return tokens, int64, which identify the sample."""
        length = int(self.lengths(seed)[prompt, member])
        return torch.arange(length) + (prompt * self.group + member)

    def ideal(self, seed: int) -> float:
        """Return the seconds of a step if only the work takes time, and each stage starts as early as possible."""
        lengths, ready = self.lengths(seed), []
        reward = reference = 0.0
        for at, prompt in self.rolled_out(seed):
            reward = max(reward, at) + self.group * self.reward
            reference = max(reference, at) + float(lengths[prompt].sum()) * self.reference
            ready.append((max(reward, reference), lengths[prompt]))
        moments = np.repeat([at for at, _ in ready], self.group)
        tokens = np.concatenate([each for _, each in ready])
        free = [0.0] * self.ranks
        for first in range(0, self.samples, self.micro_batch):
            part = slice(first, first + self.micro_batch)
            begin = max(heapq.heappop(free), float(moments[part].max()))
            heapq.heappush(free, begin + float(tokens[part].sum()) * self.update)
        return max(free)


def score(answer: torch.Tensor) -> float:
    """Return the reward of an answer."""
    return float(answer[0] % 97) + len(answer) / 1000
