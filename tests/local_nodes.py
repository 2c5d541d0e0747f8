"""A system of several nodes, which are folders of this machine: they share nothing but connections over TCP."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import psutil

from transfer_queue.client import TransferQueueClient
from transfer_queue.client.control_client import ControlClient
from transfer_queue.config.settings import Settings
from transfer_queue.messages.base import Done
from transfer_queue.messages.system import NodeGone, Topology, TopologyReply
from transfer_queue.node.system.launcher import RunningSystem, start_local
from transfer_queue.node.system.launcher_protocol import NodeRole
from transfer_queue.system_folder.paths import SystemFolder

LOOPBACK = "127.0.0.1"
SECONDS = 60.0


def held_processes(system: RunningSystem) -> list[psutil.Process]:
    """All processes of a node, of which the supervisor is stopped: it does not start the others again."""
    supervisor = psutil.Process(system.description.pid)
    supervisor.suspend()
    return [*supervisor.children(recursive=True), supervisor]


def report_gone(controller: RunningSystem, node: str) -> None:
    """Say that a node is gone, as the runtime does whose node it is."""
    with ControlClient(controller) as asking:
        asking.request(NodeGone(node, "just now"), Done)


def stop_all(systems: Iterable[RunningSystem]) -> None:
    """Stop nodes, and remove the files of those that were killed, as their next start does."""
    for system in systems:
        system.stop()
        SystemFolder(system.folder).sweep()


class Nodes:
    """A system with this configuration, and a node for each of these numbers of units.

    systems: of each node as its processes see it, the first with the controller.
    """

    def __init__(self, conf: dict[str, Any], units: list[int]) -> None:
        config = {"settings": Settings.from_config(conf).to_json()}
        name = f"nodes-{uuid.uuid4().hex[:8]}"
        home = start_local(name, config, seat=NodeRole("node-0", LOOPBACK, units[0]), timeout=SECONDS)
        self.systems = [home]
        joins = {backend: address.join for backend, address in home.stores.items()}
        try:
            for number, count in enumerate(units[1:], 1):
                seat = NodeRole(f"node-{number}", LOOPBACK, count, home.description.remote, joins)
                self.systems.append(start_local(f"{name}-{number}", config, seat=seat, key=home.key, timeout=SECONDS))
        except BaseException:
            self.stop()
            raise

    def client(self, node: int) -> TransferQueueClient:
        return TransferQueueClient(self.systems[node])

    def lose(self, node: int) -> None:
        """Kill everything on a node, and say so."""
        self.kill(node)
        self.report_gone(node)

    def kill(self, node: int) -> None:
        """Kill everything on a node."""
        for process in held_processes(self.systems[node]):
            process.kill()

    def report_gone(self, node: int) -> None:
        report_gone(self.systems[0], f"node-{node}")

    def units(self) -> dict[str, int]:
        """Node -> one of its units."""
        with ControlClient(self.systems[0]) as asking:
            return {unit.node: unit.unit for unit in asking.request(Topology(), TopologyReply).units}

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        stop_all(reversed(self.systems))
