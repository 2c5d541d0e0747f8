"""PartitionSnapshot: the state of one partition at one moment, as the named Ray actor returns it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer_queue.display import HtmlPage, ProgressCell, count_text, listed, short_name, short_repr, table_of

if TYPE_CHECKING:
    import torch


class PartitionSnapshot:
    """The state of a partition at one moment. It can be pickled and does not follow later changes.

    Args:
        partition_id: The name of the partition.
        rows: The global indexes of its samples, int64 [rows], ascending.
        fields: The names of its fields.
        produced: 1 if a sample has a field, int8 [rows, fields].
        consumed: Task -> 1 for each sample that it has consumed, int8 [rows].
        keys: The key of each sample; None for one without a key.
        tags: The tag of each sample.

    Example:
        >>> from transfer_queue.controller import DataPartitionStatus
        >>> one = np.ones((1, 1), "i1")
        >>> snapshot = DataPartitionStatus("train_0", np.array([4]), ["prompt"], one, {}, ["a"], [{}])
        >>> snapshot
        PartitionSnapshot('train_0', 1 sample, fields ['prompt'], tasks [])
        >>> snapshot.keys_mapping
        {'a': 4}
    """

    def __init__(
        self, partition_id: str, rows: np.ndarray, fields: list[str], produced: np.ndarray,
        consumed: dict[str, np.ndarray], keys: list[str | None], tags: list[dict[str, Any]],
    ) -> None:  # fmt: skip
        indexes = rows.tolist()
        self.partition_id = partition_id
        """The name of the partition."""
        self.global_indexes = set(indexes)
        """The global indexes of all samples, reserved ones included."""
        self.field_name_mapping = {name: column for column, name in enumerate(fields)}
        """Field -> column of `production_status`."""
        self.custom_meta = dict(zip(indexes, tags, strict=True))
        """Global index -> tag."""
        self.keys_mapping = {key: index for key, index in zip(keys, indexes, strict=True) if key is not None}
        """Key -> global index, of the samples that have a key."""
        self.revert_keys_mapping = {index: key for key, index in self.keys_mapping.items()}
        """Global index -> key, of the samples that have a key."""
        self._rows, self._produced, self._consumed = rows, produced, consumed

    @property
    def total_samples_num(self) -> int:
        """The number of samples."""
        return len(self._rows)

    @property
    def total_fields_num(self) -> int:
        """The number of fields."""
        return len(self.field_name_mapping)

    @cached_property
    def production_status(self) -> torch.Tensor:
        """1 if a sample has a field, int8 [highest global index + 1, fields]; 0 also for indexes without a sample."""
        return self._dense(self._produced)

    @cached_property
    def consumption_status(self) -> dict[str, torch.Tensor]:
        """Task -> int8 [highest global index + 1], 1 if the task has consumed the sample."""
        return {task: self._dense(column) for task, column in self._consumed.items()}

    def _dense(self, column: np.ndarray) -> torch.Tensor:
        import torch

        dense = np.zeros((int(self._rows.max(initial=-1)) + 1, *column.shape[1:]), "i1")
        dense[self._rows] = column
        return torch.from_numpy(dense)

    def __repr__(self) -> str:
        return (
            f"PartitionSnapshot({short_repr(self.partition_id)}, {count_text(self.total_samples_num, 'sample')}, "
            f"fields {listed(self.field_name_mapping)}, tasks {listed(self._consumed)})"
        )

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the progress of fields and tasks, and the first samples."""
        samples = self.total_samples_num
        parts = (samples, "sample"), (self.total_fields_num, "field"), (len(self._consumed), "task")
        page = HtmlPage(
            "PartitionSnapshot", f"{short_name(self.partition_id)}, {', '.join(count_text(*part) for part in parts)}"
        )
        produced = zip(self.field_name_mapping, self._produced.sum(axis=0).tolist())
        fields = ((short_name(name), ProgressCell(count, samples)) for name, count in produced)
        page.tables.append(table_of(["field", "produced"], fields, self.total_fields_num, "field"))
        tasks = (
            (short_name(name), ProgressCell(int(column.sum()), samples)) for name, column in self._consumed.items()
        )
        page.tables.append(table_of(["task", "consumed"], tasks, len(self._consumed), "task"))
        rows = (
            (index, short_name(self.revert_keys_mapping.get(index, "")), short_repr(tag))
            for index, tag in self.custom_meta.items()
        )
        page.tables.append(table_of(["global index", "key", "tag"], rows, samples, "sample"))
        return page.html()
