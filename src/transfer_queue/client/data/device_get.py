"""Gets whose tensors go to a device: received there if the store can write to the memory of the device.

Tensors are received in memory of the device and copied within the device. Objects are made on the host. If a direct
read is not possible, tensors are made on the host, too, and then copied to the device.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from transfer_queue.client.data import store_io
from transfer_queue.client.units import Units
from transfer_queue.errors import ConnectionLostError
from transfer_queue.messages.descriptors import NESTED, UnitInfo
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.queries import LookupReply
from transfer_queue.net.calls import Call
from transfer_queue.storage.stores.base import DevicePath, Piece
from transfer_queue.wire.blocks.device_memory import DeviceBlock, ReceivedArena
from transfer_queue.wire.blocks.gather import gather, stack_of, table_of
from transfer_queue.wire.blocks.gather_into import select_fields
from transfer_queue.wire.blocks.remote_ranges import RangePieces, RemoteRanges, find_remote
from transfer_queue.wire.buffers.copies import U8
from transfer_queue.wire.buffers.tensors import synchronize

_NOTHING: U8 = np.empty(0, np.uint8)


def get_to_device(
    units: Units, reply: LookupReply, device: torch.device, layout: str, shared: bool, allow_pickle: bool
) -> Generator[Call, AnyReply, TensorDict | None]:
    """Return the values of a lookup, tensors on the device; None if they must pass through the host, or are gone."""
    external = yield from units.only_store(reply)
    path = None if external is None else external[0].device_path()
    if external is None or path is None or path.kind != device.type:
        return None
    names = {field.name for field in reply.types if field.kind == "tensor"}
    tensors, objects = select_fields(reply, names), select_fields(reply, {field.name for field in reply.types} - names)
    within = units.settings.call_timeout
    columns = yield from _receive_on_device(path, external[1], tensors, device, (layout, shared), within)
    if columns is None:
        return None
    if objects.types:
        brought = yield from units.fetch_values(objects)
        if brought is None:
            return None
        columns.update(gather(*brought, layout, shared=shared, allow_pickle=allow_pickle).items())
    return table_of({field.name: columns[field.name] for field in reply.types if field.kind != NESTED}, reply.count)


def copy_to_device(values: TensorDict, reply: LookupReply, device: torch.device) -> TensorDict:
    """Return the values with the fields of tensors copied to a device. Objects stay on the host."""
    columns: dict[str, Any] = {}
    for field in reply.types:
        if field.kind == NESTED:
            continue
        column = values.get(field.name)
        if field.kind == "tensor" and isinstance(column, torch.Tensor):
            column = column.to(device)
        elif field.kind == "tensor":
            rows = column.tolist()
            moved = {id(row): row.to(device) for row in rows}  # rows may share memory
            column = stack_of([moved[id(row)] for row in rows], reply.count)
        columns[field.name] = column
    return table_of(columns, reply.count)


def _receive_on_device(
    path: DevicePath, unit: UnitInfo, reply: LookupReply, device: torch.device, form: tuple[str, bool], within: float
) -> Generator[Call, AnyReply, dict[str, Any] | None]:
    """Return the columns of tensors on the device, received from a store; None as in `get_to_device`.

    form: The `layout` and `shared` of `gather`.
    """
    ranges = find_remote(reply, (unit.unit,))
    pieces = ranges.pieces(lambda unit: _NOTHING) if ranges is not None and reply.types else []
    if ranges is None or not pieces:  # there is nothing to read from the store
        return None
    landing = _Landing(path, ranges, pieces[0], device, *form)
    try:
        yield from store_io.read(landing, unit, ranges, pieces[0], None, within, reads=1)
    except ConnectionLostError:  # the read through the host handles it
        return None
    return landing.columns


class _Landing:
    """Reads pieces of blocks into memory of a device, without gaps, and makes tensors of them."""

    def __init__(
        self,
        path: DevicePath,
        ranges: RemoteRanges,
        pieces: RangePieces,
        device: torch.device,
        layout: str,
        shared: bool,
    ) -> None:
        self.columns: dict[str, Any] | None = None
        """The columns by field when `read` has found all pieces; None before, and if the device has no memory."""
        self._path = path
        self._ranges = ranges
        self._device = device
        self._layout = layout
        self._shared = shared
        self._packed = DeviceBlock(pieces)

    def read(self, pieces: Sequence[Piece], into: None, within: float) -> list[str]:
        """See `Store.read`. One thread does all of it, so that the memory is not freed while bytes are received."""
        places = self._packed.packed_places(np.array([piece.at for piece in pieces], np.int64)).tolist()
        wanted = [piece._replace(at=at) for piece, at in zip(pieces, places, strict=True)]
        with self._path.buffer(self._device, self._packed.nbytes) as memory:
            if memory is None:
                return []
            missing = self._path.read(wanted, memory, within)
            if not missing:
                arena = ReceivedArena(memory, self._ranges.nbytes, self._packed)
                self.columns = dict(gather(self._ranges.reply, arena, self._layout, shared=self._shared).items())
                synchronize(self._device)
        return missing
