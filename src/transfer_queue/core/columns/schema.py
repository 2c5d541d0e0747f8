"""Declares the columns that a table keeps, each once: from it follow saving, restoring, comparison and checks.

A table subclasses `Persisted` and names its columns::

    class Wants(Persisted):
        groups: dict[str, int] = map_of(str, Count)

A declaration gives an attribute its initial value, its part of the saved tree and the form that this part of a loaded
tree is checked against (`form`), and what `comparable` and `check` look at. The functions at the end of this module
make the declarations; a table with a special one subclasses `Column`.

A saved tree consists of dicts, lists, text, numbers, bytes and numpy arrays. Its arrays are those of the table, not
copies. A tree comes out of a file that anybody may have written; a checksum says that it is complete, and not that it
is true. Therefore nothing of it is used before it has the declared form.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from types import GenericAlias, SimpleNamespace
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

import msgspec
import numpy as np

LONG = 64  # entries of an array that a comparison does not show one by one
MOST = 1 << 62  # what a number of the state is below, so that sums of two are numbers of 64 bits, too

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
T = TypeVar("T", bound="Persisted")


class BrokenInvariant(AssertionError):
    """The state contradicts itself; the message says where."""


def require(fine: object, words: str) -> None:
    """Raises BrokenInvariant where something is not as it has to be."""
    if not fine:
        raise BrokenInvariant(words)


# ------------------------------------------------------------ forms


class _ArrayType(type):
    """The type, in a form, of numpy arrays of one dimension with such a dtype.

    msgspec passes what it finds there to `_array`, and then asks whether the result is an instance.
    """

    dtypes: tuple[str, ...]
    length: int | None

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def matches(cls, value: Any) -> bool:
        """Whether a value is such an array."""
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.str not in cls.dtypes:
            return False
        return cls.length is None or len(value) == cls.length


@cache
def array_of(*dtypes: str, length: int | None = None) -> Any:
    """The form of an array of one of these dtypes ("<i8", "|u1"), and of this length unless it is None."""
    return _ArrayType("Array", (), {"dtypes": dtypes, "length": length})


def _list(form: Any) -> Any:
    return GenericAlias(list, (form,))


def _tuple(forms: Iterable[Any]) -> Any:
    return GenericAlias(tuple, tuple(forms))


def _dict(key: Any, value: Any) -> Any:
    return GenericAlias(dict, (key, value))


def _dtype_of(dtype: str) -> str:
    return np.dtype(dtype).str


def _array(wanted: Any, value: Any) -> Any:
    """Where msgspec meets a type that it does not know; its errors say where that was."""
    if wanted.matches(value):
        return value
    there = type(value).__name__
    if isinstance(value, np.ndarray):
        there = f"a column of {value.dtype}" if wanted.length is None else f"{len(value)} of {value.dtype}"
    length = "" if wanted.length is None else f" with {wanted.length} entries"
    raise ValueError(f"Expected a column of {' or '.join(wanted.dtypes)}{length}, got {there}")


def converted(tree: Any, form: Any) -> Any:
    """The values of a tree, in the types of a form. Raises msgspec.ValidationError, which names the place."""
    return msgspec.convert(tree, form, dec_hook=_array)


class I8(metaclass=_ArrayType):
    """The form of an array of integers of 64 bits."""

    dtypes = ("<i8",)
    length = None


class AnyColumn(metaclass=_ArrayType):
    """The form of an array of any dtype that a state has."""

    dtypes = ("|i1", "|u1", "<u2", "<i4", "<i8", "<f8")
    length = None


class Joined(msgspec.Struct, forbid_unknown_fields=True):
    """The form of what `join_columns` returns."""

    ends: I8
    values: I8


class JoinedBytes(msgspec.Struct, forbid_unknown_fields=True):
    """The same for bytes; without any columns its values are `I8`."""

    ends: I8
    values: AnyColumn


# ------------------------------------------------------------ a table


class Column:
    """One declared attribute of a table.

    form: of its part of the tree. make: returns the initial value; None if the table itself makes it. save: returns the
    value's part of the tree; load: returns the value of such a part, which has the form. missing: the part in trees of
    releases that did not have the column. compared: whether a replay of the records must reproduce the value.
    """

    name: str
    """Of the attribute."""
    key: str
    """Of the part of the tree: the name of the attribute without a leading underscore."""

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
        self.compared = compared
        self.make = make
        self._save = save
        self._load = load
        self.missing = missing

    def forms(self) -> list[tuple[str, Any, Any]]:
        """(key, form, what is there if the key is missing) of each part of the tree that the column writes."""
        return [(self.key, self.form, self.missing)]

    def save(self, table: Any, tree: dict[str, Any]) -> None:
        """Puts the value of a table into its tree."""
        tree[self.key] = self.encoded(getattr(table, self.name))

    def load(self, table: Any, loaded: Any) -> None:
        """Takes the value of a table out of a loaded tree, which has the form."""
        setattr(table, self.name, self.decoded(getattr(loaded, self.key)))

    def encoded(self, value: Any) -> Any:
        """The tree's part for a value."""
        return value if self._save is None else self._save(value)

    def decoded(self, part: Any) -> Any:
        """The value of a part of a tree, which has the form."""
        return part if self._load is None else self._load(part)

    def comparable(self, table: Any) -> Any:
        """What is saved of the value, as plain values that compare by ==."""
        tree: dict[str, Any] = {}
        self.save(table, tree)
        return plain(next(iter(tree.values())) if len(tree) == 1 else tree)

    def check(self, table: Any, where: str) -> None:
        """Raises BrokenInvariant if the value is not possible beside the other columns of its table."""


