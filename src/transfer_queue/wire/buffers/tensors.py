"""Tensors over plain memory: dtypes by name, tensors of other values, the bytes of a tensor, tensors over bytes.

The encoder, the gatherer and the object codec share these functions. Jagged tensors are in `jagged`.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import os
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from transfer_queue.errors import FieldTypeError
from transfer_queue.wire.buffers.block_layout import ITEM_SIZES
from transfer_queue.wire.buffers.copies import MIN_PART, U8, Copies, address_of, allocate, copy_range

I8 = NDArray[np.int64]

DTYPES: dict[str, torch.dtype] = {
    name: dtype for name in ITEM_SIZES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

# numpy has no bfloat16, float8 or complex32, so elements pass through it as integers of the same width
BITS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

_forked = False


def _mark_forked() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_mark_forked)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that torch gives a dtype, without the prefix."""
    return NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def promote_dtypes(field: str, names: Sequence[str]) -> torch.dtype:
    """Return the dtype that `torch.promote_types` gives for the dtypes of the rows of a field.

    Raises:
        FieldTypeError: torch does not promote them.
    """
    try:
        return functools.reduce(torch.promote_types, [DTYPES[name] for name in names])
    except RuntimeError as error:
        raise FieldTypeError(
            f"field {field!r} has rows of {' and '.join(names)}, which torch does not promote to one dtype "
            f"({str(error).partition(chr(10))[0]}); get rows of one dtype at a time, or put them in one dtype"
        ) from error


