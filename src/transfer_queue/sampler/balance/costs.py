"""Costs of items: a cost takes all lengths as an array and returns the cost of each."""

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
    """Return the lengths themselves: the cost of what grows with the tokens, as memory and matrix products do.

    Args:
        lengths: The lengths, float64 [n].

    Returns:
        The cost of each length, float64 [n].

    Example:
        >>> from transfer_queue.sampler.balance import linear
        >>> linear(np.array([1.0, 2.0])).tolist()
        [1.0, 2.0]
    """
    return lengths


@dataclass(frozen=True)
class Quadratic:
    """The cost `a * length + b * length ** 2`. `quadratic` makes it.

    Example:
        >>> from transfer_queue.sampler.balance import Quadratic
        >>> Quadratic(1.0, 0.5)(np.array([2.0])).tolist()
        [4.0]
    """

    a: float
    """The factor of the length."""
    b: float
    """The factor of the square of the length."""

    def __call__(self, lengths: Floats) -> Floats:
        """Return the cost of each length."""
        with np.errstate(over="ignore"):  # refused by who asked for the costs
            return self.a * lengths + self.b * lengths**2


def quadratic(a: float, b: float) -> Quadratic:
    """Return the cost `a * length + b * length ** 2`: the time of attention grows with the square of the length.

    For a transformer with hidden size h and without grouped heads, a : b is about 6 * h : 1 (Narayanan et al.,
    "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021).

    Args:
        a: The factor of the length.
        b: The factor of the square of the length.

    Returns:
        The cost function.

    Raises:
        BalanceInputError: A factor is not a finite, non-negative number, or both are 0.

    Example:
        >>> from transfer_queue.sampler.balance import balance, quadratic
        >>> balance([4, 3, 3], parts=2, cost=quadratic(6 * 4096, 1))
        [[0], [1, 2]]
    """
    one, two = numbers([a, b], "coefficients").tolist()
    if one == two == 0:
        raise BalanceInputError("the coefficients are both 0, so that no length costs anything; make one positive")
    return Quadratic(one, two)


def costs_of(cost: Cost, lengths: Floats) -> Floats:
    """Return the cost of each length. Raises BalanceInputError if `cost` is not a cost function of these lengths."""
    if not callable(cost):
        raise BalanceInputError(f"cost must be a function of the lengths, but is a {type(cost).__name__}")
    costs = numbers(cost(lengths.copy()), "costs")
    if costs.shape != lengths.shape:
        raise BalanceInputError(f"cost gave {len(costs)} costs for {len(lengths)} lengths; give one for each")
    return costs
