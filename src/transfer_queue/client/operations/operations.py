"""Combines the operations of a client. Each is defined once, as a generator of calls, in the module of its topic.

`tools/generate_surface.py` generates the blocking and the awaitable methods of `TransferQueueClient`, and the KV
functions of the package, from the signatures and docstrings of the operations. An operation yields `Call`s, and its
driver sends the replies into it (`net/drivers/blocking_driver.py`, `net/drivers/asyncio_driver.py`, `testing/`). Every
operation takes `timeout=`, which `TransferQueueClient` explains.
"""

from __future__ import annotations

from transfer_queue.client.operations.checkpoint_operations import CheckpointOperations
from transfer_queue.client.operations.fetch_operations import FetchOperations
from transfer_queue.client.operations.kv_operations import KVOperations
from transfer_queue.client.operations.lease_operations import LeaseOperations, LockOperations
from transfer_queue.client.operations.partition_operations import PartitionOperations
from transfer_queue.client.operations.queue_operations import QueueOperations
from transfer_queue.client.operations.sample_operations import SampleOperations
from transfer_queue.client.operations.status_operations import StatusOperations
from transfer_queue.client.operations.update_operations import UpdateOperations


class Operations(
    FetchOperations,
    SampleOperations,
    PartitionOperations,
    StatusOperations,
    KVOperations,
    UpdateOperations,
    LockOperations,
    LeaseOperations,
    QueueOperations,
    CheckpointOperations,
):
    """All operations of one client."""
