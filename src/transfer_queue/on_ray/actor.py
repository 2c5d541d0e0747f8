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
from dataclasses import dataclass
from typing import Any

import numpy as np

from transfer_queue.client.onlooker import Onlooker
from transfer_queue.config import pre_alloc_sample_num
from transfer_queue.errors import ConnectionLostError, StartError
from transfer_queue.messages import (
    ClearPartition,
    CreatePartition,
    Done,
    ListPartitions,
    SnapshotReply,
    TakeSnapshot,
    UseSampler,
)
from transfer_queue.node.launcher import RunningSystem, start_local, take_over
from transfer_queue.node.paths import SystemFolder
from transfer_queue.node.sampler_files import SamplerFiles
from transfer_queue.node.samplers import PickledSampler, dump
from transfer_queue.partition_snapshot import PartitionSnapshot

logger = logging.getLogger(__name__)

TRIES = 5  # of a snapshot in pages, until none of its fields changed meanwhile


@dataclass(frozen=True)
class Order:
    """What is to be started. name: of the system on its node. conf: the merged DictConfig, pickled, as it may hold
    objects of the driver's. config: see `start_local`. seconds: until it must be up. restart_seconds: for which the
    servers live on after the actor was killed."""

    name: str
    conf: bytes
    config: dict[str, Any]
    sampler: PickledSampler | None
    seconds: float
    restart_seconds: float


@dataclass(frozen=True)
class Place:
    """Where a system is. node: Ray's id of the node; address: of it; folder: the system's, there."""

    node: str
    address: str
    folder: str


class ControllerActor:
    """One system. Its methods may be called at the same time, from any process of the cluster."""

    def __init__(self, order: Order) -> None:
        import ray

        self._order = order
        self._lock = threading.Lock()
        self._system: RunningSystem | None = None
        self._asking: Onlooker | None = None
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._system = take_over(order.name)
            if self._system is None:
                logger.error("the system %s has ended with its actor: an empty one is started in its place", order.name)
            self.start()

    # ------------------------------------------------------------ the system

    def start(self) -> Place:
        """Starts the servers, where those of the actor that was here before were not taken over. StartError."""
        with self._lock:
            if self._system is None:
                order = self._order
                self._system = start_local(
                    order.name, order.config, order.sampler, timeout=order.seconds, heirs=order.restart_seconds
                )
            if self._asking is None:
                self._asking = Onlooker(self._system)
            return self._place(self._system)

    def place(self) -> Place:
        """Where the system is. StartError where it was not started."""
        return self._place(self._running())

    def process(self) -> int:
        """The number of the actor's process on its node."""
        return os.getpid()

    def stop(self) -> None:
        """Ends the servers. Idempotent; the actor itself is ended by who calls this."""
        with self._lock:
            system, self._system = self._system, None
            asking, self._asking = self._asking, None
        if asking is not None:
            asking.close()
        if system is not None:
            system.stop()

    def _place(self, system: RunningSystem) -> Place:
        import ray

        node = ray.get_runtime_context().get_node_id()
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return Place(node, str(address), str(system.folder))

    def _running(self) -> RunningSystem:
        with self._lock:
            if self._system is None:
                raise StartError(f"the system {self._order.name} is not up: it is being started, or was stopped")
            return self._system

    def _client(self) -> Onlooker:
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
