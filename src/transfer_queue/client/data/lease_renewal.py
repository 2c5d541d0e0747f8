"""Renews leases in the background while their samples are in use, with one request for all leases.

A lease is renewed every third of its time, until it ends or no object refers to it any more. So a lease ends by itself
if its metadata was lost, or if its process was stopped or died.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Union

import msgspec

from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Renew
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.metadata.batch_columns import BatchLease
from transfer_queue.net.calls import CONTROLLER, Call, Request

TIMES = 3
"""Renewals within the time of a lease, of which two may fail."""


REPEAT_SECONDS = 5.0
"""Seconds after which a notice is repeated if no request of the client was answered since it was written. The client
must do this before it counts as gone (`core.absent_clients.ABSENCE_SECONDS`)."""


class LockLease(msgspec.Struct, frozen=True, weakref=True, eq=False):
    """The lease of a lock, which is renewed while an object refers to it."""

    partition: str
    token: int
    seconds: float


Renewable = Union[BatchLease, LockLease]
"""What a client renews: the lease of a batch, or a lock of keys."""


class Renewals:
    """The leases that a client renews, and the notices that it repeats.

    Args:
        clock: The clock.
        has_notices: Returns whether there are notices that the controller may not have read. Each request carries them.
    """

    def __init__(self, clock: Callable[[], float], has_notices: Callable[[], bool] = lambda: False) -> None:
        self._clock = clock
        self._has_notices = has_notices
        self._notices_due: float | None = None
        self._lock = threading.Lock()
        self._leases: dict[int, tuple[weakref.ref[Renewable], float]] = {}
        """Token -> the lease, and the time of its next renewal."""
        self._kept: dict[int, Renewable] = {}
        """Token -> a lease that is renewed without other references."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a lease was added."""

    def add(self, lease: Renewable, *, keep: bool = False) -> None:
        """Renew this lease from now on; with `keep` until it ends, also if no object refers to it."""
        with self._lock:
            self._leases[lease.token] = weakref.ref(lease), self._clock() + lease.seconds / TIMES
            if keep:
                self._kept[lease.token] = lease
        self.on_change()

    def note_notice(self) -> None:
        """Note that a notice was written, to repeat it if no request of the client carries it before."""
        if self._notices_due is None:
            self._notices_due = self._clock() + REPEAT_SECONDS
            self.on_change()

    def is_renewed(self, lease: Renewable) -> bool:
        """Whether this lease is renewed because it may still be in force."""
        return lease.token in self._leases

    def forget(self, token: int) -> None:
        """Stop renewing a lease that has ended."""
        with self._lock:
            self._leases.pop(token, None)
            self._kept.pop(token, None)

    def next_deadline(self) -> float | None:
        """Return the time of the next renewal; None if there is nothing to renew or to repeat."""
        with self._lock:
            self._leases = {token: entry for token, entry in self._leases.items() if entry[0]() is not None}
            due = [when for _, when in self._leases.values()]
            return min(due if self._notices_due is None else [*due, self._notices_due], default=None)

    def renew(self) -> Generator[Call, AnyReply, None]:
        """Renew all leases if the next renewal is due, and forget those that have ended."""
        with self._lock:
            now = self._clock()
            due = any(when <= now for _, when in self._leases.values())
            leases = [lease for ref, _ in self._leases.values() if (lease := ref()) is not None] if due else []
            for lease in leases:  # set before the request, so that a failed renewal is not repeated at once
                self._leases[lease.token] = weakref.ref(lease), now + lease.seconds / TIMES
            repeats = self._notices_due is not None and self._notices_due <= now and self._has_notices()
            if self._notices_due is not None and self._notices_due <= now:
                self._notices_due = now + REPEAT_SECONDS if repeats else None
        if not (leases or repeats):
            return
        reply = yield Request(CONTROLLER, Renew([(lease.partition, lease.token) for lease in leases]))
        for lease, held in zip(leases, reply.value if isinstance(reply, Done) else ()):
            if not held:
                self.forget(lease.token)


class Renewer:
    """Renews leases in a thread, which exists while there are leases to renew.

    `run` is a method that runs an operation in the calling thread. The renewer has only weak references to its object
    and to leases.
    """

    def __init__(self, renewals: Renewals, clock: Callable[[], float], run: Callable[..., object]) -> None:
        self._renewals = weakref.ref(renewals)
        self._clock = clock
        self._run = weakref.WeakMethod(run)
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        renewals.on_change = self.wake

    def wake(self) -> None:
        """Start the thread, or wake it, because a lease was added."""
        with self._lock:
            if self._closed:
                return
            self._woken.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._renew, name="transfer_queue leases", daemon=True)
                self._thread.start()

    def close(self, seconds: float) -> None:
        """Stop renewing, and wait at most this time for a renewal under way."""
        with self._lock:
            self._closed, thread = True, self._thread
            self._woken.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def _renew(self) -> None:
        while (wait := self._pause()) is not None:
            self._woken.wait(wait)
            self._woken.clear()
            renewals, run = self._renewals(), self._run()
            if renewals is not None and run is not None and not self._closed:
                with contextlib.suppress(TransferQueueError):  # the next renewal is tried when it is due
                    run(renewals.renew())
            del renewals, run

    def _pause(self) -> float | None:
        """Return the seconds until the next renewal; None if there is none, so that the thread ends."""
        with self._lock:
            renewals = self._renewals()
            due = None if renewals is None or self._closed else renewals.next_deadline()
            if due is None:
                self._thread = None
                return None
            return max(0.0, due - self._clock())
