"""Gathers rows out of arenas into a TensorDict. The values are copies, unless the caller has views of the arena.

The container of a field follows from the type of the field over all its live rows (`FieldType`), not from the rows of
this batch. The caller checks generations after `gather` has returned: until then the bytes may be overwritten, which
causes wrong values or a `ProtocolError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Union, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection

from transfer_queue.errors import InvalidArgumentError, ProtocolError, TransferQueueError, UncarriableValueError
from transfer_queue.messages.descriptors import NESTED, SEPARATOR, FieldType, parents
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.blocks.contiguous_rows import EqualRows, RowRun, equal_rows, row_runs, some_row_runs
from transfer_queue.wire.blocks.device_memory import DeviceArena, ReceivedArena
from transfer_queue.wire.blocks.remote_ranges import HERE
from transfer_queue.wire.blocks.row_addressing import (
    LOOKUP_REPLY,
    ON_DEVICE,
    FieldRows,
    Memory,
    locate_rows,
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
LEAST_SHARE = 16
"""A tensor is copied out of received memory, which it would keep alive, if it is less than one in 16 of it."""
Place = tuple[int, int, int]
"""The unit, the start and the length of bytes in an arena."""
View = Union[U8, None]
"""Held bytes of an arena; None if they cannot be held."""
Views = Callable[[list[Place]], list[View]]
"""Returns a view of the bytes at each place."""
Cuts = dict[bytes, JaggedOffsets]
"""Row lengths -> the offsets that all fields with these lengths share."""


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
    with ON_DEVICE if isinstance(memory, DeviceArena) else LOOKUP_REPLY:
        later: Copies = []
        if views is not None and not isinstance(memory, DeviceArena):
            columns = _viewed_columns(reply, memory, layout, shared, allow_pickle, views, later)
        else:
            columns = _columns(reply, memory, layout, shared, allow_pickle, later)
        copy_all(later)
        return table_of(columns, reply.count)


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
        runs = row_runs(reply, memory)
        (rows,) = locate_rows(reply, memory) if runs is None else runs.values()
        if rows.type.kind != "object":
            raise ProtocolError(f"field {rows.type.name!r} has values of kind {rows.type.kind!r}, not objects")
        places = list(rows.places())
        objects = _objects(rows.type.name, places, memory, allow_pickle, UnreadableObject)
        return objects, sum(length for _, _, length in places)


def _columns(
    reply: LookupReply, memory: Memory, layout: str, shared: bool, allow_pickle: bool, later: Copies
) -> dict[str, Any]:
    """Return the columns of the fields. The caller must make the copies in `later`."""
    cuts: Cuts = {}
    if layout == "jagged" and not isinstance(memory, DeviceArena) and (found := row_runs(reply, memory)) is not None:
        return {
            field.name: _of_run(found[field.name], memory, allow_pickle, cuts, later)
            for field in reply.types
            if field.kind != NESTED
        }
    if layout in ("jagged", "dense") and not shared and not isinstance(memory, DeviceArena):
        equal = _equal_columns(reply, memory, layout, cuts)
        if equal is not None:
            return equal
    columns: dict[str, Any] = {}
    for rows in locate_rows(reply, memory):
        if rows.type.kind != NESTED:
            columns[rows.type.name] = _column(rows, memory, layout, shared, allow_pickle, cuts, later)
    return columns


def _equal_columns(reply: LookupReply, memory: Memory, layout: str, cuts: Cuts) -> dict[str, Any] | None:
    """Return the columns of the fields if all of them are `EqualRows` that are one tensor; None otherwise."""
    found = equal_rows(reply, memory)
    if found is None:
        return None
    columns: dict[str, Any] = {}
    for field in reply.types:
        rows = found[field.name]
        form = _tensor_form(rows, layout)
        if form is None:
            return None
        columns[field.name] = _in_form(form, cuts, partial(tensor_over, rows.gather_bytes(memory), rows.type.dtype))
    return columns


def _viewed_columns(
    reply: LookupReply, memory: Memory, layout: str, shared: bool, allow_pickle: bool, views: Views, later: Copies
) -> dict[str, Any]:
    """Return the columns of the fields, as far as possible as views."""
    cuts: Cuts = {}
    columns: dict[str, Any] = {}
    runs = some_row_runs(reply, memory)
    forms = {name: form for name, run in runs.items() if run.nbytes and (form := _tensor_form(run, layout))}
    viewed = {name: runs[name] for name in forms if runs[name].unit != HERE}
    places = [(run.unit, run.start, run.nbytes) for run in viewed.values()]
    held = dict(zip(viewed, views(places), strict=True)) if places else {}
    for name, run in runs.items():
        form = forms.get(name)
        if form is not None:
            tensor = _tensor_of_run(run, form, memory, cuts, later, held.get(name))
            columns[name] = stack_of(list(tensor.unbind(0)), run.count) if layout == "list" else tensor
        elif layout == "jagged" and run.type.kind != NESTED:
            columns[name] = _of_run(run, memory, allow_pickle, cuts, later)
    if any(field.kind != NESTED and field.name not in columns for field in reply.types):
        for rows in locate_rows(reply, memory):
            if rows.type.kind != NESTED and rows.type.name not in columns:
                columns[rows.type.name] = _column(rows, memory, layout, shared, allow_pickle, cuts, later)
    return {field.name: columns[field.name] for field in reply.types if field.name in columns}


def _column(
    rows: FieldRows, memory: Memory, layout: str, shared: bool, allow_pickle: bool, cuts: Cuts, later: Copies
) -> Any:
    """Return the column of one field."""
    name = rows.type.name
    if shared and (distinct := rows.distinct()) is not None:
        return _shared(*distinct, memory, allow_pickle)
    if rows.type.kind == "object":
        return stack_of(_objects(name, rows.places(), memory, allow_pickle), len(rows.starts))
    if rows.parts:
        return _tensors(*promoted_rows(rows, memory), layout, cuts, later)
    return _tensors(rows, memory, layout, cuts, later)


def _shared(rows: FieldRows, slots: list[int], memory: Memory, allow_pickle: bool) -> NonTensorStack:
    """Return a value for each of `slots`, which are positions in `rows`. Equal positions get the same object."""
    if rows.type.kind == "object":
        values = _objects(rows.type.name, rows.places(), memory, allow_pickle)
    elif rows.type.dtype not in DTYPES:
        raise _unknown_dtype(rows.type)
    else:
        values = _rows(*(promoted_rows(rows, memory) if rows.parts else (rows, memory)))
    return stack_of([values[slot] for slot in slots], len(slots))


def _tensors(rows: FieldRows, memory: Memory, layout: str, cuts: Cuts, later: Copies) -> Any:
    """Return the rows of a field of tensors in the container of the layout."""
    if rows.type.dtype not in DTYPES:
        raise _unknown_dtype(rows.type)
    if layout == "jagged":
        return _by_type(rows, memory, cuts, later)
    if layout == "list":
        return stack_of(_rows(rows, memory), len(rows.starts))
    return dense_rows(rows, memory) if layout == "dense" else _padded(rows, memory)


def _unknown_dtype(field: FieldType) -> ProtocolError:
    return ProtocolError(f"field {field.name!r} has dtype {field.dtype}, which this version of torch does not have")


def nest_tables(values: TensorDict, names: Iterable[str]) -> TensorDict:
    """Return the values with nested TensorDicts of these names, which contain their leaves as they were put."""
    tables = sorted(names)
    if not tables:
        return values
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


class _TensorForm(NamedTuple):
    """How the bytes of a run, as they are, are the elements of one tensor."""

    shape: tuple[int, ...]
    """The shape of all elements, with -1 at the ragged dimension of a jagged tensor."""
    lengths: bytes | None
    """The lengths of the rows of a jagged tensor; None for a dense one."""


def _tensor_form(run: RowRun | EqualRows, layout: str) -> _TensorForm | None:
    """Return the form of rows as one tensor of the layout; None if they are none."""
    if run.type.kind != "tensor" or run.type.dtype not in DTYPES:
        return None
    if layout != "jagged":
        return None if run.shape is None else _TensorForm((run.count, *run.shape), None)
    ragged = max(run.type.differs.bit_length() - 1, 0)
    form = _equal_rows_form(run, ragged)
    if form is None and isinstance(run, RowRun):
        rows = run.field_rows()
        if _is_one_jagged_tensor(run, rows, ragged):
            sizes, lengths = _common_shape(rows, ragged), np.ascontiguousarray(rows.shapes[:, ragged]).tobytes()
            form = _TensorForm((*sizes[:ragged], -1, *sizes[ragged + 1 :]), lengths)
    return form


def _equal_rows_form(run: RowRun | EqualRows, ragged: int) -> _TensorForm | None:
    """Return the default form of a run of rows of equal shapes; None if they have none as one tensor."""
    field, shape = run.type, run.shape
    if (
        shape is None or field.mixed_rank or field.ndim != len(shape) or field.differs & (field.differs - 1)
        or 0 < field.ndim <= ragged or (ragged and math.prod(shape[:ragged]) != 1)
    ):  # fmt: skip
        return None
    if not shape:
        return _TensorForm((run.count,), None)
    lengths = shape[ragged].to_bytes(8, "little") * run.count
    return _TensorForm((*shape[:ragged], -1, *shape[ragged + 1 :]), lengths)


def _of_run(run: RowRun, memory: Memory, allow_pickle: bool, cuts: Cuts, later: Copies) -> Any:
    """Return the default container of a field whose rows are one after the other in one block."""
    field = run.type
    if field.kind == "object":
        return stack_of(_objects(field.name, run.places(), memory, allow_pickle), run.count)
    if field.dtype not in DTYPES:
        raise _unknown_dtype(field)
    form = _equal_rows_form(run, max(field.differs.bit_length() - 1, 0))
    if form is None:
        return _by_type(run.field_rows(), memory, cuts, later)
    return _tensor_of_run(run, form, memory, cuts, later)


def _is_one_jagged_tensor(run: RowRun, rows: FieldRows, ragged: int) -> bool:
    """Whether the bytes of a run, as they are, are the elements of one jagged tensor."""
    field = run.type
    return (
        0 <= ragged < field.ndim == rows.shapes.shape[1]
        and not field.differs & (field.differs - 1)
        and not (rows.shapes < 0).any()
        and int(rows.lengths.sum()) == run.nbytes
        and math.prod(_common_shape(rows, ragged)[:ragged]) == 1
    )


def _tensor_of_run(
    run: RowRun, form: _TensorForm, memory: Memory, cuts: Cuts, later: Copies, view: View = None
) -> torch.Tensor:
    """Return a run in this form."""
    return _in_form(form, cuts, lambda shape: _elements(run, memory, shape, later, view))


def _in_form(form: _TensorForm, cuts: Cuts, elements: Callable[[tuple[int, ...]], torch.Tensor]) -> torch.Tensor:
    """Return a tensor in this form. elements: returns the dense tensor of all elements in a shape."""
    if form.lengths is None:
        return elements(form.shape)
    cut = cuts.get(form.lengths)
    if cut is None:
        cut = cuts[form.lengths] = offsets_of_lengths(form.lengths)
    values = elements(tuple(cut.total if size < 0 else size for size in form.shape))
    if not values.is_cpu:
        cut = cut.to_device(values.device)
    return cut.make_jagged(values, form.shape.index(-1) + 1)


def _elements(run: RowRun, memory: Memory, shape: tuple[int, ...], later: Copies, view: View) -> torch.Tensor:
    """Return a tensor of a run's elements: a view, a view of the memory into which they were received, or a copy."""
    if view is not None:
        return tensor_over(view, run.type.dtype, shape)
    its = memory(run.unit)
    if run.unit == HERE and run.nbytes * LEAST_SHARE >= len(its):
        return tensor_over(its[run.start : run.start + run.nbytes], run.type.dtype, shape)
    return copy_tensor(its, run.start, run.nbytes, run.type.dtype, shape, later)


