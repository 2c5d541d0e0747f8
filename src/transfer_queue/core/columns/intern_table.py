"""A table that stores equal values once, for example the schemas of blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import msgspec

from transfer_queue.core.columns.schema import Column, Persisted, numbers

T = TypeVar("T", bound=Hashable)


class InternTable(Persisted, Generic[T]):
    """Stores equal values once and counts their uses. Each value has a small number; freed numbers are used again."""

    uses: list[int] = numbers()
    """The number of uses of each value, by number."""
    spare: list[int] = numbers()
    """The unused numbers below the number of values."""

    def __init__(self) -> None:
        super().__init__()
        self.number: dict[T, int] = {}
        self.values: list[T | None] = []

    def add(self, value: T) -> int:
        """Return the number of this value, and count one more use of it."""
        at = self.number.get(value)
        if at is not None:
            self.uses[at] += 1
            return at
        if self.spare:
            at = self.spare.pop()
            self.values[at], self.uses[at] = value, 1
        else:
            at = len(self.values)
            self.values.append(value)
            self.uses.append(1)
        self.number[value] = at
        return at

    def take(self, value: T, uses: int) -> int:
        """Do the same for several uses."""
        at = self.add(value)
        self.uses[at] += uses - 1
        return at

    def drop(self, at: int, uses: int = 1) -> None:
        """Count fewer uses of a value. It is removed with its last use."""
        self.uses[at] -= uses
        if not self.uses[at]:
            del self.number[self[at]]
            self.values[at] = None
            self.spare.append(at)

    def __getitem__(self, at: int) -> T:
        value = self.values[at]
        assert value is not None
        return value

    def set_values(self, values: list[T]) -> None:
        """Set the values by number, after the counts were restored. Entries of unused numbers are ignored."""
        self.values = [value if uses else None for value, uses in zip(values, self.uses, strict=True)]
        self.number = {value: at for at, value in enumerate(self.values) if value is not None}


class _Interning(Column):
    """A column that is an `InternTable`. Its values are saved under a key of their own."""

    def __init__(self, values_key: str, form: Any, save: Callable[[Any], Any], load: Callable[[Any], Any]) -> None:
        super().__init__(form, InternTable, save=save, load=load)
        self._values_key = values_key

    def forms(self) -> list[tuple[str, Any, Any]]:
        """See `Column`."""
        return [(self.key, InternTable.form(), msgspec.NODEFAULT), (self._values_key, self.form, msgspec.NODEFAULT)]

    def save(self, table: Any, tree: dict[str, Any]) -> None:
        """See `Column`."""
        interned: InternTable[Any] = getattr(table, self.name)
        tree[self.key] = interned.to_tree()
        tree[self._values_key] = self.encode_value(interned.values)

    def load(self, table: Any, loaded: Any) -> None:
        """See `Column`."""
        interned: InternTable[Any] = InternTable()
        interned.load(getattr(loaded, self.key))
        interned.set_values(self.decode_part(getattr(loaded, self._values_key)))
        setattr(table, self.name, interned)

    def to_comparable(self, table: Any) -> Any:
        """See `Column`."""
        interned: InternTable[Any] = getattr(table, self.name)
        return {**interned.to_comparable(), "values": list(interned.values)}


def interned(values_key: str, form: Any, save: Callable[[Any], Any], load: Callable[[Any], Any]) -> Any:
    """Declare a column that is an `InternTable`. `save` encodes the list of its values, and `load` decodes it."""
    return _Interning(values_key, form, save, load)
