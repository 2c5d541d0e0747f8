"""A view of a client for a loader and its `fetch_batch_fn`: its claims hand nothing over, because the loader does."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

from transfer_queue.client._generated_methods import GeneratedMethods
from transfer_queue.client.operations.fetch_operations import KnownRows


def claiming(client: GeneratedMethods, *, again: bool = False, known: KnownRows | None = None) -> GeneratedMethods:
    """Return a view of a client whose claims hand nothing over: whoever uses it does, or returns the batches.

    The leases of what it claims are in the metadata and in `_operations.held`. It has everything else of the client,
    also what a subclass has changed.

    Args:
        client: The client.
        again: True if the claims return only batches that were dealt before. Default: False.
        known: Rows that they return instead, without a claim. Default: none.
    """
    operations = client._operations._claiming(again=again, known=known)  # connects, before the client is copied
    view: Any = copy.copy(client)
    view.__class__ = _view_of(type(client))
    view._claims = operations
    return view  # type: ignore[no-any-return]


@lru_cache
def _view_of(kind: type) -> type:
    """Return the class of views of clients of this class."""
    if "_claims" in vars(kind):
        return kind  # it is the class of a view
    return type(kind.__name__, (kind,), {"_claims": None, "_operations": property(lambda self: self._claims)})
