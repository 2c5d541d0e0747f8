"""The first node of a system on a Ray cluster dies or is cut off, and another node takes over the controller.

The nodes are processes of this machine. The system is started by a process of a node that is not Ray's head.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from test_ray_nodes import SECONDS, Cluster, units

import transfer_queue as tq
from tests.server_processes import until  # Ray imports this module in workers, which find only this path
from transfer_queue.attachment import CURRENT
from transfer_queue.errors import StartError, WaitTimeoutError
from transfer_queue.journal.terms import Terms
from transfer_queue.node.system.durable_folder import DurableFolder, Identity, known_folders
from transfer_queue.node.unit.mirror_folders import list_mirrors
from transfer_queue.system_folder.paths import SystemFolder, runtime_dir

BATCH = 8
EARLY = 20  # rows that the first node puts


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        made = Cluster()
        yield made
        if CURRENT.system is not None:
            CURRENT.system.stop()
        tq.close()
        ray.shutdown()
        made.cluster.shutdown()
    ours = [known for known in known_folders() if Path(known.folder).parent == tmp_path]
    until(lambda: all(map(is_discarded, ours)), "a durable folder is still in use")
    until(lambda: not list(runtime_dir().iterdir()), f"files of a system were left in {runtime_dir()}")


def is_discarded(identity: Identity) -> bool:
    """Remove what a durable folder keeps. Returns False if a process of its system has not ended yet."""
    try:
        DurableFolder(Path(identity.folder)).discard()
    except StartError as error:
        print(error)
        return False
    return True


@ray.remote(num_cpus=0)
class Starter:
    """The process that starts the system, on its first node."""

    def start(self, folder: str, on_disk: bool) -> str:
        """Start the system, with a second copy of each value on another node or on disk."""
        storage = {"arena_bytes": 64 << 20, "replicas": 1 if on_disk else 2}
        values = {"values": "machine", "mode": "sync"} if on_disk else {}
        conf = {
            "backend": {"SimpleStorage": storage},
            "durability": {"folder": folder, **values},
            "ray": {"detached": True, "restart_seconds": 30},
            "timeouts": {"start": SECONDS, "call": SECONDS},
        }
        tq.init(conf)
        return str(tq.get_client().storage_manager.system.folder)

    def put(self, count: int) -> None:
        """Put values, which are in the memory of this node."""
        rows = torch.arange(count * 1000).reshape(count, 1000)
        tq.kv_batch_put([f"k{number}" for number in range(count)], "of the first", {"x": rows})


@ray.remote(num_cpus=0, max_concurrency=2)
class Producer:
    """Puts samples with different numbers, until it is stopped."""

    def __init__(self, at: int) -> None:
        self.acknowledged: list[int] = []
        self.times: list[float] = []
        self.at = at
        self.stopped = False

    def run(self) -> None:
        for number in itertools.count(self.at, 2):
            if self.stopped:
                return
            tq.kv_put(key=f"k{number}", partition_id="p", fields={"x": torch.full((64,), number)})
            self.acknowledged.append(number)
            self.times.append(time.time())

    def count(self) -> int:
        return len(self.acknowledged)

    def stop(self) -> None:
        self.stopped = True

    def result(self) -> tuple[list[int], list[float]]:
        return self.acknowledged, self.times


@ray.remote(num_cpus=0, max_concurrency=2)
class Consumer:
    """Take samples of a task until none arrive for a while after `end` was called."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def run(self) -> list[int]:
        client = tq.get_client()
        for _ in range(1_000_000):
            try:
                meta = client.get_meta(["x"], BATCH, "p", task_name="train", timeout=2.0)
            except WaitTimeoutError:
                if self.ending:
                    return self.taken
                continue
            self.taken += [int(row[0]) for row in client.get_data(meta)["x"].unbind()]
        raise AssertionError("the producers do not end")

    ending = False

    def end(self) -> None:
        self.ending = True


def on(node: str) -> Any:
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)


