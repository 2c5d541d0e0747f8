"""The client of a system: `TransferQueueClient`."""

from transfer_queue.client.client import TransferQueueClient

__all__ = ["TransferQueueClient"]
