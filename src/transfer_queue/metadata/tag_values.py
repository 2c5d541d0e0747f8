"""Copies, compares and merges the values of tags and `extra_info`.

Such a value can be any object: a number, text, a nested dict or list, an array, a tensor, or an object of a user's
class. This module does not depend on batches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from transfer_queue.errors import InvalidArgumentError

# values of exactly these types are immutable, so that a copy may share them
_UNCHANGING = frozenset({type(None), bool, int, float, complex, str, bytes})
# `__eq__` of classes that do not define it
_IDENTITY: Any = object.__eq__
_ABSENT = object()


class UnreadTags(Protocol):
    """The tags of rows, as a reply has them, until somebody reads them (`wire.objects.tag_rows.TagRows`).

    Tags that are not a list are of this type. `isinstance` with a protocol takes as long as all else of a reply.
    """

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def take(self, selection: Any) -> UnreadTags:
        """Return the tags of the selected rows. selection: a slice, or int64 positions."""
        ...

    def to_list(self) -> list[dict[str, Any]]:
        """Return a new dict for each row. No two of them share a mutable value."""
        ...


def deep_copy(value: Any) -> Any:
    """Return a deep copy. A value that cannot be copied (a lock, an open file) is shared."""
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind is dict:
        return {key: deep_copy(entry) for key, entry in value.items()}
    if kind is list:
        return [deep_copy(entry) for entry in value]
    if kind is tuple:
        return tuple(deep_copy(entry) for entry in value)
    if isinstance(value, torch.Tensor):
        # deepcopy raises an error for tensors that are results of autograd
        return value.detach().clone().requires_grad_(value.requires_grad)
    try:
        return copy.deepcopy(value)
    except Exception:  # a user's __deepcopy__ may raise anything
        return value


def copy_tag(tag: Any, what: str) -> dict[str, Any]:
    """Return a copy of a user's tag.

    Raises:
        InvalidArgumentError: The tag is not a mapping. `what` is the argument's name.
    """
    if type(tag) is not dict and not isinstance(tag, Mapping):
        raise InvalidArgumentError(f"{what} must have one dict for each row, got a {type(tag).__name__}: {tag!r}")
    return {key: deep_copy(value) for key, value in tag.items()}


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are equal; also for arrays and tensors.

    NaN equals NaN. Arrays and tensors are equal if their dtypes, shapes and elements are. Objects whose class does not
    define equality are equal if their attributes are. Values that cannot be compared are not equal.
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
    except Exception:  # a user's __eq__ may raise anything
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
    if one.is_nested:  # torch.equal does not support nested tensors
        return same_value(list(one.unbind()), list(other.unbind()))
    if one.shape != other.shape:
        return False
    one, other = one.detach().cpu(), other.detach().cpu()
    if torch.equal(one, other):
        return True
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))  # NaN


def changed_entries(tag: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `tag` that `saved` does not have, or has with another value or type.

    Entries that were removed are not reported.
    """
    changes = {}
    for key, value in tag.items():
        old = saved.get(key, _ABSENT)
        # most values are unchanged, and the copy shares those that are immutable
        if old is not value and (type(old) is not type(value) or not same_value(old, value)):
            changes[key] = value
    return changes


def merge_extra_info(infos: Iterable[Mapping[str, Any]], validate: bool = True) -> dict[str, Any]:
    """Merge several `extra_info`.

    Raises:
        InvalidArgumentError: Two of them have different values for a key, and `validate` is true. If `validate` is
            false, the last value is used.
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
