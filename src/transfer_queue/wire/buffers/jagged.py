"""Jagged nested tensors: made of values and row lengths, sliced by rows, and rebuilt from parts that may not be valid.

torch needs 40 us to 100 us to make one of any size, depending on its version, and 100 us more by its public function:
more than the rest of a small get. `JaggedOffsets` makes them in 10 us, with the same attributes.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch.utils.weak import WeakIdKeyDictionary

from transfer_queue.errors import UncarriableValueError

KEPT = 64
"""The number of `JaggedOffsets` that are kept for later batches with the same row lengths."""
KEPT_OF_ONE_ROW = 1024
"""The same for batches of one row, which differ only in its length. Offsets take four times as long as the tensor."""
KEPT_ROWS = 4096
"""The largest number of rows of kept `JaggedOffsets`."""


class JaggedOffsets:
    """The offsets of the rows of jagged tensors. torch treats tensors over the same offsets as equally ragged."""

    __slots__ = ("_longest", "_offsets", "_ragged_size", "_seqlens", "_shortest", "total")

    def __init__(self, offsets: torch.Tensor, shortest: int, longest: int, total: int = -1) -> None:
        self._offsets = offsets
        self._shortest, self._longest = shortest, longest
        self._ragged_size: Any = None
        """torch's symbol for the lengths of these rows."""
        self._seqlens: dict[str, torch.Tensor] = {}
        self.total = total
        """The sum of the lengths."""

    def make_jagged(self, values: torch.Tensor, ragged: int) -> torch.Tensor:
        """Return a jagged tensor whose dimension `ragged` (from 1), dimension ragged - 1 of `values`, is ragged."""
        parts = _parts()
        if parts is None:
            return torch.nested.nested_tensor_from_jagged(
                values, self._offsets, jagged_dim=ragged, min_seqlen=self._shortest, max_seqlen=self._longest
            )
        return self._make(parts, values, ragged)

    def _make(self, parts: _TorchParts, values: torch.Tensor, ragged: int) -> torch.Tensor:
        if self._ragged_size is None:
            with torch.inference_mode(False):
                self._seqlens = {
                    "min_seqlen": torch.zeros(self._shortest, 0), "max_seqlen": torch.zeros(self._longest, 0),
                }  # fmt: skip
            for stored in self._seqlens.values():
                torch._dynamo.mark_dynamic(stored, 0)
            self._ragged_size = parts.symbol_of(self._offsets)
        shape, strides = values.shape, values.stride()
        size = (self._offsets.shape[0] - 1, *shape[: ragged - 1], self._ragged_size, *shape[ragged:])
        step = strides[ragged - 1]
        strides = (self._ragged_size if step == 1 else self._ragged_size * step, *strides)  # a product takes 3 us
        made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
            parts.kind, size, strides, 0, torch.contiguous_format, values.dtype, torch.jagged, values.device, False,
            False, "sizes", False, True, parts.keys, storage_size=values.untyped_storage().nbytes(),
        )  # fmt: skip
        made.__dict__.update(
            _values=values, _offsets=self._offsets, _lengths=None, _size=size, _strides=strides, _ragged_idx=ragged,
            _metadata_cache=dict(self._seqlens),
        )  # fmt: skip
        for mark in parts.marks:
            values.__dict__[mark], made.__dict__[mark] = {ragged - 1}, {ragged}
        return made

    def to_device(self, device: torch.device) -> JaggedOffsets:
        """Return the same offsets for values on a device."""
        moved = moved_to(self._offsets, device)
        _on_host[moved] = self._offsets
        return JaggedOffsets(moved, self._shortest, self._longest, self.total)


_on_host: Any = WeakIdKeyDictionary()
"""Offsets on a device -> the same on the host, so that nobody must wait for the device to know them."""


