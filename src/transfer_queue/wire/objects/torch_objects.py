"""Encodes and decodes values of torch and tensordict inside objects (the codes from TENSOR on).

Only the elements of a tensor are encoded, not its storage, device or graph: it is decoded as a plain host tensor. This
module is imported only if torch is already imported, or a value needs it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from transfer_queue.wire.buffers.copies import U8
from transfer_queue.wire.buffers.jagged import jagged_from_parts, lost_lengths
from transfer_queue.wire.buffers.tensors import (
    DTYPES,
    copied_bytes,
    dtype_name,
    flat_bytes,
    is_carriable,
    nested_from_rows,
    tensor_from_bytes,
    tensor_over,
)
from transfer_queue.wire.objects import extensions as codes
from transfer_queue.wire.objects.extensions import PartEncoder


def encode_value(lowering: PartEncoder, value: Any, depth: int) -> Any:
    """Return the value as Ext, or None if its type has no code, so that it must be pickled."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return _lower_tensor(lowering, value, depth)
    if kind is TensorDict:
        names = value.names if value._has_names() else None
        device = None if value.device is None else str(value.device)
        entries = [item for key in value.keys() for item in (key, lowering.encode_value(value.get(key), depth))]  # noqa: SIM118
        return lowering.pack(codes.TABLE, [tuple(value.batch_size), names, device, entries])
    if kind is NonTensorData:
        return lowering.pack(codes.NON_TENSOR, [tuple(value.batch_size), lowering.encode_value(value.data, depth)])
    if kind is NonTensorStack or kind is LazyStackedTensorDict:
        code = codes.NON_TENSOR_STACK if kind is NonTensorStack else codes.LAZY_STACK
        rows = [lowering.encode_value(row, depth) for row in value.tensordicts]
        return lowering.pack(code, [value.stack_dim, rows])
    return None


def _lower_tensor(lowering: PartEncoder, value: torch.Tensor, depth: int) -> Any:
    if value.is_nested and value.layout == torch.jagged:
        jagged: Any = value
        if lost := lost_lengths(jagged):
            raise ValueError(lost)
        parts = [jagged.values(), jagged.offsets(), jagged.lengths()]
        lowered = [None if part is None else lowering.encode_value(part.detach(), depth) for part in parts]
        seqlens = [jagged._maybe_min_seqlen, jagged._maybe_max_seqlen]
        return lowering.pack(codes.JAGGED, [*lowered, jagged._ragged_idx, *seqlens])
    if value.is_nested:
        rows = [lowering.encode_value(row, depth) for row in value.detach().unbind(0)]
        return lowering.pack(codes.NESTED, [dtype_name(value.dtype), rows])
    if not is_carriable(value) or not _is_plain(value):
        return None
    small = copied_bytes(value) if value.nbytes < codes.OUT_OF_BAND else None
    reference = lowering.reference(flat_bytes(value).data) if small is None else small
    return lowering.pack(codes.TENSOR, [dtype_name(value.dtype), tuple(value.shape), reference])


def _is_plain(value: torch.Tensor) -> bool:
    """Whether a dense tensor can be decoded as a torch.Tensor without loss."""
    return type(value) is torch.Tensor or type(value).__name__ == "MemoryMappedTensor"


def decode_value(memory: Callable[[Any], U8], code: int, content: Any) -> Any:
    """Return the value of a code. Raises `ValueError` or a similar error if the content is not valid.

    Args:
        memory: Returns a writable copy of the buffer of a reference.
        code: One of TORCH_CODES.
        content: The decoded content.
    """
    if code == codes.TENSOR:
        name, shape, reference = content
        if type(reference) is bytes and name != "complex32":  # torch warns when it makes a tensor of this dtype
            return tensor_from_bytes(reference, name, shape)
        return tensor_over(memory(reference), name, shape)
    if code == codes.JAGGED:
        values, offsets, lengths, ragged, shortest, longest = content
        return jagged_from_parts(values, offsets, lengths, ragged, shortest, longest)
    if code == codes.NESTED:
        name, rows = content
        return nested_from_rows(rows, DTYPES[name])
    if code == codes.TABLE:
        batch_size, names, device, entries = content
        pairs = iter(entries)
        columns = dict(zip(pairs, pairs, strict=True))
        return TensorDict(columns, batch_size=batch_size, names=names, device=device)
    if code == codes.NON_TENSOR:
        batch_size, data = content
        return NonTensorData(data, batch_size=batch_size)
    stack_dim, rows = content
    return (NonTensorStack if code == codes.NON_TENSOR_STACK else LazyStackedTensorDict)(*rows, stack_dim=stack_dim)


def reduce_tensor(value: torch.Tensor) -> Any:
    """Return how pickle reduces a tensor inside an object; NotImplemented if torch's own way is used."""
    if type(value) is torch.nn.Parameter and is_carriable(value):
        return torch.nn.Parameter, (value.detach(), value.requires_grad)
    if value.is_nested and value.layout == torch.jagged and (lost := lost_lengths(value)):
        raise ValueError(lost)
    if value.is_nested or not is_carriable(value) or not _is_plain(value):
        return NotImplemented
    return _rebuilt, (pickle.PickleBuffer(flat_bytes(value).data), dtype_name(value.dtype), tuple(value.shape))


def _rebuilt(memory: Any, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor of a pickled buffer. Pickles contain the name of this function, so it must never change."""
    import numpy as np

    flat: U8 = np.frombuffer(memory, np.uint8)
    return tensor_over(flat if flat.flags.writeable else flat.copy(), name, shape)
