"""The actor `TransferQueueController`: it starts a system's servers on its node, and speaks for them.

The servers are processes of their own, under a supervisor, as without Ray: no torch, no Ray, and no other thread holds
them up. Samples never go through the actor; a client asks it once where the system is. Where Ray restarts an actor that
was killed, the new one takes over the system that runs.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from transfer_queue.client.control_client import ControlClient
from transfer_queue.config.environment import pre_alloc_sample_num
from transfer_queue.config.settings import Settings
from transfer_queue.errors import ConnectionLostError, StartError, TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.partitions import ClearPartition, CreatePartition, ListPartitions
from transfer_queue.messages.queries import SnapshotReply, TakeSnapshot
from transfer_queue.messages.system import Drain, NodeGone, Topology, TopologyReply, UseSampler
from transfer_queue.metadata.partition_snapshot import PartitionSnapshot
from transfer_queue.node.samplers.sampler_files import SamplerFiles
from transfer_queue.node.system.launcher import RunningSystem, replace_supervisor, start_local, sweep_killed
from transfer_queue.node.system.launcher_protocol import NodeRole
from transfer_queue.node.system.paths import SystemFolder
from transfer_queue.node.system.sampler_transfer import PickledSampler, dump
from transfer_queue.node.system.store_process import reload_members
from transfer_queue.ray_runtime.node_actors import (
    CALLS_AT_ONCE,
    FOLDERS,
    Nodes,
    NodeSpec,
    NodeSystem,
    all_nodes,
    folder_name,
)
from transfer_queue.ray_runtime.store_actors import end_keeper

logger = logging.getLogger(__name__)

LONGEST_SECONDS = 86400.0  # that anybody waits for a node to be emptied
TRIES = 5  # of a snapshot in pages, until none of its fields changed meanwhile


@dataclass(frozen=True)
class SystemSpec:
    """What is to be started.

    name: of the system on its node. conf: the merged DictConfig, pickled, as it may hold objects of the driver's.
    config: see `start_local`. seconds: until it must be up. restart_seconds: for which the servers live on after the
    actor was killed.
    """

    name: str
    conf: bytes
    config: dict[str, Any]
    sampler: PickledSampler | None
    seconds: float
    restart_seconds: float


class ControllerActor:
    """One system. Its methods may be called at the same time, from any process of the cluster."""

    def __init__(self, order: SystemSpec) -> None:
        import ray

        self._order = order
        self._node = str(ray.get_runtime_context().get_node_id())
        self._address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._system: RunningSystem | None = None
        self._asking: ControlClient | None = None
        self._nodes: Nodes | None = None
        self._again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        if self._again:
            self._system = replace_supervisor(order.name)
            if self._system is None:
                logger.error("the system %s has ended with its actor: an empty one is started in its place", order.name)
            self.start()

    # ------------------------------------------------------------ the system

    def start(self) -> None:
        """Starts the servers on all nodes, where those of the actor before this one were not taken over. StartError."""
        order = self._order
        settings = Settings.from_json(order.config["settings"])
        limit = time.monotonic() + order.seconds
        with self._lock:
            spread = _Spread(settings, self._node)
            if self._system is None:
                sweep_killed(FOLDERS)
                seat = NodeRole(self._node, self._address, spread.at_home)
                self._system = start_local(
                    order.name,
                    order.config,
                    order.sampler,
                    timeout=order.seconds,
                    heirs=order.restart_seconds,
                    seat=seat,
                )
            if self._asking is None:
                self._asking = ControlClient(self._system)
            if self._nodes is None:
                nodes = Nodes(self._node, self._order_for, spread.on, self._options(settings), self._lose, self._empty)
                try:
                    nodes.begin(max(0.0, limit - time.monotonic()), strict=not self._again)
                except BaseException:
                    nodes.stop()
                    raise
                self._nodes = nodes

    def place(self, node: str) -> NodeSystem:
        """Where a process on this node finds the system. StartError where it is not, or not in time."""
        system = self._running()
        if node == self._node:
            return NodeSystem(node, self._address, str(system.folder))
        with self._lock:
            nodes = self._nodes
        if nodes is None:
            raise StartError(f"the system {self._order.name} is being started")
        return nodes.place(node, self._order.seconds)

    def process(self) -> int:
        """The number of the actor's process on its node."""
        return os.getpid()

    def stop(self) -> None:
        """Ends the servers. Idempotent; the actor itself is ended by who calls this."""
        with self._lock:
            system, self._system = self._system, None
            asking, self._asking = self._asking, None
            nodes, self._nodes = self._nodes, None
        if nodes is not None:
            nodes.stop()
        if asking is not None:
            asking.close()
        if system is not None:
            system.stop()
        settings = self._order.config["settings"]
        if settings["storage_backend"] == "RayStore":
            import ray

            end_keeper(ray, settings["store_options"])

    def _order_for(self, node: str, address: str, units: int) -> NodeSpec:
        system, order = self._running_now(), self._order
        store = system.store
        seat = NodeRole(node, address, units, system.description.remote, "" if store is None else store.join)
        name = folder_name(order.name, node)
        return NodeSpec(name, order.config, system.key, seat, order.seconds, order.restart_seconds)

    def _options(self, settings: Settings) -> dict[str, Any]:
        """Of the actors on other nodes."""
        given = settings.ray_actor_options
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": CALLS_AT_ONCE}
        return {**options, **({"runtime_env": given["runtime_env"]} if "runtime_env" in given else {})}

    def _lose(self, node: str) -> None:
        """A node is gone, and with it what lay in its storage units alone."""
        asking = self._asking
        if asking is not None:
            asking.ask(NodeGone(node, time.strftime("%Y-%m-%d %H:%M:%S")), Done)
            reload_members(SystemFolder(self._running().folder))

    def drain_node(self, node: str, timeout: float | None = None) -> None:
        """Moves all that lies on a node to others; returns when it holds nothing. timeout: seconds; None: no limit.

        WaitTimeoutError past them; moving goes on. InvalidArgumentError where too few units would be left.
        """
        wait = LONGEST_SECONDS if timeout is None else timeout
        for unit in self._units_on(node):
            self._client().ask(Drain(unit, wait=wait), Done, wait + self._order.seconds)

    def _empty(self, node: str) -> None:
        """A node is about to leave, and nobody waits for what is moved off it."""
        try:
            for unit in self._units_on(node):
                self._client().ask(Drain(unit), Done)
        except TransferQueueError as error:
            logger.error("what lies on node %s, which is about to leave, cannot be moved: %s", node, error)

    def _units_on(self, node: str) -> list[int]:
        units = self._client().ask(Topology(), TopologyReply).units
        return [unit.unit for unit in units if unit.node == node]

    def _running_now(self) -> RunningSystem:
        assert self._system is not None
        return self._system

    def _running(self) -> RunningSystem:
        with self._lock:
            if self._system is None:
                raise StartError(f"the system {self._order.name} is not up: it is being started, or was stopped")
            return self._system

    def _client(self) -> ControlClient:
        system = self._running()
        assert self._asking is not None
        if not system.alive():
            raise ConnectionLostError(f"the system {system.name} has ended; its logs were in {system.logs}")
        return self._asking

    # ------------------------------------------------------------ the contract

    def get_config(self) -> Any:
        """The merged conf, a DictConfig: it pickles, and finds the system from any process of the node."""
        from omegaconf import OmegaConf

        conf = pickle.loads(self._order.conf)
        OmegaConf.update(conf, "system.folder", str(self._running().folder), force_add=True)
        return conf

    def list_partitions(self) -> list[str]:
        """The names of all partitions, in order of creation."""
        return list(self._client().ask(ListPartitions(), Done).value)

    def create_partition(self, partition_id: str) -> bool:
        """Makes a partition; False if it exists."""
        return bool(self._client().ask(CreatePartition(partition_id, pre_alloc_sample_num()), Done).value)

    def clear_partition(self, partition_id: str) -> None:
        """Drops a partition with its samples; an unknown one is fine."""
        self._client().ask(ClearPartition(partition_id), Done)

    def register_sampler(self, sampler: object) -> None:
        """This sampler deals from now on; what was dealt stays. SamplerError where it cannot be used."""
        client = self._client()
        name = SamplerFiles(SystemFolder(self._running().folder).samplers).leave(dump(sampler, alone=True))
        client.ask(UseSampler(name), Done)

    def get_partition_snapshot(self, partition_id: str) -> PartitionSnapshot | None:
        """What the partition holds, None if it is unknown. Of more than 4096 samples, each page is of one moment."""
        for _ in range(TRIES):
            pages = self._pages(partition_id)
            if not pages:
                return None
            if all(page.known and page.fields == pages[0].fields for page in pages):
                break
        return _snapshot(partition_id, [page for page in pages if page.known])

    def _pages(self, partition_id: str) -> list[SnapshotReply]:
        """All pages; none of an unknown partition. The last is not known where it was dropped in between."""
        pages: list[SnapshotReply] = []
        request = TakeSnapshot(partition_id)
        while True:
            page = self._client().ask(request, SnapshotReply)
            if pages or page.known:
                pages.append(page)
            if not page.known or page.start is None:
                return pages
            request = TakeSnapshot(partition_id, page.made, page.start)


