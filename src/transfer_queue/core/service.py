"""What a feature of the controller keeps outside of the state, and when the controller calls it.

A feature stands in modules of its own: handlers of its requests, records with their appliers, decisions, and a
`Service` if something has to be kept. One line of `core.services` registers it. The controller and the kernel name no
feature: they call the hooks of those services that run, and only the hooks that a service defines. So a feature that
nobody has used costs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.events.records import Record
from transfer_queue.core.state.wait_queues import ParkedRequest

if TYPE_CHECKING:
    from transfer_queue.core.control.context import ControllerContext
    from transfer_queue.core.state.partition import Partition

ServiceT = TypeVar("ServiceT", bound="Service")
MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def observes(*kinds: type) -> Callable[[MethodT], MethodT]:
    """Call the decorated method of a running service with each record of these types, after it was applied.

    The method of a request type is called with the client and the request, before it is handled. Requests that change
    nothing (`registry.READS`) are not observed.
    """

    def mark(method: MethodT) -> MethodT:
        method.observed = kinds  # type: ignore[attr-defined]
        return method

    return mark


class Service:
    """What one feature keeps outside of the state.

    A service starts when it is used for the first time (`context.services[Kind]`), or earlier by `must_start` and
    `begins_with`. It must
    derive everything from the state, because it has not seen the records before its start. Its methods that are named
    like those here are hooks, which return the effects of what they do.
    """

    observed: ClassVar[list[tuple[type, str]]] = []
    """Types of records and requests, each with a method that observes it."""

    begins_with: ClassVar[tuple[type, ...]] = ()
    """The service starts when a record of one of these types was applied."""

    def __init_subclass__(cls) -> None:
        """Collect the methods that observe something."""
        super().__init_subclass__()
        methods = [(name, method.observed) for name, method in vars(cls).items() if hasattr(method, "observed")]
        cls.observed = [*cls.observed, *((kind, name) for name, kinds in methods for kind in kinds)]

    def __init__(self, context: ControllerContext) -> None:
        self.context = context

    @classmethod
    def must_start(cls, context: ControllerContext) -> bool:
        """Return whether it must run now: it is always used, or the configuration or the state needs it.

        Asked at the start of the controller, and when another state was loaded.
        """
        return False

    # ------------------------------------------------------------ times

    def next_due(self) -> float | None:
        """Return the time of the next `on_due`; None if there is none. Asked after each event that changes something.

        A time that has passed means: as soon as possible.
        """
        raise NotImplementedError

    def on_due(self) -> list[Effect]:
        """Do what is due."""
        raise NotImplementedError

    def when_settled(self) -> list[Effect]:
        """Begin what has waited until all requests that can be met were met. It may lead to further ones."""
        raise NotImplementedError

    def after_event(self) -> list[Effect]:
        """Do what follows from an event, after all requests that it can meet were met."""
        raise NotImplementedError

    # ------------------------------------------------------------ clients and units

    def on_connected(self, client: str) -> None:
        """Note that a client has opened a connection, its first one or a further one."""

    def on_connection_ended(self, client: str, peer: int) -> None:
        """Forget a connection. What waits on it will not be answered."""

    def on_client_left(self, client: str, announced: bool) -> list[Effect]:
        """Note that the last connection of a client has ended. announced: the client has said that it closes."""
        raise NotImplementedError

    def on_client_gone(self, client: str) -> None:
        """Forget a client whose connections have all ended, or who has not come back after a restart in time."""

    def on_unit_gone(self, unit: int) -> None:
        """Forget the connection of a storage unit, and what it has reported on it."""

    # ------------------------------------------------------------ requests

    def on_partition_changed(self, partition: Partition) -> None:
        """Note that something happened to a partition, before the requests that wait for it are looked at."""

    def on_wait_ended(self, waiting: ParkedRequest, met: bool) -> None:
        """Note that a request does not wait any more. met: whether it got what it waited for."""

    def holds_reply(self, client: str, send: Send, again: bool) -> bool:
        """Return whether this service keeps a reply to a put back. again: the client has asked again."""
        raise NotImplementedError

    def on_extents_unneeded(self) -> list[Effect]:
        """Act after an event because extents of units are not needed any more."""
        raise NotImplementedError

    def is_working(self) -> bool:
        """Return whether it may still make space or rows by itself, so that no put or claim waits for ever."""
        raise NotImplementedError


_HOOKS = [
    name for name in vars(Service) if not name.startswith("_") and name not in ("observed", "begins_with", "must_start")
]


class Services(dict[type[Any], Any]):
    """The services that run. `services[Kind]` starts one that does not run yet."""

    def __init__(self, context: ControllerContext, features: Iterable[type[Service]]) -> None:
        super().__init__()
        self._context = context
        self._features = list(features)
        self.with_hook: dict[str, list[Any]] = {name: [] for name in _HOOKS}
        """Name of a hook -> the running services that define it, in the order of `core.services`."""
        self.requests: dict[type, list[Callable[[str, Any], None]]] = {}
        """Type of a request -> the methods that observe it."""
        for kind in self._features:
            if kind.begins_with:
                context.log.observe(kind.begins_with, functools.partial(self._start, kind))

    if TYPE_CHECKING:

        def __getitem__(self, kind: type[ServiceT]) -> ServiceT:
            """Return a service, which starts if it does not run."""

        def get(self, kind: type[ServiceT]) -> ServiceT | None:  # type: ignore[override]
            """Return a service if it runs."""

    def __missing__(self, kind: type[ServiceT]) -> ServiceT:
        service = self[kind] = kind(self._context)
        for name, running in self.with_hook.items():
            if getattr(kind, name) is not getattr(Service, name):
                running.append(service)
                running.sort(key=lambda each: self._features.index(type(each)))
        for observed, name in kind.observed:
            if issubclass(observed, Record):
                self._context.log.observe([observed], getattr(service, name))
            else:
                self.requests.setdefault(observed, []).append(getattr(service, name))
        return service

    def _start(self, kind: type[Service], record: Record) -> None:
        self[kind]

    def start_needed(self) -> None:
        """Start the services that must run now."""
        for kind in self._features:
            if kind not in self and kind.must_start(self._context):
                self[kind]

    def due(self, now: float) -> Iterator[Any]:
        """Iterate over the services that have something to do at this time."""
        for service in self.with_hook["next_due"]:
            when = service.next_due()
            if when is not None and when <= now:
                yield service
