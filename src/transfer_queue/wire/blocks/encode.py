"""Encodes the columns of a TensorDict as blocks, with one copy from the source directly into the arena.

`encode_put` takes a batch, in which values that rows share are stored once; `encode_columns` stores every row.
`encode_row` takes the fields of one sample. All of them only describe the blocks (schema, dims, length);
`EncodedBlock.write_into` copies. Until then a block refers to the caller's memory.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, Union

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)

from transfer_queue.errors import InvalidArgumentError, UncarriableValueError
from transfer_queue.messages.descriptors import NESTED, SEPARATOR, FieldSpec
from transfer_queue.wire.blocks.column_sources import (
    MIN_SAVED,
    ArrayColumn,
    ColumnSource,
    DeviceColumn,
    EncodedBytes,
    PieceColumn,
    SharedRows,
    StridedColumn,
    TensorMemory,
    find_same_memory,
    find_same_objects,
    lies_on,
    rows_of_one_value,
)
from transfer_queue.wire.blocks.device_memory import KINDS, flat_on_device
from transfer_queue.wire.buffers.block_layout import ITEM_SIZES, MIXED_RANK, align
from transfer_queue.wire.buffers.copies import U8, Copies, address_of, allocate, copy_all
from transfer_queue.wire.buffers.jagged import check_lengths
from transfer_queue.wire.buffers.tensors import (
    NAMES,
    dtype_name,
    first_without_tensor,
    is_carriable,
    tensors_of,
    to_host,
)
from transfer_queue.wire.objects.extensions import Buffer
from transfer_queue.wire.objects.object_encoder import Refusal, encode_parts

Columns = Union[TensorDictBase, Mapping[str, Any]]

_NUMERIC = "biufc"
MAX_STACKED = 1 << 14
"""Elements of tensors that torch joins. It would use its threads for several times as many (decision 0004)."""


Slots = Union[NDArray[np.int32], None]
"""For each row of a put the row of its block; None: row k is row k."""


class PutColumn(msgspec.Struct, frozen=True, eq=False):
    """The values of a field."""

    spec: FieldSpec
    dims: bytes
    nbytes: int
    source: ColumnSource
    slots: Slots
    """For each row of the put the row of the column."""


class EncodedBlock:
    """A block that is ready to be written, or the values of a put that `split` divides into blocks.

    `messages.descriptors.NewBlock` describes `schema`, `dims`, `rows`, `nbytes` and `slots` of a block.
    """

    __slots__ = ("_given", "_shares", "_sources", "columns", "converted", "dims", "nbytes", "rows", "schema", "slots")

    def __init__(self, rows: int, columns: list[PutColumn], slots: bytes | None = None):
        self.rows = rows
        self.slots = slots
        """See `NewBlock.slots`."""
        self.converted: dict[str, list[str]] = {}
        """Fields with objects that are encoded as tensors -> the known dtypes of the field."""
        self._given = columns
        self._lay_out(columns)

    def hold_as_tensors(self, fields: Mapping[str, Sequence[str]]) -> bool:
        """Encode the values of these fields as tensors if possible, and the values of all others as they were put.

        Args:
            fields: Field -> dtypes of its live rows, see `tensors_of`.

        Returns:
            Whether the block has changed.
        """
        columns, converted = [], {}
        for column in self._given:
            spec, source = column.spec, column.source
            if spec.kind == "object" and spec.name in fields and isinstance(source, EncodedBytes):
                tensors = tensors_of(source.values, fields[spec.name])
                if tensors is not None:
                    column = replace(_rows(spec.name, tensors, False), slots=column.slots)
                    converted[spec.name] = list(fields[spec.name])
            columns.append(column)
        if converted.keys() == self.converted.keys():
            return False
        self.converted = converted
        self._lay_out(columns)
        return True

    def first_mismatch(self, name: str, dtypes: Sequence[str]) -> tuple[int, str]:
        """Return the first row of a put with a value that does not match its field, and the Python type of the value.

        Args:
            name: The field, whose values do not match.
            dtypes: The dtypes of the live rows of a field of tensors; [] for another field, of which no row matches.
        """
        column = next(column for column in self._given if column.spec.name == name)
        spec, source, slots = column.spec, column.source, column.slots
        if spec.kind == NESTED:
            return 0, "TensorDict"
        if not isinstance(source, EncodedBytes) or not source.values:
            return 0, "ndarray" if isinstance(source, ArrayColumn) else "Tensor"
        at = first_without_tensor(source.values, dtypes) if dtypes else 0
        at = 0 if at == len(source.values) else at
        return at if slots is None else int(np.argmax(slots == at)), type(source.values[at]).__name__

    def with_columns(self, positions: Sequence[int]) -> EncodedBlock:
        """Return a block of some columns, given by their positions in the schema, as they are encoded now."""
        return EncodedBlock(self.rows, [self.columns[at] for at in positions])

    def split(self) -> list[EncodedBlock]:
        """Return the blocks to write: this one, or one for each set of columns whose rows share values alike."""
        if not self._shares:
            return [self]
        by_slots: dict[bytes | None, list[PutColumn]] = {}
        for each in self.columns:
            by_slots.setdefault(None if each.slots is None else each.slots.tobytes(), []).append(each)
        plain = by_slots.get(None, [])
        shared = (some for some in by_slots.values() if some[0].slots is not None and some[0].slots.min() >= 0)
        if plain and not any(each.nbytes or each.spec.ragged for each in plain) and (first := next(shared, None)):
            # columns without bytes need no block of their own, which an external store could not have
            first += [replace(each, slots=first[0].slots) for each in by_slots.pop(None)]
        blocks = []
        for packed, some in by_slots.items():
            slots = some[0].slots
            blocks.append(EncodedBlock(self.rows if slots is None else int(slots.max()) + 1, some, packed))
        return blocks

    def _lay_out(self, columns: list[PutColumn]) -> None:
        schema, dims, sources = [], [], []
        end, shares = 0, False
        for column in columns:
            schema.append(column.spec)
            dims.append(column.dims)
            sources.append((end, column.source))
            end = align(end + column.nbytes)
            if column.slots is not None:
                shares = True
        self.columns = columns
        """The columns as they will be written."""
        self.schema = schema
        self.dims = b"".join(dims)
        self.nbytes = end
        self._sources = sources
        self._shares = shares
        """Whether rows of a column share values."""

    def write_into(self, memory: memoryview | U8) -> None:
        """Copy the columns to the start of writable memory of at least `nbytes` bytes.

        Raises:
            ValueError: The memory is shorter than the block, or read-only.
        """
        array: U8 = memory if isinstance(memory, np.ndarray) else np.frombuffer(memory, np.uint8)
        if array.nbytes < self.nbytes or not array.flags.writeable or not array.flags.c_contiguous:
            raise ValueError(f"a block needs {self.nbytes} contiguous writable bytes, got an array of {array.nbytes}")
        address = address_of(array)
        later: Copies = []
        for start, source in self._sources:
            source.write(array, address, start, later)
        if later:
            copy_all(later)

    def device_of_kind(self, kind: str) -> torch.device | None:
        """Return a device of this kind that has values of the block; None if there is none."""
        return next((part.tensor.device for _, part in self._parts() if lies_on(part, kind)), None)

    def write_on(self, memory: torch.Tensor) -> None:
        """Copy the columns to the start of memory of a device, of at least `nbytes` bytes (see `device_memory`).

        Values on such a device are not copied to the host. Values on the host are copied in as few copies as possible.
        """
        kind = memory.device.type
        for here, group in groupby(self._parts(), lambda part: lies_on(part[1], kind)):
            some = list(group)
            if here:
                for start, part in some:
                    memory[start : start + part.nbytes].copy_(flat_on_device(part.tensor))
                continue
            begin, end = some[0][0], some[-1][0] + some[-1][1].nbytes
            staged = allocate(end - begin)
            later: Copies = []
            for start, part in some:
                part.write(staged, address_of(staged), start - begin, later)
            copy_all(later)
            memory[begin:end].copy_(torch.from_numpy(staged))

    def _parts(self) -> Iterator[tuple[int, Any]]:
        """Yield each source that does not consist of several, and its start."""
        for start, source in self._sources:
            if isinstance(source, PieceColumn):
                yield from source.parts(start)
            else:
                yield start, source


def encode_put(fields: Columns, rows: int, *, allow_pickle: bool = True) -> EncodedBlock:
    """Encode a batch. A value that several rows share in memory is encoded once if that saves `MIN_SAVED` bytes.

    Rows share a value if they are expanded (a stride of 0), the same object, or tensors over the same elements.
    For containers and errors see `encode_columns`.
    """
    return EncodedBlock(rows, _columns(fields, rows, allow_pickle, rows > 1))


def encode_columns(fields: Columns, rows: int, *, allow_pickle: bool = True) -> EncodedBlock:
    """Encode a batch as a block: a column of `rows` values for each field.

    The columns of a TensorDict are used as it stores them. In a mapping, a list has one value for each row. If all
    values of a column are tensors of one dtype, it is a column of tensors in every container.

    Raises:
        InvalidArgumentError: A column has another number of rows, or is not a column.
        UncarriableValueError: A value cannot be stored. The message names field, row and type.
    """
    return EncodedBlock(rows, _columns(fields, rows, allow_pickle, False))


def _columns(fields: Columns, rows: int, allow_pickle: bool, share: bool) -> list[PutColumn]:
    """Return the columns of a batch. share: whether to look for rows that share memory."""
    if isinstance(fields, TensorDictBase):
        if fields.batch_dims and fields.batch_size[0] != rows:
            raise _wrong_length(next(iter(fields.keys()), "(none)"), rows, fields.batch_size[0])
        is_stack = isinstance(fields, LazyStackedTensorDict) and fields.stack_dim == 0
        items: Iterable[tuple[Any, Any]] = _items_of_stack(fields) if is_stack else list(fields.items())
    elif isinstance(fields, Mapping):
        items = fields.items()
    else:
        raise InvalidArgumentError(f"fields must be a TensorDict or a dict of columns, got a {type(fields).__name__}")
    columns: list[PutColumn] = []
    for key, value in items:
        name = _name(key)
        if isinstance(value, torch.Tensor):
            columns.append(_tensor(name, value, rows, share))
        elif is_nested_table(value):
            columns += _nested_columns(name, value, rows, allow_pickle, share)
        else:
            columns.append(_column(name, value, rows, allow_pickle, share))
    return columns


def _items_of_stack(fields: LazyStackedTensorDict) -> list[tuple[Any, Any]]:
    """Return the columns of a lazy stack row by row: rows may differ in shape, and a stack would be copied again."""
    rows = fields.tensordicts
    first = rows[0] if rows else {}
    return [
        (key, fields.get(key) if _is_table(first.get(key)) else [row.get(key) for row in rows])
        for key in list(fields.keys())
    ]


def encode_row(fields: Mapping[str, Any], *, allow_pickle: bool = True) -> EncodedBlock:
    """Encode one sample as a block of one row: a tensor is the sample's row, and other values are objects.

    Raises:
        InvalidArgumentError: A value is a nested tensor.
        UncarriableValueError: A value cannot be stored. The message names field, row and type.
    """
    columns: list[PutColumn] = []
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            if value.is_nested:
                raise InvalidArgumentError(
                    f"field {name!r} must have the value of one sample, got a nested tensor; put its rows as a batch"
                )
            tensor = _checked(_name(name), 0, value)
            spec = _spec(name, "tensor", NAMES[tensor.dtype], tensor.ndim, False)
            columns.append(PutColumn(spec, _i8(tensor.shape), tensor.nbytes, _dense(tensor), None))
        else:
            columns.append(_objects(_name(name), [_unwrap(value)], allow_pickle, False))
    return EncodedBlock(1, columns)


def encode_rows(rows: Sequence[Mapping[str, Any]], *, allow_pickle: bool = True) -> EncodedBlock:
    """Encode samples as a block with a row for each, with the values that `encode_row` would encode.

    All samples have the same fields. In a field with tensors all values are tensors of one dtype and number of
    dimensions, in host memory and not nested.

    Raises:
        UncarriableValueError: A value cannot be stored. The message names field, row and type.
    """
    columns: list[PutColumn] = []
    for name in rows[0]:
        values = [row[name] for row in rows]
        if isinstance(values[0], torch.Tensor):
            columns.append(_stacked(_name(name), values))
        else:
            columns.append(_objects(_name(name), list(map(_unwrap, values)), allow_pickle, False))
    return EncodedBlock(len(rows), columns)


def encode_objects(name: str, values: Sequence[Any], *, allow_pickle: bool = True) -> EncodedBlock:
    """Encode one field of objects, a row for each value, as a block. Tensors, too, are stored as objects.

    Raises:
        UncarriableValueError: A value cannot be stored. The message names field, row and type.
    """
    return EncodedBlock(len(values), [_objects(name, list(values), allow_pickle, False)])


# ---------------------------------------------------------------- columns


def is_nested_table(value: Any) -> bool:
    """Whether this is a TensorDict with a row for each row of the one that contains it, and not a Python object."""
    return _is_table(value) and value.batch_dims > 0


def _is_table(value: Any) -> bool:
    return isinstance(value, TensorDictBase) and not is_non_tensor(value)


def _nested_columns(name: str, value: TensorDictBase, rows: int, allow_pickle: bool, share: bool) -> list[PutColumn]:
    """Return a column without bytes for the nested TensorDict itself, and one for each leaf.

    The names of leaves contain `messages.descriptors.SEPARATOR`.
    """
    if value.batch_size[0] != rows:
        raise _wrong_length(name, rows, value.batch_size[0])
    table = PutColumn(_spec(name, NESTED, "object", 1, False), _i8([0]), 0, EncodedBytes([], []), None)
    leaves = {f"{name}{SEPARATOR}{_name(key)}": value.get(key) for key in list(value.keys())}
    return [table, *_columns(leaves, rows, allow_pickle, share)]


def _column(name: str, value: Any, rows: int, allow_pickle: bool, share: bool) -> PutColumn:
    """Return the column of a value that is neither a tensor nor a nested TensorDict."""
    if isinstance(value, np.ndarray):
        return _array(name, value, rows, allow_pickle, share)
    if isinstance(value, NonTensorData):
        return _non_tensor(name, value.data, rows, allow_pickle, share)
    if isinstance(value, NonTensorStack):
        values = value.tolist() if value.batch_dims else [value]
    elif isinstance(value, list | tuple):
        values = list(value) if _UNWRAPPED.issuperset(map(type, value)) else list(map(_unwrap, value))
    elif is_tensor_collection(value) and value.batch_dims:
        values = list(value.unbind(0))
    else:
        raise InvalidArgumentError(
            f"field {name!r} must be a tensor, list or array of {rows} rows, got a {type(value).__name__}"
        )
    if len(values) != rows:
        raise _wrong_length(name, rows, len(values))
    return _values(name, values, allow_pickle, share)


def _non_tensor(name: str, value: Any, rows: int, allow_pickle: bool, share: bool) -> PutColumn:
    """Encode the value of a NonTensorData: one value for each row if it has as many values, otherwise one for all."""
    if isinstance(value, list) and len(value) == rows:
        return _values(name, list(map(_unwrap, value)), allow_pickle, share)
    if isinstance(value, np.ndarray) and value.ndim and len(value) == rows:
        return _values(name, array_rows(value), allow_pickle, share)
    if isinstance(value, torch.Tensor) and not value.is_nested:
        whole = value.dim() > 0 and value.size(0) == rows
        return _tensor(name, value if whole else value.expand(rows, *value.shape), rows, share)
    return _objects(name, [value] * rows, allow_pickle, share, True)


def _tensor(name: str, value: torch.Tensor, rows: int, share: bool) -> PutColumn:
    if value.is_nested:
        if value.size(0) != rows:
            raise _wrong_length(name, rows, value.size(0))
        return _jagged(name, value, share) if value.layout == torch.jagged else _nested(name, value, share)
    tensor = _checked(name, 0, value)
    shape = tensor.shape
    if not shape:
        raise InvalidArgumentError(f"field {name!r} must have {rows} rows, got a tensor without dimensions")
    if shape[0] != rows:
        raise _wrong_length(name, rows, shape[0])
    spec, dims = _spec(name, "tensor", NAMES[tensor.dtype], len(shape) - 1, False), _i8(shape[1:])
    nbytes = tensor.nbytes
    if share and nbytes > MIN_SAVED and value.stride(0) == 0 and nbytes - nbytes // rows >= MIN_SAVED:
        one = tensor[:1]
        return PutColumn(spec, dims, one.nbytes, _dense(one), rows_of_one_value(rows).slots)
    return PutColumn(spec, dims, nbytes, _dense(tensor), None)


def _jagged(name: str, value: Any, share: bool) -> PutColumn:
    """Encode a jagged tensor: with one copy if its rows are one after the other, otherwise with a copy for each row."""
    check_lengths(name, value)
    values = value.values()
    if value.lengths() is not None or value._ragged_idx != 1 or not is_carriable(values):
        return _rows(name, list(value.unbind(0)), share)
    offsets = value.offsets().detach().cpu().numpy().astype(np.int64, copy=False)
    lengths = np.diff(offsets)
    if not len(lengths) or offsets[0] < 0 or lengths.min() < 0 or offsets[-1] > values.size(0):
        return _rows(name, list(value.unbind(0)), share)
    tensor = _checked(name, 0, values[int(offsets[0]) : int(offsets[-1])])
    ragged = bool((lengths != lengths[0]).any())
    shapes = np.empty((len(lengths) if ragged else 1, tensor.dim()), np.int64)
    shapes[:, 0] = lengths if ragged else lengths[0]
    shapes[:, 1:] = tensor.shape[1:]
    spec = _spec(name, "tensor", NAMES[tensor.dtype], tensor.dim(), ragged)
    return PutColumn(spec, shapes.tobytes(), tensor.nbytes, _dense(tensor), None)


def _nested(name: str, value: torch.Tensor, share: bool) -> PutColumn:
    """Encode a strided nested tensor: with one copy if its rows are one after the other, or one per row."""
    if not value.is_contiguous() or not value.size(0) or value.dtype not in NAMES:
        return _rows(name, list(value.unbind(0)), share)
    shapes = value._nested_tensor_size().numpy()
    tensor = _checked(name, 0, value.values())
    ragged = bool((shapes != shapes[0]).any())
    spec = _spec(name, "tensor", NAMES[tensor.dtype], shapes.shape[1], ragged)
    dims = np.ascontiguousarray(shapes if ragged else shapes[0])
    nbytes = int(shapes.prod(axis=1).sum()) * tensor.element_size()
    return PutColumn(spec, dims.tobytes(), nbytes, _dense(tensor.reshape(-1)[: nbytes // tensor.element_size()]), None)


def _array(name: str, value: NDArray[Any], rows: int, allow_pickle: bool, share: bool) -> PutColumn:
    if not value.ndim:
        raise InvalidArgumentError(f"field {name!r} must have {rows} rows, got an array without dimensions")
    if len(value) != rows:
        raise _wrong_length(name, rows, len(value))
    if value.dtype.kind not in _NUMERIC or value.dtype.name not in ITEM_SIZES or isinstance(value, np.ma.MaskedArray):
        return _values(name, array_rows(value), allow_pickle, share)
    spec, dims = _spec(name, "tensor", value.dtype.name, value.ndim - 1, False), _i8(value.shape[1:])
    slots = None
    if share and value.strides[0] == 0 and value.nbytes - value.nbytes // rows >= MIN_SAVED:
        value, slots = value[:1], rows_of_one_value(rows).slots
    return PutColumn(spec, dims, value.nbytes, ArrayColumn(np.asarray(value), value.dtype.newbyteorder("<")), slots)


def array_rows(value: NDArray[Any]) -> list[Any]:
    """Return the rows of an array as objects: str, bytes and objects themselves, otherwise numpy scalars and arrays."""
    if value.ndim == 1 and value.dtype.kind in "USO":
        rows: list[Any] = value.tolist()
        return rows
    return list(value)


def _values(name: str, values: list[Any], allow_pickle: bool, share: bool) -> PutColumn:
    """Encode one value for each row: as a column of tensors if all are tensors of one dtype, otherwise as objects."""
    distinct = {id(value): value for value in values}.values()  # rows often share objects
    if values and all(isinstance(value, torch.Tensor) and not value.is_nested for value in distinct):
        dtype = values[0].dtype
        if all(value.dtype == dtype for value in distinct):
            return _rows(name, values, share)
    return _objects(name, values, allow_pickle, share)


def _rows(name: str, values: list[torch.Tensor], share: bool) -> PutColumn:
    """Encode tensors of one dtype, one for each row."""
    same = find_same_objects(values) if share else None
    if same is None:
        tensors = [_checked(name, row, value) for row, value in enumerate(values)]
    else:
        tensors = [_checked(name, row, values[row]) for row in same.firsts]
    views = find_same_memory(tensors) if share else None
    slots = None if same is None else same.slots
    if views is not None:
        tensors, slots = [tensors[row] for row in views.firsts], views.slots if slots is None else views.slots[slots]
    if slots is not None and not _saves_enough([tensor.nbytes for tensor in tensors], slots):
        tensors, slots = [tensors[slot] for slot in slots.tolist()], None
    shapes = [tuple(tensor.shape) for tensor in tensors]
    first = shapes[0]
    pieces = [(tensor.nbytes, _dense(tensor)) for tensor in tensors]
    nbytes = sum([piece[0] for piece in pieces])
    ndim, ragged = len(first), any(shape != first for shape in shapes)
    if not ragged:
        dims = _i8(first)
    elif all(len(shape) == ndim for shape in shapes):
        dims = np.array(shapes, np.int64).tobytes()
    else:
        ndim = MIXED_RANK
        dims = _i8([size for shape in shapes for size in (len(shape), *shape)])
    spec = _spec(name, "tensor", NAMES[tensors[0].dtype], ndim, ragged)
    return PutColumn(spec, dims, nbytes, PieceColumn(pieces), slots)


def _stacked(name: str, values: list[torch.Tensor]) -> PutColumn:
    """Do the same as `_rows` for host tensors of one dtype and rank, with one copy before that into the block.

    For small tensors this is several times as fast as a copy of each.
    """
    shapes = [value.shape for value in values]
    if max(map(torch.Size.numel, shapes)) * len(values) > MAX_STACKED:
        return _rows(name, values, False)
    ragged = shapes.count(shapes[0]) != len(shapes)
    joined = torch.cat([value.reshape(-1) for value in values]) if ragged else torch.stack(values)
    tensor = _checked(name, 0, joined)
    spec = _spec(name, "tensor", NAMES[tensor.dtype], len(shapes[0]), ragged)
    dims = np.array(shapes if ragged else shapes[0], np.int64)
    return PutColumn(spec, dims.tobytes(), tensor.nbytes, _dense(tensor), None)


def _objects(name: str, values: list[Any], allow_pickle: bool, share: bool, is_one: bool = False) -> PutColumn:
    """Encode objects, one for each row. is_one: all rows have the same object."""
    shared: SharedRows | None = None
    if len(values) > 1 and (is_one or share):
        shared = rows_of_one_value(len(values)) if is_one else find_same_objects(values)
    if shared is None:
        parts = [_parts(name, row, value, allow_pickle) for row, value in enumerate(values)]
        return _encoded(name, values, parts, None)
    encoded = [_parts(name, row, values[row], allow_pickle) for row in shared.firsts]
    if share and _saves_enough([sum(map(len, parts)) for parts in encoded], shared.slots):
        return _encoded(name, [values[row] for row in shared.firsts], encoded, shared.slots)
    return _encoded(name, values, [encoded[slot] for slot in shared.slots.tolist()], None)


def _saves_enough(lengths: list[int], slots: NDArray[np.int32]) -> bool:
    """Whether a column of rows with these slots is worth storing its values, which have these lengths, once."""
    each = np.array(lengths, np.int64)
    return int(each[slots].sum() - each.sum()) >= MIN_SAVED


def _encoded(name: str, values: list[Any], encoded: list[list[Buffer]], slots: Slots) -> PutColumn:
    """Return a column of objects, one for each element of `encoded`, which are the parts of each."""
    if len(encoded) == 1:
        (parts,) = encoded
        length = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        spec = _spec(name, "object", "object", 1, False)
        return PutColumn(spec, _i8([length]), length, EncodedBytes(parts, values), slots)
    parts = list(chain.from_iterable(encoded))
    if len(parts) == len(encoded):  # one part each
        lengths = list(map(len, parts))
    else:
        lengths = [sum(map(len, each)) for each in encoded]
    if len(parts) == len(values) and len(parts) > 1:
        parts = [b"".join(parts)]
    ragged = bool(lengths) and lengths.count(lengths[0]) < len(lengths)
    dims = _i8(lengths if ragged else lengths[:1] or [0])
    return PutColumn(_spec(name, "object", "object", 1, ragged), dims, sum(lengths), EncodedBytes(parts, values), slots)


def _parts(name: str, row: int, value: Any, allow_pickle: bool) -> list[Buffer]:
    try:
        return encode_parts(value, allow_pickle=allow_pickle)
    except Refusal as refusal:
        raise UncarriableValueError(f"field {name!r}, row {row}: {refusal}") from refusal.__cause__


def _dense(tensor: torch.Tensor) -> ColumnSource:
    if not tensor.is_cpu:
        return DeviceColumn(tensor)
    return TensorMemory(tensor) if tensor.is_contiguous() else StridedColumn(tensor)


def _checked(name: str, row: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, on the host or a device. Raises `UncarriableValueError` if its elements are not in memory."""
    if not is_carriable(tensor):
        what = "a meta tensor" if tensor.is_meta else f"layout {tensor.layout}, dtype {dtype_name(tensor.dtype)}"
        raise UncarriableValueError(
            f"field {name!r}, row {row}: a value of type {type(tensor).__name__} cannot be stored: {what}; "
            "put a dense tensor with elements of its own"
        )
    try:
        return to_host(tensor, KINDS)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise UncarriableValueError(
            f"field {name!r}, row {row}: a value of type {type(tensor).__name__} cannot be stored: {error}"
        ) from error


_UNWRAPPED = frozenset({torch.Tensor, str, bytes, int, float, bool, dict, list, type(None)})
"""Types of which `_unwrap` returns every value unchanged. To ask tensordict costs a microsecond for each row."""


def _unwrap(value: Any) -> Any:
    """Return a row's value as tensordict shows it: the value of a NonTensorData, a NonTensorStack as a list."""
    if isinstance(value, NonTensorData):
        return value.data
    if isinstance(value, NonTensorStack):
        return value.tolist()
    return value


@functools.lru_cache(maxsize=4096)
def _spec(name: str, kind: str, dtype: str, ndim: int, ragged: bool) -> FieldSpec:
    return FieldSpec(name, kind, dtype, ndim, ragged)


def _i8(numbers: Iterable[int]) -> bytes:
    return array("q", numbers).tobytes()


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise InvalidArgumentError(f"a field's name must be a str, got {name!r}")
    return str.__str__(name)


def _wrong_length(name: Any, rows: int, length: int) -> InvalidArgumentError:
    return InvalidArgumentError(f"field {name!r} must have {rows} rows, got {length}")