# ---------------------------------------------------------------- tensors


def promoted_rows(rows: FieldRows, memory: Memory) -> tuple[FieldRows, Memory]:
    """Convert rows of several dtypes to the dtype that `torch.promote_types` gives, in new memory.

    Raises:
        FieldTypeError: torch does not promote these dtypes.
    """
    names = [name for name, _ in rows.parts]
    for name in names:
        if name not in DTYPES:
            raise _unknown_dtype(with_dtype(rows.type, name))
    dtype = promote_dtypes(rows.type.name, names)
    lengths, starts = np.empty_like(rows.lengths), np.empty_like(rows.starts)
    pieces, end = [], 0
    for name, chosen in rows.parts:
        part = FieldRows(
            with_dtype(rows.type, name), rows.units[chosen], rows.starts[chosen], rows.lengths[chosen],
            rows.shapes[chosen],
        )  # fmt: skip
        pieces.append(_flat(part, memory).to(dtype).view(torch.uint8))
        lengths[chosen] = part.lengths // ITEM_SIZES[name] * dtype.itemsize
        ends = end + np.cumsum(lengths[chosen])
        starts[chosen], end = ends - lengths[chosen], int(ends[-1])
    joined = torch.cat(pieces)
    made = FieldRows(with_dtype(rows.type, NAMES[dtype]), np.full_like(rows.units, HERE), starts, lengths, rows.shapes)
    if isinstance(memory, DeviceArena):
        return made, ReceivedArena.of_memory(joined)
    array: U8 = joined.numpy()
    return made, lambda unit: array


