"""The exceptions of queues. If Ray's queue is loaded in this process, they are also those of Ray.

Ray is never imported here: code that catches Ray's exceptions has imported them.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

from transfer_queue.errors import QueueEmptyError, QueueFullError

_OWN: dict[str, type[Exception]] = {"Empty": QueueEmptyError, "Full": QueueFullError}


def empty_error(message: str) -> Exception:
    """Return the exception for a queue that has no item."""
    return _make("Empty", message)


def full_error(message: str) -> Exception:
    """Return the exception for a queue that has no space."""
    return _make("Full", message)


def _make(name: str, message: str) -> Exception:
    theirs = getattr(sys.modules.get("ray.util.queue"), name, None)
    return (_OWN[name] if theirs is None else _combined(name, theirs))(message)


@lru_cache
def _combined(name: str, theirs: type[Exception]) -> type[Exception]:
    """Return a class that is the exception of this package and that of Ray."""
    own = _OWN[name]

    def reduce(error: Exception) -> tuple[Any, ...]:
        """Pickle by name, because a process that loads the exception may not have Ray's."""
        return _make, (name, *error.args)

    return type(own.__name__, (own, theirs), {"__module__": own.__module__, "__reduce__": reduce})
