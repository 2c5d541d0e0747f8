"""The type of a partition's snapshot, under the name that code for other implementations imports.

The controller itself is `transfer_queue.core.controller`. It runs in a process of its own.
"""

from __future__ import annotations

from transfer_queue.metadata.partition_snapshot import PartitionSnapshot

__all__ = ["DataPartitionStatus"]

DataPartitionStatus = PartitionSnapshot
"""The type that `get_partition_snapshot` of the named Ray actor returns."""
