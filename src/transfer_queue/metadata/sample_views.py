"""Read-only views of the samples of a BatchMeta, for code that handles one sample at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, overload

from transfer_queue.metadata.batch_contents import BatchContents


class SampleView:
    """A read-only view of one sample of a batch. It shows the present state of the batch at its position.

    Args:
        batch: The batch.
        position: The position of the sample in the batch.

    Example:
        >>> sample = tq.BatchMeta([4, 5], "train_0").samples[0]
        >>> sample.global_index, sample.partition_id
        (4, 'train_0')
    """

    __slots__ = ("_batch", "_place")

    def __init__(self, batch: BatchContents, position: int) -> None:
        self._batch = batch
        self._place = position

    @property
    def global_index(self) -> int:
        """The global index of the sample.

        Example:
            >>> tq.BatchMeta([4, 5], "train_0").samples[1].global_index
            5
        """
        return int(self._batch._indexes[self._place])

    @property
    def partition_id(self) -> str:
        """The partition of the sample.

        Example:
            >>> tq.BatchMeta([4, 5], "train_0").samples[1].partition_id
            'train_0'
        """
        return self._batch._partitions.name_of(self._place)

    @property
    def production_status(self) -> int:
        """1 if the sample is produced, otherwise 0.

        Example:
            >>> tq.BatchMeta([4, 5], "train_0").samples[1].production_status
            0
        """
        return int(self._batch._status[self._place])

    @property
    def custom_meta(self) -> Mapping[str, Any]:
        """The tag of the sample.

        Example:
            >>> dict(tq.BatchMeta([4], "train_0", custom_meta=[{"step": 1}]).samples[0].custom_meta)
            {'step': 1}
        """
        return MappingProxyType(self._batch._tags.editable_tags()[self._place])

    @property
    def fields(self) -> Mapping[str, Mapping[str, Any]]:
        """The schema of each field of the sample: "dtype", "shape", "is_nested" and "is_non_tensor".

        Example:
            >>> meta = tq.BatchMeta([4], "train_0").add_fields({"reward": torch.ones(1)})
            >>> meta.samples[0].fields["reward"]["dtype"]
            torch.float32
        """
        batch, place = self._batch, self._place
        return MappingProxyType(
            {name: MappingProxyType(field.schema_of(place)) for name, field in batch._fields.items()}
        )

    def __repr__(self) -> str:
        return f"Sample(global_index={self.global_index}, partition_id={self.partition_id!r})"


class SampleViews(Sequence[SampleView]):
    """The views of all samples of a batch. Each view is made when it is requested."""

    def __init__(self, batch: BatchContents) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return self._batch.size

    @overload
    def __getitem__(self, item: int) -> SampleView: ...
    @overload
    def __getitem__(self, item: slice) -> list[SampleView]: ...
    def __getitem__(self, item: int | slice) -> SampleView | list[SampleView]:
        if isinstance(item, slice):
            return [SampleView(self._batch, position) for position in range(*item.indices(len(self)))]
        return SampleView(self._batch, self._batch._position(item))
