"""The steps by which a loader gets its next batch. The caller runs them: in its thread, or in an event loop.

A function that makes several steps is a generator, like the operations of a client: it yields each step, and gets its
result. So one code decides what is fetched, acknowledged and kept, however it is run.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, wait
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar, Union

from transfer_queue.client._generated_methods import GeneratedMethods
from transfer_queue.net.drivers.blocking_driver import BLOCKED_SECONDS, blocks_loop, warn_of_blocked_loop

T = TypeVar("T")


class OperationStep(NamedTuple):
    """Run an operation of a client."""

    client: GeneratedMethods
    operation: str
    """The name of the operation."""
    arguments: tuple[Any, ...] = ()
    more: Mapping[str, Any] = MappingProxyType({})
    """The arguments that are passed by name."""


class FunctionStep(NamedTuple):
    """Call a function of the user, which may block. It runs to its end, even if no caller waits for it any more."""

    function: Callable[[], Any]


class Reception(Protocol):
    """An item that will arrive, which any thread can await. If it is not taken, it stays for the next caller."""

    def begin(self) -> Future[None]:
        """Return a future that is done when `take` does not block."""

    def take(self) -> Any:
        """Wait until something has arrived, and return it."""


class ReceptionStep(NamedTuple):
    """Wait until something has arrived, and take it. The result is `NOT_RECEIVED` if that takes too long."""

    reception: Reception
    seconds: float | None
    """The longest wait; None for no limit."""


NOT_RECEIVED = object()
"""The result of a `ReceptionStep` whose time has ended."""

Step = Union[OperationStep, FunctionStep, ReceptionStep]
Steps = Generator[Step, Any, T]


def ask_blocking(client: GeneratedMethods, operation: str, *arguments: Any, **more: Any) -> Any:
    """Run an operation of a client in this thread. An operation whose name begins with "_" has no method."""
    if operation.startswith("_"):
        return client._run(getattr(client._operations, operation)(*arguments, **more))
    return getattr(client, operation)(*arguments, **more)


async def ask_in_loop(client: GeneratedMethods, operation: str, *arguments: Any, **more: Any) -> Any:
    """Run an operation of a client in the event loop. See `ask_blocking`."""
    if operation.startswith("_"):
        return await client._run_async(getattr(client._operations, operation)(*arguments, **more))
    return await getattr(client, f"async_{operation}")(*arguments, **more)


def run_steps(steps: Steps[T], ask: Callable[..., Any] = ask_blocking) -> T:
    """Run steps in this thread, and return their result. If they block an event loop for long, warn once.

    Args:
        steps: The steps.
        ask: A function (client, operation, ...) that runs an operation.
    """
    begun = time.monotonic()
    try:
        step = next(steps)
        while True:
            if time.monotonic() - begun >= BLOCKED_SECONDS and blocks_loop():
                warn_of_blocked_loop()
            try:
                result = _run_step(step, ask)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as end:
        value: T = end.value
        return value


def _run_step(step: Step, ask: Callable[..., Any]) -> Any:
    if isinstance(step, OperationStep):
        return ask(step.client, step.operation, *step.arguments, **step.more)
    if isinstance(step, FunctionStep):
        return step.function()
    return _receive(step.reception, step.seconds)


def _receive(reception: Reception, seconds: float | None) -> Any:
    """Wait in this thread. If that blocks an event loop for long, warn once."""
    begun = time.monotonic()
    may_block = blocks_loop() and (seconds is None or seconds > BLOCKED_SECONDS)
    if may_block and not wait((reception.begin(),), BLOCKED_SECONDS).done:
        warn_of_blocked_loop()
    if seconds is not None and not wait((reception.begin(),), seconds - (time.monotonic() - begun)).done:
        return NOT_RECEIVED
    return reception.take()


def call_in_thread(function: Callable[[], T]) -> Future[T]:
    """Call a function in a separate thread, because long calls would fill an executor."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # it cannot be cancelled
    context = contextvars.copy_context()

    def call() -> None:
        try:
            result = context.run(function)
        except StopIteration as error:  # an asyncio future cannot hold it; a generator raises the same instead
            failure = RuntimeError(f"a function that a loader calls raised {error!r}")
            failure.__cause__ = error
            future.set_exception(failure)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=call, name="transfer_queue loader", daemon=True).start()
    return future