def _bytes(rows: FieldRows, memory: Memory, later: Copies | None = None) -> U8 | torch.Tensor:
    """Return all rows, one after the other, in new memory on the device of the arena."""
    if isinstance(memory, DeviceArena):
        return memory.gather_bytes(rows.units, rows.starts, rows.lengths)
    return rows.gather_bytes(memory, later)


def _by_type(rows: FieldRows, memory: Memory, cuts: Cuts, later: Copies) -> Any:
    """Return the default container of a field's rows."""
    field = rows.type
    if field.mixed_rank:
        return stack_of(_rows(rows, memory), len(rows.starts))
    if rows.shapes.shape[1] != field.ndim or (rows.shapes < 0).any():
        raise ProtocolError(f"field {field.name!r} has rows of {field.ndim} dimensions, but not in its blocks")
    if field.ndim == 0:
        return tensor_over(_bytes(rows, memory, later), field.dtype, (len(rows.starts),))
    if field.differs & (field.differs - 1):
        flat = _flat(rows, memory)
        # an empty strided nested tensor has no rank
        if len(rows.starts):
            return nested_tensor_over(flat, rows.shapes)
        return torch.nested.nested_tensor([], dtype=flat.dtype, device=flat.device)
    return _jagged(rows, memory, max(field.differs.bit_length() - 1, 0), cuts, later)