def moved_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a host tensor on a device. A copy to a GPU does not wait for what the GPU does before it."""
    source = tensor.pin_memory() if device.type == "cuda" else tensor
    return source.to(device, non_blocking=True, copy=True)


def host_offsets(value: Any) -> NDArray[Any]:
    """Return the offsets of the rows of a jagged tensor, [rows + 1]."""
    offsets = value.offsets()
    if not offsets.is_cpu:
        known = _on_host.get(offsets)
        offsets = offsets.cpu() if known is None else known
    host: NDArray[Any] = offsets.numpy()
    return host


def offsets_of_lengths(lengths: bytes) -> JaggedOffsets:
    """Return the offsets of rows of these lengths (i8)."""
    if len(lengths) > 8 * KEPT_ROWS:
        return _make_offsets(lengths).cut
    cache = _kept_of_one_row if len(lengths) == 8 else _kept
    kept = cache(lengths)
    # users who have tensors over the offsets could have changed them
    if kept.offsets.tobytes() != kept.were or kept.cut._offsets.data_ptr() != kept.place:
        cache.cache_clear()
        kept = cache(lengths)
    return kept.cut


class _OffsetsCache(NamedTuple):
    """Kept `JaggedOffsets`."""

    cut: JaggedOffsets
    offsets: NDArray[np.int64]
    """Its offsets, as an array over the same memory."""
    were: bytes
    """The values of the offsets when they were made."""
    place: int
    """Their address when they were made. It changes when torch shares them with another process."""


def _make_offsets(lengths: bytes) -> _OffsetsCache:
    listed = np.frombuffer(lengths, np.int64)
    offsets = np.zeros(len(listed) + 1, np.int64)
    np.cumsum(listed, out=offsets[1:])
    shortest, longest = (int(listed.min()), int(listed.max())) if len(listed) else (0, 0)
    # tensors made in inference mode cannot become part of a graph, but these may later
    with torch.inference_mode(False):
        cut = JaggedOffsets(torch.from_numpy(offsets), shortest, longest, int(offsets[-1]))
    return _OffsetsCache(cut, offsets, offsets.tobytes(), cut._offsets.data_ptr())


_kept = functools.lru_cache(maxsize=KEPT)(_make_offsets)
_kept_of_one_row = functools.lru_cache(maxsize=KEPT_OF_ONE_ROW)(_make_offsets)


class _TorchParts(NamedTuple):
    """The parts of this version of torch that make jagged tensors."""

    kind: Any
    """The class of jagged tensors."""
    symbol_of: Any
    """The function that returns the symbol for the lengths of the rows with some offsets."""
    keys: Any
    """The keys by which torch dispatches operations on jagged tensors."""
    marks: tuple[str, ...]
    """The attributes that mark the ragged dimension for `torch.compile`; their names depend on torch's version."""


@functools.cache
def _parts() -> _TorchParts | None:
    """Return the parts; None if this version of torch does not have them, or makes other tensors than these would."""
    try:
        from torch.nested._internal.nested_tensor import NestedTensor, get_tensor_symint

        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.NestedTensor)
        keys = keys.add(torch._C.DispatchKey.AutogradNestedTensor)
        with torch.device("cpu"):  # whatever the default device of the program is
            values: Any = torch.zeros(1)
            NestedTensor(values, torch.tensor([0, 1]))
        parts = _TorchParts(NestedTensor, get_tensor_symint, keys, tuple(values.__dict__))
        return parts if _makes_what_torch_makes(parts) else None
    except Exception:  # internals of torch may be missing or different
        return None


def _makes_what_torch_makes(parts: _TorchParts) -> bool:
    """Whether `JaggedOffsets` makes the same tensors as the constructor of this version of torch."""
    with torch.device("cpu"):  # whatever the default device of the program is
        offsets, numbers = torch.tensor([0, 1, 3]), torch.arange(6)
        return all(
            _makes_it(parts, numbers.view(shape), offsets, ragged) for shape, ragged in (((3, 2), 1), ((1, 3, 2), 2))
        )


def _makes_it(parts: _TorchParts, values: torch.Tensor, offsets: torch.Tensor, ragged: int) -> bool:
    own: Any = JaggedOffsets(offsets, 1, 2)._make(parts, values, ragged)
    seqlens: dict[str, torch.Tensor] = own._metadata_cache
    marks = copy.deepcopy([part.__dict__ for part in (values, *seqlens.values())])
    values.__dict__.clear()
    official: Any = parts.kind(values, offsets, _ragged_idx=ragged, _metadata_cache=dict(seqlens))
    return bool(
        own.__dict__ == official.__dict__
        and marks == [part.__dict__ for part in (values, *seqlens.values())]
        and (official._maybe_min_seqlen, official._maybe_max_seqlen) == (1, 2)
        and (own.shape, own.stride(), own.is_contiguous()) == (official.shape, official.stride(), True)
        and str(torch._C._dispatch_keys(own)) == str(torch._C._dispatch_keys(official))
        and all(map(torch.equal, (own + own).unbind(), (official + official).unbind()))
    )


def is_plain_jagged(value: Any) -> bool:
    """Whether this is a jagged tensor whose rows are ragged in their first dimension and one after the other."""
    parts = _parts()
    if parts is not None and type(value) is parts.kind:  # each check by the public interface takes 20 us
        return bool(value._ragged_idx == 1 and value._lengths is None)
    return (
        isinstance(value, torch.Tensor)
        and value.is_nested
        and value.layout == torch.jagged
        and value._ragged_idx == 1  # type: ignore[attr-defined]
        and value.lengths() is None  # type: ignore[attr-defined]
    )


def rows_follow(value: Any) -> bool:
    """Whether this is a jagged tensor whose rows are one after the other in memory, ragged in any dimension."""
    if is_plain_jagged(value):
        return True
    nested = isinstance(value, torch.Tensor) and value.is_nested and value.layout == torch.jagged
    return nested and value.lengths() is None