def start_on(node: str, folder: Path, on_disk: bool) -> Path:
    """Start the system from a process of this node, with the controller there. Returns its folder there."""

    def started() -> Path | None:
        starter = Starter.options(scheduling_strategy=on(node)).remote()
        place = Path(ray.get(starter.start.remote(str(folder), on_disk), timeout=SECONDS))
        description = SystemFolder(place).read_description()
        tq.init()
        if not description.is_outpost:
            ray.get(starter.put.remote(EARLY), timeout=SECONDS)
            return place
        CURRENT.system.stop()  # not every node of Ray knew the new node, so Ray chose another one
        tq.close()
        return None

    found: Path = until(started, f"Ray does not start the controller on node {node}")
    return found


def processes_of(folder: Path) -> list[psutil.Process]:
    """The processes of the system in this folder, stopped."""
    description = SystemFolder(folder).read_description()
    supervisor = psutil.Process(description.pid)
    supervisor.suspend()
    children = supervisor.children()
    for child in children:
        child.suspend()
    return [supervisor, *children]


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended. If its parent has ended, too, no process may have reaped it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("frozen", "on_disk"), [(False, True), (True, False)], ids=["killed, values on disk", "frozen, values twice"]
)
def test_a_run_goes_on_when_the_first_node_is_gone(
    cluster: Cluster, tmp_path: Path, frozen: bool, on_disk: bool
) -> None:
    """No acknowledged sample is lost, and none is dealt twice. A frozen controller that wakes up has no effect."""
    doomed = cluster.add()
    others = [node for node in cluster.nodes() if node != doomed]
    folder = tmp_path / "kept"
    first = start_on(doomed, folder, on_disk)
    producers = [Producer.options(scheduling_strategy=on(node)).remote(at) for at, node in enumerate(others[1:])]
    consumers = [Consumer.options(scheduling_strategy=on(node)).remote() for node in others[1:]]
    producing = [each.run.remote() for each in producers]
    consuming = [each.run.remote() for each in consumers]
    until(lambda: all(n > 100 for n in ray.get([each.count.remote() for each in producers])), "nothing is put")
    terms = [term.number for term in Terms(folder).list()]
    stopped = processes_of(first)
    if not frozen:
        for process in stopped:
            process.kill()
    began = time.time()
    cluster.remove(doomed)
    before = ray.get([each.count.remote() for each in producers])
    until(
        lambda: all(
            n > was + 100 for n, was in zip(ray.get([p.count.remote() for p in producers]), before, strict=True)
        ),
        "no client puts after the takeover",
    )
    if frozen:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        until(lambda: all(map(has_ended, stopped)), "the first controller still runs")
    assert [term.number for term in Terms(folder).list()][-1] > terms[-1], "no other node has taken over"
    ray.get([each.stop.remote() for each in producers], timeout=SECONDS)
    ray.get(producing, timeout=SECONDS)
    told = ray.get([each.result.remote() for each in producers], timeout=SECONDS)
    acknowledged = sorted(number for numbers, _ in told for number in numbers)
    gaps = [min(when for when in times if when > began + 0.5) - began for _, times in told]
    print(f"puts went on {max(gaps):.1f} s after the first node was gone")
    until(lambda: doomed not in units(), "the units of the first node are still there")
    found = tq.kv_batch_get([f"k{number}" for number in acknowledged], "p")["x"]
    assert [int(row[0]) for row in found.unbind()] == acknowledged
    early = tq.kv_batch_get([f"k{number}" for number in range(EARLY)], "of the first")["x"]
    assert torch.equal(torch.stack(list(early.unbind())), torch.arange(EARLY * 1000).reshape(EARLY, 1000))
    if on_disk:
        until(lambda: len(list_mirrors(folder)) == 1, "the mirrors of before were not removed")
    ray.get([each.end.remote() for each in consumers], timeout=SECONDS)
    taken = [number for numbers in ray.get(consuming, timeout=SECONDS) for number in numbers]
    assert len(taken) == len(set(taken))
    assert len(acknowledged) - len(taken) < BATCH
    assert set(taken) <= set(acknowledged)
