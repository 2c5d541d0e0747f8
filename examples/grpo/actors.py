"""Runs the roles of a run as Ray actors; `processes.py` does the same with processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import ray
import transfer_queue as tq
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from processes import Roles, WorkerError, prepare
from settings import Settings

BESIDE_THE_DRIVER = "trainer"
"""Roles whose names begin so are on the driver's node: the ranks meet through a file in the run's folder."""


class Role:
    """An actor that plays one role. It is one process; Ray ends it with the driver."""

    def pid(self) -> int:
        """Return the id of the actor's process."""
        return os.getpid()

    def run(self, function: Callable[..., None], settings: Settings, name: str, arguments: tuple[Any, ...]) -> None:
        """Run the role to its end."""
        prepare(settings, name)
        try:
            function(settings, name, *arguments)
        finally:
            tq.close()


class Actors(Roles):
    """A context that ends its actors when it is left, with the interface of `processes.Processes`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._running: dict[str, Any] = {}
        self._ends: dict[Any, str] = {}
        self._asked: dict[str, Any] = {}  # for their process ids
        self._pids: dict[str, int] = {}
        self.killed: list[str] = []
        """Workers that were killed from outside."""

    def start(self, name: str, function: Callable[..., None], *arguments: Any) -> None:
        """Run function(settings, name, *arguments) in a new actor."""
        options: dict[str, Any] = {"num_cpus": 0}  # six roles share two cores
        if name.startswith(BESIDE_THE_DRIVER):
            node = ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        actor: Any = ray.remote(**options)(Role).remote()
        self._running[name] = actor
        self._asked[name] = actor.pid.remote()
        self._ends[actor.run.remote(function, self._settings, name, arguments)] = name

    @property
    def alive(self) -> dict[str, int]:
        """Return the name and process id of every running actor."""
        while self._asked:
            name, asked = self._asked.popitem()
            self._pids[name] = ray.get(asked)
        return {name: self._pids[name] for name in self._running}

    def watch(self, seconds: float, expendable: str) -> None:
        """Wait until an actor ends, at most `seconds`.

        Actors whose names begin with `expendable` may be killed while one of them is left.

        Raises:
            WorkerError: Another actor failed, or the last of these.
        """
        if not self._ends:
            time.sleep(seconds)
            return
        for end in ray.wait(list(self._ends), timeout=seconds)[0]:
            name = self._ends.pop(end)
            del self._running[name]
            try:
                ray.get(end)
            except RayTaskError as failure:
                raise WorkerError(f"{name} failed:\n{failure}") from None
            except (ActorDiedError, ActorUnavailableError) as death:
                if not name.startswith(expendable) or not any(each.startswith(expendable) for each in self._running):
                    raise WorkerError(f"{name} failed:\n{death}") from None
                self.killed.append(name)

    def __enter__(self) -> Actors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for actor in self._running.values():
            ray.kill(actor)
        self._running.clear()
