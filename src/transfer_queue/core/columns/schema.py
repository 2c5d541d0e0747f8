"""Declares each column of a table once. Saving, restoring, comparing and checking follow from the declaration.

A table subclasses `Persisted` and declares its columns::

    class Wants(Persisted):
        groups: dict[str, int] = map_of(str, Count)

A declaration defines the initial value of an attribute, its part of the saved tree, the form that this part of a loaded
tree must have, and what `to_comparable` and `check` examine. The functions at the end of this module, in
`kinds` and in `kinds` make the declarations; a table that needs another kind subclasses `Column`.

A saved tree consists of dicts, lists, text, numbers, bytes and numpy arrays. Its arrays are those of the table, not
copies. A loaded tree comes from a file that anybody may have written: a checksum shows that it is complete, not that it
is valid. Therefore nothing of it is used before its form is checked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import GenericAlias, SimpleNamespace
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
import numpy as np

LONG = 64  # arrays with more entries are compared by their length and their entries other than 0
MOST = 1 << 62  # the largest number of the state, so that the sum of two such numbers fits into 64 bits, too

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
T = TypeVar("T", bound="Persisted")


class BrokenInvariant(AssertionError):
    """The state contradicts itself. The message says where."""


def require(fine: object, message: str) -> None:
    """Raise BrokenInvariant with these words unless the condition is true."""
    if not fine:
        raise BrokenInvariant(message)


# ------------------------------------------------------------ forms


class _ArrayType(type):
    """The type, in a form, of one-dimensional numpy arrays with one of these dtypes.

    msgspec passes the value to `_array`, and then asks whether the result is an instance of this type.
    """

    dtypes: tuple[str, ...]
    length: int | None

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def matches(cls, value: Any) -> bool:
        """Return whether a value is such an array."""
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.str not in cls.dtypes:
            return False
        return cls.length is None or len(value) == cls.length


@cache
def array_of(*dtypes: str, length: int | None = None) -> Any:
    """Return the form of an array with one of these dtypes ("<i8", "|u1") and this length (None: any length)."""
    return _ArrayType("Array", (), {"dtypes": dtypes, "length": length})


def list_form(form: Any) -> Any:
    """Return the form of a list whose entries have this form."""
    return GenericAlias(list, (form,))


def tuple_form(forms: Iterable[Any]) -> Any:
    """Return the form of a tuple whose items have these forms."""
    return GenericAlias(tuple, tuple(forms))


def dict_form(key: Any, value: Any) -> Any:
    """Return the form of a dict whose keys and values have these forms."""
    return GenericAlias(dict, (key, value))


def _array(wanted: Any, value: Any) -> Any:
    """Check a value of a type that msgspec does not know. msgspec adds the place in the tree to the error."""
    if wanted.matches(value):
        return value
    given = type(value).__name__
    if isinstance(value, np.ndarray):
        given = f"a column of {value.dtype}" if wanted.length is None else f"{len(value)} of {value.dtype}"
    length = "" if wanted.length is None else f" with {wanted.length} entries"
    raise ValueError(f"Expected a column of {' or '.join(wanted.dtypes)}{length}, got {given}")


def convert_tree(tree: Any, form: Any) -> Any:
    """Return the values of a tree in the types of a form. Raise msgspec.ValidationError, which names the place."""
    return msgspec.convert(tree, form, dec_hook=_array)


class I8(metaclass=_ArrayType):
    """The form of an array of 64-bit integers."""

    dtypes = ("<i8",)
    length = None


class AnyColumn(metaclass=_ArrayType):
    """The form of an array with any dtype that occurs in a state."""

    dtypes = ("|i1", "|u1", "<u2", "<i4", "<i8", "<f8")
    length = None


# ------------------------------------------------------------ a table


def _unchanged(value: Any) -> Any:
    return value


class Column:
    """One declared attribute of a table."""

    name: str
    """The name of the attribute."""
    key: str
    """The key in the tree: the name of the attribute without a leading underscore."""

    def __init__(
        self,
        form: Any,
        make: Callable[[], Any] | None,
        *,
        save: Callable[[Any], Any] | None = None,
        load: Callable[[Any], Any] | None = None,
        missing: Any = msgspec.NODEFAULT,
        compared: bool = True,
    ) -> None:
        self.form = form
        """The form of the column's part of the tree."""
        self.compared = compared
        """Whether a replay of the records must reproduce the value."""
        self.make = make
        """Returns the initial value; None if the table itself makes it."""
        self.encode = save or _unchanged
        """Returns the part of the tree for a value."""
        self.decode = load or _unchanged
        """Returns the value for a part of a tree that has the form."""
        self.missing = missing
        """The part to use for trees of releases that did not have the column."""

    def forms(self) -> list[tuple[str, Any, Any]]:
        """Return (key, form, default for a missing key) of each part of the tree that the column writes."""
        return [(self.key, self.form, self.missing)]

    def save(self, table: Any, tree: dict[str, Any]) -> None:
        """Write the value of a table into its tree."""
        tree[self.key] = self.encode(getattr(table, self.name))

    def load(self, table: Any, loaded: Any) -> None:
        """Set the value of a table from a loaded tree that has the form."""
        setattr(table, self.name, self.decode(getattr(loaded, self.key)))

    def to_comparable(self, table: Any) -> Any:
        """Return what is saved of the value, as plain values that can be compared with ==."""
        tree: dict[str, Any] = {}
        self.save(table, tree)
        return plain_values(next(iter(tree.values())) if len(tree) == 1 else tree)

    def check(self, table: Any, where: str) -> None:
        """Raise BrokenInvariant if the value contradicts the other columns of its table."""


