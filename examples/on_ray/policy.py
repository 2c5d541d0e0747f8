"""A small policy: for each digit of a prompt it draws the digit of the answer.

It learns to answer with the next digit (9 is followed by 0). The examples are about the data flow around the policy:
which process makes which field, and which process waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PROMPTS = 64
SAMPLES = 8  # of each prompt: a group
LONGEST = 24
LEARNING_RATE = 4.0


def prompts(step: int) -> list[Tensor]:
    """Return PROMPTS prompts, int64 [length], of lognormal lengths."""
    draw = torch.Generator().manual_seed(step)
    lengths = torch.exp(torch.randn(PROMPTS, generator=draw) * 0.6 + 2).clamp(2, LONGEST).long().tolist()
    return [torch.randint(0, 10, (length,), generator=draw) for length in lengths]


@dataclass
class Policy:
    """logits: float32 [10, 10], the logits of the answer's digit for each digit of the prompt."""

    logits: Tensor

    @classmethod
    def new(cls) -> Policy:
        """Return a policy that answers at random."""
        return cls(torch.zeros(10, 10))

    def log_probs(self, prompt: Tensor, response: Tensor) -> Tensor:
        """Return the log-probability of each digit of the response, float32 [length]."""
        return self.logits.log_softmax(-1)[prompt, response]

    def sample(self, prompt: Tensor) -> Tensor:
        """Return a random response, int64 [length]."""
        return torch.multinomial(self.logits.softmax(-1)[prompt], 1).squeeze(-1)


def reward(prompt: Tensor, response: Tensor) -> float:
    """Return the share of the response that is correct, from 0 to 1."""
    return float((response == (prompt + 1) % 10).float().mean())


def advantages(rewards: Tensor) -> Tensor:
    """Return rewards, centered and scaled in their groups, float32 [groups, SAMPLES] (GRPO, arXiv 2402.03300)."""
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-6)


def gradient(policy: Policy, batch: list[tuple[Tensor, Tensor, float]]) -> Tensor:
    """Return the policy gradient, summed over samples (prompt, response, advantage), float32 [10, 10]."""
    logits = policy.logits.clone().requires_grad_()
    total = torch.zeros(())
    for prompt, response, advantage in batch:
        total = total + advantage * logits.log_softmax(-1)[prompt, response].mean()
    (found,) = torch.autograd.grad(total, logits)
    return found
