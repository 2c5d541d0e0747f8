"""A training step's work, as made up for `pipeline`: how long each stage takes for which samples, and the least a step
can take. Imports nothing of this package, so that other systems can be given the same.

Work is slept, not computed: it stands for accelerators, and leaves the processors to what passes the samples on.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch

PROMPT = 200  # tokens


@dataclass(frozen=True)
class Step:
    """Of a training: prompts, answers a prompt (group), micro-batches a rank, ranks; mean tokens of an answer.

    rollout, reference, update: seconds a token; reward: seconds a sample.
    """

    prompts: int = 64
    group: int = 8
    micro_batches: int = 4
    ranks: int = 4
    tokens: int = 1000
    rollout: float = 3e-4
    reward: float = 1e-3
    reference: float = 1e-6
    update: float = 4e-6

    @property
    def samples(self) -> int:
        """Of the whole step."""
        return self.prompts * self.group

    @property
    def micro_batch(self) -> int:
        """Samples of one."""
        return self.samples // (self.micro_batches * self.ranks)

    def lengths(self, seed: int) -> np.ndarray:
        """Tokens of each answer, log-normal; int64 [prompts, group]."""
        drawn = np.exp(np.random.default_rng(seed).normal(0, 0.7, (self.prompts, self.group)))
        return np.maximum(1, drawn * (self.tokens / drawn.mean())).astype(np.int64)  # type: ignore[no-any-return]

    def rolled_out(self, seed: int) -> list[tuple[float, int]]:
        """(seconds after the start, prompt) in the order in which whole groups come."""
        done = self.lengths(seed).max(axis=1) * self.rollout
        return sorted((float(at), prompt) for prompt, at in enumerate(done))

    def answer(self, seed: int, prompt: int, member: int) -> torch.Tensor:
        """Tokens, int64; they tell which sample it is."""
        length = int(self.lengths(seed)[prompt, member])
        return torch.arange(length) + (prompt * self.group + member)

    def ideal(self, seed: int) -> float:
        """Seconds of a step in which nothing costs but the work, and each stage begins what it can at once."""
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

    def in_turn(self, seed: int) -> float:
        """Seconds of a step in which each stage waits for all of the one before, and nothing else costs."""
        lengths = self.lengths(seed)
        tokens = float(lengths.sum())
        shares = lengths.reshape(self.ranks, -1).sum(axis=1)
        stages = self.samples * self.reward + tokens * self.reference + float(shares.max()) * self.update
        return self.rolled_out(seed)[-1][0] + stages


def score(answer: torch.Tensor) -> float:
    """What the reward stage says of an answer."""
    return float(answer[0] % 97) + len(answer) / 1000
