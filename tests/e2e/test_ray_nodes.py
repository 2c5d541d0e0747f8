"""A system over the nodes of a Ray cluster; these are processes of this machine, which share nothing else here."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray import cluster_utils
from ray._raylet import GcsClient
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from tensordict import TensorDict

import transfer_queue as tq
from tests.server_processes import until  # Ray imports this module in workers, which find only this path
from transfer_queue.attachment import CURRENT
from transfer_queue.client.control_client import ControlClient
from transfer_queue.errors import StartError, StorageKeyNotFoundError
from transfer_queue.messages.system import Topology, TopologyReply
from transfer_queue.system_folder.paths import SystemFolder, runtime_dir

SECONDS = 120.0
HEAD = "accelerator_of_the_head"
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


class Cluster:
    """Nodes of Ray's, the first with the driver."""

    def __init__(self) -> None:
        self.cluster = cluster_utils.Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 2,
                "include_dashboard": False,
                "resources": {HEAD: 1},
                "_system_config": HEALTH,
            },
        )
        self.handles = [self.cluster.head_node]
        for _ in range(2):
            self.add()
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="ERROR")

    def add(self, **resources: float) -> str:
        """The id of a new node."""
        self.handles.append(self.cluster.add_node(num_cpus=1, resources=resources))
        return str(self.handles[-1].node_id)

    def nodes(self) -> list[str]:
        return [str(handle.node_id) for handle in self.handles]

    def kill(self, node: str) -> None:
        """All that runs on a node, the servers of the system first: nothing there has time for anything."""
        place = ray.get(_actor().place.remote(node), timeout=SECONDS)
        description = SystemFolder(Path(place.folder)).read_description()
        supervisor = psutil.Process(description.pid)
        supervisor.suspend()
        for process in [*supervisor.children(), supervisor]:
            process.kill()
        self.remove(node)
        SystemFolder(Path(place.folder)).sweep()

    def remove(self, node: str) -> None:
        handle = next(handle for handle in self.handles if handle.node_id == node)
        self.handles.remove(handle)
        self.cluster.remove_node(handle, allow_graceful=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        )
        made = Cluster()
        yield made
        ray.shutdown()
        made.cluster.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    tq.close()
    until(lambda: not list(runtime_dir().iterdir()), "files of a system were left")


def _actor() -> Any:
    return ray.get_actor("TransferQueueController", namespace="transfer_queue")


def start(node_resource: str | None = None, restart_seconds: float = 5, **storage: object) -> None:
    storage = {"arena_bytes": 64 << 20, **storage}
    its = {"restart_seconds": restart_seconds, "node_resource": node_resource}
    tq.init({"backend": {"SimpleStorage": storage}, "ray": its, "timeouts": {"start": SECONDS}})


@contextlib.contextmanager
def asking() -> Iterator[ControlClient]:
    """Something to ask the controller with."""
    with ControlClient(CURRENT.system) as found:
        yield found


def units() -> list[str]:
    """The nodes of the storage units."""
    with asking() as its:
        return [unit.node for unit in its.request(Topology(), TopologyReply).units]


def is_leaving(node: str) -> bool:
    """Whether all is being moved off the storage units of a node."""
    with asking() as its:
        there = {unit.unit for unit in its.request(Topology(), TopologyReply).units if unit.node == node}
        return all(unit.drained for unit in its.status().units if unit.unit in there)


@ray.remote(num_cpus=0)
class Worker:
    """A process on some node, which never calls `init`."""

    def node(self) -> str:
        return str(tq.get_client().storage_manager.system.node)

    def put(self, name: str, count: int) -> int:
        values = TensorDict({"x": torch.arange(count).view(count, 1).expand(count, 64).contiguous()}, [count])
        tq.kv_batch_put([f"{name}-{n}" for n in range(count)], "p", fields=values)
        return count

    def put_many(self, name: str, times: int) -> list[str]:
        """The names of the puts that succeeded."""
        for n in range(times):
            self.put(f"{name}.{n}", 8)
        return [f"{name}.{n}" for n in range(times)]

    def read(self, name: str, count: int) -> bool:
        return is_right(name, count)


def is_right(name: str, count: int) -> bool:
    got = tq.kv_batch_get([f"{name}-{n}" for n in range(count)], "p")["x"]
    return [row.tolist() for row in got.unbind()] == [[n] * 64 for n in range(count)]


def worker(node: str) -> Any:
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    return Worker.options(scheduling_strategy=strategy(node, soft=False)).remote()


def get(*references: Any) -> list[Any]:
    return list(ray.get(list(references), timeout=SECONDS))


def test_each_node_has_a_unit_and_reads_what_others_wrote(cluster: Cluster) -> None:
    start()
    nodes = cluster.nodes()
    assert sorted(units()) == sorted(nodes)
    workers = [worker(node) for node in nodes]
    assert get(*(each.node.remote() for each in workers)) == nodes
    get(*(each.put.remote(f"w{at}", 20) for at, each in enumerate(workers)))
    assert all(get(*(each.read.remote(f"w{at}", 20) for each in workers for at in range(3))))
    assert all(is_right(f"w{at}", 20) for at in range(3))


