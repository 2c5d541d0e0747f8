"""How a loader runs its operations: with its client, with an interruptible wait, or with a stand-in for a client.

What a loader does for its next batch is an operation, like those of a client: a generator of calls. So one code decides
what is fetched, acknowledged and kept, however it is run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from transfer_queue.client._generated_methods import GeneratedMethods
from transfer_queue.client.operations.operations import Operations
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.net.calls import Call, Operation, Pause, Work
from transfer_queue.net.drivers.blocking_driver import pause

T = TypeVar("T")


def operations_of(client: GeneratedMethods) -> Operations | None:
    """Return the operations of a client, which connects; None for a stand-in that has only methods."""
    operations = getattr(client, "_operations", None)
    return operations if isinstance(operations, Operations) else None


def run(client: GeneratedMethods, operation: Operation[T]) -> T:
    """Run an operation with this client, in this thread."""
    if operations_of(client) is None:
        return run_here(operation, lambda request: client._run(request))
    return client._run(operation)


async def run_async(client: GeneratedMethods, operation: Operation[T]) -> T:
    """Run an operation with this client, in this event loop. A stand-in blocks it."""
    return run(client, operation) if operations_of(client) is None else await client._run_async(operation)


def run_here(operation: Operation[T], exchange: Callable[[Operation[AnyReply]], AnyReply]) -> T:
    """Run an operation, with its work and pauses in this thread.

    Args:
        operation: The operation.
        exchange: Runs an operation of one request, and returns the reply.
    """
    try:
        call = next(operation)
        while True:
            try:
                reply = _make(call, exchange)
            except BaseException as error:
                call = operation.throw(error)
            else:
                call = operation.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


def _make(call: Call, exchange: Callable[[Operation[AnyReply]], AnyReply]) -> AnyReply:
    if isinstance(call, Work):
        call.function()
    elif isinstance(call, Pause):
        pause(call)
    else:
        return exchange(_one(call))
    return Done()


def _one(call: Call) -> Operation[AnyReply]:
    return (yield call)


def ask(client: GeneratedMethods, name: str, *arguments: Any, **named: Any) -> Operation[Any]:
    """Run an operation of a client. If the client has a method of its own for it, call this method instead."""
    method = getattr(client, name)
    if getattr(method, "__func__", None) is getattr(GeneratedMethods, name):
        return (yield from getattr(client._operations, name)(*arguments, **named))
    return (yield from call_function(partial(method, *arguments, **named)))


def call_function(function: Callable[[], T]) -> Operation[T]:
    """Call a function of the user, which may take long, and return its result."""
    results: list[T] = []
    yield Work(lambda: results.append(function()), is_users=True)
    return results[0]
