"""For code that migrates: the type of what the controller answers about a partition, under the name it looks for.

The controller itself is `transfer_queue.core.controller`, and runs in a process of its own.
"""

from __future__ import annotations

from transfer_queue.partition_snapshot import PartitionSnapshot

__all__ = ["DataPartitionStatus"]

DataPartitionStatus = PartitionSnapshot
"""What `get_partition_snapshot` of the named Ray actor returns."""