def test_a_store_spans_the_nodes(cluster: Cluster) -> None:
    """Each has a segment of it, and the first the one unit; what lay on a node that is killed is lost, and named so."""
    doomed = cluster.add()
    mooncake = {"master_server_address": "localhost:0", "global_segment_size": 64 << 20}
    backend = {"storage_backend": "MooncakeStore", "MooncakeStore": mooncake}
    tq.init({"backend": backend, "ray": {"restart_seconds": 5}, "timeouts": {"start": SECONDS}})
    nodes = cluster.nodes()
    assert units() == nodes[:1]
    workers = {node: worker(node) for node in nodes}
    get(*(each.put.remote(f"w{at}", 20) for at, each in enumerate(workers.values())))
    assert all(get(*(each.read.remote(f"w{at}", 20) for each in workers.values() for at in range(4))))
    cluster.kill(doomed)
    for at in range(4):
        try:
            assert is_right(f"w{at}", 20)
        except StorageKeyNotFoundError as error:
            if "lost" not in str(error):
                raise
    get(workers[nodes[1]].put.remote("after", 20))
    assert is_right("after", 20)


def test_units_are_spread_over_the_nodes(cluster: Cluster) -> None:
    start(num_data_storage_units=5)
    found = units()
    assert len(found) == 5
    assert sorted(found.count(node) for node in cluster.nodes()) == [1, 2, 2]


def test_a_node_without_a_unit_writes_to_another(cluster: Cluster) -> None:
    start(num_data_storage_units=1)
    nodes = cluster.nodes()
    assert units() == nodes[:1]
    far = worker(nodes[2])
    get(far.put.remote("far", 20))
    assert get(far.read.remote("far", 20), worker(nodes[1]).read.remote("far", 20)) == [True, True]
    assert is_right("far", 20)


def test_a_new_node_gets_a_unit_and_a_drained_one_is_emptied(cluster: Cluster) -> None:
    start()
    new = cluster.add()
    until(lambda: new in units(), "the new node has no unit")
    get(worker(new).put.remote("new", 20))
    ray.get(_actor().drain_node.remote(new, SECONDS), timeout=SECONDS)
    cluster.kill(new)
    until(lambda: new not in units(), "the unit of the node that left is still there")
    assert is_right("new", 20)


def test_only_nodes_with_the_required_resource_get_units(cluster: Cluster) -> None:
    able = cluster.add(**{HEAD: 1})
    try:
        start(HEAD)
        assert sorted(units()) == sorted([cluster.nodes()[0], able])
        get(worker(cluster.nodes()[1]).put.remote("far", 8))
        assert is_right("far", 8)
    finally:
        tq.close()
        cluster.remove(able)
    with pytest.raises(StartError, match="resource 'nowhere'"):
        start("nowhere")


def test_a_node_that_ray_drains_is_emptied_before_it_leaves(cluster: Cluster) -> None:
    """As before a preemption, of which Ray tells some time ahead."""
    start()
    new = cluster.add()
    until(lambda: new in units(), "the new node has no unit")
    get(worker(new).put.remote("new", 20))
    assert not is_leaving(new)
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline = int((time.time() + 10 * SECONDS) * 1000)
    accepted, why = GcsClient(cluster.cluster.address).drain_node(new, reason, "it is taken away", deadline)
    assert accepted, why
    until(lambda: is_leaving(new), "nothing is moved off the node that is about to leave")
    ray.get(_actor().drain_node.remote(new, SECONDS), timeout=SECONDS)
    cluster.kill(new)
    assert is_right("new", 20)


@pytest.mark.parametrize("replicas", [2, 1])
def test_a_node_is_killed_in_the_middle_of_a_run(cluster: Cluster, replicas: int) -> None:
    """With two replicas nothing is lost; with one, what lay there alone is named as lost."""
    doomed = cluster.add()
    start(replicas=replicas)
    nodes = [node for node in cluster.nodes() if node != doomed]
    early = get(worker(doomed).put_many.remote("early", 10))[0]
    workers = [worker(node) for node in nodes]
    running = [each.put_many.remote(f"w{at}", 60) for at, each in enumerate(workers)]
    worker(doomed).put_many.remote("doomed", 100_000)
    cluster.kill(doomed)
    names = [name for its in get(*running) for name in its]
    until(lambda: doomed not in units(), "nobody has said that the node is gone")
    assert all(is_right(name, 8) for name in names)
    if replicas == 2:
        assert all(is_right(name, 8) for name in early)
    else:
        for name in early:
            with pytest.raises(StorageKeyNotFoundError, match="lost"):
                is_right(name, 8)
    assert get(*(each.put.remote(f"after{at}", 8) for at, each in enumerate(workers))) == [8] * len(workers)


def test_an_actor_that_is_killed_finds_the_servers_of_all_nodes_again(cluster: Cluster) -> None:
    start(restart_seconds=SECONDS)  # Ray takes some seconds to start an actor again, more on a busy machine
    nodes = cluster.nodes()
    workers = [worker(node) for node in nodes]
    get(*(each.put.remote(f"w{at}", 8) for at, each in enumerate(workers)))
    folders = [place.folder for place in get(*(_actor().place.remote(node) for node in nodes))]
    pids = [SystemFolder(Path(folder)).read_description().pid for folder in folders]  # type: ignore[union-attr]
    ray.kill(_actor(), no_restart=False)
    assert all(get(*(worker(node).read.remote(f"w{at}", 8) for at, node in enumerate(nodes))))  # they ask it anew
    assert [place.folder for place in get(*(_actor().place.remote(node) for node in nodes))] == folders
    assert [SystemFolder(Path(folder)).read_description().pid for folder in folders] == pids  # type: ignore[union-attr]
    assert all(get(*(each.read.remote(f"w{at}", 8) for each in workers for at in range(len(nodes)))))
    get(*(each.put.remote(f"v{at}", 8) for at, each in enumerate(workers)))
    assert all(is_right(f"v{at}", 8) for at in range(len(nodes)))
