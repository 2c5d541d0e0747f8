"""The nodes of a cluster other than the controller's: an actor on each starts a supervisor with storage units there.

Every process of a node finds the system through the folder that this supervisor makes, whether it has units or not, and
reads and writes its node's arenas as on the first node. Ray says which nodes there are, but tells nobody when that
changes: `Nodes` looks every LOOK_SECONDS.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transfer_queue.errors import StartError
from transfer_queue.node.system.launcher import (
    END_SECONDS,
    STOP_SECONDS,
    RunningSystem,
    replace_supervisor,
    start_local,
)
from transfer_queue.node.system.launcher_protocol import NodeRole

LOOK_SECONDS = 1.0
FOLDERS = "ray-"  # with which the names of systems' folders begin
CALLS_AT_ONCE = 4  # of a node's actor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeSystem:
    """Where a system is to be found on a node. node: Ray's id of it; address: of it; folder: the system's, there."""

    node: str
    address: str
    folder: str


@dataclass(frozen=True)
class NodeSpec:
    """What is to run on a node. name: of the system's folder there. config: see `start_local`. key: the system's.

    seconds: until it must be up. restart_seconds: for which it lives on after its actor was killed.
    """

    name: str
    config: dict[str, Any]
    key: bytes
    seat: NodeRole
    seconds: float
    restart_seconds: float


class NodeActor:
    """One node's part of a system. It ends with the controller's actor, whose child it is."""

    def __init__(self, order: NodeSpec) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._system: RunningSystem | None = None

    def start(self) -> str:
        """Return the folder of the system on this node, once its servers are up.

        Servers that an earlier actor has left are used if they are of the same system. Raises StartError.
        """
        order = self._order
        with self._lock:
            if self._system is None:
                left = replace_supervisor(order.name)
                if left is not None and (left.key, left.description.controller) != (order.key, order.seat.controller):
                    left.stop()
                    left = None
                self._system = left or start_local(
                    order.name, order.config, timeout=order.seconds, heirs=order.restart_seconds, seat=order.seat,
                    key=order.key,
                )  # fmt: skip
            return str(self._system.folder)

    def stop(self) -> None:
        """Ends the servers. Idempotent."""
        with self._lock:
            system, self._system = self._system, None
        if system is not None:
            system.stop()


@dataclass
class _Node:
    handle: Any
    address: str
    folder: str | None = None
    failure: str = ""


class Nodes:
    """The nodes of one system but its first, `home`; `look` keeps up with those of the cluster.

    lost: told of a node that is gone; leaving: of one that Ray is about to take away. options: of their actors. units:
    how many each node is to have, by its id and resources.
    """

    def __init__(
        self,
        home: str,
        order: Callable[[str, str, int], NodeSpec],
        units: Callable[[str, dict[str, float]], int],
        options: dict[str, Any],
        lost: Callable[[str], None],
        leaving: Callable[[str], None],
    ) -> None:
        self._home = home
        self._order = order
        self._units = units
        self._options = options
        self._lost = lost
        self._leaving = leaving
        self._told: set[str] = set()  # of nodes that are about to leave
        self._changed = threading.Condition()
        self._nodes: dict[str, _Node] = {}
        self._ended = False

    def begin(self, seconds: float, strict: bool) -> None:
        """Starts what is to be on the nodes that there are, and keeps up with them from then on.

        seconds: until all of it must be up. strict: StartError where it is not, else the log says so.
        """
        self.look()
        limit = time.monotonic() + seconds
        with self._changed:
            while any(node.folder is None and not node.failure for node in self._nodes.values()):
                if not self._changed.wait(limit - time.monotonic()):
                    break
            late = [node.failure or f"node {node.address}: not up within {seconds:g} s"
                    for node in self._nodes.values() if node.folder is None]  # fmt: skip
        if late and strict:
            raise StartError("; ".join(late))
        threading.Thread(target=self._keep_up, name="look at nodes", daemon=True).start()

    def place(self, node: str, seconds: float) -> NodeSystem:
        """Where a process on this node finds the system. StartError where it is not there in time."""
        self.look()
        limit = time.monotonic() + seconds
        with self._changed:
            while True:
                known = self._nodes.get(node)
                if known is not None and known.folder is not None:
                    return NodeSystem(node, known.address, known.folder)
                if known is not None and known.failure:
                    raise StartError(known.failure)
                if not self._changed.wait(limit - time.monotonic()):
                    raise StartError(f"nothing of the system is up on node {node} after {seconds:g} s")

    def look(self) -> None:
        """Starts on nodes that are new, and says which are gone."""
        there = {node["NodeID"]: node for node in all_nodes() if node["NodeID"] != self._home}
        with self._changed:
            if self._ended:
                return
            gone = [node for node in self._nodes if node not in there]
            for node in gone:
                del self._nodes[node]
            for number, its in there.items():
                if number not in self._nodes:
                    self._start(number, its["NodeManagerAddress"], its["Resources"])
        for node in gone:
            logger.warning("node %s is gone", node)
            self._lost(node)
        for node in leaving_nodes() & there.keys() - self._told:
            logger.warning("node %s is about to leave", node)
            self._told.add(node)
            self._leaving(node)

    def _start(self, number: str, address: str, resources: dict[str, float]) -> None:
        import ray

        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        options = {**self._options, "scheduling_strategy": strategy(number, soft=False)}
        order = self._order(number, address, self._units(number, resources))
        node = self._nodes[number] = _Node(ray.remote(NodeActor).options(**options).remote(order), address)
        threading.Thread(
            target=self._await, args=(number, node, order.seconds), name=f"start on {address}", daemon=True
        ).start()

    def _await(self, number: str, node: _Node, seconds: float) -> None:
        import ray

        folder, failure, there = None, "", True
        try:
            folder = ray.get(node.handle.start.remote(), timeout=seconds + END_SECONDS)
        except ray.exceptions.ActorUnschedulableError:
            there = False  # a node that has just died is listed for some seconds more: until then `look` tries again
            logger.warning("nothing can be started on node %s", node.address)
        except Exception as error:
            failure = f"the system could not be started on node {node.address}: {getattr(error, 'cause', error)}"
            logger.error("%s", failure)
        with self._changed:
            node.folder, node.failure = folder, failure
            if not there and self._nodes.get(number) is node:
                del self._nodes[number]
            self._changed.notify_all()

    def _keep_up(self) -> None:
        while not self._is_ended_within(LOOK_SECONDS):
            try:
                self.look()
            except Exception:
                logger.exception("Ray does not say which nodes there are")

    def _is_ended_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, seconds)

    def stop(self) -> None:
        """Ends what runs on all of them."""
        import ray

        with self._changed:
            self._ended = True
            nodes = list(self._nodes.values())
            self._nodes.clear()
            self._changed.notify_all()
        ending = [node.handle.stop.remote() for node in nodes]
        if ending:
            ray.wait(ending, num_returns=len(ending), timeout=STOP_SECONDS + END_SECONDS)
        for node in nodes:
            with contextlib.suppress(Exception):
                ray.kill(node.handle, no_restart=True)


def all_nodes() -> list[dict[str, Any]]:
    """What Ray says of each node that is alive."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def leaving_nodes() -> set[str]:
    """The nodes that Ray has begun to drain, as before a preemption; none where this Ray does not say."""
    from ray._private.state import state

    asked = getattr(state, "get_draining_nodes", None)
    return set() if asked is None else set(asked())


def folder_name(system: str, node: str) -> str:
    """The name of a system's folder on a node: another one on each, as nodes may share a machine."""
    return f"{system}-{node[:8]}"
