"""Values that many blocks have alike, stored once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T", bound=Hashable)


class Interned(Generic[T]):
    """Equal values stored once, counted, under small numbers that are used again when free."""

    def __init__(self) -> None:
        self.number: dict[T, int] = {}
        self.values: list[T | None] = []
        self.uses: list[int] = []
        self.spare: list[int] = []

    def add(self, value: T) -> int:
        """The number of this value, used once more."""
        spare = self.spare[-1] if self.spare else len(self.values)
        at = self.number.setdefault(value, spare)  # the one look: to hash a value may take milliseconds
        if at != spare:
            self.uses[at] += 1
        elif self.spare:
            self.spare.pop()
            self.values[at], self.uses[at] = value, 1
        else:
            self.values.append(value)
            self.uses.append(1)
        return at

    def drop(self, at: int, uses: int = 1) -> None:
        """So many uses fewer; the value goes with the last."""
        self.uses[at] -= uses
        if self.uses[at] == 0:
            del self.number[self[at]]
            self.values[at] = None
            self.spare.append(at)

    def __getitem__(self, at: int) -> T:
        value = self.values[at]
        assert value is not None
        return value

    def saved(self) -> dict[str, Any]:
        """See `core.state.serialization`. The owner, which knows their type, saves the values."""
        return {"uses": np.array(self.uses, "i8"), "spare": np.array(self.spare, "i8")}

    def restore(self, saved: Any, values: list[T]) -> None:
        """See `core.state.serialization`. values: anything where a number is unused."""
        self.uses = saved["uses"].tolist()
        self.spare = saved["spare"].tolist()
        self.values = [value if uses else None for value, uses in zip(values, self.uses, strict=True)]
        self.number = {value: at for at, value in enumerate(self.values) if value is not None}
