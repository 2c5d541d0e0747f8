"""The computations of GRPO: log-probabilities, group-normalized advantages, the clipped loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import task
from model import Transformer

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
KL_WEIGHT = 0.005


@dataclass(frozen=True)
class Loss:
    """Sums over the answer tokens of a micro-batch; divide by the tokens of the whole batch."""

    total: Tensor
    kl: float
    clipped: float
    tokens: int


def pad_right(sequences: Sequence[Tensor], value: float) -> Tensor:
    """Return rows of different lengths as one [rows, longest] tensor."""
    return torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True, padding_value=value)


def jagged(rows: Sequence[Tensor]) -> Tensor:
    """Return rows of different lengths as a jagged nested tensor [rows, *]."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def answer_logprobs(model: Transformer, sequences: Sequence[Tensor], answer_lengths: Sequence[int]) -> list[Tensor]:
    """Return the log-probabilities [answer length] of each answer's tokens; a sequence is a prompt and its answer."""
    tokens = pad_right(sequences, task.PAD)
    logprobs = model(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return [
        logprobs[row, len(sequence) - 1 - length : len(sequence) - 1]
        for row, (sequence, length) in enumerate(zip(sequences, answer_lengths, strict=True))
    ]


def advantages(rewards: Tensor) -> Tensor:
    """Return rewards [groups, n] relative to their group: mean 0, deviation 1; all 0 if they are equal."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True, correction=0) + 1e-4)


def grpo_loss(new: Tensor, old: Tensor, reference: Tensor, advantage: Tensor) -> Loss:
    """Return the clipped objective on flat token vectors, with a penalty for the distance from the reference.

    The penalty is the unbiased, non-negative estimate exp(d) - d - 1 of the divergence, d = reference - new
    (GRPO: Shao et al., 2024; the asymmetric clip: DAPO, Yu et al., 2025).
    """
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    distance = reference - new
    kl = distance.exp() - distance - 1
    return Loss(
        total=(KL_WEIGHT * kl - gain).sum(),
        kl=float(kl.detach().sum()),
        clipped=float((ratio.detach() != clipped.detach()).sum()),
        tokens=len(new),
    )


def supervised_loss(model: Transformer, examples: Sequence[tuple[str, str]]) -> Tensor:
    """Return the mean cross-entropy of the answers' tokens; an example is a prompt and its answer."""
    texts = [torch.tensor(task.encode(prompt + answer)) for prompt, answer in examples]
    tokens = pad_right(texts, task.PAD)
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:].clone()
    for row, (prompt, _) in enumerate(examples):
        targets[row, : len(prompt) - 1] = task.PAD
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=task.PAD)
