"""LifoQueue and PriorityQueue: queues whose items are not taken in order of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.queues.fifo_queue import Queue


class LifoQueue(Queue):
    """A last-in, first-out queue: a get takes the newest item.

    Args:
        name: See `Queue`.
        maxsize: See `Queue`.
        prefetch: See `Queue`.
        actor_options: See `Queue`.

    Example:
        >>> queue = tq.LifoQueue("stack")
        >>> queue.put_many(["a", "b"])
        >>> queue.get()
        'b'
    """

    order = "lifo"


class PriorityQueue(Queue):
    """A queue whose gets take the item with the lowest priority value, and the oldest of equal ones.

    The priority is the item itself if it is a number, the first entry of a tuple or a list, or otherwise the attribute
    `priority` of the item.

    Args:
        name: See `Queue`.
        maxsize: See `Queue`.
        prefetch: See `Queue`.
        actor_options: See `Queue`.

    Example:
        >>> queue = tq.PriorityQueue("tasks")
        >>> queue.put_many([(2, "later"), (1, "soon")])
        >>> queue.get()
        (1, 'soon')
    """

    order = "priority"

    def _tags(self, items: Sequence[Any]) -> list[dict[str, Any] | None]:
        return [{"priority": -_priority_of(item)} for item in items]


def _priority_of(item: Any) -> float:
    value = item[0] if isinstance(item, (tuple, list)) and item else getattr(item, "priority", item)
    if not isinstance(value, Real) or value != value:
        raise InvalidArgumentError(
            f"the priority of an item must be a number: the item itself, its first entry, or its attribute priority; "
            f"got {value!r}"
        )
    return value  # type: ignore[return-value]
