"""The task: sums of two to five digits, with every running sum written out, and its exact checker.

    3+8+4=11,15.        9+9+9+9+9=18,27,36,45.        1+2=3.

A prompt ends with "=", an answer with "." and holds one running sum for each plus sign: from 2 to 12
characters. To turn the example to a task of your own, replace this file: `Problem`, `draw`,
`encode`/`decode`, `correct` and `reward` are all that the other files use of it.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

ALPHABET = "#0123456789+=,."
PAD, END = ALPHABET.index("#"), ALPHABET.index(".")
LONGEST_ANSWER = 14
"""Sampling stops here; the longest right answer has 12 characters."""

_CODE = {character: code for code, character in enumerate(ALPHABET)}


@dataclass(frozen=True)
class Problem:
    """A sum to be written out."""

    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """What the model is given, for instance "3+8+4="."""
        return "+".join(map(str, self.terms)) + "="

    @property
    def answer(self) -> str:
        """The only right answer, for instance "11,15."."""
        return ",".join(str(total) for total in list(accumulate(self.terms))[1:]) + "."

    @property
    def held_out(self) -> bool:
        """Whether this problem is kept for measuring: one in five, fixed by its text, never trained on."""
        return zlib.crc32(self.prompt.encode()) % 5 == 0


def draw(rng: random.Random, held_out: bool = False) -> Problem:
    """A random problem of two to five terms, from the training problems or from the held-out ones."""
    while True:
        problem = Problem(tuple(rng.randint(0, 9) for _ in range(rng.randint(2, 5))))
        if problem.held_out == held_out:
            return problem


def parse(prompt: str) -> Problem:
    """The problem of a prompt."""
    return Problem(tuple(int(term) for term in prompt.removesuffix("=").split("+")))


def encode(text: str) -> list[int]:
    """Characters to tokens; KeyError for a character outside `ALPHABET`."""
    return [_CODE[character] for character in text]


def decode(tokens: Sequence[int]) -> str:
    """Tokens to characters."""
    return "".join(ALPHABET[token] for token in tokens)


def correct(prompt: str, answer: str) -> bool:
    """Whether every running sum of the answer is right and it ends there."""
    return answer == parse(prompt).answer


def reward(prompt: str, answer: str) -> float:
    """The share of the running sums that are right, from 0 to 1; surplus ones count as wrong."""
    wanted = parse(prompt).answer.removesuffix(".").split(",")
    given = answer.removesuffix(".").split(",")
    right = sum(one == other for one, other in zip(wanted, given, strict=False))
    return right / max(len(wanted), len(given))
