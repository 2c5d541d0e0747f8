"""The simulated systems of the golden files: their data, and how they save, load and resume.

A system works in a folder `system` below the working directory, so that its files contain no absolute path.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from golden_internals import CONTROLLER, FaultyCluster, faulty_cluster
from tensordict import NonTensorStack, TensorDict

from transfer_queue.sampler import GRPOGroupNSampler
from transfer_queue.testing import Cluster

MIB = 1 << 20
KIB = 1 << 10
FOLDER = Path("system")
STATE = "controller_state.pkl"  # the name of the state file in a checkpoint
LOST = ("unit", 1)  # the storage unit that loses its arena
NEVER = 1e9  # seconds; a server that is killed for this time stays down until `restart`

CONF = {
    "backend": {
        "SimpleStorage": {
            "num_data_storage_units": 2,
            "offload": {"enabled": True, "path": "/disk", "capacity": 8 * MIB},
        }
    },
    "dedup": {"fields": ["hashed"]},
}


# ------------------------------------------------------------ data


def rows(**columns: Any) -> TensorDict:
    """A TensorDict of these columns; lists become non-tensor columns."""
    first = next(iter(columns.values()))
    count = first.size(0) if isinstance(first, torch.Tensor) else len(first)
    columns = {
        name: NonTensorStack(*column) if isinstance(column, list) else column for name, column in columns.items()
    }
    return TensorDict(columns, batch_size=[count])


def numbers(count: int, start: int = 0) -> TensorDict:
    """A column `x` of consecutive numbers."""
    return rows(x=torch.arange(start, start + count))


def wide(count: int, width: int, start: int = 0) -> TensorDict:
    """A column `x` whose row i has the number `start + i` in `width` places of 8 bytes."""
    return rows(x=torch.arange(start, start + count)[:, None].expand(count, width).contiguous())


# ------------------------------------------------------------ systems


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Create a folder, and make it the working directory for the block."""
    folder.mkdir(parents=True)
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def system() -> FaultyCluster:
    """A simulated system with a journal, two storage units in memory and one on disk."""
    return FaultyCluster(
        FOLDER, seed=14, sampler=GRPOGroupNSampler(), conf=CONF, arena_bytes=4 * MIB, snapshot_every=10**9
    )


def lose_arena(cluster: FaultyCluster) -> None:
    """One unit loses its arena; the unit that replaces it reports when that happened."""
    registration = faulty_cluster.registration

    def at_noon(*about: Any) -> Any:
        return msgspec.structs.replace(registration(*about), when="at noon")

    with patch.object(faulty_cluster, "registration", at_noon):
        cluster.lose(LOST, 0.1)
        cluster.advance(5.0)


def arenas(cluster: FaultyCluster) -> list[Path]:
    """The folders of the arenas that the storage units have now."""
    return [place.arena.folder for place in cluster.places]


def resume(files: Path, journal: str, seconds: float) -> FaultyCluster:
    """A simulated system that has restarted on copies of arenas and of the journal with this name.

    seconds: the virtual time at which it restarts. A new system first gets units with the same numbers as those in the
    files. Then all of its servers are killed, its files are replaced, and the servers are restarted.
    """
    cluster = system()
    lose_arena(cluster)
    cluster.advance(seconds - cluster.clock.now)
    servers = [CONTROLLER, *(place.target for place in cluster.places)]
    for server in servers:
        cluster.crash(server, NEVER)
    for name, path in [(journal, FOLDER / "journal"), *((path.name, path) for path in arenas(cluster))]:
        shutil.rmtree(path)
        shutil.copytree(files / name, path)
    for server in servers:
        cluster.restart(server)
    cluster.run()
    return cluster


# ------------------------------------------------------------ checkpoints


def save(client: Any, folder: Path) -> None:
    """Save a checkpoint as `tq.save_checkpoint` does, with a client of a simulated system."""
    cut = client.begin_checkpoint()
    client.save_storage_checkpoint(folder, cut=cut)
    client.save_controller_checkpoint(folder / STATE, cut=cut)
    assert client.end_checkpoint(cut)
    (folder / "metadata.json").write_text(json.dumps({"storage_saved": True, "user_metadata": {}}))


def load(client: Any, folder: Path) -> None:
    """Load a checkpoint as `tq.load_checkpoint` does after its checks."""
    client.load_storage_checkpoint(folder)
    client.load_controller_checkpoint(folder / STATE)


@contextmanager
def loaded(checkpoint: Path, folder: Path) -> Iterator[tuple[Any, Cluster]]:
    """A client of a new simulated system that has loaded a checkpoint, and the system."""
    with Cluster(folder, sampler=GRPOGroupNSampler()) as cluster:
        client = cluster.client("later")
        load(client, checkpoint)
        yield client, cluster
        cluster.check()