def lost_lengths(value: Any) -> str:
    """Return why a jagged tensor has other rows than were selected, because torch lost their lengths; "" if it has not.

    `torch.nested.narrow` drops the lengths if it takes the rows for adjacent, but it does not look at the start of the
    last row. The row before then ends where the last one begins. The cached lengths are still those of the selection:
    the longest row exceeds them, or, if there are only two rows, none is as short as the shortest.
    """
    shortest, longest = value._maybe_min_seqlen, value._maybe_max_seqlen
    if value.lengths() is not None or shortest is None or longest is None or value.offsets().is_meta:
        return ""
    lengths = np.diff(host_offsets(value)).tolist()
    if not lengths or (max(lengths) <= longest and (len(lengths) != 2 or min(lengths) <= shortest)):
        return ""
    return (
        f"torch has lost the lengths of its rows, which are {lengths[:5]}{', ...' if len(lengths) > 5 else ''} by its "
        f"offsets, but from {shortest} to {longest} by its cached lengths. torch.nested.narrow causes this "
        f"(https://github.com/pytorch/pytorch/issues/196708); put a list of the rows, or "
        f"torch.nested.as_nested_tensor(rows, layout=torch.jagged)"
    )


def check_lengths(name: str, value: Any) -> None:
    """Raise `UncarriableValueError` if torch has lost the lengths of the rows of a field (see `lost_lengths`)."""
    lost = lost_lengths(value) if value.layout == torch.jagged else ""
    if lost:
        raise UncarriableValueError(f"field {name!r}: a value of type {type(value).__name__} cannot be stored: {lost}")


def rows_of_jagged(value: Any, start: int, stop: int, cuts: dict[bytes, JaggedOffsets]) -> torch.Tensor:
    """Return the rows from start to stop of a jagged tensor whose rows are one after the other, as views of its values.

    torch before 2.7 slices only tensors that are ragged in their first dimension. Rows of the same lengths share their
    `JaggedOffsets`, so that fields that were equally ragged stay so: those on a device by `cuts`, which is given for
    all fields.
    """
    ends = host_offsets(value)[start : stop + 1].astype(np.int64, copy=False)
    first, last = (int(ends[0]), int(ends[-1])) if stop > start else (0, 0)
    lengths, values = np.diff(ends).tobytes(), _values(value)
    cut = cuts.get(lengths)
    if cut is None:
        cut = offsets_of_lengths(lengths)
        cut = cuts[lengths] = cut if values.is_cpu else cut.to_device(values.device)
    return cut.make_jagged(values.narrow(value._ragged_idx - 1, first, last - first), value._ragged_idx)


def rows_of_strided(value: Any, start: int, stop: int) -> torch.Tensor:
    """Return a copy of the rows from start to stop of a strided nested tensor, which torch does not slice.

    Most of torch's operations refuse a view, because its rows do not begin where its memory begins.
    """
    parts = value._nested_tensor_size(), value._nested_tensor_strides(), value._nested_tensor_storage_offsets()
    view = torch._nested_view_from_buffer(value.values(), *(part[start:stop] for part in parts))
    return view.clone(memory_format=torch.contiguous_format)


def _values(value: Any) -> torch.Tensor:
    """Return value.values(), faster if the value does not need a gradient."""
    parts = _parts()
    if parts is not None and type(value) is parts.kind:
        with torch._C.DisableTorchFunctionSubclass():
            if not value.requires_grad:
                return value._values  # type: ignore[no-any-return]
    return value.values()  # type: ignore[no-any-return]


def bytes_of(value: Any) -> int:
    """Return the bytes of a column of tensors, or of those of a nested TensorDict.

    A stack of objects counts as 0, also if they are tensors (the layout "list"): asking each of them would take longer
    than some gets.
    """
    parts = _parts()
    if parts is not None and type(value) is parts.kind:
        return int(value._values.nbytes)  # values() takes 25 us
    if isinstance(value, torch.Tensor):
        return value.values().nbytes if value.is_nested else value.nbytes
    return sum(map(bytes_of, value.values())) if isinstance(value, TensorDict) else 0


def jagged_from_parts(
    values: Any, offsets: Any, lengths: Any, ragged: Any, shortest: Any, longest: Any
) -> torch.Tensor:
    """Return a jagged tensor of these parts. Raises `ValueError` or a similar error if they are not valid."""
    if not isinstance(values, torch.Tensor) or not isinstance(offsets, torch.Tensor) or offsets.dim() != 1:
        raise ValueError("a jagged tensor has no values or offsets")
    if not 1 <= ragged <= values.dim() or not len(offsets):
        raise ValueError("a jagged tensor does not have its ragged dimension")
    starts = offsets.numpy()
    ends = starts[1:] if lengths is None else starts[:-1] + lengths.numpy()
    if starts.dtype.kind not in "iu" or int(starts.min()) < 0 or (starts[:-1] > ends).any():
        raise ValueError("the offsets of a jagged tensor are not ascending")
    if len(ends) and int(ends.max()) > values.size(ragged - 1):
        raise ValueError("the offsets of a jagged tensor are outside its values")
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths, jagged_dim=ragged, min_seqlen=shortest, max_seqlen=longest
    )


_parts()  # beside the import of torch, and not in the first get of a process, which it would delay by 6 to 10 ms
