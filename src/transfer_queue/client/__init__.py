"""The client of a system: `TransferQueueClient`, also under the name `AsyncTransferQueueClient`.

The class is imported at its first use (PEP 562), so that the command line can use other modules here without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transfer_queue.client.client import TransferQueueClient
    from transfer_queue.client.client import TransferQueueClient as AsyncTransferQueueClient

__all__ = ["AsyncTransferQueueClient", "TransferQueueClient"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transfer_queue.client.client import TransferQueueClient

    globals()[name] = TransferQueueClient
    return TransferQueueClient
