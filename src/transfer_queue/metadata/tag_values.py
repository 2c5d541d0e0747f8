"""Copying, comparing and uniting the values users keep in tags and extra_info.

Such values are anything: numbers, text, nested dicts and lists, arrays, tensors, objects of the
user's own. This module knows nothing of batches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from transfer_queue.errors import InvalidArgumentError

# values of exactly these types cannot change, so that a copy may share them
_UNCHANGING = frozenset({type(None), bool, int, float, complex, str, bytes})
# the equality of classes that define none
_IDENTITY: Any = object.__eq__
_ABSENT = object()


def copied(value: Any) -> Any:
    """A copy deep enough that an edit in place of one side does not show in the other.

    A value that refuses to be copied (a lock, an open file) is shared.
    """
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind is dict:
        return {key: copied(entry) for key, entry in value.items()}
    if kind is list:
        return [copied(entry) for entry in value]
    if kind is tuple:
        return tuple(copied(entry) for entry in value)
    if isinstance(value, torch.Tensor):
        # deepcopy refuses tensors that an autograd graph made
        return value.detach().clone().requires_grad_(value.requires_grad)
    try:
        return copy.deepcopy(value)
    except Exception:  # whatever a user's __deepcopy__ raises
        return value


def copied_tag(tag: Any, what: str) -> dict[str, Any]:
    """A tag of the user's, copied in.

    Raises:
        InvalidArgumentError: it is no mapping; `what` names the argument.
    """
    if type(tag) is not dict and not isinstance(tag, Mapping):
        raise InvalidArgumentError(f"{what} must have one dict for each row, got a {type(tag).__name__}: {tag!r}")
    return {key: copied(value) for key, value in tag.items()}


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are equal, in words that also fit arrays and tensors.

    NaN equals NaN. Arrays and tensors are equal where dtype, shape and all elements are; objects without an
    equality of their own where their attributes are. What cannot be compared is not equal.
    """
    if one is other:
        return True
    try:
        if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
            return _same_tensor(one, other)
        if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
            return _same_array(one, other)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
        if isinstance(one, (list, tuple)) and type(one) is type(other):
            return len(one) == len(other) and all(map(same_value, one, other))
        return _same_object(one, other)
    except Exception:  # whatever a user's __eq__ raises
        return False


def _same_object(one: Any, other: Any) -> bool:
    equal = one == other
    if not isinstance(equal, (bool, np.bool_)) and hasattr(equal, "all"):
        equal = equal.all()  # containers whose == is elementwise
    if equal:
        return True
    if type(one) is not type(other):
        return False
    if type(one).__eq__ is _IDENTITY and hasattr(one, "__dict__"):
        return same_value(vars(one), vars(other))
    return bool(one != one and other != other)  # NaN


def _same_array(one: Any, other: Any) -> bool:
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return False
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.hasobject:
        return same_value(one.tolist(), other.tolist())
    return bool(np.array_equal(one, other)) or one.tobytes() == other.tobytes()


def _same_tensor(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if one.dtype != other.dtype or one.is_nested != other.is_nested:
        return False
    if one.is_nested:  # torch.equal does not know nested tensors
        return same_value(list(one.unbind()), list(other.unbind()))
    if one.shape != other.shape:
        return False
    one, other = one.detach().cpu(), other.detach().cpu()
    if torch.equal(one, other):
        return True
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))  # NaN


def changed_entries(tag: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The entries of `tag` that `saved` lacks, or holds with another value or type. Removed ones are not in it."""
    changes = {}
    for key, value in tag.items():
        old = saved.get(key, _ABSENT)
        # most values are unchanged, and those that cannot change are shared by the copy
        if old is not value and (type(old) is not type(value) or not same_value(old, value)):
            changes[key] = value
    return changes


def united(infos: Iterable[Mapping[str, Any]], validate: bool = True) -> dict[str, Any]:
    """One extra_info out of several.

    Raises:
        InvalidArgumentError: two of them hold a key with different values (unless not `validate`: the last wins).
    """
    union: dict[str, Any] = {}
    for info in infos:
        for key, value in info.items():
            if validate and key in union and not same_value(union[key], value):
                raise InvalidArgumentError(
                    f"extra_info has conflicting values for {key!r}: {union[key]!r} and {value!r}; "
                    "make them equal or remove one before joining"
                )
            union[key] = value
    return union