def _jagged(rows: FieldRows, memory: Memory, ragged: int, cuts: Cuts, later: Copies) -> torch.Tensor:
    """Return a jagged tensor whose row dimension `ragged` is ragged."""
    shape = _common_shape(rows, ragged)
    lengths = np.ascontiguousarray(rows.shapes[:, ragged])
    key = lengths.tobytes()
    cut = cuts.get(key)
    if cut is None:
        cut = offsets_of_lengths(key)
        cut = cuts[key] = cut.to_device(memory.device) if isinstance(memory, DeviceArena) else cut
    leading = math.prod(shape[:ragged])
    if leading == 1 or not rows.lengths.any():
        flat = _bytes(rows, memory, later)
    else:
        # the values have the leading dimensions first, so a row has as many pieces as these have elements
        pieces = rows.lengths // max(leading, 1)
        starts = (rows.starts + np.arange(leading)[:, None] * pieces).reshape(-1)
        outside = replace(rows, units=np.tile(rows.units, leading), starts=starts, lengths=np.tile(pieces, leading))
        flat = _bytes(outside, memory)
    shape[ragged] = cut.total
    return cut.make_jagged(tensor_over(flat, rows.type.dtype, shape), ragged + 1)


def _common_shape(rows: FieldRows, ragged: int) -> list[int]:
    """Return the row shape that all rows share, except for dimension `ragged`."""
    if not len(rows.shapes):
        return list(rows.type.shape or [0] * rows.type.ndim)
    if rows.shapes.shape[1] > 1:
        others = np.delete(rows.shapes, ragged, axis=1)
        if (others != others[0]).any():
            raise ProtocolError(
                f"field {rows.type.name!r} has rows that differ in a dimension in which its type does not"
            )
    shape: list[int] = rows.shapes[0].tolist()
    return shape


