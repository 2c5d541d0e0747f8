"""Read-only views of the samples of a BatchMeta, for those who want one sample at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from transfer_queue.batch_meta import BatchMeta


class Sample:
    """A read-only view of one sample of a batch: it shows what the batch holds at its position."""

    __slots__ = ("_batch", "_place")

    def __init__(self, batch: BatchMeta, position: int) -> None:
        self._batch = batch
        self._place = position

    @property
    def global_index(self) -> int:
        """Its global index."""
        return int(self._batch._indexes[self._place])

    @property
    def partition_id(self) -> str:
        """Its partition."""
        return self._batch._partitions.name_of(self._place)

    @property
    def production_status(self) -> int:
        """1 where it is produced."""
        return int(self._batch._status[self._place])

    @property
    def custom_meta(self) -> Mapping[str, Any]:
        """Its tag."""
        return MappingProxyType(self._batch._tags.live()[self._place])

    @property
    def fields(self) -> Mapping[str, Mapping[str, Any]]:
        """What is known of each field: "dtype", "shape" (its own), "is_nested", "is_non_tensor"."""
        batch, place = self._batch, self._place
        return MappingProxyType(
            {name: MappingProxyType(field.schema_of(place)) for name, field in batch._fields.items()}
        )

    def __repr__(self) -> str:
        return f"Sample(global_index={self.global_index}, partition_id={self.partition_id!r})"


class Samples(Sequence[Sample]):
    """The views of all samples of a batch, each made when asked for."""

    def __init__(self, batch: BatchMeta) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return self._batch.size

    @overload
    def __getitem__(self, item: int) -> Sample: ...
    @overload
    def __getitem__(self, item: slice) -> list[Sample]: ...
    def __getitem__(self, item: int | slice) -> Sample | list[Sample]:
        if isinstance(item, slice):
            return [Sample(self._batch, position) for position in range(*item.indices(len(self)))]
        return Sample(self._batch, self._batch._position(item))
