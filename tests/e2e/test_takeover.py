"""Another node takes over the controller. The nodes are folders of this machine; `test_ray_takeover.py` has Ray's."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from local_nodes import LOOPBACK, SECONDS, held_processes, report_gone, stop_all
from server_processes import until
from transfer_queue.client import TransferQueueClient
from transfer_queue.client.control_client import ControlClient
from transfer_queue.config.settings import Settings
from transfer_queue.errors import StartError, StorageKeyNotFoundError, TransferQueueError, WaitTimeoutError
from transfer_queue.journal.terms import Terms
from transfer_queue.messages.base import Done
from transfer_queue.messages.partitions import CreatePartition, ListPartitions
from transfer_queue.node.system.launcher import RunningSystem, start_local
from transfer_queue.node.system.launcher_protocol import NodeRole
from transfer_queue.system_folder.paths import ControllerPlace


class Systems:
    """A controller with a unit on node-0, a unit each on node-1 and node-2, and the nodes that take over."""

    def __init__(self, folder: Path, replicas: int = 2, **durability: object) -> None:
        self.folder = folder
        self.id = uuid.uuid4().hex
        self.name = f"take-{self.id[:8]}"
        storage = {"arena_bytes": 32 << 20, "num_data_storage_units": 3, "replicas": replicas}
        conf = {"backend": {"SimpleStorage": storage}, "durability": {"folder": str(folder), **durability}}
        self.config = {"settings": Settings.from_config(conf).to_json()}
        self.all: list[RunningSystem] = []
        self.frozen: list[psutil.Process] = []
        self.controller = self.first = self.start("", 1)
        self.remotes = [self.start(f"-{n}", 1, f"node-{n}", self.first) for n in (1, 2)]

    def start(self, suffix: str, units: int, node: str = "node-0", of: RunningSystem | None = None) -> RunningSystem:
        if of is None:
            seat = NodeRole(node, LOOPBACK, units, system=self.id, succeeds=bool(self.all))
        else:
            seat = NodeRole(node, LOOPBACK, units, of.description.remote, term=of.description.term)
        key = self.first.key if self.all else None
        self.all.append(start_local(f"{self.name}{suffix}", self.config, seat=seat, key=key, timeout=SECONDS))
        return self.all[-1]

    def take_over(self, number: int = 1) -> None:
        """As the restarted actor and the actors of the nodes do."""
        self.controller = self.start(f"-c{number}", 0, "node-1")
        place = ControllerPlace(self.controller.description.term, self.controller.description.remote)
        for remote in self.remotes:
            remote.move_controller(place)

    def tell_gone(self) -> None:
        report_gone(self.controller, "node-0")

    def freeze(self, system: RunningSystem) -> list[psutil.Process]:
        """Stop all processes of a system until the test continues them, or ends."""
        self.frozen = held_processes(system)
        for process in self.frozen:
            process.suspend()
        return self.frozen

    def stop(self) -> None:
        for process in self.frozen:
            with contextlib.suppress(psutil.Error):
                process.resume()
        stop_all(reversed(self.all))


@pytest.fixture
def systems(tmp_path: Path) -> Iterator[Systems]:
    made = Systems(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def without_copies(tmp_path: Path) -> Iterator[Systems]:
    """Clients of node-1 write only to its unit. A copy could be on node-0, and a put waits while that is frozen."""
    made = Systems(tmp_path, replicas=1)
    yield made
    made.stop()


def put(client: TransferQueueClient, name: str) -> None:
    client.kv_put(key=name, partition_id="p", fields={"x": torch.full((100,), float(len(name)))})


def check(client: TransferQueueClient, names: list[str]) -> None:
    got = client.kv_batch_get(keys=names, partition_id="p")["x"]
    assert [float(row[0]) for row in got.unbind()] == [float(len(name)) for name in names]


PAUSE = 0.005  # seconds: puts are under way all the time, and leave the processor to the takeover


class Producer:
    """Puts ascending numbers in a thread, with a pause after each, until it ends."""

    def __init__(self, put: Callable[[int], None], first: int = 0) -> None:
        self.acknowledged: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(put, first))
        self._thread.start()

    def _run(self, put: Callable[[int], None], first: int) -> None:
        for number in itertools.count(first):
            if self._ended.wait(PAUSE):
                return
            put(number)
            self.acknowledged.append(number)

    def end(self) -> list[int]:
        self._ended.set()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        return self.acknowledged


def test_clients_and_units_of_other_nodes_follow_a_controller_whose_node_is_killed(systems: Systems) -> None:
    """Puts go on during the takeover. No acknowledged one is lost, thanks to its replica; samples are dealt once.

    No other system can use the folder meanwhile; when the system has been stopped, one of one node continues with it.
    """
    with pytest.raises(StartError, match="used by"):
        start_local(f"{systems.name}-x", systems.config, seat=NodeRole("x", LOOPBACK, 0, system="x"))
    with pytest.raises(StartError, match="used by another system"):
        start_local(f"{systems.name}-y", systems.config, seat=NodeRole("y", LOOPBACK, 0, system="y", succeeds=True))
    with TransferQueueClient(systems.remotes[0]) as one, TransferQueueClient(systems.remotes[1]) as other:
        producers = [
            Producer(lambda number: put(one, f"0-{number}")),
            Producer(lambda number: put(other, f"1-{number}")),
        ]

        def count() -> int:
            return sum(len(producer.acknowledged) for producer in producers)

        until(lambda: count() > 20, "nothing was put")
        for process in held_processes(systems.first):
            process.kill()
        systems.take_over()
        systems.tell_gone()
        with pytest.raises(StartError, match="was replaced by one of term 2"):
            systems.remotes[0].move_controller(ControllerPlace(1, systems.first.description.remote))
        before = count()
        until(lambda: count() > before + 20, "no client puts after the takeover")
        acknowledged = [f"{at}-{number}" for at, producer in enumerate(producers) for number in producer.end()]
        check(one, acknowledged)
        check(other, acknowledged)
        assert sorted(one.kv_list("p")["p"]) == sorted(acknowledged)
    assert [term.number for term in Terms(systems.folder).list()] == [2]
    systems.stop()
    systems.all.clear()
    alone = start_local(f"{systems.name}-alone", systems.config, timeout=SECONDS)
    systems.all.append(alone)
    with TransferQueueClient(alone) as client:
        assert sorted(client.kv_list("p")["p"]) == sorted(acknowledged)
        with pytest.raises(StorageKeyNotFoundError, match="lost with storage unit"):
            check(client, acknowledged[:1])
        put(client, "b")
        check(client, ["b"])
    assert [term.number for term in Terms(systems.folder).list()] == [3]


def test_a_frozen_controller_that_wakes_up_answers_nobody_and_ends(without_copies: Systems) -> None:
    """A client that keeps its old address gets no reply either. One that follows the controller continues."""
    systems = without_copies
    with TransferQueueClient(systems.remotes[0]) as client:
        put(client, "before")
        frozen = systems.freeze(systems.first)
        waiting = threading.Thread(target=put, args=(client, "while it is frozen"))
        waiting.start()  # its request is in the socket of the frozen controller
        stale = ControlClient(systems.first)
        refused: list[TransferQueueError] = []

        def ask_the_first() -> None:
            try:
                stale.request(CreatePartition("late", 0), Done, timeout=SECONDS)
            except TransferQueueError as error:
                refused.append(error)

        asking = threading.Thread(target=ask_the_first)
        asking.start()
        systems.take_over()
        waiting.join(SECONDS)
        assert not waiting.is_alive(), "the client was not moved on"
        check(client, ["while it is frozen"])
        for process in reversed(frozen):
            process.send_signal(signal.SIGCONT)
        psutil.wait_procs(frozen, timeout=SECONDS)
        assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in frozen)
        asking.join(SECONDS)
        stale.close()
        assert refused
        assert not isinstance(refused[0], WaitTimeoutError)
        systems.tell_gone()
        put(client, "after")
        check(client, ["before", "while it is frozen", "after"])
        with ControlClient(systems.controller) as now:
            assert now.request(ListPartitions(), Done).value == ["p"]


def test_a_node_that_does_not_see_the_folder_does_not_take_over(tmp_path: Path) -> None:
    settings = Settings.from_config({"durability": {"folder": str(tmp_path)}})
    with pytest.raises(StartError, match="is not visible on this node"):
        start_local(
            f"take-{uuid.uuid4().hex[:8]}", {"settings": settings.to_json()},
            seat=NodeRole("x", LOOPBACK, 0, system="s", succeeds=True),
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []
