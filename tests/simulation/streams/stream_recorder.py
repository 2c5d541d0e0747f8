"""Records the events of the controllers of a simulated run: see `tests.simulation.streams`.

It watches the methods through which the simulation reaches a controller. If these change, so does this module.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import msgspec

from tests.simulation import chaos, fault_injector, lock_run
from tests.simulation.faulty_cluster import FaultyCluster
from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.controller import Controller
from transfer_queue.messages.checkpoints import LoadState
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.net.calls import CONTROLLER
from transfer_queue.net.session import Target
from transfer_queue.testing.network import Network

Event = list[Any]
MANY_FAULTS = 96
"""The maximum number of faults of a run of the kind "faults"."""
RUNS: dict[str, Callable[[int], object]] = {
    "ordinary": chaos.run,
    "takeovers": functools.partial(chaos.run, variant="takeovers"),
    "locks": lambda seed: lock_run.run(seed, takeovers=bool(seed % 2)),
    "stores": functools.partial(chaos.run, variant="stores"),
    "faults": chaos.run,
}
"""How a seed of each kind is run."""

_encode = msgspec.msgpack.Encoder().encode


class Recorder:
    """Collects the events of one run."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._lasts: list[object] = []
        """For each event since the last restart: the last record that it led to, or None."""
        self._first = 0
        """The number of the first of these events."""
        self._written: dict[int, object] = {}
        """The records that are in the journal, by id."""
        self._files: set[str] = set()
        self._controller: Controller | None = None
        self._cluster: FaultyCluster | None = None
        self._is_inside = False

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Record the run that happens in the block."""
        methods: dict[tuple[type, str], Callable[..., Any]] = {
            (FaultyCluster, "__init__"): self._around_cluster,
            (FaultyCluster, "_happened"): self._around_happened,
            (Network, "deliver"): self._around_message,
            **{(FaultyCluster, name): self._around_stop for name in ("stop", "go_on")},
            (Controller, "__init__"): self._around_start,
            **{(Controller, name): self._around_event for name in FORMS},
        }
        with contextlib.ExitStack() as stack:
            for (owner, name), around in methods.items():
                method = getattr(owner, name)
                wrapped = functools.partialmethod(around_method, functools.partial(around, name), method)
                stack.enter_context(mock.patch.object(owner, name, wrapped))
            yield
        assert self._cluster is not None
        self.events.append(["end", self._cluster.clock.now])

    def _around_cluster(
        self, name: str, method: Callable[..., None], cluster: FaultyCluster, *given: Any, **more: Any
    ) -> None:
        self._cluster = cluster
        method(cluster, *given, **more)

    def _around_happened(
        self, name: str, method: Callable[..., None], cluster: FaultyCluster, records: list[Any]
    ) -> None:
        self._written |= {id(record): record for record in records}
        method(cluster, records)

    def _around_message(self, name: str, method: Callable[..., bool], network: Network) -> bool:
        """Let the controller complete all jobs before and after each message, as the driver does."""
        self._complete_jobs()
        is_delivered = method(network)
        self._complete_jobs()
        return is_delivered

    def _complete_jobs(self) -> None:
        cluster = self._cluster
        while cluster is not None and CONTROLLER not in cluster.stopped:
            due = cluster._deadline_of(cluster.controller)
            if due is None or due > cluster.clock.now:
                return
            cluster._tick(cluster.controller)

    def _around_stop(
        self, name: str, method: Callable[..., None], cluster: FaultyCluster, target: Target, *given: Any
    ) -> None:
        before = CONTROLLER in cluster.stopped
        method(cluster, target, *given)
        if cluster.controller is self._controller and (CONTROLLER in cluster.stopped) != before:
            self._note([name, cluster.clock.now], None)

    def _around_start(
        self,
        name: str,
        method: Callable[..., None],
        controller: Controller,
        core: CoreConfig,
        *given: Any,
        **more: Any,
    ) -> None:
        method(controller, core, *given, **more)
        assert self._cluster is not None
        now = self._cluster.clock.now
        skew = self._cluster._controller_now - now
        if self._controller is None:
            sampler = core.sampler
            settings = msgspec.json.decode(core.client_config)["settings"]
            names = inspect.signature(type(sampler)).parameters
            arguments = {each: getattr(sampler, each) for each in names if hasattr(sampler, each)}
            self.events.append(["system", now, skew, settings, type(sampler).__name__, arguments])
        else:
            self._drop_lost_events()
            self.events.append(["restart", now, skew])
        self._controller, self._first, self._lasts = controller, len(self.events), []
        if CONTROLLER in self._cluster.stopped:
            self._note(["stop", now], None)

    def _drop_lost_events(self) -> None:
        """Drop the first event whose records are not in the journal of the next controller, and all events after it."""
        for number, last in enumerate(self._lasts):
            if last is not None and id(last) not in self._written:
                time = self.events[self._first + number][1]
                self.events[self._first + number :] = [["stop", time]]
                return

    def _around_event(self, name: str, method: Callable[..., Any], controller: Controller, *given: Any) -> Any:
        if self._is_inside or controller is not self._controller:  # it calls itself, or its term has ended
            return method(controller, *given)
        assert self._cluster is not None
        if name != "tick":
            self._complete_jobs()
        self._note_files(name, given)
        event = [name, self._cluster.clock.now, *FORMS[name](*given)]
        before = len(controller.context.log.records)
        self._is_inside = True
        try:
            return method(controller, *given)
        finally:
            self._is_inside = False
            records = controller.context.log.records[before:]
            written = self._cluster._journal is None  # while the cluster is made
            if records or name != "tick":
                self._note(event, records[-1] if records and not written else None)

    def _note(self, event: Event, last: object) -> None:
        self.events.append(event)
        self._lasts.append(last)

    def _note_files(self, name: str, given: tuple[Any, ...]) -> None:
        """Note the content of the file that a request names."""
        body = given[2].body if name == "handle" else None
        if isinstance(body, LoadState) and body.name not in self._files:
            assert self._cluster is not None
            path = self._cluster.states.path(body.name)
            if path.exists():
                self._files.add(body.name)
                self._note(["file", self._cluster.clock.now, body.name, path.read_bytes()], None)


def around_method(self: Any, around: Callable[..., Any], method: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """Call what watches a method of `self` in place of it."""
    return around(method, self, *given, **more)


def _form_of_request(client: str, peer: int, envelope: RequestEnvelope, now: float = 0.0) -> list[Any]:
    return [client, peer, _encode(envelope)]


FORMS: dict[str, Callable[..., list[Any]]] = {
    "on_connect": lambda client, peer: [client, peer],
    "on_disconnect": lambda client, peer, now: [client, peer],
    "handle": _form_of_request,
    "tick": lambda now: [],
    "handle_puts": lambda puts, now: [[_form_of_request(*put) for put in puts]],
}
"""How the arguments of a method of the controller are written in an event."""


def record(kind: str, seed: int) -> list[Event]:
    """Run a seed of a kind, and return the events of its controllers. Raises the error of the run."""
    recorder = Recorder()
    most = MANY_FAULTS if kind == "faults" else fault_injector.MAX_FAULTS
    with mock.patch.object(fault_injector, "MAX_FAULTS", most), recorder.watch():
        RUNS[kind](seed)
    return recorder.events
