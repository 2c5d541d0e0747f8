"""Gathers rows out of arenas into tensors of the caller, which may be pinned or on a device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from tensordict import TensorDict

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.descriptors import NESTED
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.blocks.device_memory import flat_on_device, host_to_device
from transfer_queue.wire.blocks.gather import dense_rows, gather, promoted_rows, some_shapes, table_of
from transfer_queue.wire.blocks.row_addressing import LOOKUP_REPLY, LocatedRows, Memory, locate_rows
from transfer_queue.wire.buffers.copies import Copies, copy_all
from transfer_queue.wire.buffers.tensors import DTYPES, dtype_name, flat_bytes, promote_dtypes


def gather_into(
    reply: LookupReply,
    memory: Memory,
    out: Mapping[str, torch.Tensor],
    layout: str = "jagged",
    *,
    shared: bool = False,
    allow_pickle: bool = True,
) -> TensorDict:
    """Return the rows that a lookup found. The fields of `out` are copied into its tensors, which are in the result.

    All tensors are checked before the first one is written. The caller checks generations afterwards, as for `gather`.

    Args:
        reply: See `gather`.
        memory: See `gather`; on the host.
        out: Contiguous tensors by field. Other fields are returned as `gather` returns them.
        layout: See `gather`.
        shared: See `gather`.
        allow_pickle: See `gather`.

    Raises:
        InvalidArgumentError: A field of `out` was not found, has objects or rows of different shapes, or its tensor has
            another dtype or shape. Or see `gather`.
    """
    with LOOKUP_REPLY:
        unknown = sorted(set(out) - {field.name for field in reply.types if field.kind != NESTED})
        if unknown:
            raise InvalidArgumentError(f"out has the fields {unknown}, which these samples do not have; leave them out")
        located = locate_rows(select_fields(reply, out.keys()), memory)
        shapes = {name: _checked_shape(name, tensor, located[name]) for name, tensor in out.items()}
        later: Copies = []
        for name, tensor in out.items():
            if tensor.numel():
                _fill(tensor, located[name], shapes[name], later)
        copy_all(later)
    others = select_fields(reply, [field.name for field in reply.types if field.name not in out])
    rest = gather(others, memory, layout, shared=shared, allow_pickle=allow_pickle) if others.types else {}
    columns: dict[str, Any] = {
        field.name: out[field.name] if field.name in out else rest[field.name]
        for field in reply.types
        if field.kind != NESTED
    }
    return table_of(columns, reply.count)


def select_fields(reply: LookupReply, names: Collection[str]) -> LookupReply:
    """Return the reply for some of its fields."""
    fields = [[name for name in placement.fields if name in names] for placement in reply.placements]
    placements = [
        msgspec.structs.replace(placement, fields=some)
        for placement, some in zip(reply.placements, fields, strict=True)
        if some
    ]
    types = [field for field in reply.types if field.name in names]
    return msgspec.structs.replace(reply, types=types, placements=placements)


def _checked_shape(name: str, tensor: torch.Tensor, rows: LocatedRows) -> tuple[int, ...]:
    """Return the shape of each row. Raises InvalidArgumentError if the tensor cannot take the rows."""
    if rows.type.kind != "tensor":
        raise InvalidArgumentError(f"out[{name!r}]: the field has objects, not tensors; leave it out of `out`")
    shape = rows.common_shape() if rows.count else ()
    if shape is None:
        raise InvalidArgumentError(
            f"out[{name!r}]: the rows must have one shape, got {some_shapes(rows)}; leave the field out of `out`"
        )
    parts = [part for part, _ in rows.parts]
    dtype = promote_dtypes(name, parts) if parts else DTYPES.get(rows.type.dtype)
    if tensor.dtype is not dtype or list(tensor.shape) != [rows.count, *shape]:
        wanted = "an unknown dtype" if dtype is None else dtype_name(dtype)
        raise InvalidArgumentError(
            f"out[{name!r}] must have dtype {wanted} and shape {[rows.count, *shape]} for these samples, got "
            f"{dtype_name(tensor.dtype)} and {list(tensor.shape)}; pass a tensor of that dtype and shape"
        )
    return shape


def _fill(tensor: torch.Tensor, rows: LocatedRows, shape: tuple[int, ...], later: Copies) -> None:
    """Copy the rows into the tensor, now or by the copies in `later`."""
    if rows.run is None:
        tensor.copy_(dense_rows(promoted_rows(rows) if rows.parts else rows, shape))
        return
    unit, start, nbytes = rows.run
    source = rows.memory(unit)[start : start + nbytes]
    if tensor.is_cpu:
        later.append((flat_bytes(tensor), source))
    else:
        host_to_device(flat_on_device(tensor.detach()), np.asarray(source), wait=True)
