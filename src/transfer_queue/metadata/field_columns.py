"""FieldColumn: the dtype and the row shapes of one field of a BatchMeta, as columns; and how to read them from values.

Reading the shapes of a dense or nested tensor does not need a call for each row. A FieldColumn contains no values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Union

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDictBase, is_tensor_collection

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.metadata.batch_columns import Selection, pack_integers, take_items, unpack_integers

# one shape for each row: int64 [rows, ndim], or a list of tuples if rows differ in rank
RowShapes = Union[npt.NDArray[np.int64], list[tuple[int, ...]]]

TABLE = "is_tensordict"
"""An entry of the schema of a field that is a nested TensorDict, whose leaves are fields of their own."""

_DESCRIBED = ("dtype", "shape", "is_nested", "is_non_tensor", "per_sample_shapes")


class FieldColumn(msgspec.Struct, eq=False):
    """One field of a batch. It is not changed after it was made, so that batches share it.

    Example:
        >>> from transfer_queue.metadata import FieldColumn
        >>> FieldColumn("prompt", torch.int64, ndim=1, shape=(3,)).to_sizes(rows=2)
        [torch.Size([3]), torch.Size([3])]
    """

    name: str
    """The name of the field."""
    dtype: torch.dtype | None
    """The torch dtype, promoted (`torch.promote_types`) if rows differ; None for objects and if it is not known.

    Ignored if `dtypes` is given.
    """
    ndim: int | None = None
    """The number of dimensions of one row; None if rows differ in it, and if it is not known."""
    shape: tuple[int, ...] | None = None
    """The shape of a row while all rows have the same; otherwise None. Ignored if `shapes` is given."""
    shapes: RowShapes | None = None
    """The shape of each row, int64 [rows, ndim], or a list of one tuple for each row if rows differ in rank.

    None while all rows have the same shape, and if the shapes are not known.
    """
    is_non_tensor: bool = False
    """True if the values are objects."""
    is_nested: bool | None = None
    """True if rows have differed in shape. Default: True if `shapes` is given, or if a tensor field has no `shape`."""
    extra: dict[str, Any] | None = None
    """Further entries of the schema of the field, which are kept; None if there are none."""
    dtypes: list[torch.dtype | None] | None = None
    """The dtype of each row of a field whose rows may differ in dtype; otherwise None."""

    def __post_init__(self) -> None:
        if self.is_nested is None:
            no_shape = self.shape is None and self.dtype is not None and not self.is_non_tensor
            self.is_nested = self.shapes is not None or no_shape
        if self.shapes is not None:
            self.shape = None
        if self.dtypes is not None:
            self.dtype = promote_dtypes(self.dtypes)

    @classmethod
    def from_schema(cls, name: str, entry: Mapping[str, Any], rows: int) -> FieldColumn:
        """Return the field that an entry of a user's `field_schema` describes.

        Args:
            name: The name of the field.
            entry: The entry. An absent key means "not known" or False.
            rows: The number of rows of the batch.

        Returns:
            The field.

        Raises:
            InvalidArgumentError: The entry is not a mapping, a shape is not valid, or `per_sample_shapes` does not have
                one entry for each row.

        Example:
            >>> from transfer_queue.metadata import FieldColumn
            >>> FieldColumn.from_schema("prompt", {"dtype": torch.int64, "shape": (3,)}, rows=2).ndim
            1
        """
        if not isinstance(entry, Mapping):
            raise InvalidArgumentError(f"field_schema[{name!r}] must be a dict, got a {type(entry).__name__}")
        dtype, shape, listed = entry.get("dtype"), entry.get("shape"), entry.get("per_sample_shapes")
        is_nested, is_non_tensor = bool(entry.get("is_nested")), bool(entry.get("is_non_tensor"))
        extra = {key: value for key, value in entry.items() if key not in _DESCRIBED} or None
        if listed is not None and len(listed) != rows:
            raise InvalidArgumentError(
                f"field_schema[{name!r}]: per_sample_shapes must have one entry for each of the {rows} rows, got "
                f"{len(listed)}"
            )
        try:
            row_shape = None if shape is None else tuple(int(length) for length in shape)
            shapes = None if listed is None or None in listed else row_shapes(listed)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"field_schema[{name!r}] has a shape that is not valid: {error}") from None
        if shapes is not None and not is_nested:
            return cls.from_shapes(name, dtype, shapes, is_non_tensor=is_non_tensor, extra=extra)
        if shapes is not None:
            ndim = shapes.shape[1] if isinstance(shapes, np.ndarray) else None
        else:
            ndim = None if row_shape is None else len(row_shape)
        return cls(name, dtype, ndim, row_shape, shapes, is_non_tensor, is_nested, extra)

    @classmethod
    def from_shapes(
        cls,
        name: str,
        dtype: torch.dtype | None,
        shapes: RowShapes,
        is_non_tensor: bool = False,
        extra: dict[str, Any] | None = None,
    ) -> FieldColumn:
        """Return the field whose rows have these shapes.

        Args:
            name: The name of the field.
            dtype: The torch dtype; None for objects.
            shapes: The shape of each row, int64 [rows, ndim], or a list of tuples if rows differ in rank.
            is_non_tensor: True if the values are objects. Default: False.
            extra: Further entries of the schema. Default: none.

        Returns:
            The field; it is nested if the shapes differ.

        Example:
            >>> from transfer_queue.metadata import FieldColumn
            >>> FieldColumn.from_shapes("prompt", torch.int64, np.array([[3], [5]])).is_nested
            True
        """
        if isinstance(shapes, list):
            return cls(name, dtype, None, None, shapes, is_non_tensor, True, extra)
        rows, ndim = shapes.shape
        if rows == 0:
            return cls(name, dtype, ndim, None, None, is_non_tensor, False, extra)
        if not (shapes == shapes[0]).all():
            return cls(name, dtype, ndim, None, shapes, is_non_tensor, True, extra)
        return cls(name, dtype, ndim, tuple(shapes[0].tolist()), None, is_non_tensor, False, extra)

    @classmethod
    def join(cls, columns: Sequence[FieldColumn], sizes: Sequence[int], validate: bool = True) -> FieldColumn:
        """Return the columns of one field, one after the other. If the shapes of some rows are not known, none are.

        Args:
            columns: The columns.
            sizes: The number of rows of each column.
            validate: False to use the kind and dtype of the first column without comparing. Default: True.

        Returns:
            The joined column.

        Raises:
            InvalidArgumentError: The kinds differ, or the dtypes differ and no column has one for each row.

        Example:
            >>> from transfer_queue.metadata import FieldColumn
            >>> column = FieldColumn("prompt", torch.int64, ndim=1, shape=(3,))
            >>> FieldColumn.join([column, column], [2, 2]).shape
            (3,)
        """
        first = columns[0]
        dtypes: list[torch.dtype | None] | None = None
        if any(column.dtypes is not None for column in columns):
            dtypes = [dtype for column, size in zip(columns, sizes, strict=True) for dtype in column.to_dtypes(size)]
        if validate:
            for column in columns[1:]:
                _check_same_type(first, column, dtypes is not None)
        nested = any(column.is_nested for column in columns)
        ndim = first.ndim if len({column.ndim for column in columns}) == 1 else None
        shape = first.shape
        is_uniform = all(column.shapes is None and column.shape == shape for column in columns)
        if is_uniform or any(column.shapes is None and column.shape is None for column in columns):
            if not is_uniform:
                shape = None
            return cls(first.name, first.dtype, ndim, shape, None, first.is_non_tensor, nested, first.extra, dtypes)
        parts = [column._spread(size) for column, size in zip(columns, sizes, strict=True)]
        arrays = [part for part in parts if isinstance(part, np.ndarray)]
        if len(arrays) == len(parts) and len({part.shape[1] for part in arrays}) == 1:
            shapes: RowShapes = np.concatenate(arrays)
            ndim = arrays[0].shape[1]
        else:
            shapes = [tuple(shape) for part in parts for shape in _as_lists(part)]
            ndim = None
        return cls(first.name, first.dtype, ndim, None, shapes, first.is_non_tensor, True, first.extra, dtypes)

    def take(self, selection: Selection) -> FieldColumn:
        """Return the field of the selected rows. A field that was nested in the whole batch stays nested.

        Args:
            selection: A slice or an array of positions.

        Returns:
            The field of these rows.

        Example:
            >>> from transfer_queue.metadata import FieldColumn
            >>> column = FieldColumn.from_shapes("prompt", torch.int64, np.array([[3], [5]]))
            >>> column.take(slice(1)).shapes.tolist()
            [[3]]
        """
        if self.shapes is None and self.dtypes is None:
            return self
        shapes: RowShapes | None = None
        if isinstance(self.shapes, list):
            shapes = take_items(self.shapes, selection)
        elif self.shapes is not None:
            # a copy, because the view of a slice would keep the whole array in memory
            shapes = self.shapes[selection].copy() if isinstance(selection, slice) else self.shapes[selection]
        dtypes = None if self.dtypes is None else take_items(self.dtypes, selection)
        return FieldColumn(
            self.name, self.dtype, self.ndim, self.shape, shapes, self.is_non_tensor, self.is_nested, self.extra, dtypes
        )

    def to_dtypes(self, rows: int) -> list[torch.dtype | None]:
        """Return the dtype of each row.

        Args:
            rows: The number of rows.

        Returns:
            One dtype for each row; None for objects and if it is not known.

        Example:
            >>> from transfer_queue.metadata import FieldColumn
            >>> FieldColumn("reward", torch.float32).to_dtypes(2)
            [torch.float32, torch.float32]
        """
        return [self.dtype] * rows if self.dtypes is None else list(self.dtypes)

    def to_sizes(self, rows: int) -> list[torch.Size | None]:
        """Return the shape of each row.

        Args:
            rows: The number of rows.

        Returns:
            One shape for each row; None if it is not known.

        Example:
            >>> from transfer_queue.metadata import FieldColumn
            >>> FieldColumn("prompt", torch.int64, ndim=1, shape=(3,)).to_sizes(1)
            [torch.Size([3])]
        """
        if self.shapes is not None:
            return [torch.Size(shape) for shape in _as_lists(self.shapes)]
        return [None if self.shape is None else torch.Size(self.shape)] * rows

    def size_of(self, position: int) -> torch.Size | None:
        """Return the shape of one row.

        Args:
            position: The position of the row.

        Returns:
            The shape; None if it is not known.

        Example:
            >>> from transfer_queue.metadata import FieldColumn
            >>> FieldColumn.from_shapes("prompt", torch.int64, np.array([[3], [5]])).size_of(1)
            torch.Size([5])
        """
        if isinstance(self.shapes, list):
            return torch.Size(self.shapes[position])
        if self.shapes is not None:
            return torch.Size(self.shapes[position].tolist())
        return None if self.shape is None else torch.Size(self.shape)

    def schema_of(self, position: int) -> dict[str, Any]:
        """Return the entry of `field_schema` for one row.

        Args:
            position: The position of the row.

        Returns:
            The entry, with the dtype and shape of this row.

        Example:
            >>> from transfer_queue.metadata import FieldColumn
            >>> FieldColumn("prompt", torch.int64, ndim=1, shape=(3,)).schema_of(0)["shape"]
            torch.Size([3])
        """
        dtype = self.dtype if self.dtypes is None else self.dtypes[position]
        return {**self.row_schema(self.size_of(position)), "dtype": dtype}

    def row_schema(self, shape: torch.Size | None) -> dict[str, Any]:
        """Return the entry of `field_schema` without "per_sample_shapes", for rows of this shape.

        Args:
            shape: The shape; None if it is not known or rows differ.

        Returns:
            The entry.

        Example:
            >>> from transfer_queue.metadata import FieldColumn
            >>> FieldColumn("reward", torch.float32).row_schema(torch.Size([]))["dtype"]
            torch.float32
        """
        return {
            "dtype": self.dtype,
            "shape": shape,
            "is_nested": self.is_nested,
            "is_non_tensor": self.is_non_tensor,
            **(self.extra or {}),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        # packed, so that small numbers take few bytes
        shapes = pack_integers(self.shapes) if isinstance(self.shapes, np.ndarray) else self.shapes
        kind = (self.is_non_tensor, self.is_nested, self.extra, self.dtypes)
        return _unpickled, (self.name, self.dtype, self.ndim, self.shape, shapes, *kind)

    def _spread(self, rows: int) -> RowShapes:
        if self.shapes is not None:
            return self.shapes
        shape = self.shape or ()
        return np.broadcast_to(np.array(shape, dtype=np.int64), (rows, len(shape)))


def _unpickled(
    name: str, dtype: torch.dtype | None, ndim: int | None, shape: Any, shapes: Any, *kind: Any
) -> FieldColumn:
    return FieldColumn(
        name, dtype, ndim, shape, unpack_integers(*shapes) if isinstance(shapes, tuple) else shapes, *kind
    )


def promote_dtypes(dtypes: Sequence[torch.dtype | None]) -> torch.dtype | None:
    """Return the dtype that `torch.promote_types` gives for the dtypes of rows.

    None if torch does not promote them, or if there is none. A get of such rows raises an error that says why.
    """
    known = [dtype for dtype in dict.fromkeys(dtypes) if dtype is not None]
    try:
        return functools.reduce(torch.promote_types, known) if known else None
    except RuntimeError:
        return None


def _check_same_type(one: FieldColumn, other: FieldColumn, by_row: bool) -> None:
    if (one.dtype != other.dtype and not by_row) or one.is_non_tensor != other.is_non_tensor:
        types = ["objects" if column.is_non_tensor else str(column.dtype) for column in (one, other)]
        raise InvalidArgumentError(
            f"the dtype of field {one.name!r} does not match: {types[0]} in one batch, {types[1]} in another"
        )


def _as_lists(shapes: RowShapes) -> Sequence[Sequence[int]]:
    return shapes if isinstance(shapes, list) else shapes.tolist()


def row_shapes(shapes: Iterable[Sequence[int]]) -> RowShapes:
    """Return the shapes of rows as a column."""
    tuples = [tuple(int(length) for length in shape) for shape in shapes]
    ranks = {len(shape) for shape in tuples}
    if len(ranks) > 1:
        return tuples
    return np.array(tuples, dtype=np.int64).reshape(len(tuples), ranks.pop() if ranks else 0)


# ---------------------------------------------------------------- columns of values


def columns_of(values: TensorDictBase | Mapping[str, Any], rows: int) -> list[FieldColumn]:
    """Describe the columns of a TensorDict, or of a dict of columns.

    A column may be a dense or nested tensor, a NonTensorStack, a NonTensorData (with one value for each row, or one for
    all rows), a list, a tuple or an array, with `rows` rows.

    Raises:
        InvalidArgumentError: `values` is neither, or a column has another number of rows.
    """
    if isinstance(values, TensorDictBase):
        if tuple(values.batch_size[:1]) != (rows,):
            raise InvalidArgumentError(
                f"the batch size {list(values.batch_size)} of the TensorDict does not match the batch: wanted [{rows}]"
            )
        return [_column_of(name, _entry(values, name), rows) for name in values.keys()]  # noqa: SIM118
    if isinstance(values, Mapping):
        return [_column_of(name, column, rows) for name, column in values.items()]
    raise InvalidArgumentError(f"fields must be a TensorDict or a dict of columns, got a {type(values).__name__}")


def _entry(values: TensorDictBase, name: str) -> Any:
    try:
        return values.get(name)
    except RuntimeError:
        if isinstance(values, LazyStackedTensorDict) and values.stack_dim == 0:
            return [row.get(name) for row in values.tensordicts]  # rows that cannot be stacked
        raise


def _column_of(name: str, values: Any, rows: int) -> FieldColumn:
    if isinstance(values, NonTensorData):
        values = _unwrap(values.data, rows)
    elif isinstance(values, NonTensorStack) and values.stack_dim == 0:
        values = values.tensordicts
    if isinstance(values, np.ndarray):
        values = _tensor_like(values)
    _check_rows(name, values, rows)
    if isinstance(values, torch.Tensor):
        if values.is_nested:
            return FieldColumn.from_shapes(name, values.dtype, _nested_shapes(values))
        return FieldColumn(name, values.dtype, values.ndim - 1, tuple(values.shape[1:]))
    if isinstance(values, TensorDictBase):
        return FieldColumn(name, None, is_non_tensor=True)
    return _column_of_rows(name, values)


def _unwrap(value: Any, rows: int) -> Any:
    """Return the value of a NonTensorData as a column: one value for each row if it has one for each row."""
    if isinstance(value, (list, tuple)):
        return value if len(value) == rows else [value] * rows
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value if rows_of_column(value) == rows else [value] * rows
    return [value] * rows


def _tensor_like(values: npt.NDArray[Any]) -> Any:
    """Return an array as a column without copying its values: a meta tensor of its shape for numbers, else a list."""
    if values.ndim and values.dtype.kind in "biufc":
        try:
            dtype = torch.from_numpy(np.empty(0, values.dtype.newbyteorder("="))).dtype
        except TypeError:  # torch has no such dtype, for example for long doubles
            return list(values)
        return torch.empty(values.shape, dtype=dtype, device="meta")
    return list(values) if values.ndim else values


def rows_of_column(values: Any) -> int | None:
    """Return the number of rows of a column; None if the value is not a column."""
    if isinstance(values, torch.Tensor) or is_tensor_collection(values):
        return int(values.size(0)) if values.ndim else None
    if isinstance(values, np.ndarray):
        return len(values) if values.ndim else None
    return len(values) if isinstance(values, (list, tuple)) else None


def _check_rows(name: str, values: Any, rows: int) -> None:
    length = rows_of_column(values)
    if length != rows:
        given = f"a {type(values).__name__} that has no rows" if length is None else f"{length} rows"
        raise InvalidArgumentError(f"field {name!r} does not match the batch: wanted {rows} rows, got {given}")


def _nested_shapes(values: torch.Tensor) -> npt.NDArray[np.int64]:
    """Return the row shapes of a nested tensor, int64 [rows, ndim], from its offsets and sizes."""
    nested: Any = values
    if values.layout is not torch.jagged:
        sizes: npt.NDArray[np.int64] = nested._nested_tensor_size().cpu().numpy()
        return sizes if sizes.ndim == 2 else np.empty((0, 0), dtype=np.int64)  # no rows, no dimensions
    lengths = nested.lengths()
    if lengths is None:
        lengths = nested.offsets().diff()
    inner = nested.values().shape  # `values` contains the rows one after the other along the ragged dimension
    shapes = np.empty((len(lengths), len(inner)), dtype=np.int64)
    shapes[:] = tuple(inner)
    shapes[:, nested._ragged_idx - 1] = lengths.cpu().numpy()
    return shapes


def _column_of_rows(name: str, values: Iterable[Any]) -> FieldColumn:
    """Describe a column of separate rows: a tensor field if all rows are tensors of one dtype, otherwise objects."""
    shapes: list[torch.Size] = []
    dtype: torch.dtype | None = None
    for value in values:
        row = value.data if isinstance(value, NonTensorData) else value
        if not isinstance(row, torch.Tensor) or row.is_nested or dtype not in (None, row.dtype):
            return FieldColumn(name, None, is_non_tensor=True)
        dtype = row.dtype
        shapes.append(row.shape)
    if dtype is None:
        return FieldColumn(name, None, is_non_tensor=True)
    return FieldColumn.from_shapes(name, dtype, row_shapes(shapes))
