"""The nodes of a cluster other than the controller's: an actor on each starts a supervisor with storage units there.

Every process of a node finds the system through the folder that this supervisor creates, even if it has no units, and
reads and writes its node's arenas as on the first node. Ray lists the nodes, but does not report changes: `Nodes`
checks them every LOOK_SECONDS.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection
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
from transfer_queue.system_folder.paths import ControllerPlace

LOOK_SECONDS = 1.0
FOLDERS = "ray-"  # the prefix of the names of systems' folders
CALLS_AT_ONCE = 4  # of a node's actor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeSystem:
    """Where a process of a node finds a system."""

    node: str
    """The node's id in Ray."""
    address: str
    """The node's address."""
    folder: str
    """The system's folder on the node."""


@dataclass(frozen=True)
class NodeSpec:
    """The part of a system to run on a node."""

    name: str
    """The name of the system's folder on the node."""
    config: dict[str, Any]
    """See `start_local`."""
    key: bytes
    """The system's key."""
    seat: NodeRole
    seconds: float
    """Seconds until it must be up."""
    restart_seconds: float
    """Seconds for which it continues after its actor was killed."""


class NodeActor:
    """One node's part of a system. The actor is a child of the controller's actor and ends with it."""

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
                if left is not None and not self._can_use(left):
                    left.stop()
                    left = None
                self._system = left or start_local(
                    order.name, order.config, timeout=order.seconds, heirs=order.restart_seconds, seat=order.seat,
                    key=order.key,
                )  # fmt: skip
            return str(self._system.folder)

    def _can_use(self, left: RunningSystem) -> bool:
        """Whether these servers are of the same system. Moves them to its controller of today."""
        order = self._order
        if left.key != order.key:
            return False
        if not order.seat.term:
            return left.description.controller == order.seat.controller
        left.move_controller(ControllerPlace(order.seat.term, order.seat.controller))
        return True

    def stop(self) -> None:
        """Stop the servers. Idempotent."""
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
    """The nodes of one system except its first, `home`. `look` compares them with those of the cluster."""

    def __init__(
        self,
        home: str | None,
        order: Callable[[str, str, int], NodeSpec],
        units: Callable[[str, dict[str, float]], int],
        options: dict[str, Any],
        lost: Callable[[str], None],
        leaving: Callable[[str], None],
        known: Collection[str] = (),
    ) -> None:
        """Make the list, which is empty at first.

        Args:
            home: The controller's node, if the servers on it are not those of a node actor.
            order: Makes the order for a node from its id, its address and its number of units.
            units: Returns the number of units of a node, from its id and resources.
            options: The options of the nodes' actors.
            lost: Called with a node that is gone.
            leaving: Called with a node that Ray is about to remove.
            known: Nodes that the system has used before. Those that are gone are reported.
        """
        self._home = home
        self._order = order
        self._units = units
        self._options = options
        self._lost = lost
        self._leaving = leaving
        self._known = set(known)
        """Nodes of which it is not known whether they are gone."""
        self._reported: set[str] = set()
        """Nodes that are about to leave, and were passed to `leaving`."""
        self._changed = threading.Condition()
        self._nodes: dict[str, _Node] = {}
        self._has_ended = False

    def begin(self, seconds: float, strict: bool) -> None:
        """Start the system's part on all current nodes, and on later ones as they appear.

        `seconds` is the time in which all of them must be up. If one is not, it raises StartError if `strict` is set,
        and only logs it otherwise.
        """
        self.look()
        limit = time.monotonic() + seconds
        with self._changed:
            while any(node.folder is None and not node.failure for node in self._nodes.values()):
                if not self._changed.wait(limit - time.monotonic()):
                    break
            late = [node.failure or f"the system was not up on node {node.address} within {seconds:g} s"
                    for node in self._nodes.values() if node.folder is None]  # fmt: skip
        if late and strict:
            raise StartError("; ".join(late))
        threading.Thread(target=self._keep_up, name="look at nodes", daemon=True).start()

    def place(self, node: str, seconds: float) -> NodeSystem:
        """Return where a process on this node finds the system. Raises StartError if it is not there in time."""
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
                    raise StartError(f"the system was not up on node {node} within {seconds:g} s; see the logs of Ray")

    def look(self) -> None:
        """Start on new nodes, and report nodes that are gone."""
        everywhere = {node["NodeID"]: node for node in all_nodes()}
        others = {number: node for number, node in everywhere.items() if number != self._home}
        with self._changed:
            if self._has_ended:
                return
            removed = [node for node in {**self._nodes, **dict.fromkeys(self._known)} if node not in everywhere]
            for node in removed:
                self._nodes.pop(node, None)
            self._known.clear()
            for number, facts in others.items():
                if number not in self._nodes:
                    self._start(number, facts["NodeManagerAddress"], facts["Resources"])
        for node in removed:
            logger.warning("node %s is gone; the values that only its storage units had are lost", node)
            self._lost(node)
        for node in leaving_nodes() & others.keys() - self._reported:
            logger.warning("node %s is about to leave; its blocks are moved to other nodes", node)
            self._reported.add(node)
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

        folder, failure, is_listed = None, "", True
        try:
            folder = ray.get(node.handle.start.remote(), timeout=seconds + END_SECONDS)
        except ray.exceptions.ActorUnschedulableError:
            is_listed = False  # Ray lists a dead node for some more seconds, in which `look` tries again
            logger.warning(
                "the system cannot be started on node %s, because Ray cannot run an actor there", node.address
            )
        except Exception as error:
            failure = f"the system could not be started on node {node.address}: {getattr(error, 'cause', error)}"
            logger.error("%s", failure)
        with self._changed:
            node.folder, node.failure = folder, failure
            if not is_listed and self._nodes.get(number) is node:
                del self._nodes[number]
            self._changed.notify_all()

    def _keep_up(self) -> None:
        while not self._is_ended_within(LOOK_SECONDS):
            try:
                self.look()
            except Exception:
                logger.exception("the nodes of the cluster cannot be listed; this is tried again in %g s", LOOK_SECONDS)

    def _is_ended_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._has_ended, seconds)

    def stop(self) -> None:
        """Stop the system's part on all nodes."""
        import ray

        with self._changed:
            self._has_ended = True
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
    """Return Ray's descriptions of all nodes that are alive."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def leaving_nodes() -> set[str]:
    """Return the nodes that Ray has begun to drain, for example before a preemption; none if this Ray has no list."""
    from ray._private.state import state

    list_nodes = getattr(state, "get_draining_nodes", None)
    return set() if list_nodes is None else set(list_nodes())


def folder_name(system: str, node: str) -> str:
    """Return the name of a system's folder on a node. It differs between nodes, because they may share a machine."""
    return f"{system}-{node[:8]}"