class Persisted:
    """A table whose columns are declared in its class.

    Subclasses call `super().__init__()`, which sets the initial values, before they set attributes that are not
    persisted. The columns of a base class come first. With `array_like=True` in the line of the class the tree is a
    list of the parts of the columns instead of a dict; with `bare=True` it is the part of the only column.
    """

    _persisted: ClassVar[tuple[Column, ...]] = ()
    _array_like: ClassVar[bool] = False
    _bare: ClassVar[bool] = False

    def __init_subclass__(cls, array_like: bool = False, bare: bool = False) -> None:
        declared = {name: value for name, value in vars(cls).items() if isinstance(value, Column)}
        for name, column in declared.items():
            column.name, column.key = name, name.lstrip("_")
            delattr(cls, name)
        cls._persisted = (*cls._persisted, *declared.values())
        cls._array_like, cls._bare = array_like, bare

    def __init__(self) -> None:
        for column in self._persisted:
            if column.make is not None:
                setattr(self, column.name, column.make())

    @classmethod
    def declared_columns(cls) -> tuple[Column, ...]:
        """Return the columns, in the order of their declaration."""
        return cls._persisted

    @classmethod
    @cache
    def form(cls) -> Any:
        """Return the form of a loaded tree of such a table."""
        if cls._bare:
            return cls._persisted[0].forms()[0][1]
        keys = [each for column in cls._persisted for each in column.forms()]
        keys.sort(key=lambda each: each[2] is not msgspec.NODEFAULT)
        fields = [(key, form) if missing is msgspec.NODEFAULT else (key, form, missing) for key, form, missing in keys]
        return msgspec.defstruct(
            cls.__name__, fields, forbid_unknown_fields=True, array_like=cls._array_like, module=cls.__module__
        )

    def to_tree(self) -> Any:
        """Return the table as a tree. Write the tree before the table changes, because the arrays are not copied."""
        tree: dict[str, Any] = {}
        for column in self._persisted:
            column.save(self, tree)
        if self._bare:
            return tree[self._persisted[0].key]
        return list(tree.values()) if self._array_like else tree

    def restore(self, tree: Any) -> None:
        """Restore what `to_tree` returned, on a new table, which owns the arrays of the tree from then on.

        Raises msgspec.ValidationError, which names the place, if the tree does not have the form.
        """
        self.load(convert_tree(tree, self.form()))

    def load(self, loaded: Any) -> None:
        """Set the columns from a tree that has the form, as `convert_tree` returned it."""
        if self._bare:
            loaded = SimpleNamespace(**{self._persisted[0].key: loaded})
        for column in self._persisted:
            column.load(self, loaded)
        self.derive()

    def derive(self) -> None:
        """Compute what is derived from the columns. Called after they are restored."""

    def to_comparable(self) -> Any:
        """Return every column that a replay of the records must reproduce, as plain values for comparison with ==."""
        return {column.name: column.to_comparable(self) for column in self._persisted if column.compared}

    def check_columns(self, where: str) -> None:
        """Raise BrokenInvariant if the length of a column or the range of its numbers is wrong.

        `where` is the name of the table in messages.
        """
        for column in self._persisted:
            column.check(self, where)