class Persisted:
    """A table whose columns are declared in its class.

    Subclasses call `super().__init__()`, which makes the initial values, before they make what is not persisted.
    Columns of a base class come first. array_like: the tree is a list of the columns' parts instead of a dict. bare: it
    is the part of the only column.
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
        """The columns, in the order of their declaration."""
        return cls._persisted

    @classmethod
    @cache
    def form(cls) -> Any:
        """The form that a loaded tree of such a table has."""
        if cls._bare:
            return cls._persisted[0].forms()[0][1]
        keys = [each for column in cls._persisted for each in column.forms()]
        keys.sort(key=lambda each: each[2] is not msgspec.NODEFAULT)
        fields = [(key, form) if missing is msgspec.NODEFAULT else (key, form, missing) for key, form, missing in keys]
        return msgspec.defstruct(
            cls.__name__, fields, forbid_unknown_fields=True, array_like=cls._array_like, module=cls.__module__
        )

    def saved(self) -> Any:
        """The table as a tree. Write it before the table changes, because its arrays are those of the table."""
        tree: dict[str, Any] = {}
        for column in self._persisted:
            column.save(self, tree)
        if self._bare:
            return tree[self._persisted[0].key]
        return list(tree.values()) if self._array_like else tree

    def restore(self, tree: Any) -> None:
        """Takes in what `saved` returned, on a table that was just made. Its arrays are the table's from now on.

        Raises msgspec.ValidationError, which names the place, if the tree does not have the form.
        """
        self.load(converted(tree, self.form()))

    def load(self, loaded: Any) -> None:
        """Takes in a tree that has the form, as `converted` returned it."""
        if self._bare:
            loaded = SimpleNamespace(**{self._persisted[0].key: loaded})
        for column in self._persisted:
            column.load(self, loaded)
        self.restored()

    def restored(self) -> None:
        """Makes what follows from the columns; called when they are restored."""

    def comparable(self) -> Any:
        """Every column as plain values that compare by ==: what a replay of the records must reproduce."""
        return {column.name: column.comparable(self) for column in self._persisted if column.compared}

    def check_columns(self, where: str) -> None:
        """Raises BrokenInvariant if a column is not possible: its length, or the range of its numbers.

        where: names the table in messages.
        """
        for column in self._persisted:
            column.check(self, where)


def plain(value: Any) -> Any:
    """A part of a tree as plain values that compare by ==. A long array is shown by its length and what is not 0."""
    if isinstance(value, np.ndarray):
        if len(value) <= LONG:
            return value.tolist()
        there = np.flatnonzero(value)
        return [len(value), dict(zip(there.tolist(), value[there].tolist(), strict=True))]
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


# ------------------------------------------------------------ declarations
#
# They return Any, so that the annotation of the attribute says its type.


def of_kind(kind: Column) -> Any:
    """A column of a kind of its own."""
    return kind


def scalar(form: Any, initial: Any, missing: Any = msgspec.NODEFAULT, compared: bool = True) -> Any:
    """A number, text or another value that does not change in place. compared: see `Column`."""
    return Column(form, lambda: initial, missing=missing, compared=compared)


def counter(initial: int = 0, missing: Any = msgspec.NODEFAULT) -> Any:
    """A number from 0 to `MOST`."""
    return Column(Count, lambda: initial, missing=missing)


def map_of(key: Any, value: Any, missing: Any = msgspec.NODEFAULT) -> Any:
    """A dict. key, value: their forms; a value may be another `map_of` or an `array_of`."""
    return Column(_dict(key, _form_of(value)), dict, missing=missing)


def list_of(value: Any) -> Any:
    """A list."""
    return Column(_list(_form_of(value)), list)


def set_of(value: Any) -> Any:
    """A set, saved as an ascending list."""
    return Column(_list(_form_of(value)), set, save=sorted, load=set)


def numbers() -> Any:
    """A list of integers, saved as an array of 64 bits."""
    return Column(I8, list, save=lambda value: np.array(value, "i8"), load=lambda value: value.tolist())


def deque_of(*entry: Any) -> Any:
    """A deque of tuples. entry: the forms of their parts."""
    return Column(_list(_tuple(entry)), deque, save=list, load=deque)


def map_of_tuples(key: tuple[Any, ...], value: Any) -> Any:
    """A dict whose keys are tuples, saved as a list of (*key, value). key: the forms of its parts."""
    return Column(
        _list(_tuple((*key, value))),
        dict,
        save=lambda values: [(*name, each) for name, each in values.items()],
        load=lambda entries: keyed([(entry[:-1], entry[-1]) for entry in entries]),
    )


def map_of_values(key: Any, form: Any, save: Callable[[Any], Any], load: Callable[[Any], Any]) -> Any:
    """A dict of values of a type of their own. save: returns a value's part of the tree; load: the value of a part."""
    return Column(
        _dict(key, form),
        dict,
        save=lambda values: {name: save(each) for name, each in values.items()},
        load=lambda parts: {name: load(each) for name, each in parts.items()},
    )


