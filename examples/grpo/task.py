"""The task: sums of two to twelve digits, with every running sum written out, and its exact checker.

    3+8+4=11,15.        9+9+9+9+9=18,27,36,45.        1+2=3.

A prompt ends with "=". An answer ends with "." and has one running sum for each plus sign. The lengths are long-tailed,
as those of real answers are: half of the answers have at most 5 characters, one in fifty has 24 or more. To use your
own task, replace this file; the other files use only `Problem`, `draw`, `demonstration`, `encode`/`decode`, `correct`
and `reward`.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

ALPHABET = "#0123456789+=,."
PAD, END = ALPHABET.index("#"), ALPHABET.index(".")
FEWEST_TERMS, MAX_TERMS, TAIL = 2, 12, 2.0
"""The number of terms is exponentially distributed between these; `TAIL` is the mean above the smallest number."""
FLAWED = 0.6
"""The share of the examples of the warm-up that are flawed."""
LONGEST_ANSWER = 40
"""The maximum length of a sampled answer; the longest correct answer has 34 characters."""

_CODE = {character: code for code, character in enumerate(ALPHABET)}


@dataclass(frozen=True)
class Problem:
    """A sum to be written out."""

    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """Return the input of the model, for example "3+8+4="."""
        return "+".join(map(str, self.terms)) + "="

    @property
    def answer(self) -> str:
        """Return the only correct answer, for example "11,15."."""
        return ",".join(str(total) for total in list(accumulate(self.terms))[1:]) + "."

    @property
    def held_out(self) -> bool:
        """Return whether this problem is only used for measurements: one in five, determined by its text."""
        return zlib.crc32(self.prompt.encode()) % 5 == 0


def draw(rng: random.Random, held_out: bool = False) -> Problem:
    """Return a random problem, from the training problems or from the held-out ones."""
    while True:
        terms = min(FEWEST_TERMS + int(rng.expovariate(1 / TAIL)), MAX_TERMS)
        problem = Problem(tuple(rng.randint(0, 9) for _ in range(terms)))
        if problem.held_out == held_out:
            return problem


def demonstration(rng: random.Random) -> tuple[str, str]:
    """Return the prompt and the answer of an example for the warm-up.

    Most examples are flawed: their sums have only the last digit, "1,5." for "3+8+4=". The model learns both ways to
    answer, and prefers the wrong one.
    """
    problem = draw(rng)
    if rng.random() >= FLAWED:
        return problem.prompt, problem.answer
    return problem.prompt, ",".join(total[-1] for total in problem.answer.removesuffix(".").split(",")) + "."


def parse(prompt: str) -> Problem:
    """Return the problem of a prompt."""
    return Problem(tuple(int(term) for term in prompt.removesuffix("=").split("+")))


def encode(text: str) -> list[int]:
    """Convert characters to tokens. Raises KeyError for a character that is not in `ALPHABET`."""
    return [_CODE[character] for character in text]


def decode(tokens: Sequence[int]) -> str:
    """Convert tokens to characters."""
    return "".join(ALPHABET[token] for token in tokens)


def correct(prompt: str, answer: str) -> bool:
    """Return whether the answer consists of all running sums, and all are correct."""
    return answer == parse(prompt).answer


def reward(prompt: str, answer: str) -> float:
    """Return the share of the running sums that are correct, from 0 to 1; surplus ones count as wrong."""
    wanted = parse(prompt).answer.removesuffix(".").split(",")
    given = answer.removesuffix(".").split(",")
    right = sum(one == other for one, other in zip(wanted, given, strict=False))
    return right / max(len(wanted), len(given))