def plain_values(value: Any) -> Any:
    """Return a part of a tree as plain values. A long array becomes its length and its entries other than 0."""
    if isinstance(value, np.ndarray):
        if len(value) <= LONG:
            return value.tolist()
        places = np.flatnonzero(value)
        return [len(value), dict(zip(places.tolist(), value[places].tolist(), strict=True))]
    if isinstance(value, Mapping):
        return {key: plain_values(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(each) for each in value]
    return value


# ------------------------------------------------------------ declarations
#
# They return Any, so that the annotation of the attribute gives its type.


def custom_column(kind: Column) -> Any:
    """Declare a column of a special kind."""
    return kind


def scalar(form: Any, initial: Any, missing: Any = msgspec.NODEFAULT, compared: bool = True) -> Any:
    """Declare a number, a text or another value that is replaced and never modified. For `compared` see `Column`."""
    return Column(form, lambda: initial, missing=missing, compared=compared)


def counter(initial: int = 0, missing: Any = msgspec.NODEFAULT) -> Any:
    """Declare a number from 0 to `MOST`."""
    return Column(Count, lambda: initial, missing=missing)


def map_of(key: Any, value: Any, missing: Any = msgspec.NODEFAULT) -> Any:
    """Declare a dict with the forms of its keys and values. A value may be another `map_of` or an `array_of`."""
    return Column(dict_form(key, _form_of(value)), dict, missing=missing)


def list_of(value: Any) -> Any:
    """Declare a list."""
    return Column(list_form(_form_of(value)), list)


def set_of(value: Any, missing: Any = msgspec.NODEFAULT) -> Any:
    """Declare a set, which is saved as an ascending list."""
    return Column(list_form(_form_of(value)), set, save=sorted, load=set, missing=missing)


def numbers() -> Any:
    """Declare a list of integers, which is saved as an array of 64-bit integers."""
    return Column(I8, list, save=lambda value: np.array(value, "i8"), load=lambda value: value.tolist())


def deque_of(*entry: Any) -> Any:
    """Declare a deque of tuples. `entry` contains the forms of their items."""
    return Column(list_form(tuple_form(entry)), deque, save=list, load=deque)


def map_of_tuples(key: tuple[Any, ...], value: Any) -> Any:
    """Declare a dict with tuples as keys, saved as a list of (*key, value). `key` contains the forms of their items."""
    return Column(
        list_form(tuple_form((*key, value))),
        dict,
        save=lambda values: [(*name, each) for name, each in values.items()],
        load=lambda entries: unique_dict([(entry[:-1], entry[-1]) for entry in entries]),
    )


def value_of(form: Any, make: Callable[[], Any] | None, save: Callable[[Any], Any], load: Callable[[Any], Any]) -> Any:
    """Declare a value of a special type."""
    return Column(form, make, save=save, load=load)


def unique_dict(entries: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a dict of these entries of a loaded tree. Raise ValueError if two entries have the same key."""
    made = dict(entries)
    if len(made) != len(entries):
        raise ValueError(f"{len(entries)} entries have {len(made)} distinct keys")
    return made


def _form_of(value: Any) -> Any:
    return value.form if isinstance(value, Column) else value


class _Part(Column):
    """Another table."""

    def __init__(self, table: type[Persisted], make: Callable[[], Any] | None, missing: Any) -> None:
        super().__init__(table, make, missing=missing)

    def forms(self) -> list[tuple[str, Any, Any]]:
        return [(self.key, self.form.form(), self.missing)]

    def save(self, table: Any, tree: dict[str, Any]) -> None:
        tree[self.key] = getattr(table, self.name).to_tree()

    def load(self, table: Any, loaded: Any) -> None:
        getattr(table, self.name).load(getattr(loaded, self.key))

    def to_comparable(self, table: Any) -> Any:
        return getattr(table, self.name).to_comparable()

    def check(self, table: Any, where: str) -> None:
        getattr(table, self.name).check_columns(f"{where}.{self.key}")


def part(table: type[Persisted], missing: Any = msgspec.NODEFAULT) -> Any:
    """Declare another table as a part of this one."""
    return _Part(table, table, missing)


def linked_part(table: type[Persisted], missing: Any = msgspec.NODEFAULT) -> Any:
    """Declare another table that refers to others, so that the owner makes it in its `__init__`."""
    return _Part(table, None, missing)


class _Parts(Column):
    """A dict of other tables."""

    def __init__(self, key: Any, table: type[Persisted], make: Callable[[Any], Persisted]) -> None:
        super().__init__(table, dict)
        self._key = key
        self._made = make

    def forms(self) -> list[tuple[str, Any, Any]]:
        return [(self.key, dict_form(self._key, self.form.form()), self.missing)]

    def save(self, table: Any, tree: dict[str, Any]) -> None:
        tree[self.key] = {key: each.to_tree() for key, each in getattr(table, self.name).items()}

    def load(self, table: Any, loaded: Any) -> None:
        parts = getattr(table, self.name)  # which other tables may refer to
        for key, each in getattr(loaded, self.key).items():
            parts[key] = self._made(key)
            parts[key].load(each)

    def to_comparable(self, table: Any) -> Any:
        return {key: each.to_comparable() for key, each in getattr(table, self.name).items()}

    def check(self, table: Any, where: str) -> None:
        for key, each in getattr(table, self.name).items():
            each.check_columns(f"{where}.{self.key}[{key!r}]")


def parts_of(key: Any, table: type[T], make: Callable[[Any], T] | None = None) -> Any:
    """Declare a dict of other tables. `make` makes the table of a key."""
    return _Parts(key, table, make or (lambda key: table()))


class SeveralKeys(Column):
    """A value that is saved under several keys. `save` returns the parts in the order of `forms`."""

    def __init__(
        self,
        forms: dict[str, Any],
        make: Callable[[], Any],
        save: Callable[[Any], tuple[Any, ...]],
        load: Callable[..., Any],
    ) -> None:
        super().__init__(forms, make)
        self._split, self._join = save, load

    def forms(self) -> list[tuple[str, Any, Any]]:
        """See `Column`."""
        return [(key, form, msgspec.NODEFAULT) for key, form in self.form.items()]

    def save(self, table: Any, tree: dict[str, Any]) -> None:
        """See `Column`."""
        tree.update(zip(self.form, self._split(getattr(table, self.name)), strict=True))

    def load(self, table: Any, loaded: Any) -> None:
        """See `Column`."""
        setattr(table, self.name, self._join(*(getattr(loaded, key) for key in self.form)))


several: Any = SeveralKeys
"""Declares such a value."""
