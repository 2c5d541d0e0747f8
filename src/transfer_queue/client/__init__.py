"""The client of a system: `TransferQueueClient`. Code that migrates can import it as `AsyncTransferQueueClient`, too.

It is imported at its first use (PEP 562): `calls`, which the command line needs, has no torch.
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
