"""Gathers rows out of arenas into a TensorDict. The values are copies, unless the caller has views of the arena.

The container of a field follows from the type of the field over all its live rows (`FieldType`), not from the rows of
this batch. The caller checks generations after `gather` has returned: until then the bytes may be overwritten, which
causes wrong values or a `ProtocolError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, Union, get_args

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection

from transfer_queue.errors import InvalidArgumentError, ProtocolError, TransferQueueError, UncarriableValueError
from transfer_queue.messages.descriptors import NESTED, SEPARATOR, FieldType, parents
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.blocks.device_memory import DeviceArena, ReceivedArena
from transfer_queue.wire.blocks.remote_ranges import HERE
from transfer_queue.wire.blocks.row_addressing import (
    LOOKUP_REPLY,
    ON_DEVICE,
    LocatedRows,
    Memory,
    Place,
    RowArrays,
    locate_rows,
    of_arrays,
    with_dtype,
)
from transfer_queue.wire.buffers.block_layout import ITEM_SIZES
from transfer_queue.wire.buffers.copies import LARGEST, U8, Copies, allocate, copy_all
from transfer_queue.wire.buffers.jagged import JaggedOffsets, offsets_of_lengths
from transfer_queue.wire.buffers.tensors import (
    DTYPES,
    NAMES,
    copy_tensor,
    nested_tensor_over,
    promote_dtypes,
    tensor_over,
)
from transfer_queue.wire.objects.object_decoder import decode_object

I8 = NDArray[np.int64]
Layout = Literal["jagged", "dense", "padded", "list"]
LAYOUTS = get_args(Layout)
MIN_SHARE = 16
"""A tensor is copied out of received memory, which it would keep alive, if it is less than one in 16 of it."""
MAX_AT_ONCE = 4 << 20
"""The bytes of values that `gather_each` copies. More would hold up an event loop for longer than a millisecond."""
View = Union[U8, None]
"""Held bytes of an arena; None if they cannot be held."""
Views = Callable[[list[Place]], list[View]]
"""Returns a view of the bytes at each place."""

_run_of = attrgetter("run")
_kind_of = attrgetter("kind")


def gather(
    reply: LookupReply,
    memory: Memory,
    layout: str = "jagged",
    *,
    shared: bool = False,
    allow_pickle: bool = True,
    views: Views | None = None,
) -> TensorDict:
    """Return the rows that a lookup found, in its order.

    A field whose rows differ in dtype has the dtype of `torch.promote_types`.

    Args:
        reply: The reply of the lookup.
        memory: Returns a uint8 view of the whole arena of a unit. If it is a `DeviceArena`, tensors are made on that
            device; if it has only the lengths of the arenas, there must be no objects.
        layout: The container of fields of tensors: "jagged", the default; "dense", rows of equal shapes stacked;
            "padded", rows stacked with zeros up to the largest; "list", a tensor for each row.
        shared: Whether rows whose value is stored once share memory. A field with such rows has the container of
            "list". Default: every row has memory of its own.
        allow_pickle: Whether pickled values may be decoded. Default: True.
        views: Makes views of the arena, which are used for fields whose rows are one after the other in one block and
            need no rearrangement. Default: every field is copied.

    Raises:
        InvalidArgumentError: The layout is unknown, or it is "dense" and rows differ in shape, or it is "padded" and
            rows differ in rank.
        FieldTypeError: Rows have dtypes that torch does not promote.
        ProtocolError: The reply is not valid, or stored bytes are not a valid object. If the generations have changed,
            a writer has reused the space.
        UncarriableValueError: A value was pickled, and `allow_pickle` is false.
    """
    if layout not in LAYOUTS:
        raise InvalidArgumentError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    device = memory.device if isinstance(memory, DeviceArena) else None
    with LOOKUP_REPLY if device is None else ON_DEVICE:
        located = locate_rows(reply, memory)
        maker = _ColumnMaker(layout, shared, allow_pickle, device)
        if views is not None and device is None:
            maker.hold(located, views)
        elif layout == "jagged" and device is None:
            maker.in_place = all(map(_run_of, located.values()))
        made = {}
        for field in reply.types:
            if field.kind != NESTED:
                made[field.name] = maker.make(located[field.name])
        if maker.later:
            copy_all(maker.later)
        return table_of(made, reply.count)


def gather_each(
    reply: LookupReply, counts: Sequence[int], memory: Memory, layout: str, *, shared: bool, allow_pickle: bool
) -> list[TensorDict] | None:
    """Return what `gather` would return for the first `counts[0]` rows alone, for the next `counts[1]` rows, and so on.

    No two of the results share memory. For the other arguments and errors see `gather`: the rows of one result may be
    the reason for an error. Returns None if the rows are not gathered at once: they have more than MAX_AT_ONCE bytes,
    or a field has rows of several dtypes, which the rows of one result may not have.
    """
    with LOOKUP_REPLY:
        located = locate_rows(reply, memory)
        nbytes = sum([int(rows.each().lengths.sum()) for rows in located.values()])
        if nbytes > MAX_AT_ONCE or any(rows.parts for rows in located.values()):
            return None
        maker = _ColumnMaker(layout, shared, allow_pickle, None)
        names = [field.name for field in reply.types if field.kind != NESTED]
        parts = [located[name].split(counts) for name in names]
        made = [
            table_of({name: maker.make(rows) for name, rows in zip(names, rows_of_fields, strict=True)}, count)
            for count, *rows_of_fields in zip(counts, *parts, strict=True)
        ]
        copy_all(maker.later)
        return made


@dataclass(frozen=True, slots=True)
class UnreadableObject:
    """Takes the place of an object that cannot be decoded in this process."""

    error: TransferQueueError


def gather_objects(reply: LookupReply, memory: Memory, *, allow_pickle: bool = True) -> tuple[list[Any], int]:
    """Return the objects that a lookup of one field of objects found, in its order, and the number of their bytes.

    In the place of an object that cannot be decoded there is an `UnreadableObject`. For arguments and other errors see
    `gather`.
    """
    with LOOKUP_REPLY:
        (rows,) = locate_rows(reply, memory).values()
        if rows.type.kind != "object":
            raise ProtocolError(f"field {rows.type.name!r} has values of kind {rows.type.kind!r}, not objects")
        objects = _objects(rows, allow_pickle, UnreadableObject)
        return objects, int(rows.pieces()[2].sum())


def nest_fields(values: TensorDict, types: Sequence[FieldType]) -> TensorDict:
    """Return the values with the nested TensorDicts among these fields, which contain their leaves as they were put."""
    if NESTED not in map(_kind_of, types):
        return values
    return nest_tables(values, [field.name for field in types if field.kind == NESTED])


def nest_tables(values: TensorDict, names: Iterable[str]) -> TensorDict:
    """Return the values with nested TensorDicts of these names, which contain their leaves as they were put."""
    tables = sorted(names)
    whole: dict[str, Any] = {}
    columns: dict[str, dict[str, Any]] = {name: {} for name in tables}

    def put(name: str, column: Any) -> None:
        around = [parent for parent in parents(name) if parent in columns]
        if around:
            columns[around[-1]][name[len(around[-1]) + len(SEPARATOR) :]] = column
        else:
            whole[name] = column

    for name in map(str, values.keys()):
        put(name, values.get(name))
    for name in reversed(tables):  # the inner ones first
        put(name, table_of(columns[name], values.batch_size[0]))
    return table_of(whole, values.batch_size[0])


def table_of(columns: dict[str, Any], count: int) -> TensorDict:
    """Return a TensorDict of these columns. The checks of its constructor would cost more than a small gather."""
    unchecked = getattr(TensorDict, "_new_unsafe", TensorDict)
    table: TensorDict = unchecked(columns, batch_size=torch.Size([count]))
    return table


class _Form(msgspec.Struct, eq=False):
    """How the elements of rows are one tensor."""

    shape: list[int]
    """The shape of the dense tensor of all elements; the number at `ragged` has no meaning."""
    ragged: int = -1
    """The dimension of the shape in which the rows of a jagged tensor follow one another; -1 if it is dense."""
    lengths: bytes = b""
    """The lengths of the rows of a jagged tensor."""
    leading: int = 1
    """The number of elements of the dimensions before `ragged`, which is how many pieces each row has in the tensor."""


class _ColumnMaker(msgspec.Struct, eq=False):
    """Makes the columns of one gather."""

    layout: str
    """See `gather`."""
    shared: bool
    """See `gather`."""
    allow_pickle: bool
    """See `gather`."""
    device: torch.device | None
    """The device on which tensors are made; None for the host."""
    later: Copies = []
    """Copies that the caller must make."""
    in_place: bool = False
    """Whether rows that are one after the other are used where they are, instead of copies that share nothing."""
    views: bool = False
    """Whether fields may be views of the arena."""
    held: dict[str, View] = {}
    """The held bytes of fields that are views of the arena."""
    forms: dict[str, _Form] = {}
    """The forms of these fields."""
    cuts: dict[bytes, JaggedOffsets] = {}
    """Row lengths -> the offsets that all fields with these lengths share."""

    def hold(self, located: Mapping[str, LocatedRows], views: Views) -> None:
        """Hold the bytes of the fields that can be views of the arena."""
        self.in_place = self.views = True
        places: dict[str, Place] = {}
        for name, rows in located.items():
            run = rows.run
            if run is None or not run[2] or run[0] == HERE or not self._may_stay(rows) or rows.type.kind != "tensor":
                continue
            form = _form(rows, self.layout) if rows.type.dtype in DTYPES else None
            if form is not None and form.leading == 1:
                places[name], self.forms[name] = run, form
        if places:
            self.held = dict(zip(places, views(list(places.values())), strict=True))

    def _may_stay(self, rows: LocatedRows) -> bool:
        """Whether the bytes of rows that are one after the other may be used where they are."""
        return self.in_place and (rows.shape is not None or (self.views and self.layout == "jagged"))

    def make(self, rows: LocatedRows) -> Any:
        """Return the column of one field."""
        field = rows.type
        if self.shared and rows.run is None:
            distinct = rows.distinct()
            if distinct is not None:
                return self._share(*distinct)
        if field.kind == "object":
            return stack_of(_objects(rows, self.allow_pickle), rows.count)
        if rows.parts or field.dtype not in DTYPES:
            rows = _of_one_dtype(rows)
        form = self.forms.get(field.name) or _form(rows, self.layout)
        if form is None:
            return self._collect(rows)
        if form.ragged < 0:
            tensor = self._elements(rows, form.shape)
            return stack_of(list(tensor.unbind(0)), rows.count) if self.layout == "list" else tensor
        cut = self.cuts.get(form.lengths)
        if cut is None:
            cut = offsets_of_lengths(form.lengths)
            cut = self.cuts[form.lengths] = cut if self.device is None else cut.to_device(self.device)
        form.shape[form.ragged] = cut.total
        if form.leading > 1:
            rows = _divide(rows, form.leading)
        return cut.make_jagged(self._elements(rows, form.shape), form.ragged + 1)

    def _share(self, rows: LocatedRows, slots: list[int]) -> NonTensorStack:
        """Return a value for each of `slots`, which are positions in `rows`. Equal positions get the same object."""
        is_object = rows.type.kind == "object"
        values = _objects(rows, self.allow_pickle) if is_object else _rows(_of_one_dtype(rows))
        return stack_of([values[slot] for slot in slots], len(slots))

    def _collect(self, rows: LocatedRows) -> Any:
        """Return the container of rows that have no `_Form`."""
        field = rows.type
        if self.layout == "dense":
            raise InvalidArgumentError(
                f'field {field.name!r} must have rows of one shape for layout "dense", got {some_shapes(rows)}; '
                'use "padded", "jagged" or "list"'
            )
        if self.layout == "padded":
            return _padded(rows)
        if self.layout == "list" or field.mixed_rank:
            return stack_of(_rows(rows), rows.count)
        flat = _flat(rows)
        # an empty strided nested tensor has no rank
        if rows.count:
            return nested_tensor_over(flat, rows.each().shapes)
        return torch.nested.nested_tensor([], dtype=flat.dtype, device=flat.device)

    def _elements(self, rows: LocatedRows, shape: list[int]) -> torch.Tensor:
        """Return a dense tensor of the elements of rows: a view of where they are, or a copy."""
        dtype = rows.type.dtype
        if rows.run is None or self.device is not None:
            return tensor_over(_bytes(rows, self.later), dtype, shape)
        view = self.held.get(rows.type.name)
        if view is not None:
            return tensor_over(view, dtype, shape)
        unit, start, nbytes = rows.run
        memory = rows.memory(unit)
        if unit == HERE and nbytes * MIN_SHARE >= len(memory) and self._may_stay(rows):
            return tensor_over(memory[start : start + nbytes], dtype, shape)
        return copy_tensor(memory, start, nbytes, dtype, shape, self.later)


def _form(rows: LocatedRows, layout: str) -> _Form | None:
    """Return the form of rows as one tensor of the layout; None if they have none.

    Raises:
        ProtocolError: The rows are not as the type of their field says.
    """
    field, shape = rows.type, rows.shape
    if layout != "jagged":
        shape = rows.common_shape()
        return None if shape is None else _Form([rows.count, *shape])
    if field.mixed_rank:
        return None
    if (len(shape) if shape is not None else _common_rank(rows)) != field.ndim:
        raise ProtocolError(f"field {field.name!r} has rows of {field.ndim} dimensions, but not in its blocks")
    if field.ndim == 0:
        return _Form([rows.count])
    ragged = 0
    if field.differs:
        if field.differs & (field.differs - 1):
            return None
        ragged = field.differs.bit_length() - 1
    if shape is not None:
        sizes, lengths = list(shape), shape[ragged].to_bytes(8, "little") * rows.count
    else:
        sizes, lengths = _shape_beside(rows, ragged), rows.each().shapes[:, ragged].tobytes()
    leading = math.prod(sizes[:ragged]) if ragged else 1
    if leading != 1 and not rows.each().lengths.any():
        leading = 1  # rows without bytes: a few numbers of a reply must not make a reader allocate memory
    return _Form(sizes, ragged, lengths, leading)


def _common_rank(rows: LocatedRows) -> int | None:
    """Return the number of dimensions of all rows; None if rows differ in it."""
    shapes = rows.each().shapes
    return None if (shapes < 0).any() else shapes.shape[1]


def _shape_beside(rows: LocatedRows, ragged: int) -> list[int]:
    """Return the row shape that all rows share, except for dimension `ragged`."""
    shapes = rows.each().shapes
    if not len(shapes):
        return list(rows.type.shape or [0] * rows.type.ndim)
    if shapes.shape[1] > 1:
        others = np.delete(shapes, ragged, axis=1)
        if (others != others[0]).any():
            raise ProtocolError(
                f"field {rows.type.name!r} has rows that differ in a dimension in which its type does not"
            )
    shape: list[int] = shapes[0].tolist()
    return shape


def _divide(rows: LocatedRows, number: int) -> LocatedRows:
    """Return the first of this number of equal pieces of each row, then the second of each row, and so on."""
    units, starts, lengths, shapes = rows.each()
    pieces = lengths // number
    starts = (starts + np.arange(number)[:, None] * pieces).reshape(-1)
    each = RowArrays(np.tile(units, number), starts, np.tile(pieces, number), shapes)
    return of_arrays(rows.type, rows.memory, each)


# ---------------------------------------------------------------- tensors


def _of_one_dtype(rows: LocatedRows) -> LocatedRows:
    """Return rows of tensors of one dtype, which this version of torch has: `promoted_rows` if they differ in dtype."""
    if rows.parts:
        return promoted_rows(rows)
    if rows.type.dtype not in DTYPES:
        raise _unknown_dtype(rows.type)
    return rows


def _unknown_dtype(field: FieldType) -> ProtocolError:
    return ProtocolError(f"field {field.name!r} has dtype {field.dtype}, which this version of torch does not have")


def promoted_rows(rows: LocatedRows) -> LocatedRows:
    """Convert rows of several dtypes to the dtype that `torch.promote_types` gives, in new memory.

    Raises:
        FieldTypeError: torch does not promote these dtypes.
    """
    names = [name for name, _ in rows.parts]
    for name in names:
        if name not in DTYPES:
            raise _unknown_dtype(with_dtype(rows.type, name))
    dtype = promote_dtypes(rows.type.name, names)
    units, lengths, starts, shapes = rows.each()
    lengths, starts = np.empty_like(lengths), np.empty_like(starts)
    pieces, end = [], 0
    for name, chosen in rows.parts:
        part = rows.select(chosen)
        part.type = with_dtype(rows.type, name)
        pieces.append(_flat(part).to(dtype).view(torch.uint8))
        lengths[chosen] = part.each().lengths // ITEM_SIZES[name] * dtype.itemsize
        ends = end + np.cumsum(lengths[chosen])
        starts[chosen], end = ends - lengths[chosen], int(ends[-1])
    joined = torch.cat(pieces)
    each = RowArrays(np.full_like(units, HERE), starts, lengths, shapes)
    field = with_dtype(rows.type, NAMES[dtype])
    if isinstance(rows.memory, DeviceArena):
        return of_arrays(field, ReceivedArena.of_memory(joined), each)
    array: U8 = joined.numpy()
    return of_arrays(field, lambda unit: array, each)


def _bytes(rows: LocatedRows, later: Copies | None = None) -> U8 | torch.Tensor:
    """Return all rows, one after the other, in new memory on the device of the arena."""
    if isinstance(rows.memory, DeviceArena):
        return rows.memory.gather_bytes(*rows.pieces())
    return rows.gather_bytes(later)


def _flat(rows: LocatedRows) -> torch.Tensor:
    """Return all elements of all rows."""
    flat = _bytes(rows)
    return tensor_over(flat, rows.type.dtype, (len(flat) // ITEM_SIZES[rows.type.dtype],))


def dense_rows(rows: LocatedRows, shape: Sequence[int]) -> torch.Tensor:
    """Return rows that all have this shape as one new tensor."""
    return tensor_over(_bytes(rows), rows.type.dtype, (rows.count, *shape))


def some_shapes(rows: LocatedRows) -> list[tuple[int, ...]]:
    """Return some of the shapes of rows that differ in shape, for the message of an error."""
    return sorted({tuple(size for size in shape if size >= 0) for shape in rows.each().shapes.tolist()})[:4]


def _padded(rows: LocatedRows) -> torch.Tensor:
    """Return rows that differ in shape, filled up with zeros to the largest sizes."""
    _, _, lengths, shapes = rows.each()
    ranks = (shapes >= 0).sum(axis=1)
    if (ranks != ranks[0]).any():
        raise InvalidArgumentError(
            f'field {rows.type.name!r} must have rows of one rank for layout "padded"; use "list"'
        )
    shapes = shapes[:, : int(ranks[0])]
    sizes: list[int] = shapes.max(axis=0).tolist()
    item_size = ITEM_SIZES[rows.type.dtype]
    nbytes = rows.count * math.prod(sizes) * item_size
    if nbytes > LARGEST:
        raise InvalidArgumentError(
            f'field {rows.type.name!r}: layout "padded" would need {nbytes} bytes for {rows.count} rows, more memory '
            'than this machine has; use "jagged" or "list"'
        )
    inner = math.prod(sizes[1:]) * item_size
    steps = _padded_steps(shapes, sizes)
    if isinstance(rows.memory, DeviceArena):
        return _padded_on(rows, rows.memory, (rows.count, *sizes), inner, steps)
    memory_of_all = allocate(nbytes)
    memory_of_all[:] = 0
    flat = rows.gather_bytes()
    if steps is not None:
        if inner:
            step = np.dtype((np.void, inner))
            memory_of_all.view(step)[steps] = flat.view(step)
    else:
        item = np.dtype((np.void, item_size))
        whole = memory_of_all.view(item).reshape(rows.count, *sizes)
        end = 0
        for row, (size_of_row, nbytes) in enumerate(zip(shapes.tolist(), lengths.tolist(), strict=True)):
            corner = tuple(slice(size) for size in size_of_row)
            whole[row][corner] = flat[end : end + nbytes].view(item).reshape(size_of_row)
            end += nbytes
    return tensor_over(memory_of_all, rows.type.dtype, (rows.count, *sizes))


def _padded_steps(shapes: I8, sizes: list[int]) -> I8 | None:
    """Return the places of the rows' steps in padded rows; None if rows are ragged beyond the first dimension.

    A step is an element of the first dimension. All have the same size, so that one operation moves them.
    """
    if (shapes[:, 1:] != sizes[1:]).any():
        return None
    lengths = shapes[:, 0]
    ends = np.cumsum(lengths)
    steps: I8 = np.repeat(np.arange(len(shapes)) * sizes[0] - (ends - lengths), lengths) + np.arange(int(ends[-1]))
    return steps


def _padded_on(
    rows: LocatedRows, memory: DeviceArena, shape: tuple[int, ...], inner: int, steps: I8 | None
) -> torch.Tensor:
    """Return padded rows on a device. inner: the bytes of a step of `_padded_steps`."""
    dtype = DTYPES[rows.type.dtype]
    made = torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=memory.device)
    if steps is None:
        whole = made.view(dtype).view(shape)
        for padded, row in zip(whole, _rows(rows), strict=True):
            padded[tuple(slice(size) for size in row.shape)] = row
    elif inner:
        flat = memory.gather_bytes(*rows.pieces())
        made.view(-1, inner).index_copy_(0, torch.from_numpy(steps).to(memory.device), flat.view(-1, inner))
    return made.view(dtype).view(shape)


def _rows(rows: LocatedRows) -> list[torch.Tensor]:
    """Return one tensor for each row, of any shapes."""
    shape = rows.common_shape() if rows.count else None
    if shape is not None:
        return list(dense_rows(rows, shape).unbind(0))
    flat = _flat(rows)
    _, _, lengths, shapes = rows.each()
    pieces = torch.split_with_sizes(flat, (lengths // ITEM_SIZES[rows.type.dtype]).tolist())
    sizes = [[size for size in shape if size >= 0] for shape in shapes.tolist()]
    return [piece.view(size) for piece, size in zip(pieces, sizes, strict=True)]


# ---------------------------------------------------------------- objects


def _objects(
    rows: LocatedRows, allow_pickle: bool, instead: Callable[[TransferQueueError], Any] | None = None
) -> list[Any]:
    """Return the objects.

    instead: makes what takes the place of an object that cannot be decoded; None: the error is raised.
    """
    result = []
    unit: int | None = None
    view = memoryview(b"")
    for row, (of_unit, start, length) in enumerate(rows.places()):
        if of_unit != unit:
            unit, view = of_unit, rows.memory(of_unit).data
        try:
            result.append(decode_object(view[start : start + length], allow_pickle=allow_pickle))
        except (ProtocolError, UncarriableValueError) as error:
            failure = type(error)(f"field {rows.type.name!r}, row {row}: {error}")
            if instead is None:
                raise failure from error
            result.append(instead(failure))
    return result


def stack_of(values: list[Any], count: int) -> NonTensorStack:
    """Return a NonTensorStack of one value for each row."""
    if not count:
        return _empty_stack()
    if _SIMPLE.issuperset(map(type, values)):
        return NonTensorStack(*values)
    if not _fills:
        # a value that is a TensorDict must be wrapped, otherwise it would become a part of the stack
        return NonTensorStack(*[NonTensorData(value) if is_tensor_collection(value) else value for value in values])
    # making a stack of simple values is four times as fast, so other values are put into it afterwards
    stack = NonTensorStack(*[None] * count)
    for member, value in zip(stack.tensordicts, values, strict=True):
        member._non_tensordict["data"] = value
    return stack


def tensor_rows(column: Any) -> list[torch.Tensor] | None:
    """Return the rows of a column in the form of layout "list"; None for other columns, and for one without rows."""
    if not isinstance(column, NonTensorStack):
        return None
    rows = column.tolist()
    return rows if rows and all(isinstance(row, torch.Tensor) for row in rows) else None


def _empty_stack() -> NonTensorStack:
    """Return a stack without rows. tensordict cannot make one; since 0.11 it can slice a stack to no rows."""
    stack = NonTensorStack(None)
    try:
        return stack[:0]
    except RuntimeError:
        stack.tensordicts.clear()
        stack._batch_size = torch.Size([0])
        return stack


def _can_fill() -> bool:
    """Whether this version of tensordict stores the value of a NonTensorData where `stack_of` would put it."""
    try:
        stack = NonTensorStack(None, None)
        stack.tensordicts[1]._non_tensordict["data"] = _SIMPLE
        return stack.tolist() == [None, _SIMPLE] and stack[1].data is _SIMPLE
    except (AttributeError, KeyError, TypeError):
        return False


_SIMPLE = frozenset({type(None), bool, int, float, str, bytes})
_fills = _can_fill()