def value_of(form: Any, make: Callable[[], Any] | None, save: Callable[[Any], Any], load: Callable[[Any], Any]) -> Any:
    """A value of a type of its own."""
    return Column(form, make, save=save, load=load)


def per_chunk(dtype: str, length: int) -> Any:
    """An array of `length` for each chunk of rows in which any row has a value: chunk number -> array."""
    return map_of(Count, array_of(_dtype_of(dtype), length=length))


def per_task(value: Any) -> Any:
    """One such value for each task, by the task's name."""
    return map_of(str, value)


def keyed(entries: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict of these entries of a loaded tree. Raises ValueError if a key is there twice."""
    made = dict(entries)
    if len(made) != len(entries):
        raise ValueError(f"{len(entries)} entries have {len(made)} distinct keys")
    return made


def _form_of(value: Any) -> Any:
    return value.form if isinstance(value, Column) else value


class _Part(Column):
    """Another table, which the table that has it makes."""

    def __init__(self, table: type[Persisted]) -> None:
        super().__init__(table, None)

    def forms(self) -> list[tuple[str, Any, Any]]:
        return [(self.key, self.form.form(), self.missing)]

    def save(self, table: Any, tree: dict[str, Any]) -> None:
        tree[self.key] = getattr(table, self.name).saved()

    def load(self, table: Any, loaded: Any) -> None:
        getattr(table, self.name).load(getattr(loaded, self.key))

    def comparable(self, table: Any) -> Any:
        return getattr(table, self.name).comparable()

    def check(self, table: Any, where: str) -> None:
        getattr(table, self.name).check_columns(f"{where}.{self.key}")


def part(table: type[Persisted]) -> Any:
    """Another table, which the owner makes in its `__init__`."""
    return _Part(table)


class _Parts(Column):
    """Tables by key."""

    def __init__(self, key: Any, table: type[Persisted], make: Callable[[Any], Persisted]) -> None:
        super().__init__(table, dict)
        self._key = key
        self._made = make

    def forms(self) -> list[tuple[str, Any, Any]]:
        return [(self.key, _dict(self._key, self.form.form()), self.missing)]

    def save(self, table: Any, tree: dict[str, Any]) -> None:
        tree[self.key] = {key: each.saved() for key, each in getattr(table, self.name).items()}

    def load(self, table: Any, loaded: Any) -> None:
        parts: dict[Any, Persisted] = {}
        for key, each in getattr(loaded, self.key).items():
            parts[key] = self._made(key)
            parts[key].load(each)
        setattr(table, self.name, parts)

    def comparable(self, table: Any) -> Any:
        return {key: each.comparable() for key, each in getattr(table, self.name).items()}

    def check(self, table: Any, where: str) -> None:
        for key, each in getattr(table, self.name).items():
            each.check_columns(f"{where}.{self.key}[{key!r}]")


def parts_of(key: Any, table: type[T], make: Callable[[Any], T] | None = None) -> Any:
    """A dict of other tables. make: makes one, by its key."""
    return _Parts(key, table, make or (lambda key: table()))


class _Columns(Column):
    """Arrays of fixed names and dtypes and of one length, the table's `capacity`."""

    def __init__(self, dtypes: Iterable[tuple[str, str]], optional: bool) -> None:
        self._dtypes = {name: array_of(_dtype_of(dtype)) for name, dtype in dtypes}
        self._optional = optional
        absent = (None,) if optional else ()
        fields = [(name, form | None if optional else form, *absent) for name, form in self._dtypes.items()]
        super().__init__(msgspec.defstruct("Columns", fields, forbid_unknown_fields=True), dict)

    def decoded(self, part: Any) -> Any:
        found = {name: getattr(part, name) for name in self._dtypes}
        if not self._optional:
            return found
        there = {name: array for name, array in found.items() if array is not None}
        if there and len(there) < len(found):
            raise ValueError(f"`{self.key}` has the columns {list(there)}, but not all of {list(found)}")
        return there

    def check(self, table: Any, where: str) -> None:
        for name, array in getattr(table, self.name).items():
            _check_length(array, table.capacity, f"{self.key} {name!r} of {where}")


def columns_of(dtypes: Iterable[tuple[str, str]], optional: bool) -> Any:
    """A dict of arrays with fixed names, each as long as the table's `capacity`. optional: the dict may be empty."""
    return _Columns(dtypes, optional)


def _check_length(array: np.ndarray, length: int, what: str) -> None:
    require(len(array) == length, f"the column {what} is {len(array)} long, not {length}")


class PerRow(Column):
    """Arrays with an entry for each row of a chunk, as long as the chunk's `capacity`.

    kinds: the dtypes of the arrays, which are one or two. shape: what the attribute is. fill: of rows without a value.
    least, most: of each entry of the first array. cleared: whether that of a cleared row is `fill`.
    """

    ONE, OPTIONAL, BY_NAME = range(3)  # an array; an array or None; a dict of arrays, or of pairs of arrays, by name

    def __init__(
        self, dtypes: tuple[str, ...], shape: int, fill: int, least: int | None, most: int | None, cleared: bool
    ) -> None:
        forms = [array_of(_dtype_of(dtype)) for dtype in dtypes]
        form = forms[0] if len(forms) == 1 else _tuple(forms)
        if shape == self.BY_NAME:
            super().__init__(_dict(str, form), dict)
        elif shape == self.OPTIONAL:
            super().__init__(form | None, lambda: None)
        else:
            super().__init__(form, lambda: np.zeros(0, dtypes[0]))
        self._shape, self._fill, self._least, self._most, self._cleared = shape, fill, least, most, cleared

    def grow(self, table: Any) -> None:
        """Makes the arrays as long as the chunk's capacity."""
        value = getattr(table, self.name)
        if self._shape == self.BY_NAME:
            setattr(table, self.name, {name: self.grown(each, table.capacity) for name, each in value.items()})
        elif value is not None:
            setattr(table, self.name, self.grown(value, table.capacity))

    def grown(self, value: Any, capacity: int) -> Any:
        """A copy of an array, or of a pair of them, with this many entries."""
        if isinstance(value, tuple):
            return tuple(self.grown(each, capacity) for each in value)
        out = np.full(capacity, self._fill, value.dtype) if self._fill else np.zeros(capacity, value.dtype)
        out[: len(value)] = value
        return out

    def comparable(self, table: Any) -> Any:
        """Of names without any value nothing is left: a column may be made before there is a value."""
        value = getattr(table, self.name)
        if self._shape != self.BY_NAME:
            return None if value is None else value[: table.size].tolist()
        shown: dict[str, Any] = {}
        for name, each in sorted(value.items()):
            first, *others = each if isinstance(each, tuple) else (each,)
            there = np.flatnonzero(first[: table.size] != self._fill)
            if len(there):
                shown[name] = [there.tolist(), *(array[there].tolist() for array in (first, *others))]
        return shown

    def check(self, table: Any, where: str) -> None:
        """Checks the length of each array, and the range of its numbers."""
        value = getattr(table, self.name)
        named = value.items() if self._shape == self.BY_NAME else [] if value is None else [("", value)]
        dead: np.ndarray | tuple[()] = ()
        if self._cleared:
            _check_length(table.alive, table.capacity, f"alive of {where}")
            dead = np.flatnonzero(table.alive == 0)
        for name, each in named:
            what = f"{self.key} of {name!r}" if name else self.key
            first, *others = each if isinstance(each, tuple) else (each,)
            for array in (first, *others):
                _check_length(array, table.capacity, f"{what} of {where}")
            self._check_range(first, f"{what} of {where}")
            if len(dead):
                require((first[dead] == self._fill).all(), f"1: a cleared row of {where} still has something: {what}")

    def _check_range(self, array: np.ndarray, what: str) -> None:
        if not len(array):
            return
        low, high = int(array.min()), int(array.max())
        fine = (self._least is None or low >= self._least) and (self._most is None or high <= self._most)
        limits = [
            f"{word} {limit}"
            for word, limit in (("at least", self._least), ("at most", self._most))
            if limit is not None
        ]
        require(fine, f"{what} has numbers from {low} to {high}, but must have {' and '.join(limits)}")


def per_row(
    *dtypes: str,
    fill: int = 0,
    least: int | None = None,
    most: int | None = None,
    cleared: bool = False,
    optional: bool = False,
    by_name: bool = False,
) -> Any:
    """An array with an entry for each row of a chunk. See `PerRow`.

    optional: None if no row has a value. by_name: a dict of such arrays; of pairs of arrays if there are two dtypes.
    """
    shape = PerRow.BY_NAME if by_name else PerRow.OPTIONAL if optional else PerRow.ONE
    return PerRow(dtypes, shape, fill, least, most, cleared)


class _NumbersOfTexts(Column):
    """A dict from texts to numbers, saved as packed texts and an array."""

    def __init__(self, texts_key: str, numbers_key: str, loaded: Callable[[Any, np.ndarray, np.ndarray], None]) -> None:
        super().__init__(JoinedBytes | list[str], dict)  # older releases saved a list
        self._texts_key, self._numbers_key, self._loaded = texts_key, numbers_key, loaded

    def forms(self) -> list[tuple[str, Any, Any]]:
        return [(self._texts_key, self.form, self.missing), (self._numbers_key, I8, self.missing)]

    def save(self, table: Any, tree: dict[str, Any]) -> None:
        value = getattr(table, self.name)
        tree[self._texts_key] = packed_texts(list(value))
        tree[self._numbers_key] = np.fromiter(value.values(), "i8", len(value))

    def load(self, table: Any, loaded: Any) -> None:
        numbers = getattr(loaded, self._numbers_key)
        value: dict[str, int] = {}
        names = np.empty(len(numbers), object)
        done = 0
        for texts in unpacked_texts(getattr(loaded, self._texts_key)):  # other threads run between two pieces
            first, done = done, done + len(texts)
            value.update(zip(texts, numbers[first:done].tolist(), strict=True))
            names[first:done] = texts
        if done != len(numbers):
            raise ValueError(f"{done} {self.name}, for {len(numbers)} rows")
        if len(value) != done:
            raise ValueError(f"{done} {self.name}, of which {len(value)} are distinct")
        setattr(table, self.name, value)
        self._loaded(table, names, numbers)

    def comparable(self, table: Any) -> Any:
        return dict(getattr(table, self.name))


def numbers_of_texts(texts_key: str, numbers_key: str, loaded: Callable[[Any, np.ndarray, np.ndarray], None]) -> Any:
    """A dict from texts to integers, saved as packed texts and an array under these keys; for a million entries.

    loaded: is called with the table, the texts and the numbers when they were loaded.
    """
    return _NumbersOfTexts(texts_key, numbers_key, loaded)


class _Several(Column):
    """A value that is saved under several keys."""

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
        return [(key, form, msgspec.NODEFAULT) for key, form in self.form.items()]

    def save(self, table: Any, tree: dict[str, Any]) -> None:
        tree.update(zip(self.form, self._split(getattr(table, self.name)), strict=True))

    def load(self, table: Any, loaded: Any) -> None:
        setattr(table, self.name, self._join(*(getattr(loaded, key) for key in self.form)))


def several(
    forms: dict[str, Any],
    make: Callable[[], Any],
    save: Callable[[Any], tuple[Any, ...]],
    load: Callable[..., Any],
) -> Any:
    """A value saved under several keys. save: returns their parts, in the order of `forms`; load: takes them."""
    return _Several(forms, make, save, load)


def rows_of(row: type[msgspec.Struct], key: str, array: str, by: str) -> Any:
    """A dict of structs, saved as a list of tuples and one joined array.

    key: of the list. array: the field of the struct that has an array, and the key of the joined one. by: the field
    under whose value each struct is in the dict.
    """
    types = get_type_hints(row, include_extras=True)
    names = [name for name in row.__struct_fields__ if name != array]

    def save(rows: dict[Any, Any]) -> tuple[Any, ...]:
        listed = [tuple(getattr(each, name) for name in names) for each in rows.values()]
        return listed, join_columns([getattr(each, array) for each in rows.values()])

    def load(entries: list[tuple[Any, ...]], arrays: Joined) -> dict[Any, Any]:
        made = [
            row(**dict(zip(names, entry, strict=True)), **{array: values})
            for entry, values in zip(entries, split_columns(arrays), strict=True)
        ]
        return keyed([(getattr(each, by), each) for each in made])

    entry = _tuple(types[name] for name in names)
    return several({key: _list(entry), array: Joined}, dict, save, load)


# ------------------------------------------------------------ many short columns as one long one


PIECE = 4096
"""Texts of one piece of those that are saved as bytes."""

_encode = msgspec.msgpack.Encoder().encode
_decode_texts = msgspec.msgpack.Decoder(list[str]).decode


def join_columns(columns: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """Columns of one dtype, one behind the other, and where each ends. Without any they are i8."""
    parts = list(columns)
    ends = np.cumsum([len(part) for part in parts], dtype="i8")
    return {"ends": ends, "values": np.concatenate(parts) if parts else np.zeros(0, "i8")}


def split_columns(saved: Any) -> list[np.ndarray]:
    """The columns that were joined, as views. saved: what `join_columns` returned, or a `Joined`.

    Raises ValueError if they cannot have been joined.
    """
    ends, values = (saved["ends"], saved["values"]) if isinstance(saved, dict) else (saved.ends, saved.values)
    edges = [0, *ends.tolist()]
    if edges != sorted(edges) or edges[-1] != len(values):
        raise ValueError(f"{len(values)} numbers cannot be parted at {edges[1:][:5]}")
    return [values[a:b] for a, b in pairwise(edges)]


def packed_texts(texts: list[str]) -> dict[str, np.ndarray]:
    """Texts as bytes, in pieces: one piece is decoded in a millisecond, while other threads wait."""
    return join_columns([np.frombuffer(_encode(texts[at : at + PIECE]), "u1") for at in range(0, len(texts), PIECE)])


def unpacked_texts(saved: Any) -> Iterator[list[str]]:
    """The texts that were packed, piece by piece. ValueError or msgspec.DecodeError where they cannot have been.

    Older releases saved them as one list, which is parted here.
    """
    if isinstance(saved, list):
        for at in range(0, len(saved), PIECE):
            yield saved[at : at + PIECE]
    else:
        for piece in split_columns(saved):
            yield _decode_texts(piece.data)
