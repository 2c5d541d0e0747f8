"""Tensors over plain memory: their dtypes by name, their bytes, dense, jagged and nested tensors over given bytes.

What the encoder, the gatherer and the object codec need of torch, in one place.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from transfer_queue.wire.copies import U8, allocate
from transfer_queue.wire.layout import ITEM_SIZES

I8 = NDArray[np.int64]

DTYPES: dict[str, torch.dtype] = {
    name: found for name in ITEM_SIZES if isinstance(found := getattr(torch, name, None), torch.dtype)
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

# integers of the same width keep every bit on the way through numpy, which has no bfloat16, float8 or complex32
_BITS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

_forked = False


def _mark_forked() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_forked)


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without the prefix."""
    return NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def is_carriable(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor (not nested) are bytes in memory, here or on a device."""
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.dtype in NAMES


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements in host memory, without graph, pending conjugation or negation; itself where that is so.

    Raises:
        TypeError: the tensor has no memory of its own (a traced, fake or distributed one).
    """
    if type(tensor) is not torch.Tensor and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(f"a {type(tensor).__name__} has no memory of its own; give its local or full tensor")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor


def bits(tensor: torch.Tensor) -> NDArray[Any]:
    """A host tensor as an array over the same memory, with elements of the same width."""
    width = tensor.element_size()
    array: NDArray[Any] = tensor.detach().view(_BITS[width]).numpy()
    return array


def flat_bytes(tensor: torch.Tensor) -> U8:
    """The bytes of a carriable tensor in C order: its own memory where it is contiguous there, else a copy."""
    host = on_host(tensor)
    if host.numel() == 0:
        return np.empty(0, np.uint8)
    flat: U8
    if host.is_contiguous():
        flat = bits(host).reshape(-1).view(np.uint8)
    else:
        flat = allocate(host.numel() * host.element_size())
        copy_elements(flat, host)
    return flat


def copy_elements(destination: U8, tensor: torch.Tensor) -> None:
    """Copies a host tensor that is not contiguous into flat memory, in C order, in one go."""
    if tensor.numel() == 0:
        return
    source = bits(tensor)
    into = destination.view(source.dtype).reshape(source.shape)
    if tensor.dim() >= 2 and tensor.stride(-1) != 1 and tensor.size(-1) > 1 and not _forked:
        # torch transposes by blocks, four times as fast; but its threads do not survive a fork (see `copies`)
        torch.from_numpy(into).copy_(torch.from_numpy(source))
    else:
        np.copyto(into, source)


def tensor_over(memory: U8, name: str, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of this dtype and shape over writable memory of just its length (ValueError, KeyError otherwise)."""
    dtype = DTYPES[name]
    count = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise ValueError(f"no shape: {shape!r:.80}")
        count *= size
    if count * ITEM_SIZES[name] != len(memory):
        raise ValueError(f"{len(memory)} bytes are no {name} of shape {shape}")
    # numpy's empty arrays have stride 0, which torch views as no other dtype
    flat = torch.from_numpy(memory) if count else torch.empty(0, dtype=torch.uint8)
    return (flat if dtype is torch.uint8 else flat.view(dtype)).view(tuple(shape))


def offsets_of(lengths: I8) -> torch.Tensor:
    """The offsets, from 0, of rows of these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return torch.from_numpy(offsets)


class Cut:
    """Where one dimension of jagged tensors is cut. Tensors over one Cut are known to torch as equally ragged."""

    __slots__ = ("_longest", "_offsets", "_seqlens", "_shortest")

    def __init__(self, offsets: torch.Tensor, shortest: int, longest: int) -> None:
        self._offsets = offsets
        self._shortest, self._longest = shortest, longest
        self._seqlens: dict[str, torch.Tensor] | None = None

    def over(self, values: torch.Tensor, ragged: int) -> torch.Tensor:
        """A jagged tensor cut in its dimension `ragged` (1 and up), which is dimension ragged - 1 of values."""
        made = _nested_tensor()
        if made is None:
            return torch.nested.nested_tensor_from_jagged(
                values, self._offsets, jagged_dim=ragged, min_seqlen=self._shortest, max_seqlen=self._longest
            )
        # the public function makes a view of the same, at three times the cost (63 against 20 us)
        kind, stored = made
        if self._seqlens is None:
            self._seqlens = {"min_seqlen": stored(self._shortest), "max_seqlen": stored(self._longest)}
        cut: torch.Tensor = kind(values, self._offsets, _ragged_idx=ragged, _metadata_cache=dict(self._seqlens))
        return cut


@functools.cache
def _nested_tensor() -> tuple[Any, Any] | None:
    """What makes jagged tensors, and how it wants numbers stored; None where this torch has it elsewhere."""
    try:
        from torch.nested._internal.nested_tensor import NestedTensor, _store_val_in_tensor
    except ImportError:
        return None
    return NestedTensor, _store_val_in_tensor


def is_plain_jagged(value: Any) -> bool:
    """Whether this is a jagged tensor whose rows are ragged in their first dimension and follow one another."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_nested
        and value.layout == torch.jagged
        and value._ragged_idx == 1  # type: ignore[attr-defined]
        and value.lengths() is None  # type: ignore[attr-defined]
    )


def rows_of_jagged(value: Any, start: int, stop: int) -> torch.Tensor:
    """Rows start to stop of a plain jagged tensor, as views of its values."""
    offsets = value.offsets()[start : stop + 1]
    lengths = offsets.diff()
    first, last = (int(offsets[0]), int(offsets[-1])) if stop > start else (0, 0)
    shortest, longest = (int(lengths.min()), int(lengths.max())) if stop > start else (0, 0)
    return Cut(offsets - first, shortest, longest).over(value.values()[first:last], 1)


def jagged_from_parts(
    values: Any, offsets: Any, lengths: Any, ragged: Any, shortest: Any, longest: Any
) -> torch.Tensor:
    """A jagged tensor of parts that may be wrong (ValueError and the like if they are)."""
    if not isinstance(values, torch.Tensor) or not isinstance(offsets, torch.Tensor) or offsets.dim() != 1:
        raise ValueError("a jagged tensor without values or offsets")
    if not 1 <= ragged <= values.dim() or not len(offsets):
        raise ValueError("a jagged tensor without its ragged dimension")
    starts = offsets.numpy()
    ends = starts[1:] if lengths is None else starts[:-1] + lengths.numpy()
    if starts.dtype.kind not in "iu" or int(starts.min()) < 0 or (starts[:-1] > ends).any():
        raise ValueError("the offsets of a jagged tensor are in no order")
    if len(ends) and int(ends.max()) > values.size(ragged - 1):
        raise ValueError("the offsets of a jagged tensor lie outside of its values")
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths, jagged_dim=ragged, min_seqlen=shortest, max_seqlen=longest
    )


def nested_over(flat: torch.Tensor, shapes: I8) -> torch.Tensor:
    """A strided nested tensor of rows (shapes: [rows, ndim]) that follow one another in flat memory."""
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
    """A strided nested tensor with rows of its own."""
    if not all(isinstance(row, torch.Tensor) and row.dtype == dtype for row in rows):
        raise ValueError("a nested tensor whose rows are no tensors of its dtype")
    if not rows:
        return torch.nested.nested_tensor([], dtype=dtype)
    if len({row.dim() for row in rows}) != 1 or not rows[0].dim():
        raise ValueError("a nested tensor with rows of different rank")
    flat = np.concatenate([flat_bytes(row) for row in rows])
    shapes = np.array([tuple(row.shape) for row in rows], np.int64)
    name = NAMES[dtype]
    return nested_over(tensor_over(flat, name, (len(flat) // ITEM_SIZES[name],)), shapes)
