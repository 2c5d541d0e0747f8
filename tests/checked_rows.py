"""Rows with a checksum of every value in a second field, so that a reader can check that it got the row's own bytes.

A `Writer` puts, replaces, clears and reads rows of its own, at random: ragged ones of a few elements, and now and then
large ones, in every container and layout. A `Reader` reads the rows of all writers. A checksum covers the number of the
row, the name of the field, and the shape and bytes of the value, so that a value of another row, of another field or of
another put is found out. Works with every client, in the simulation and in real systems.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from transfer_queue.errors import CapacityError, InvalidArgumentError, StorageKeyNotFoundError, WaitTimeoutError

NUMBER = "number"
RAGGED: dict[str, tuple[torch.dtype, int]] = {
    "bytes": (torch.uint8, 1), "flags": (torch.bool, 1), "halves": (torch.bfloat16, 1), "scores": (torch.float32, 1),
    "tokens": (torch.int64, 1), "waves": (torch.complex128, 1), "pairs": (torch.int32, 2), "grids": (torch.float64, 2),
}  # fmt: skip
"""Dtype and rank of the fields whose rows differ in shape: the last one in both dimensions, the others in the first."""
FIXED: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "scalar": (torch.int16, ()), "vector": (torch.float32, (3,)), "nothing": (torch.uint8, (0, 2)),
}  # fmt: skip
"""Dtype and shape of the fields whose rows agree."""
TEXT = "text"
FIELDS = [*RAGGED, *FIXED, TEXT]
LARGE = 100_000
"""Elements of a large row."""
KEPT_VIEWS = 4
"""Reads without a copy whose values a reader keeps, and checks again later."""


def sums_of(field: str) -> str:
    """The field that has the checksums and shapes of another."""
    return f"{field} sums"


def checksum(number: int, field: str, value: Any) -> list[int]:
    """A checksum of a value, and its shape."""
    if isinstance(value, str):
        return [zlib.crc32(f"{number} {field} {value}".encode()), len(value)]
    shape = list(value.shape)
    content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return [zlib.crc32(content, zlib.crc32(f"{number} {field} {shape} {value.dtype}".encode())), *shape]


class Reader:
    """Reads rows and checks every byte. rows: how many it has checked so far."""

    def __init__(self, client: Any, partition: str, seed: int) -> None:
        self.client = client
        self.partition = partition
        self.random = np.random.default_rng(seed)
        self.rows = 0
        self._views: list[tuple[Any, ...]] = []

    def read(self, numbers: Sequence[int], whole: bool = False) -> None:
        """Reads rows by their keys, some fields of them in one of the layouts. whole: none of them is cleared."""
        layout = str(self.random.choice(["jagged", "jagged", "list", "padded", "dense"]))
        fields = self._some(list(FIXED) if layout == "dense" else FIELDS)
        keys = [str(number) for number in numbers]
        names = [NUMBER, *fields, *map(sums_of, fields)]
        copied = bool(self.random.random() < 0.7)
        by_metadata = self.random.random() < 0.3 and len(set(keys)) == len(keys)
        try:
            if by_metadata:
                meta = self.client.kv_retrieve_meta(keys, self.partition)
                if not meta.size:
                    return
                found = self.client.get_data(meta.select_fields(names), layout=layout, copy=copied)
            else:
                found = self.client.kv_batch_get(keys, self.partition, names, layout=layout, copy=copied)
        except (InvalidArgumentError, StorageKeyNotFoundError):  # they were cleared
            assert not whole
            return
        self.check(found, fields, layout, numbers, whole)
        if not copied:
            self._keep(found, fields, layout, numbers)

    def _keep(self, *read: Any) -> None:
        """Keep what was read without a copy. Check again what was kept before, and write to some of it."""
        self._views.append(read)
        if len(self._views) > KEPT_VIEWS:
            found, fields, layout, numbers = self._views.pop(int(self.random.integers(0, KEPT_VIEWS)))
            self.check(found, fields, layout, numbers)
            rows_of(found.get(NUMBER))[0].fill_(-1)

    def check(
        self, found: TensorDict, fields: Sequence[str], layout: str, wanted: Sequence[int], whole: bool = False
    ) -> None:
        """Check the rows that were read. wanted: their numbers, in order; some of them may be missing."""
        numbers = [int(row) for row in rows_of(found.get(NUMBER))]
        left = iter(wanted)
        assert all(number in left for number in numbers), f"rows {numbers} came where {list(wanted)} were asked for"
        assert not whole or len(numbers) == len(wanted)
        for field in fields:
            values, sums = rows_of(found.get(field)), rows_of(found.get(sums_of(field)))
            assert len(values) == len(sums) == len(numbers)
            for number, value, known in zip(numbers, values, sums, strict=True):
                kept = known.tolist()
                if layout == "padded" and isinstance(value, torch.Tensor):
                    corner = tuple(slice(size) for size in kept[1:])
                    assert value.count_nonzero() == value[corner].count_nonzero(), f"{field} of row {number}: no zeros"
                    value = value[corner]
                assert checksum(number, field, value) == kept, (
                    f"{field} of row {number} is not what was put (layout {layout}): {value!r:.200} with {kept}"
                )
        self.rows += len(numbers)

    def _some(self, names: list[str]) -> list[str]:
        count = int(self.random.integers(1, len(names) + 1))
        return [str(name) for name in self.random.choice(names, count, replace=False)]

    def selection(self, numbers: Sequence[int]) -> list[int]:
        """Return some of these rows: neighbours, a few rows many times, or any rows in any order."""
        how, count = self.random.integers(0, 3), len(numbers)
        if how == 0:
            start = int(self.random.integers(0, count))
            return list(numbers[start : start + int(self.random.integers(1, 40))])
        if how == 1:
            few = self.random.choice(count, min(count, 3), replace=False)
            return [numbers[at] for at in self.random.choice(few, int(self.random.integers(1, 30)))]
        return [numbers[at] for at in self.random.choice(count, min(count, int(self.random.integers(1, 40))), False)]


class Writer(Reader):
    """Puts, replaces, clears and reads rows of its own. place: of this writer among all, which its numbers begin with.

    live: the numbers of its rows.
    """

    def __init__(self, client: Any, partition: str, seed: int, place: int = 0, most: int = 400) -> None:
        super().__init__(client, partition, seed)
        self.live: list[int] = []
        self._next = place << 32
        self._most = most

    def step(self) -> None:
        """Do one random step."""
        what = self.random.random()
        if not self.live or (what < 0.3 and len(self.live) < self._most):
            self._put()
        elif what < 0.5:
            self._replace()
        elif what < 0.6 or len(self.live) >= self._most:
            gone = sorted(set(self.selection(self.live)))
            self.client.kv_clear([str(number) for number in gone], self.partition)
            self.live = [number for number in self.live if number not in gone]
        else:
            self.read(self.selection(self.live), whole=True)

    def _put(self) -> None:
        count = int(self.random.integers(1, 12))
        numbers = list(range(self._next, self._next + count))
        if self._write(numbers, FIELDS):
            self._next += count
            self.live += numbers

    def _replace(self) -> None:
        numbers = list(dict.fromkeys(self.selection(self.live)))
        self._write(numbers, self._some(FIELDS))

    def _write(self, numbers: list[int], fields: list[str]) -> bool:
        columns: dict[str, Any] = {NUMBER: torch.tensor(numbers)}
        for field in fields:
            values = self._values(field, len(numbers))
            columns[field] = self._container(values)
            columns[sums_of(field)] = torch.tensor([checksum(n, field, v) for n, v in zip(numbers, values)])
        try:
            self.client.kv_batch_put([str(number) for number in numbers], self.partition, columns, timeout=5)
        except (CapacityError, WaitTimeoutError):  # nothing was put
            self.client.kv_clear([str(number) for number in self.live], self.partition)
            self.live = []
            return False
        return True

    def _values(self, field: str, count: int) -> list[Any]:
        if field == TEXT:
            return ["ab"[: int(self.random.integers(0, 3))] * int(self.random.integers(0, 3)) for _ in range(count)]
        if field in FIXED:
            dtype, shape = FIXED[field]
            return [self._value(dtype, shape) for _ in range(count)]
        dtype, rank = RAGGED[field]
        sizes = self.random.integers(0, 3, (count, rank))
        if self.random.random() < 0.2:
            sizes[:] = sizes[0]
        elif field != "grids":
            sizes[:, 1:] = 2
        if rank == 1 and self.random.random() < 0.02:
            sizes[int(self.random.integers(0, count))] = LARGE
        return [self._value(dtype, tuple(size)) for size in sizes.tolist()]

    def _value(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a value; a small one has few distinct elements."""
        count = int(np.prod(shape, dtype=np.int64))
        high = 2 if dtype is torch.bool or count < 4 else 256
        raw = self.random.integers(0, high, count * dtype.itemsize, dtype=np.uint8)
        flat = torch.from_numpy(raw) if count else torch.empty(0, dtype=torch.uint8)
        return flat.view(dtype).reshape(shape)

    def _container(self, values: list[Any]) -> Any:
        how = self.random.random()
        if isinstance(values[0], str):
            return values
        if how < 0.3:
            return NonTensorStack(*values)
        alike = len({value.shape for value in values}) == 1
        if how < 0.6 and alike:
            return torch.stack(values)
        trailing = {tuple(value.shape[1:]) for value in values}
        if how < 0.9 and values[0].dim() and len(trailing) == 1 and 0 not in next(iter(trailing)):
            return torch.nested.nested_tensor(values, layout=torch.jagged)
        return values


def rows_of(column: Any) -> list[Any]:
    """The rows of a column, whatever holds them."""
    return list(column.unbind(0)) if isinstance(column, torch.Tensor) else list(column.tolist())
