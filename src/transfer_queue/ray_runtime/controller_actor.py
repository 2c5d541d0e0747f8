"""The actor `TransferQueueController`: starts a system's servers on its node, and answers calls for them.

The servers are processes of their own under a supervisor, as without Ray: no torch, Ray or other thread delays them.
Samples never go through the actor; a client asks it once where the system is. If the actor is killed and Ray restarts
it, the new one continues with the running system. If it is restarted on another node, because its own is gone, it takes
over the journal in the shared folder, if the system has one, and moves all nodes to its controller.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer_queue.client.control_client import ControlClient
from transfer_queue.config.environment import pre_alloc_sample_num
from transfer_queue.config.settings import Settings
from transfer_queue.errors import ConnectionLostError, StartError, TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.descriptors import MIRROR
from transfer_queue.messages.partitions import ClearPartition, CreatePartition, ListPartitions
from transfer_queue.messages.queries import SnapshotReply, TakeSnapshot
from transfer_queue.messages.system import Drain, NodeGone, Topology, TopologyReply, UseSampler
from transfer_queue.messages.tag_table import tag_rows
from transfer_queue.node.controller.sampler_loading import SamplerFiles
from transfer_queue.node.system.launcher import RunningSystem, replace_supervisor, start_local, sweep_killed
from transfer_queue.node.system.launcher_protocol import NodeRole
from transfer_queue.node.system.sampler_transfer import PickledSampler, dump
from transfer_queue.node.system.store_process import check_all_objects
from transfer_queue.ray_runtime.node_actors import (
    CALLS_AT_ONCE,
    FOLDERS,
    Nodes,
    NodeSpec,
    NodeSystem,
    all_nodes,
    folder_name,
)
from transfer_queue.ray_runtime.store_actors import end_store_actor
from transfer_queue.system_folder.paths import SystemFolder

if TYPE_CHECKING:
    from transfer_queue.metadata.partition_snapshot import PartitionSnapshot

logger = logging.getLogger(__name__)

LONGEST_SECONDS = 86400.0  # for which a call waits until a node is drained
TRIES = 5  # to take a snapshot in pages of which no field changes meanwhile


@dataclass(frozen=True)
class SystemSpec:
    """The system to start."""

    name: str
    """The name of the system on its node."""
    conf: bytes
    """The merged DictConfig, pickled, because it may contain objects of the driver."""
    config: dict[str, Any]
    """See `start_local`."""
    samplers: dict[str, PickledSampler]
    """See `start_local`."""
    seconds: float
    """Seconds until it must be up."""
    restart_seconds: float
    """Seconds for which the servers continue after the actor was killed."""
    system: str = ""
    """The id of a system whose controller may restart on another node; "" if it may not."""
    key: bytes | None = None
    """The key of the system, which is the same on all nodes. None: the first node makes one."""


class ControllerActor:
    """One system. Any process of the cluster may call its methods, at the same time as others."""

    def __init__(self, order: SystemSpec) -> None:
        import ray

        self._order = order
        self._node = str(ray.get_runtime_context().get_node_id())
        self._address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._lock = threading.RLock()
        self._system: RunningSystem | None = None
        self._asking: ControlClient | None = None
        self._nodes: Nodes | None = None
        with warnings.catch_warnings():  # Ray implements this property with one of its own that is deprecated
            warnings.simplefilter("ignore", ray.util.annotations.RayDeprecationWarning)
            self._again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        if self._again:
            self._system = self._left_here()
            if self._system is None and not order.system:
                logger.error(
                    "system %s ended together with its actor, so all its samples are lost; the restarted actor starts "
                    "an empty system",
                    order.name,
                )
            self.start()

    # ------------------------------------------------------------ the system

    def _left_here(self) -> RunningSystem | None:
        """Return the servers that the actor before this one has left on this node; None if there are none."""
        for name in (self._order.name, self._successor_name):
            running = replace_supervisor(name, self._node)
            if running is not None:
                return running
        return None

    @property
    def _successor_name(self) -> str:
        """The name of the folder of the controller, if this node takes it over."""
        return f"{folder_name(self._order.name, self._node)}-c"

    @property
    def _has_moved(self) -> bool:
        """Whether this node has taken over the controller. Its units then have a folder of their own, as elsewhere."""
        return self._system is not None and self._system.name != self._order.name

    def start(self) -> None:
        """Start the servers on all nodes, unless those of the previous actor continue. Raises StartError."""
        order = self._order
        settings = Settings.from_json(order.config["settings"])
        limit = time.monotonic() + order.seconds
        with self._lock:
            spread = _Spread(settings, self._node, strict=not self._again)
            if self._system is None:
                sweep_killed(FOLDERS)
                succeeds = self._again and bool(order.system)
                units = 0 if succeeds else spread.at_home
                self._system = start_local(
                    self._successor_name if succeeds else order.name,
                    order.config,
                    order.samplers,
                    timeout=order.seconds,
                    heirs=order.restart_seconds,
                    seat=NodeRole(self._node, self._address, units, system=order.system, succeeds=succeeds),
                    key=order.key,
                )
            if self._asking is None:
                self._asking = ControlClient(self._system)
            if self._nodes is None:
                nodes = Nodes(
                    None if self._has_moved else self._node,
                    self._order_for,
                    spread.units_of,
                    self._options(settings),
                    self._report_lost_node,
                    self._begin_drain,
                    self._nodes_of_units(),
                )
                try:
                    nodes.begin(max(0.0, limit - time.monotonic()), strict=not self._again)
                except BaseException:
                    nodes.stop()
                    raise
                self._nodes = nodes

    def place(self, node: str) -> NodeSystem:
        """Return where a process on this node finds the system. Raises StartError if it is not there in time."""
        system = self._running()
        if node == self._node and not self._has_moved:
            return NodeSystem(node, self._address, str(system.folder))
        with self._lock:
            nodes = self._nodes
        if nodes is None:
            raise StartError(f"the system {self._order.name} is not up yet; try again")
        return nodes.place(node, self._order.seconds)

    def process(self) -> int:
        """Return the id of the actor's process on its node."""
        return os.getpid()

    def stop(self) -> None:
        """Stop the servers. Idempotent. The caller ends the actor itself."""
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
        if "RayStore" in settings["store_options"]:
            import ray

            end_store_actor(ray, settings["store_options"]["RayStore"])

    def _order_for(self, node: str, address: str, units: int) -> NodeSpec:
        system, order = self._running_now(), self._order
        joins = {backend: address.join for backend, address in system.stores.items()}
        description = system.description
        seat = NodeRole(node, address, units, description.remote, joins, term=description.term)
        name = folder_name(order.name, node)
        return NodeSpec(name, order.config, system.key, seat, order.seconds, order.restart_seconds)

    def _options(self, settings: Settings) -> dict[str, Any]:
        """Return the options of the actors on other nodes."""
        given = settings.ray_actor_options
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": CALLS_AT_ONCE}
        return {**options, **({"runtime_env": given["runtime_env"]} if "runtime_env" in given else {})}

    def _report_lost_node(self, node: str) -> None:
        """Report that a node is gone, so that values which only its storage units had are lost."""
        asking = self._asking
        if asking is not None:
            asking.request(NodeGone(node, time.strftime("%Y-%m-%d %H:%M:%S")), Done)
            check_all_objects(SystemFolder(self._running_now().folder))

    def _nodes_of_units(self) -> set[str]:
        """Return the nodes that have units in the state of the controller, also those that are gone."""
        return {unit.node for unit in self._client().request(Topology(), TopologyReply).units if unit.node}

    def drain_node(self, node: str, timeout: float | None = None) -> None:
        """Move everything on a node to other nodes. Returns when it has no block.

        `timeout` is in seconds; None: no limit. Raises WaitTimeoutError after that time, while the drain continues, and
        InvalidArgumentError if too few units would be left.
        """
        wait = LONGEST_SECONDS if timeout is None else timeout
        for unit in self._units_on(node):
            self._client().request(Drain(unit, wait=wait), Done, wait + self._order.seconds)

    def _begin_drain(self, node: str) -> None:
        """Begin to drain a node that is about to leave, without waiting for the end."""
        try:
            for unit in self._units_on(node):
                self._client().request(Drain(unit), Done)
        except TransferQueueError as error:
            logger.error("the blocks on node %s, which is about to leave, cannot be moved: %s", node, error)

    def _units_on(self, node: str) -> list[int]:
        units = self._client().request(Topology(), TopologyReply).units
        # the mirror is not on the node, but in durability.folder
        return [unit.unit for unit in units if unit.node == node and unit.tier != MIRROR]

    def _running_now(self) -> RunningSystem:
        assert self._system is not None
        return self._system

    def _running(self) -> RunningSystem:
        with self._lock:
            if self._system is None:
                raise StartError(f"the system {self._order.name} is not up: it is starting, or was stopped")
            return self._system

    def _client(self) -> ControlClient:
        system = self._running()
        assert self._asking is not None
        if not system.is_alive():
            raise ConnectionLostError(f"the system {system.name} has ended; its logs were in {system.logs}")
        return self._asking

    # ------------------------------------------------------------ the contract

    def get_config(self) -> Any:
        """Return the merged conf, a DictConfig that can be pickled. With it, processes of the node find the system."""
        from omegaconf import OmegaConf

        conf = pickle.loads(self._order.conf)
        OmegaConf.update(conf, "system.folder", str(self._running().folder), force_add=True)
        return conf

    def list_partitions(self) -> list[str]:
        """Return the names of all partitions, in order of creation."""
        return list(self._client().request(ListPartitions(), Done).value)

    def create_partition(self, partition_id: str) -> bool:
        """Create a partition. Returns False if it exists."""
        return bool(self._client().request(CreatePartition(partition_id, pre_alloc_sample_num()), Done).value)

    def clear_partition(self, partition_id: str) -> None:
        """Remove a partition with its samples. An unknown partition is ignored."""
        self._client().request(ClearPartition(partition_id), Done)

    def register_sampler(self, sampler: object) -> None:
        """Use this sampler from now on; dealt batches stay. Raises SamplerError if it cannot be used."""
        client = self._client()
        name = SamplerFiles(SystemFolder(self._running().folder).samplers).write_sampler(dump(sampler, alone=True))
        client.request(UseSampler(name), Done)

    def get_partition_snapshot(self, partition_id: str) -> PartitionSnapshot | None:
        """Return a snapshot of a partition; None if it is unknown. Each page of 4096 samples is of one moment."""
        for _ in range(TRIES):
            pages = self._pages(partition_id)
            if not pages:
                return None
            if all(page.known and page.fields == pages[0].fields for page in pages):
                break
        return _snapshot(partition_id, [page for page in pages if page.known])

    def _pages(self, partition_id: str) -> list[SnapshotReply]:
        """Return all pages; [] for an unknown partition. The last one is not `known` if the partition was dropped."""
        pages: list[SnapshotReply] = []
        request = TakeSnapshot(partition_id)
        while True:
            page = self._client().request(request, SnapshotReply)
            if pages or page.known:
                pages.append(page)
            if not page.known or page.start is None:
                return pages
            request = TakeSnapshot(partition_id, page.made, page.start)


