"""The leases under which the samples of a batch were given: what its metadata carries along, and who renews it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


class BatchLease:
    """One lease. It is renewed as long as anything refers to this object: the metadata, and every cut of it.

    token: what the controller knows it by. seconds: how long it lasts without being renewed. rows: global indexes of
    its samples, ascending. deliveries: the delivery number of each of them, from 1, and 0 for samples that were
    cleared before; None if all are 1.
    """

    __slots__ = ("__weakref__", "deliveries", "partition", "rows", "seconds", "token")

    def __init__(
        self, partition: str, token: int, seconds: float, rows: Rows, deliveries: npt.NDArray[np.int32] | None
    ) -> None:
        self.partition = partition
        self.token = token
        self.seconds = seconds
        order = np.argsort(rows, kind="stable")
        self.rows = rows[order]
        self.deliveries = None if deliveries is None else deliveries[order]

    def deliveries_of(self, rows: Rows) -> npt.NDArray[np.int64]:
        """The delivery number of each of these rows; -1 for rows of other leases."""
        at = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        known = self.rows[at] == rows
        counts = np.ones(len(rows), "i8") if self.deliveries is None else self.deliveries[at].astype("i8")
        return np.where(known, counts, -1)

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchLease, (self.partition, self.token, self.seconds, self.rows, self.deliveries)


def joined(leases: Iterable[tuple[BatchLease, ...]]) -> tuple[BatchLease, ...]:
    """The leases of several batches, each once."""
    return tuple({lease.token: lease for some in leases for lease in some}.values())