class _Spread:
    """How many storage units each node gets; of an external store the first has all. home: the controller's node.

    StartError where there are too few for all copies of a value.
    """

    def __init__(self, settings: Settings, home: str) -> None:
        self._required = settings.ray_node_resource
        self._each = settings.num_data_storage_units is None
        if settings.storage_backend != "SimpleStorage":  # one speaks for the store, wherever the bytes are
            self._each, self._planned, self.at_home = False, {}, settings.num_data_storage_units or 1
            return
        nodes = {node["NodeID"]: node["Resources"] for node in all_nodes()}
        able = sorted((node for node in nodes if self._is_able(nodes[node])), key=lambda node: (node != home, node))
        if not able:
            raise StartError(f"no node of the cluster has the resource {self._required!r} (ray.node_resource)")
        count = settings.num_data_storage_units or len(able)
        self._planned = {node: count // len(able) + (at < count % len(able)) for at, node in enumerate(able)}
        self.at_home = self._planned.get(home, 0)
        if count < settings.replicas:
            raise StartError(
                f"backend.SimpleStorage.replicas is {settings.replicas}, and there would be one storage unit, on the "
                f"one node that can have one: add nodes, or set backend.SimpleStorage.num_data_storage_units"
            )

    def _is_able(self, resources: dict[str, float]) -> bool:
        return self._required is None or resources.get(self._required, 0) > 0

    def on(self, node: str, resources: dict[str, float]) -> int:
        """For a node that is there, or came later."""
        return self._planned.get(node, int(self._each and self._is_able(resources)))


def _snapshot(partition_id: str, pages: list[SnapshotReply]) -> PartitionSnapshot:
    rows = [np.frombuffer(page.rows, "i8") for page in pages]
    fields = list(dict.fromkeys(name for page in pages for name in page.fields))
    tasks = dict.fromkeys(task for page in pages for task in page.consumed)
    keys: list[str | None] = []
    tags: list[dict[str, Any]] = []
    for page, its in zip(pages, rows, strict=True):
        keys += page.keys if page.keys is not None else [None] * len(its)
        tags += page.tags if page.tags is not None else [{} for _ in its.tolist()]
    return PartitionSnapshot(
        partition_id,
        np.concatenate(rows),
        fields,
        np.concatenate([_produced(page, fields) for page in pages]),
        {task: np.concatenate([_consumed(page, task) for page in pages]) for task in tasks},
        keys,
        tags,
    )


def _produced(page: SnapshotReply, fields: list[str]) -> np.ndarray:
    """A page's columns where the whole has them: a field may have come after the page was taken."""
    out = np.zeros((len(page.rows) // 8, len(fields)), "i1")
    columns = [fields.index(name) for name in page.fields]
    out[:, columns] = np.frombuffer(page.produced, "i1").reshape(len(out), len(columns))
    return out


def _consumed(page: SnapshotReply, task: str) -> np.ndarray:
    found = page.consumed.get(task)
    return np.zeros(len(page.rows) // 8, "i1") if found is None else np.frombuffer(found, "i1")
