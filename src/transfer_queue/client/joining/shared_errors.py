"""The error of a joined request whose outcome is unknown, for each operation that it carried."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from transfer_queue.errors import TransferQueueError
from transfer_queue.net.calls import Call


def share_error(calls: Sequence[Call], error: TransferQueueError) -> None:
    """Let each operation raise the error, in an object of its own."""
    for call in calls:
        call.outcome = copy.copy(error)
        call.outcome.__cause__ = error.__cause__
