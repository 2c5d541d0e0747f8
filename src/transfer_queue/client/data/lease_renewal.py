"""Keeps leases from running out while the samples are worked on: in the background, with one message for all of them.

A lease is renewed every third of its time, until it is over or nobody refers to it any more: what was lost on the way
runs out. So does what a stopped or dead process has.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Generator

from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Renew
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.metadata.batch_columns import BatchLease
from transfer_queue.net.calls import CONTROLLER, Call

TIMES = 3  # renewals within the time of a lease: two may be lost


class Renewals:
    """The leases that a client renews. clock: seconds. on_change: called when there is one more."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[int, tuple[weakref.ref[BatchLease], float]] = {}  # token -> when it is to be renewed
        self._kept: dict[int, BatchLease] = {}
        self.on_change: Callable[[], None] = lambda: None

    def add(self, lease: BatchLease, *, keep: bool = False) -> None:
        """Renews this lease from now on. keep: until it is over, even if nobody refers to it."""
        with self._lock:
            self._leases[lease.token] = weakref.ref(lease), self._clock() + lease.seconds / TIMES
            if keep:
                self._kept[lease.token] = lease
        self.on_change()

    def renews(self, lease: BatchLease) -> bool:
        """Whether this lease is renewed, because it may still be in force."""
        return lease.token in self._leases

    def forget(self, token: int) -> None:
        """A lease is over."""
        with self._lock:
            self._leases.pop(token, None)
            self._kept.pop(token, None)

    def next(self) -> float | None:
        """When the next renewal is due, on the clock; None where there is nothing to renew."""
        with self._lock:
            self._leases = {token: entry for token, entry in self._leases.items() if entry[0]() is not None}
            return min((when for _, when in self._leases.values()), default=None)

    def renew(self) -> Generator[Call, AnyReply, None]:
        """Renews all leases if it is time; forgets those that are over."""
        with self._lock:
            now = self._clock()
            due = any(when <= now for _, when in self._leases.values())
            leases = [lease for ref, _ in self._leases.values() if (lease := ref()) is not None] if due else []
            for lease in leases:  # before it is known whether this one succeeds: it is not tried at once again
                self._leases[lease.token] = weakref.ref(lease), now + lease.seconds / TIMES
        if not leases:
            return
        reply = yield Call(CONTROLLER, Renew([(lease.partition, lease.token) for lease in leases]))
        for lease, held in zip(leases, reply.value if isinstance(reply, Done) else ()):
            if not held:
                self.forget(lease.token)


class Renewer:
    """Does it in a thread, which is there while there is something to renew.

    run: a method that runs an operation in the calling thread. Who renews keeps neither its object nor leases alive.
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
        """There is a lease more."""
        with self._lock:
            if self._closed:
                return
            self._woken.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._renew, name="transfer_queue leases", daemon=True)
                self._thread.start()

    def close(self, seconds: float) -> None:
        """Renews no more; waits no longer than this for a renewal under way."""
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
                with contextlib.suppress(TransferQueueError):  # asked again when it is due again
                    run(renewals.renew())
            del renewals, run

    def _pause(self) -> float | None:
        """Seconds to the next renewal; None where there is none, and the thread ends."""
        with self._lock:
            renewals = self._renewals()
            due = None if renewals is None or self._closed else renewals.next()
            if due is None:
                self._thread = None
                return None
            return max(0.0, due - self._clock())