def _flat(rows: FieldRows, memory: Memory) -> torch.Tensor:
    """Return all elements of all rows."""
    flat = _bytes(rows, memory)
    return tensor_over(flat, rows.type.dtype, (len(flat) // ITEM_SIZES[rows.type.dtype],))


def _agree(rows: FieldRows) -> bool:
    return not len(rows.shapes) or bool((rows.shapes == rows.shapes[0]).all())


def dense_rows(rows: FieldRows, memory: Memory) -> torch.Tensor:
    """Return the rows, which must have one shape, as one new tensor."""
    if not _agree(rows):
        shapes = {tuple(size for size in shape if size >= 0) for shape in rows.shapes.tolist()}
        raise InvalidArgumentError(
            f'field {rows.type.name!r} must have rows of one shape for layout "dense", got {sorted(shapes)[:4]}; '
            'use "padded", "jagged" or "list"'
        )
    if len(rows.shapes):
        shape = [size for size in rows.shapes[0].tolist() if size >= 0]
    else:
        shape = list(rows.type.shape or [0] * max(rows.type.ndim, 0))
    return tensor_over(_bytes(rows, memory), rows.type.dtype, (len(rows.starts), *shape))


def _padded(rows: FieldRows, memory: Memory) -> torch.Tensor:
    if _agree(rows):
        return dense_rows(rows, memory)
    ranks = (rows.shapes >= 0).sum(axis=1)
    if (ranks != ranks[0]).any():
        raise InvalidArgumentError(
            f'field {rows.type.name!r} must have rows of one rank for layout "padded"; use "list"'
        )
    shapes = rows.shapes[:, : int(ranks[0])]
    sizes: list[int] = shapes.max(axis=0).tolist()
    count, item_size = len(rows.starts), ITEM_SIZES[rows.type.dtype]
    nbytes = count * math.prod(sizes) * item_size
    if nbytes > LARGEST:
        raise InvalidArgumentError(
            f'field {rows.type.name!r}: layout "padded" would need {nbytes} bytes for {count} rows, more memory than '
            'this machine has; use "jagged" or "list"'
        )
    inner = math.prod(sizes[1:]) * item_size
    steps = _padded_steps(shapes, sizes)
    if isinstance(memory, DeviceArena):
        return _padded_on(rows, memory, (count, *sizes), inner, steps)
    memory_of_all = allocate(nbytes)
    memory_of_all[:] = 0
    flat = rows.gather_bytes(memory)
    if steps is not None:
        if inner:
            step = np.dtype((np.void, inner))
            memory_of_all.view(step)[steps] = flat.view(step)
    else:
        item = np.dtype((np.void, item_size))
        whole = memory_of_all.view(item).reshape(count, *sizes)
        end = 0
        for row, (size_of_row, nbytes) in enumerate(zip(shapes.tolist(), rows.lengths.tolist(), strict=True)):
            corner = tuple(slice(size) for size in size_of_row)
            whole[row][corner] = flat[end : end + nbytes].view(item).reshape(size_of_row)
            end += nbytes
    return tensor_over(memory_of_all, rows.type.dtype, (count, *sizes))


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
    rows: FieldRows, memory: DeviceArena, shape: tuple[int, ...], inner: int, steps: I8 | None
) -> torch.Tensor:
    """Return padded rows on a device. inner: the bytes of a step of `_padded_steps`."""
    dtype = DTYPES[rows.type.dtype]
    made = torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=memory.device)
    if steps is None:
        whole = made.view(dtype).view(shape)
        for padded, row in zip(whole, _rows(rows, memory), strict=True):
            padded[tuple(slice(size) for size in row.shape)] = row
    elif inner:
        flat = memory.gather_bytes(rows.units, rows.starts, rows.lengths)
        made.view(-1, inner).index_copy_(0, torch.from_numpy(steps).to(memory.device), flat.view(-1, inner))
    return made.view(dtype).view(shape)


def _rows(rows: FieldRows, memory: Memory) -> list[torch.Tensor]:
    """Return one tensor for each row, of any shapes."""
    if len(rows.starts) and _agree(rows):
        return list(dense_rows(rows, memory).unbind(0))
    flat = _flat(rows, memory)
    counts = (rows.lengths // ITEM_SIZES[rows.type.dtype]).tolist()
    shapes = [[size for size in shape if size >= 0] for shape in rows.shapes.tolist()]
    pieces = torch.split_with_sizes(flat, counts)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


# ---------------------------------------------------------------- objects


def _objects(
    field: str,
    places: Iterable[tuple[int, int, int]],
    memory: Memory,
    allow_pickle: bool,
    instead: Callable[[TransferQueueError], Any] | None = None,
) -> list[Any]:
    """Return the objects at these places (unit, start, length).

    instead: makes what takes the place of an object that cannot be decoded; None: the error is raised.
    """
    result = []
    unit: int | None = None
    view = memoryview(b"")
    for row, (of_unit, start, length) in enumerate(places):
        if of_unit != unit:
            unit, view = of_unit, memory(of_unit).data
        try:
            result.append(decode_object(view[start : start + length], allow_pickle=allow_pickle))
        except (ProtocolError, UncarriableValueError) as error:
            failure = type(error)(f"field {field!r}, row {row}: {error}")
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