class _Spread:
    """Spreads storage units over nodes. All units of an external store are on the controller's node, `home`.

    Raises StartError if there are too few units for all replicas of a value, and `strict` is set.
    """

    def __init__(self, settings: Settings, home: str, strict: bool) -> None:
        self._required = settings.ray_node_resource
        self._each = settings.num_data_storage_units is None
        if not settings.has_arenas:  # one unit records a store's contents, wherever the bytes are
            self._each, self._planned, self.at_home = False, {}, settings.num_data_storage_units or 1
            return
        nodes = {node["NodeID"]: node["Resources"] for node in all_nodes()}
        able = sorted((node for node in nodes if self._is_able(nodes[node])), key=lambda node: (node != home, node))
        if not able:
            raise StartError(
                f"no node of the cluster has the resource {self._required!r} (ray.node_resource); add it to a node, or "
                f"change the setting"
            )
        count = settings.num_data_storage_units or len(able)
        self._planned = {node: count // len(able) + (at < count % len(able)) for at, node in enumerate(able)}
        self.at_home = self._planned.get(home, 0)
        if strict and count < settings.replicas:
            raise StartError(
                f"backend.SimpleStorage.replicas is {settings.replicas}, but there would be only one storage unit, "
                f"because one node can have units: add nodes, or set backend.SimpleStorage.num_data_storage_units"
            )

    def _is_able(self, resources: dict[str, float]) -> bool:
        return self._required is None or resources.get(self._required, 0) > 0

    def units_of(self, node: str, resources: dict[str, float]) -> int:
        """Return the number of units for a node, which may have been added later."""
        return self._planned.get(node, int(self._each and self._is_able(resources)))


def _snapshot(partition_id: str, pages: list[SnapshotReply]) -> PartitionSnapshot:
    from transfer_queue.metadata.partition_snapshot import (
        PartitionSnapshot,
    )  # imports torch, which the actor seldom needs

    rows = [np.frombuffer(page.rows, "i8") for page in pages]
    fields = list(dict.fromkeys(name for page in pages for name in page.fields))
    tasks = dict.fromkeys(task for page in pages for task in page.consumed)
    keys: list[str | None] = []
    tags: list[dict[str, Any]] = []
    for page, numbers in zip(pages, rows, strict=True):
        keys += page.keys if page.keys is not None else [None] * len(numbers)
        tags += tag_rows(page.tags, len(numbers))
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
    """Return the columns of a page in the order of `fields`, which may have been added after the page was taken."""
    out = np.zeros((len(page.rows) // 8, len(fields)), "i1")
    columns = [fields.index(name) for name in page.fields]
    out[:, columns] = np.frombuffer(page.produced, "i1").reshape(len(out), len(columns))
    return out


def _consumed(page: SnapshotReply, task: str) -> np.ndarray:
    column = page.consumed.get(task)
    return np.zeros(len(page.rows) // 8, "i1") if column is None else np.frombuffer(column, "i1")
