"""Says whether a tensor is a view: memory over the values in an arena, for which nothing was copied."""

from __future__ import annotations

import torch

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.storage.arena.arena_views import is_viewed


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view of values in the store, as a get with `copy=False` returns them.

    A slice of a view is one, too. A view holds the space of its values in the store: it is free for other values when
    no tensor refers to it any more.

    Args:
        tensor: The tensor, also a nested one.

    Returns:
        True if the elements are those in the store; False if they are in memory of their own.

    Raises:
        InvalidArgumentError: `tensor` is not a tensor.

    Example:
        >>> put = client.kv_batch_put(["a", "b"], "train_0", {"reward": torch.zeros(2)})
        >>> values = client.kv_batch_get(["a", "b"], "train_0", copy=False)
        >>> tq.is_view(values["reward"]), tq.is_view(values["reward"].clone())
        (True, False)
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(f"tensor must be a torch.Tensor, got a {type(tensor).__name__}; pass one field")
    elements = tensor.values() if tensor.is_nested else tensor
    return elements.is_cpu and elements.numel() > 0 and is_viewed(elements.data_ptr())
