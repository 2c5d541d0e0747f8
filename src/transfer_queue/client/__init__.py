"""The client of a system: `TransferQueueClient`.

It is imported at its first use (PEP 562): `calls`, which the command line needs, has no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transfer_queue.client.client import TransferQueueClient

__all__ = ["TransferQueueClient"]


def __getattr__(name: str) -> Any:
    if name != "TransferQueueClient":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transfer_queue.client.client import TransferQueueClient

    globals()[name] = TransferQueueClient
    return TransferQueueClient
