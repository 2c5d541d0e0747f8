"""What an item of a length costs: a cost takes all lengths as an array and gives as many costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from transfer_queue.errors import BalanceInputError
from transfer_queue.sampler.balance.arrays import Floats
from transfer_queue.sampler.balance.checks import numbers

Cost: TypeAlias = Callable[[Floats], Floats]


def linear(lengths: Floats) -> Floats:
    """L: what grows with the tokens, as memory and the matrix products of a layer do."""
    return lengths


@dataclass(frozen=True)
class Quadratic:
    """a * L + b * L^2; made by `quadratic`."""

    a: float
    b: float

    def __call__(self, lengths: Floats) -> Floats:
        """The cost of each length."""
        with np.errstate(over="ignore"):  # refused by who asked for the costs
            return self.a * lengths + self.b * lengths**2


def quadratic(a: float, b: float) -> Quadratic:
    """The cost a * L + b * L^2: attention takes its share by the square of the length.

    For a transformer of hidden size h without grouped heads, a : b is about 6 * h : 1. Raises BalanceInputError for
    coefficients that are negative, not finite, no numbers, or both 0.
    """
    one, two = numbers([a, b], "coefficients").tolist()
    if one == two == 0:
        raise BalanceInputError("the coefficients are both 0, so that no length costs anything; make one positive")
    return Quadratic(one, two)


def costs_of(cost: Cost, lengths: Floats) -> Floats:
    """The cost of each length. Raises BalanceInputError for what is no cost function of these lengths."""
    if not callable(cost):
        raise BalanceInputError(f"cost must be a function of the lengths, but is a {type(cost).__name__}")
    costs = numbers(cost(lengths.copy()), "costs")
    if costs.shape != lengths.shape:
        raise BalanceInputError(f"cost gave {len(costs)} costs for {len(lengths)} lengths; give one for each")
    return costs