def is_carriable(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor (not nested) are bytes in memory, here or on a device."""
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.dtype in NAMES


def to_host(tensor: torch.Tensor, stays: Collection[str] = ()) -> torch.Tensor:
    """Return the elements in host memory, without graph and pending conjugation or negation.

    The result is the tensor itself if it is so already. A tensor on a kind of device in `stays` is not copied. The
    function then waits until the device has computed it.

    Raises:
        TypeError: The tensor has no memory of its own (a traced, fake or distributed one).
    """
    if type(tensor) is not torch.Tensor and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(f"a {type(tensor).__name__} has no memory of its own; put its local or full tensor")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_cpu:
        if tensor.device.type in stays:
            synchronize(tensor.device)  # its kernels may be running on another stream than the copy
        else:
            tensor = tensor.cpu()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor


def synchronize(device: torch.device) -> None:
    """Wait until the kernels that this thread has started on a device are done."""
    if device.type != "cpu":
        getattr(torch, device.type).current_stream(device).synchronize()


def view_as_integers(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a host tensor as an array over the same memory, with elements of the same width."""
    width = tensor.element_size()
    array: NDArray[Any] = tensor.detach().view(BITS[width]).numpy()
    return array


def flat_bytes(tensor: torch.Tensor) -> U8:
    """Return the bytes of a tensor in C order: its own memory if it is contiguous on the host, otherwise a copy."""
    host = to_host(tensor)
    if host.numel() == 0:
        return np.empty(0, np.uint8)
    flat: U8
    if host.is_contiguous():
        flat = view_as_integers(host).reshape(-1).view(np.uint8)
    else:
        flat = allocate(host.numel() * host.element_size())
        copy_elements(flat, host)
    return flat


def copied_bytes(tensor: torch.Tensor) -> bytes | None:
    """Return a copy of the bytes of a carriable tensor, if it is plain contiguous host memory; otherwise None.

    This is for small tensors: views, as `flat_bytes` makes them, would take five times as long.
    """
    plain = type(tensor) is torch.Tensor and tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()
    if not plain or not tensor.is_contiguous():
        return None
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def copy_elements(destination: U8, tensor: torch.Tensor) -> None:
    """Copy a host tensor that is not contiguous into flat memory in C order, in one pass."""
    if tensor.numel() == 0:
        return
    source = view_as_integers(tensor)
    into = destination.view(source.dtype).reshape(source.shape)
    if tensor.dim() >= 2 and tensor.stride(-1) != 1 and tensor.size(-1) > 1 and not _forked:
        # torch transposes in tiles, four times as fast, but its threads do not survive a fork (see `copies`)
        torch.from_numpy(into).copy_(torch.from_numpy(source))
    else:
        np.copyto(into, source)


def tensor_over(memory: U8 | torch.Tensor, name: str, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of this dtype and shape over writable memory of exactly its length.

    The memory is an array, or a flat uint8 tensor of a device. Raises `ValueError` or `KeyError` if the length, the
    shape or the dtype is not valid.
    """
    dtype = DTYPES[name]
    count = _checked_count(len(memory), name, shape)
    # numpy's empty arrays have stride 0, which torch cannot view as another dtype
    if isinstance(memory, torch.Tensor):
        flat = memory
    else:
        flat = torch.from_numpy(memory) if count else torch.empty(0, dtype=torch.uint8)
    return (flat if dtype is torch.uint8 else flat.view(dtype)).view(tuple(shape))


def tensor_from_bytes(data: bytes, name: str, shape: Sequence[int]) -> torch.Tensor:
    """Return a new tensor of this dtype and shape with these bytes. For errors see `tensor_over`."""
    count = _checked_count(len(data), name, shape)
    made = torch.empty(tuple(shape), dtype=DTYPES[name], device="cpu")
    if count:
        ctypes.memmove(made.data_ptr(), data, len(data))
    return made


def _checked_count(nbytes: int, name: str, shape: Sequence[int]) -> int:
    """Return the number of elements of a tensor. Raises `ValueError` if it does not have this many bytes."""
    count = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise ValueError(f"a shape must have sizes that are not negative, got {shape!r:.80}")
        count *= size
    if count * ITEM_SIZES[name] != nbytes:
        raise ValueError(f"{nbytes} bytes are not the length of {name} of shape {shape}")
    return count


def copy_tensor(memory: U8, start: int, nbytes: int, name: str, shape: Sequence[int], later: Copies) -> torch.Tensor:
    """Return a new tensor with the elements in memory[start : start + nbytes], which must have exactly its length.

    A large copy is not made but added to `later`, for a `copy_all` by the caller. The caller has checked that the range
    is inside the memory.
    """
    if nbytes >= MIN_PART:
        return tensor_over(copy_range(memory, start, nbytes, later), name, shape)
    # an array and views of it would need three times as long
    made = torch.empty(shape, dtype=DTYPES[name], device="cpu")
    if made.nbytes != nbytes:
        raise ValueError(f"{nbytes} bytes are not the length of {name} of shape {shape}")
    ctypes.memmove(made.data_ptr(), address_of(memory) + start, nbytes)
    return made


def nested_tensor_over(flat: torch.Tensor, shapes: I8) -> torch.Tensor:
    """Return a strided nested tensor of rows (shapes: [rows, ndim]) that are one after the other in flat memory."""
    counts = shapes.prod(axis=1)
    strides = np.ones_like(shapes)
    if shapes.shape[1] > 1:
        strides[:, :-1] = np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1]
    starts = np.cumsum(counts) - counts
    sizes, steps, offsets = (
        torch.from_numpy(np.array(part, np.int64, order="C")) for part in (shapes, strides, starts)
    )
    return torch._nested_view_from_buffer(flat, sizes, steps, offsets)


def nested_from_rows(rows: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a strided nested tensor with copies of these rows."""
    if not all(isinstance(row, torch.Tensor) and row.dtype == dtype for row in rows):
        raise ValueError("the rows of a nested tensor are not tensors of its dtype")
    if not rows:
        return torch.nested.nested_tensor([], dtype=dtype)
    if len({row.dim() for row in rows}) != 1 or not rows[0].dim():
        raise ValueError("the rows of a nested tensor differ in rank")
    flat = np.concatenate([flat_bytes(row) for row in rows])
    shapes = np.array([tuple(row.shape) for row in rows], np.int64)
    name = NAMES[dtype]
    return nested_tensor_over(tensor_over(flat, name, (len(flat) // ITEM_SIZES[name],)), shapes)


def tensors_of(values: Sequence[Any], dtypes: Sequence[str]) -> list[torch.Tensor] | None:
    """Return a tensor for each value, all of one dtype; None if a value cannot be one, or the dtypes are not promoted.

    Arrays and NumPy scalars keep their dtype. A Python number takes the dtype of the field as in torch's arithmetic: a
    float in a field of float16 becomes float16, and a float in a field of integers has torch's default dtype.

    Args:
        values: The values.
        dtypes: The dtypes of the field's live rows, in the order in which they appeared.
    """
    own = _promoted([DTYPES[name] for name in dtypes if name in DTYPES]) or torch.get_default_dtype()
    made = []
    for value in values:
        tensor = _tensor(value, own)
        if tensor is None:
            return None
        made.append(tensor)
    dtype = _promoted(list({tensor.dtype for tensor in made}))
    return None if dtype is None else [tensor.to(dtype) for tensor in made]


def first_without_tensor(values: Sequence[Any], dtypes: Sequence[str]) -> int:
    """Return the position of the first value because of which `tensors_of` returns None; the end if there is none."""
    return bisect.bisect_left(range(len(values)), True, key=lambda at: tensors_of(values[: at + 1], dtypes) is None)


def _promoted(dtypes: list[torch.dtype]) -> torch.dtype | None:
    try:
        return functools.reduce(torch.promote_types, dtypes) if dtypes else None
    except RuntimeError:
        return None


def _tensor(value: Any, dtype: torch.dtype) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return None if value.is_nested else value
    if isinstance(value, np.ndarray | np.generic):
        if (
            value.dtype.kind not in "biufc"
            or value.dtype.name not in ITEM_SIZES
            or isinstance(value, np.ma.MaskedArray)
        ):
            return None
        # a copy, because torch does not support negative strides and other byte orders, and warns about read-only
        # memory
        return torch.from_numpy(np.array(value, value.dtype.newbyteorder("="), order="C"))
    if type(value) not in (bool, int, float):
        return None
    try:
        own_dtype = torch.result_type(torch.empty(1, dtype=dtype), value)
        if type(value) is int and not own_dtype.is_floating_point and not own_dtype.is_complex:
            limits = torch.iinfo(own_dtype)
            own_dtype = own_dtype if limits.min <= value <= limits.max else torch.int64
        return torch.tensor(value, dtype=own_dtype)
    except (RuntimeError, OverflowError, TypeError, ValueError):
        return None
