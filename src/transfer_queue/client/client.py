"""TransferQueueClient: runs the operations of `client.operations` in any thread, event loop or forked child."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np

from transfer_queue.client.attachment import Attachment
from transfer_queue.client.buffered_puts import MAX_DELAY, MAX_ROWS, BufferedPuts
from transfer_queue.client.conversion.arguments import introduction
from transfer_queue.client.data.lease_renewal import Renewer
from transfer_queue.client.key_lock import LockMethods
from transfer_queue.client.operations.operations import Operations
from transfer_queue.client.subscriptions import Subscriptions
from transfer_queue.client.units import SystemAddress
from transfer_queue.display import HtmlPage, short_name, short_repr
from transfer_queue.errors import NotInitializedError, TransferQueueError
from transfer_queue.messages.descriptors import SEPARATOR
from transfer_queue.messages.reports.progress_text import status_page
from transfer_queue.messages.system import Status, SystemStatus
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.field_columns import FieldColumn
from transfer_queue.net.calls import Operation, ask_controller
from transfer_queue.net.drivers.asyncio_driver import call_in_thread, run_async, run_joining
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.net.drivers.threaded_driver import run_threaded
from transfer_queue.net.session import Session, reply_decoder

T = TypeVar("T")

NOT_SHOWN = frozenset({"await_ready", "begin_checkpoint", "end_checkpoint", "load_samples", "register_task_sampler"})
"""Methods that the package itself uses. They work, but `dir()`, completion and the reference do not show them."""


class TransferQueueClient(Subscriptions, LockMethods):
    """Put and fetch samples of one system.

    Blocking methods work in any thread, inside a running event loop (which they block), and after a fork, where the
    child is a new client of the same system. Each `async_` method works in any event loop. Most programs get their
    client from `transfer_queue.get_client()`.

    An `async_` put or reservation whose task is cancelled leaves no samples. If a task has already got its samples, or
    it wrote into samples that exist, the cancellation came too late: the call returns normally. Only if the controller
    does not reply within 2 seconds, the task is cancelled without knowing. (A put into samples of several partitions
    ends after the partition that it has reached.)

    Every method takes `timeout`: the seconds in which a server must reply, or each of several servers. The default is
    the setting `timeouts.call` (60 s). A method raises WaitTimeoutError after that. The timeout of methods that wait
    for samples, changes or space is the time of this wait, and their docstrings give its default; a reply that is later
    than this wait and `timeouts.call` raises WaitTimeoutError. All examples assume the following lines.

    Args:
        system: The address of the system.
        task: The task of this process, which the timeline shows. Default: that of its last fetch.
        rank: The rank of this process in the task. Default: not known.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> import transfer_queue as tq
        >>> config = tq.init()
        >>> client = tq.get_client()
    """

    def __init__(self, system: SystemAddress, *, task: str | None = None, rank: int | None = None) -> None:
        self._system = system
        self._introduction = introduction(task, rank)
        self._lock = threading.RLock()  # a finalizer may use the client while its thread connects or closes
        self._closed = False
        self._attachment: Attachment | None = None
        self._session: Session
        """The session of the operations that `_operations` has made last."""
        self._bound: Operations | None = None
        self._renewer: Renewer | None = None
        _clients.add(self)

    @property
    def _operations(self) -> Operations:
        return self._bound or self._connect()

    def _connect(self) -> Operations:
        with self._lock:
            if self._closed:
                raise NotInitializedError("this client was closed; call transfer_queue.init() for a new one")
            if self._bound is None:
                attachment = Attachment(self._system, introduction=self._introduction)
                bound = Operations(attachment)
                if self._bound is None:  # otherwise a finalizer has connected meanwhile
                    self._attachment, self._session, self._bound = attachment, attachment.session, bound
                    self._renewer = Renewer(attachment.renewals, attachment.session.clock, self._renew)
            return self._bound

    def _run(self, operation: Operation[T]) -> T:
        return run_blocking(self._session, operation)

    def _run_aside(self, operation: Operation[T]) -> Future[T]:
        return call_in_thread(partial(self._run, operation), name="transfer_queue fetch ahead", daemon=False)

    def _run_async(self, operation: Operation[T]) -> Coroutine[Any, Any, T]:
        return run_async(self._session, operation)  # not awaited: a coroutine around it would cost time in each call

    def _run_joining(self, operation: Operation[T]) -> Coroutine[Any, Any, T]:
        return run_joining(self._session, operation)

    async def _run_threaded(self, operation: Operation[T]) -> T:
        return await run_threaded(self._session, operation)

    def _renew(self, operation: Operation[None]) -> None:
        attachment = self._attachment
        if attachment is not None:
            run_blocking(attachment.session, operation)

    def _introduce(self, task: str | None, rank: int | None) -> None:
        """Send the task and rank of this process to the controller. A forked child sends the same ones."""
        given = introduction(task, rank)
        if given is not None:
            self._introduction = given
            self._run(self._operations._introduce(given))

    def _read_value(self, partition: str, index: int, name: str) -> Any:
        """Return one value. The name of a field inside a nested TensorDict contains `SEPARATOR`."""
        meta = BatchMeta._from_columns(np.array([index], "<i8"), partition, [FieldColumn(name, None)])
        value: Any = self.get_data(meta)
        for part in name.split(SEPARATOR):
            value = value[part]
        return value[0]

    def buffered(self, max_rows: int = MAX_ROWS, max_delay: float | None = MAX_DELAY) -> BufferedPuts:
        """Return a buffer for puts of single samples, which are published many at a time.

        This is for blocking code that puts row by row. At the end of its `with` block everything is published.
        Concurrent `async_kv_put` need no buffer.

        Args:
            max_rows: The number of puts at which the buffer is published, in the call that reaches it. Default: 256.
            max_delay: Seconds after which a put is published at the latest; None for no limit. Default: 0.05.

        Returns:
            The buffer, a context manager.

        Raises:
            InvalidArgumentError: An argument is not valid.

        Example:
            >>> with client.buffered(max_rows=100) as puts:
            ...     for number in range(250):
            ...         puts.kv_put(f"row-{number}", "train_0", {"reward": torch.tensor(float(number))})
            >>> len(client.kv_list("train_0")["train_0"])
            250
        """
        return BufferedPuts(lambda: self._operations, lambda operation: self._run(operation), max_rows, max_delay)

    @property
    def client_id(self) -> str:
        """The id of this client. A forked child has another one.

        Example:
            >>> client.client_id == client.client_id
            True
        """
        return self.storage_manager.client_id

    @property
    def storage_manager(self) -> Attachment:
        """The object with this client's state, for example the storage units that it knows.

        Example:
            >>> client.storage_manager is not None
            True
        """
        self._connect()
        assert self._attachment is not None
        return self._attachment

    @property
    def closed(self) -> bool:
        """True after `close` was called.

        Example:
            >>> client.closed
            False
        """
        return self._closed

    def close(self) -> None:
        """Release everything that this client holds, and close its connections. Further calls do nothing.

        The process stays attached to the system. `tq.close()` detaches the process. The verdict does not report a
        client that was closed as gone, unless an exception ends the process or is being handled.

        Example:
            >>> client.close()
            >>> client.closed
            True
        """
        with self._lock:
            self._closed = True
            attachment, self._attachment, self._bound = self._attachment, None, None
            renewer, self._renewer = self._renewer, None
        if attachment is None:
            return
        if renewer is not None:
            renewer.close(CLOSE_SECONDS)
        try:
            attachment.session.grace = min(attachment.session.grace, CLOSE_SECONDS)
            run_blocking(attachment.session, attachment.leave(in_order=not _is_failing()))
        except TransferQueueError:
            pass  # the system is gone, and with it everything that was leased
        finally:
            attachment.close()

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name.removeprefix("async_") not in NOT_SHOWN]

    def __repr__(self) -> str:
        state = "closed" if self._closed else "not connected yet" if self._attachment is None else "connected"
        attachment = self._attachment  # another thread may close the client in the meantime
        own = "" if attachment is None else f", client_id={short_repr(attachment.client_id[:8])}"
        return f"TransferQueueClient(system={short_repr(getattr(self._system, 'name', None))}{own}, {state})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the status of the system, or why it cannot be reached."""
        name = short_name(getattr(self._system, "name", "the system"))
        try:
            self._connect()
            # unlike `status`, this does not ask first for what the client needs to know of its system
            status = self._run(ask_controller(Status(), SystemStatus, DISPLAY_SECONDS))
        except Exception as error:
            page = HtmlPage("TransferQueueClient", f"of the system {name}")
            page.alarms.append(f"The system cannot be reached. {type(error).__name__}: {error}")
            return page.html()
        page = status_page(status.partitions, status.units, status.trouble, "TransferQueueClient")
        page.summary = f"of the system {name}: {page.summary}"
        return page.html()

    def __enter__(self) -> TransferQueueClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _after_fork(self) -> None:
        """In a forked child: start again. A thread of the parent, which the child does not have, may hold the lock."""
        self._lock = threading.RLock()
        attachment, self._attachment, self._bound = self._attachment, None, None
        self._renewer = None  # the child does not have its thread
        if attachment is not None:
            attachment.after_fork()


def _is_failing() -> bool:
    """Return whether an exception is being handled in this thread, or has ended the program."""
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # in an interactive session, an earlier command may have failed
        error = getattr(sys, "last_value", None)
    return isinstance(error, Exception) or (isinstance(error, SystemExit) and error.code not in (None, 0))


CLOSE_SECONDS = 5.0
"""Seconds that a closing client waits for its system."""
DISPLAY_SECONDS = 2.0
"""Seconds that a notebook waits for the status of the system."""
_clients: weakref.WeakSet[TransferQueueClient] = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_clients):
        client._after_fork()


os.register_at_fork(after_in_child=_after_fork)
reply_decoder()  # see there
