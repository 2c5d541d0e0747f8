"""What a server says may contradict itself: then it is an error of the tree, whatever it was that stumbled over it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transfer_queue.errors import ProtocolError, TransferQueueError

_STUMBLES = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, StopIteration, TypeError, ValueError,
)  # fmt: skip


@contextlib.contextmanager
def sense_in(what: str) -> Iterator[None]:
    """Within it whatever is wrong with the data is a ProtocolError. what: the name of the data, for its message."""
    try:
        yield
    except TransferQueueError:
        raise
    except _STUMBLES as error:
        # contextlib takes a RuntimeError caused by a StopIteration for one of its own making
        cause = None if isinstance(error, StopIteration) else error
        raise ProtocolError(f"{what} makes no sense: {type(error).__name__}: {error}") from cause
