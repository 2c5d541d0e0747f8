"""The sources of the columns of a block: what their bytes are copied from, and which of their rows share memory."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from transfer_queue.wire.blocks.device_memory import device_to_host, flat_on_device
from transfer_queue.wire.buffers.copies import MIN_PART, U8, Copies, allocate
from transfer_queue.wire.buffers.tensors import copy_elements, view_as_integers
from transfer_queue.wire.objects.extensions import Buffer

MIN_SAVED = 16 << 10
"""Bytes that a column must save to be stored once. A further block costs the put as much as copying these bytes."""


class SharedRows(NamedTuple):
    """The distinct values of a column."""

    firsts: list[int]
    """For each distinct value the first row that has it, ascending."""
    slots: NDArray[np.int32]
    """For each row the position of its value in `firsts`."""


def rows_of_one_value(rows: int) -> SharedRows:
    """Return the description of rows that all have the same value."""
    return SharedRows([0], np.zeros(rows, np.int32))


def find_equal_keys(keys: Sequence[Hashable]) -> SharedRows | None:
    """Return which of these keys are equal, one for each row; None if all of them differ."""
    if len(set(keys)) == len(keys):
        return None
    numbers: dict[Hashable, int] = {}
    firsts: list[int] = []
    slots = []
    for row, key in enumerate(keys):
        number = numbers.setdefault(key, len(firsts))
        if number == len(firsts):
            firsts.append(row)
        slots.append(number)
    return SharedRows(firsts, np.array(slots, np.int32))


def find_same_objects(values: Sequence[Any]) -> SharedRows | None:
    """Return which rows are the same object; None if every row is an object of its own."""
    return find_equal_keys(list(map(id, values)))


def find_same_memory(tensors: Sequence[torch.Tensor]) -> SharedRows | None:
    """Return which of these tensors of one dtype are views of the same elements; None if there are none."""
    places = [tensor.data_ptr() for tensor in tensors]
    if len(set(places)) == len(places):
        return None
    return find_equal_keys(
        [
            (place, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg(), tensor.device)
            for place, tensor in zip(places, tensors, strict=True)
        ]
    )


_MANY = 4096
"""Bytes from which a copy releases the GIL."""


class ColumnSource(Protocol):
    """The source of a column's bytes."""

    def write(self, memory: U8, address: int, start: int, later: Copies) -> None:
        """Copy the column to memory[start:], or add large copies to `later`. `address` is the address of the memory."""

    def memory(self) -> list[U8]:
        """Return the bytes of the column in pieces, without a copy where its elements are in C order on the host."""


class _Tensor(ABC):
    """A source with the elements of a tensor."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    @property
    def nbytes(self) -> int:
        """The length of the column in bytes."""
        return self.tensor.nbytes

    @abstractmethod
    def write(self, memory: U8, address: int, start: int, later: Copies) -> None:
        """See `ColumnSource.write`."""

    def memory(self) -> list[U8]:
        """See `ColumnSource.memory`."""
        copied = allocate(self.nbytes)
        self.write(copied, 0, 0, [])
        return [copied]


def lies_on(source: object, kind: str) -> bool:
    """Whether this is a tensor on a device of this kind."""
    return isinstance(source, _Tensor) and source.tensor.device.type == kind


class TensorMemory(_Tensor):
    """A contiguous host tensor."""

    __slots__ = ()

    def write(self, memory: U8, address: int, start: int, later: Copies) -> None:
        """See `ColumnSource.write`."""
        nbytes = self.tensor.nbytes
        if nbytes < MIN_PART:
            ctypes.memmove(address + start, self.tensor.data_ptr(), nbytes)
        else:
            later.append((memory[start : start + nbytes], self._flat()))

    def memory(self) -> list[U8]:
        """See `ColumnSource.memory`."""
        return [self._flat()]

    def _flat(self) -> U8:
        flat: U8 = view_as_integers(self.tensor).reshape(-1).view(np.uint8)
        return flat


class StridedColumn(_Tensor):
    """A host tensor whose elements are not in C order."""

    __slots__ = ()

    def write(self, memory: U8, address: int, start: int, later: Copies) -> None:
        """See `ColumnSource.write`."""
        copy_elements(memory[start : start + self.tensor.nbytes], self.tensor)


class DeviceColumn(_Tensor):
    """A tensor on a device."""

    __slots__ = ()

    def write(self, memory: U8, address: int, start: int, later: Copies) -> None:
        """See `ColumnSource.write`."""
        if self.nbytes:
            device_to_host(memory[start : start + self.nbytes], flat_on_device(self.tensor))


class ArrayColumn:
    """A numeric array, of any byte order and strides."""

    __slots__ = ("_array", "_dtype")

    def __init__(self, array: NDArray[Any], dtype: np.dtype[Any]):
        self._array, self._dtype = array, dtype

    @property
    def nbytes(self) -> int:
        """The length of the column in bytes."""
        return self._array.size * self._dtype.itemsize

    def write(self, memory: U8, address: int, start: int, later: Copies) -> None:
        """See `ColumnSource.write`."""
        into = memory[start : start + self.nbytes]
        if self._array.dtype == self._dtype and self._array.flags.c_contiguous:
            later.append((into, self._array.reshape(-1).view(np.uint8)))
        else:
            np.copyto(into.view(self._dtype).reshape(self._array.shape), self._array)

    def memory(self) -> list[U8]:
        """See `ColumnSource.memory`."""
        return [np.ascontiguousarray(self._array, self._dtype).reshape(-1).view(np.uint8)]


class PieceColumn:
    """Sources one after the other."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: list[tuple[int, ColumnSource]]):
        self._pieces = pieces

    def write(self, memory: U8, address: int, start: int, later: Copies) -> None:
        """See `ColumnSource.write`."""
        for nbytes, source in self._pieces:
            source.write(memory, address, start, later)
            start += nbytes

    def memory(self) -> list[U8]:
        """See `ColumnSource.memory`."""
        return [memory for _, source in self._pieces for memory in source.memory()]

    def parts(self, start: int) -> Iterator[tuple[int, ColumnSource]]:
        """Yield each source, and its start."""
        for nbytes, source in self._pieces:
            yield start, source
            start += nbytes


class EncodedBytes:
    """Buffers one after the other: encoded objects, or rows that were encoded before."""

    __slots__ = ("_parts", "values")

    def __init__(self, parts: Sequence[Buffer | U8], values: Sequence[Any]):
        self._parts: Sequence[Any] = parts
        self.values = values
        """The objects, one for each row; empty if the rows are not objects."""

    @property
    def nbytes(self) -> int:
        """The length of the column in bytes."""
        return sum(map(len, self._parts))

    def write(self, memory: U8, address: int, start: int, later: Copies) -> None:
        """See `ColumnSource.write`."""
        view = memory.data
        for part in self._parts:
            end = start + len(part)
            if end - start < _MANY:
                view[start:end] = part
            else:
                later.append((memory[start:end], np.frombuffer(part, np.uint8)))
            start = end

    def memory(self) -> list[U8]:
        """See `ColumnSource.memory`."""
        return [np.frombuffer(part, np.uint8) for part in self._parts]
