"""A view of a client whose claims return batches that were dealt before, for a loader and its `fetch_batch_fn`."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from transfer_queue.client._generated_methods import GeneratedMethods
from transfer_queue.client.data.data_path import Operation
from transfer_queue.client.operations.fetch_operations import KnownRows
from transfer_queue.client.operations.operations import Operations

T = TypeVar("T")


class ClaimView(GeneratedMethods):
    """A client with other operations. It has everything else of the client.

    Args:
        client: The client.
        operations: The operations of the same client, with other claims.
    """

    def __init__(self, client: GeneratedMethods, operations: Operations) -> None:
        self._client = client
        self._bound_operations = operations

    @property
    def _operations(self) -> Operations:
        return self._bound_operations

    def _run(self, operation: Operation[T]) -> T:
        return self._client._run(operation)

    def _run_async(self, operation: Operation[T]) -> Coroutine[Any, Any, T]:
        return self._client._run_async(operation)

    def _run_joining(self, operation: Operation[T]) -> Coroutine[Any, Any, T]:
        return self._client._run_joining(operation)

    def _run_threaded(self, operation: Operation[T]) -> Coroutine[Any, Any, T]:
        return self._client._run_threaded(operation)

    def __getattr__(self, name: str) -> Any:
        client = vars(self).get("_client")  # a copy asks for attributes before it has any
        if client is None:
            raise AttributeError(name)
        return getattr(client, name)


def claiming(client: GeneratedMethods, *, again: bool = False, known: KnownRows | None = None) -> GeneratedMethods:
    """Return a view of a client whose claims deal nothing.

    Args:
        client: The client.
        again: True if they return only batches that were dealt before.
        known: Rows that they return instead, without a claim.
    """
    return ClaimView(client, client._operations._claiming(again=again, known=known))
