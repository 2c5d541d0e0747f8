"""PartitionSnapshot: what one partition held at a moment, as the controller's actor gives it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


class PartitionSnapshot:
    """A partition as it was. It pickles, follows nothing that happens later, and is made of columns.

    partition_id: its name. global_indexes: of all its samples, reserved ones included. field_name_mapping: field ->
    column of `production_status`. custom_meta: index -> tag. keys_mapping: key -> index, of samples that have a key;
    revert_keys_mapping: the other way round.
    """

    def __init__(
        self, partition_id: str, rows: np.ndarray, fields: list[str], produced: np.ndarray,
        consumed: dict[str, np.ndarray], keys: list[str | None], tags: list[dict[str, Any]],
    ) -> None:  # fmt: skip
        """rows: i8; produced: i1 [rows, fields]; consumed: task -> i1 [rows]."""
        indexes = rows.tolist()
        self.partition_id = partition_id
        self.global_indexes = set(indexes)
        self.field_name_mapping = {name: column for column, name in enumerate(fields)}
        self.custom_meta = dict(zip(indexes, tags, strict=True))
        self.keys_mapping = {key: index for key, index in zip(keys, indexes, strict=True) if key is not None}
        self.revert_keys_mapping = {index: key for key, index in self.keys_mapping.items()}
        self._rows, self._produced, self._consumed = rows, produced, consumed

    @property
    def total_samples_num(self) -> int:
        """How many samples there are."""
        return len(self._rows)

    @property
    def total_fields_num(self) -> int:
        """How many fields there are."""
        return len(self.field_name_mapping)

    @cached_property
    def production_status(self) -> torch.Tensor:
        """int8 [highest global index + 1, fields]: 1 where a sample has the field, 0 also where there is no sample."""
        return self._dense(self._produced)

    @cached_property
    def consumption_status(self) -> dict[str, torch.Tensor]:
        """Task -> int8 [highest global index + 1]: 1 where the task has consumed the sample."""
        return {task: self._dense(column) for task, column in self._consumed.items()}

    def _dense(self, column: np.ndarray) -> torch.Tensor:
        import torch

        dense = np.zeros((int(self._rows.max(initial=-1)) + 1, *column.shape[1:]), "i1")
        dense[self._rows] = column
        return torch.from_numpy(dense)

    def __repr__(self) -> str:
        return (
            f"PartitionSnapshot({self.partition_id!r}, {self.total_samples_num} samples, "
            f"fields {list(self.field_name_mapping)}, tasks {list(self._consumed)})"
        )
