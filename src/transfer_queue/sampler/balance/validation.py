"""Checks arguments, and converts them to the arrays of this package and results to lists of positions.

A division is `part_of`: the number of the part of each item. Functions that need the items by descending size identify
an item by its rank in this order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import BalanceInputError

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


def largest_first(values: Floats) -> Ints:
    """Return the positions by descending value; of equal values the lower position is first."""
    return np.argsort(-values, kind="stable")


def by_position(part_of_rank: Ints, order: Ints) -> Ints:
    """Return the part of each position from the part of each rank."""
    part_of = np.empty_like(part_of_rank)
    part_of[order] = part_of_rank
    return part_of


def members(part_of: Ints, k: int) -> list[Ints]:
    """Return the items of each part, ascending."""
    by_part = np.argsort(part_of, kind="stable")
    cuts = np.cumsum(np.bincount(part_of, minlength=k))[:-1]
    return np.split(by_part, cuts)


def as_lists(part_of: Ints, k: int) -> list[list[int]]:
    """Return the positions in each part, ascending, in the order of their first positions. No part may be empty."""
    return sorted(part.tolist() for part in members(part_of, k))


Numbers: TypeAlias = Sequence[float] | Floats

# Whole numbers below this are exact in float64.
_EXACT = 2**53


def numbers(values: Numbers, name: str = "lengths") -> Floats:
    """Return the numbers as float64. Raises BalanceInputError unless all are non-negative and their sum is finite."""
    array = _array(values, name)
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(wrong):
        raise BalanceInputError(
            f"{name} must be finite and not negative, but the one at position {wrong[0]} is {array[wrong[0]]}"
        )
    with np.errstate(over="ignore"):
        if not np.isfinite(array.sum() * 2):
            raise BalanceInputError(f"the sum of the {name} is beyond the range of float64; scale them down")
    return array


def scalar(value: Any) -> Any:
    """Return the number in a tensor without dimensions; any other value is returned itself."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def positive_int(value: int, name: str) -> int:
    """Return the value as an int. Raises BalanceInputError unless it is a positive int."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise BalanceInputError(f"{name} must be an int, got a {type(value).__name__}") from None
    if number < 1:
        raise BalanceInputError(f"{name} must be positive, got {number}")
    return number


def parts_for(count: int, k: int, name: str = "parts") -> int:
    """Return the number of parts k. Raises BalanceInputError if `count` items cannot fill k parts."""
    k = positive_int(k, name)
    if count < k:
        raise BalanceInputError(
            f"number of items:[{count}] < {name}:[{k}]: a part would be empty; give at least one length for each part"
        )
    return k


def cap_of(max_tokens: float) -> int:
    """Return the cap as a whole number of tokens."""
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, Real):
        raise BalanceInputError(f"max_tokens must be a number, got a {type(max_tokens).__name__}")
    if not (math.isfinite(max_tokens) and max_tokens >= 1):
        raise BalanceInputError(f"max_tokens must be finite and 1 or more, got {max_tokens}")
    return min(math.floor(max_tokens), _EXACT)


def tokens_of(lengths: Floats) -> Floats:
    """Return whole tokens, with a fraction counted as one, so that every sum is exact."""
    tokens = np.ceil(lengths)
    if tokens.sum() >= _EXACT:
        raise BalanceInputError(f"the lengths sum to {tokens.sum():.3g} tokens, beyond exact counting; scale them down")
    return tokens


def _array(values: Numbers, name: str) -> Floats:
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in "iuf":
            raise BalanceInputError(f"{name} must be one row of numbers, got {values.dtype} of shape {values.shape}")
        return values.astype(np.float64)
    try:
        items: list[Any] = list(values)
    except TypeError:
        raise BalanceInputError(f"{name} must be a list, got a {type(values).__name__}") from None
    if not all(issubclass(kind, Real) for kind in set(map(type, items))):
        items = [scalar(item) for item in items]
    wrong_types = {kind for kind in set(map(type, items)) if issubclass(kind, bool) or not issubclass(kind, Real)}
    if wrong_types:
        position = next(at for at, item in enumerate(items) if type(item) in wrong_types)
        raise BalanceInputError(
            f"{name} must be numbers, but the one at position {position} is a {type(items[position]).__name__}"
        )
    try:
        return np.array(items, np.float64)
    except OverflowError:
        raise BalanceInputError(f"one of the {name} is beyond the range of float64; scale them down") from None


Cost: TypeAlias = Callable[[Floats], Floats]


def linear(lengths: Floats) -> Floats:
    """Return the lengths themselves, for costs in proportion to the tokens, such as memory and matrix products.

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
        with np.errstate(over="ignore"):  # `costs_of` refuses infinite costs
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
        raise BalanceInputError(f"cost must be a function of the lengths, got a {type(cost).__name__}")
    costs = numbers(cost(lengths.copy()), "costs")
    if costs.shape != lengths.shape:
        raise BalanceInputError(f"cost must return one cost per length, got {len(costs)} for {len(lengths)} lengths")
    return costs
