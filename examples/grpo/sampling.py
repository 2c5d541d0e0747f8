"""Answers from the model, many at once, with a key-value cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import task
from model import Transformer

MEASURED_TOGETHER = 128
"""The number of problems that `accuracy` answers in one batch."""


@dataclass
class Answer:
    """One sampled answer: its tokens and their log-probabilities at the time of sampling."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Return whether the answer has ended by itself or has the maximum length."""
        return self.tokens[-1:] == [task.END] or len(self.tokens) >= task.LONGEST_ANSWER


@torch.no_grad()
def generate(
    model: Transformer, prompts: Sequence[str], n: int, temperature: float = 1.0
) -> Iterator[tuple[int, list[Answer]]]:
    """Yield (position of the prompt, its n answers), each as soon as all n have ended.

    A prompt is read once and its cache repeated n times; the rows of a group that has ended leave the
    batch. `temperature` 0 takes the likeliest token.
    """
    groups = [[Answer() for _ in range(n)] for _ in prompts]
    alive = list(range(len(prompts)))
    tokens, seen = pad_left([task.encode(prompt) for prompt in prompts])
    columns = tokens.shape[1]
    causal = torch.ones(columns, columns, dtype=torch.bool).tril()
    # a padded column attends to itself, because a row that attends to no column would become NaN
    look = (causal & seen[:, None, :]) | torch.eye(columns, dtype=torch.bool)
    logits, cache = model.extend(tokens, None, look[:, None])
    last = logits[:, -1].repeat_interleave(n, 0)
    cache = [(k.repeat_interleave(n, 0), v.repeat_interleave(n, 0)) for k, v in cache]
    seen = seen.repeat_interleave(n, 0)
    while True:
        drawn = draw(last, temperature)
        logprobs = last.log_softmax(-1).gather(1, drawn[:, None])[:, 0]
        rows = (answer for position in alive for answer in groups[position])
        for answer, token, logprob in zip(rows, drawn.tolist(), logprobs.tolist(), strict=True):
            if not answer.finished:
                answer.tokens.append(token)
                answer.logprobs.append(logprob)
        going = [not all(answer.finished for answer in groups[position]) for position in alive]
        for position, goes_on in zip(alive, going, strict=True):
            if not goes_on:
                yield position, groups[position]
        alive = [position for position, goes_on in zip(alive, going, strict=True) if goes_on]
        if not alive:
            return
        if not all(going):
            kept = torch.tensor(going).repeat_interleave(n)
            cache = [(k[kept], v[kept]) for k, v in cache]
            drawn, seen = drawn[kept], seen[kept]
        seen = torch.cat((seen, seen.new_ones(len(seen), 1)), 1)
        logits, cache = model.extend(drawn[:, None], cache, seen[:, None, None])
        last = logits[:, -1]


def draw(logits: Tensor, temperature: float) -> Tensor:
    """Return one sampled token for each row of logits [rows, vocabulary]."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0]


def pad_left(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the tokens [rows, longest], and a mask of the same shape that is true for real tokens."""
    longest = max(map(len, sequences))
    tokens = [[task.PAD] * (longest - len(one)) + list(one) for one in sequences]
    real = [[False] * (longest - len(one)) + [True] * len(one) for one in sequences]
    return torch.tensor(tokens), torch.tensor(real)


def accuracy(model: Transformer, problems: Sequence[task.Problem]) -> float:
    """Return the share of problems whose most likely answer is completely correct."""
    right = 0
    prompts = sorted((problem.prompt for problem in problems), key=len)  # for little padding
    for start in range(0, len(prompts), MEASURED_TOGETHER):
        batch = prompts[start : start + MEASURED_TOGETHER]
        for position, (answer,) in generate(model, batch, 1, temperature=0):
            right += task.correct(batch[position], task.decode(answer.tokens))
    return right / len(problems)
