"""What may be divided: every refusal of bad input is a BalanceInputError from here, with or without `python -O`."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from transfer_queue.errors import BalanceInputError
from transfer_queue.sampler.balance.arrays import Floats

Numbers: TypeAlias = Sequence[float] | Floats

# Whole numbers below this are exact in float64.
_EXACT = 2**53


def numbers(values: Numbers, name: str = "lengths") -> Floats:
    """Finite, non-negative numbers, whose sum is finite too."""
    found = _array(values, name)
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if len(wrong):
        raise BalanceInputError(
            f"{name} must be finite and not negative, but the one at position {wrong[0]} is {found[wrong[0]]}"
        )
    with np.errstate(over="ignore"):
        if not np.isfinite(found.sum() * 2):
            raise BalanceInputError(f"the sum of the {name} is beyond the range of float64; scale them down")
    return found


def scalar(value: Any) -> Any:
    """A value that a tensor holds without dimensions, as the number that it is; any other value as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def whole(value: int, name: str) -> int:
    """A positive int."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise BalanceInputError(f"{name} must be an int, but is a {type(value).__name__}") from None
    if number < 1:
        raise BalanceInputError(f"{name} must be positive, got {number}")
    return number


def parts_for(count: int, k: int, name: str = "parts") -> int:
    """A number of parts that so many items can fill."""
    k = whole(k, name)
    if count < k:
        raise BalanceInputError(
            f"number of items:[{count}] < {name}:[{k}]: a part would be empty; give at least one length for each part"
        )
    return k


def cap_of(max_tokens: float) -> int:
    """The most whole tokens under this cap."""
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, Real):
        raise BalanceInputError(f"max_tokens must be a number, but is a {type(max_tokens).__name__}")
    if not (math.isfinite(max_tokens) and max_tokens >= 1):
        raise BalanceInputError(f"max_tokens must be finite and 1 or more, but is {max_tokens}")
    return min(math.floor(max_tokens), _EXACT)


def tokens_of(lengths: Floats) -> Floats:
    """Whole tokens, a fraction counted as one, so that every sum of them is exact."""
    tokens = np.ceil(lengths)
    if tokens.sum() >= _EXACT:
        raise BalanceInputError(f"the lengths sum to {tokens.sum():.3g} tokens, beyond exact counting; scale them down")
    return tokens


def _array(values: Numbers, name: str) -> Floats:
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in "iuf":
            raise BalanceInputError(
                f"{name} must be one row of numbers, but are {values.dtype} of shape {values.shape}"
            )
        return values.astype(np.float64)
    try:
        items: list[Any] = list(values)
    except TypeError:
        raise BalanceInputError(f"{name} must be a list, but are a {type(values).__name__}") from None
    if not all(issubclass(kind, Real) for kind in set(map(type, items))):
        items = [scalar(item) for item in items]
    strange = {kind for kind in set(map(type, items)) if issubclass(kind, bool) or not issubclass(kind, Real)}
    if strange:
        position = next(at for at, item in enumerate(items) if type(item) in strange)
        raise BalanceInputError(
            f"{name} must be numbers, but the one at position {position} is a {type(items[position]).__name__}"
        )
    try:
        return np.array(items, np.float64)
    except OverflowError:
        raise BalanceInputError(f"one of the {name} is beyond the range of float64; scale them down") from None
