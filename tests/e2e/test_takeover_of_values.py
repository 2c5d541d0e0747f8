"""Another node takes over the controller, and reads the values of the dead node from disk.

With `durability.values: machine`. The nodes are folders of this machine, as in `test_takeover.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from test_takeover import SECONDS, Producer, Systems

from batches import Batches
from local_nodes import held_processes
from server_processes import until
from transfer_queue.client import TransferQueueClient
from transfer_queue.errors import StartError
from transfer_queue.messages.reports.progress import MirrorProgress
from transfer_queue.node.system.durable_folder import DurableFolder, known_folders
from transfer_queue.node.system.launcher import start_local
from transfer_queue.node.unit.mirror_folders import list_arenas, list_mirrors

BATCHES = Batches(1 << 14)  # of 256 KiB each
put, check = BATCHES.put, BATCHES.check


@pytest.fixture
def systems(tmp_path: Path) -> Iterator[Systems]:
    folder = tmp_path / "kept"
    made = Systems(folder, replicas=1, values="machine", mode="sync")
    yield made
    made.stop()
    DurableFolder(folder).discard()
    assert not folder.exists()
    assert str(folder) not in [known.folder for known in known_folders()]


def mirror(client: TransferQueueClient) -> MirrorProgress:
    return client.status().mirror


def in_memory(client: TransferQueueClient) -> int:
    """The bytes that the units in memory have leased."""
    return sum(unit.leased for unit in client.status().units if unit.tier == "memory")


def has_one_mirror(systems: Systems) -> bool:
    """Whether the mirrors of earlier terms were emptied and removed."""
    return len(list_mirrors(systems.folder)) == 1


def test_the_values_of_a_killed_first_node_come_from_disk(systems: Systems) -> None:
    """Puts go on during the takeover, space of cleared samples is used again, and the former mirror disappears."""
    with TransferQueueClient(systems.first) as doomed:
        for number in range(8):
            put(doomed, number)
    with TransferQueueClient(systems.remotes[0]) as one, TransferQueueClient(systems.remotes[1]) as other:
        producer = Producer(lambda number: put(one, number), 100)
        until(lambda: len(producer.acknowledged) > 5, "nothing was put")
        former = list_mirrors(systems.folder)
        for process in held_processes(systems.first):
            process.kill()
        systems.take_over()
        systems.tell_gone()
        before = len(producer.acknowledged)
        until(lambda: len(producer.acknowledged) > before + 5, "no client puts after the takeover")
        numbers = [*range(8), *producer.end()]
        for client in (one, other):
            check(client, numbers)
        until(lambda: has_one_mirror(systems), "the mirror of the first node was not removed")
        assert list_mirrors(systems.folder) != former
        check(one, numbers)
        until(lambda: mirror(one).retired == 0, "the state names the former mirror")
        assert mirror(one).stored == len(numbers) * BATCHES.nbytes
        for _ in range(3):  # more than the space of the units, so that it is used again
            for number in range(1000, 1075):
                put(other, number)
            check(other, [1000, 1074])
            for number in range(1000, 1075):
                BATCHES.clear(other, number)
        check(other, numbers)
        assert other.status().partitions[0].fields[0].lost == 0


def test_a_frozen_first_node_that_wakes_up_changes_no_value(systems: Systems) -> None:
    """It is frozen while puts are under way, so that its mirror may be in the middle of an order."""
    with TransferQueueClient(systems.first) as doomed:
        for number in range(8):
            put(doomed, number)
        for number in range(0, 8, 2):
            BATCHES.clear(doomed, number)
    with TransferQueueClient(systems.remotes[0]) as client:
        producer = Producer(lambda number: put(client, number), 100)
        until(lambda: len(producer.acknowledged) > 5, "nothing was put")
        frozen = systems.freeze(systems.first)
        systems.take_over()
        before = len(producer.acknowledged)
        systems.tell_gone()
        for process in reversed(frozen):
            process.send_signal(signal.SIGCONT)
        until(lambda: len(producer.acknowledged) > before + 5, "no client puts after the takeover")
        psutil.wait_procs(frozen, timeout=SECONDS)
        assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in frozen)
        numbers = [*range(1, 8, 2), *producer.end()]
        check(client, numbers)
        until(lambda: has_one_mirror(systems), "the mirror of the first node was not removed")
        for number in range(1000, 1100):
            put(client, number)
        check(client, [*numbers, *range(1000, 1100)])


def test_takeovers_one_after_the_other_empty_all_mirrors_of_before(systems: Systems) -> None:
    """The second one comes at once, while the mirror of the first term is being emptied."""
    with TransferQueueClient(systems.first) as doomed:
        for number in range(40):
            put(doomed, number)
    with TransferQueueClient(systems.remotes[0]) as client:
        for process in held_processes(systems.first):
            process.kill()
        systems.take_over(1)
        put(client, 100)
        for process in held_processes(systems.controller):
            process.kill()
        systems.take_over(2)
        systems.tell_gone()
        put(client, 101)
        numbers = [*range(40), 100, 101]
        check(client, numbers)
        until(lambda: has_one_mirror(systems), "mirrors of before were not removed")
        check(client, numbers)


def test_a_system_of_one_node_continues_with_the_folder(systems: Systems) -> None:
    """A system of several nodes does not use the memory of this machine that it then has."""
    with TransferQueueClient(systems.remotes[0]) as client:
        for number in range(8):
            put(client, number)
    systems.stop()
    systems.all.clear()
    config = {"settings": {**systems.config["settings"], "num_data_storage_units": 1}}
    for _ in range(2):
        alone = start_local(f"{systems.name}-alone", config, timeout=SECONDS)
        with TransferQueueClient(alone) as client:
            check(client, list(range(8)))
            until(lambda: has_one_mirror(systems), "the mirror of before was not removed")
            until(lambda: in_memory(client) == mirror(client).stored, "the values were not copied back into memory")
        alone.stop()
    (arena,) = list_arenas(systems.folder)
    (arena / "generations").unlink()
    with pytest.raises(StartError, match="lacks its file 'generations'"):
        start_local(f"{systems.name}-alone", config, timeout=SECONDS)
    for path in arena.iterdir():
        path.unlink()
    systems.all.append(start_local(f"{systems.name}-alone", config, timeout=SECONDS))
    with TransferQueueClient(systems.all[0]) as client:
        check(client, list(range(8)))  # they are in memory, which outlives a system of one node
        until(lambda: mirror(client).behind_bytes == 0, "the values are not copied again")
    systems.stop()
    systems.all.clear()
    with pytest.raises(StartError, match="which a system under Ray does not use"):
        systems.start("", 1)
