"""The scenario of systems of processes: checkpoints that `tq.save_checkpoint` made, and the journal of such a system.

Everything goes through the public interface.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from golden_description import batch, described
from golden_observations import outcome, samples
from golden_records import put_kinds
from golden_systems import numbers, rows

import transfer_queue as tq

HERE = Path(__file__).resolve().parent
STORES = HERE.parents[1] / "examples" / "stores"
CHECKPOINTS = ("first", "second", "own store")


@contextmanager
def system(**sections: Any) -> Iterator[Any]:
    """The client of a new system of processes, which ends with the block."""
    found_by_all = os.pathsep.join([str(HERE), str(STORES), *filter(None, [os.environ.get("PYTHONPATH")])])
    with patch.dict(os.environ, PYTHONPATH=found_by_all), patch.object(sys, "path", [*sys.path, str(STORES)]):
        tq.init({"system": {"name": "golden"}, "runtime": "local", **sections}, attach="never")
        try:
            yield tq.get_client()
        finally:
            tq.close()


def _dealing(**more: Any) -> dict[str, Any]:
    """The section `controller` of a system whose fetches do not wait, with a user's sampler."""
    return {"polling_mode": True, "sampler": "golden_sampler:Alternating", **more}


REPLICAS = {"SimpleStorage": {"num_data_storage_units": 2, "replicas": 2, "arena_bytes": 16 << 20}}


# ------------------------------------------------------------ the files


def make_files(files: Path, scratch: Path) -> None:
    """Make checkpoints of two systems and the journal of a third one. scratch: an existing folder."""
    files.mkdir()
    with system(controller=_dealing(), backend=REPLICAS) as client:
        _begin(client)
        tq.save_checkpoint(scratch / "saved", metadata={"step": 1})
        shutil.copytree(scratch / "saved", files / "first")
        _continue(client)
        tq.save_checkpoint(scratch / "saved", metadata={"step": 2})  # links to the values of the first save
        shutil.copytree(scratch / "saved", files / "second")
    (scratch / "blocks").mkdir()
    own = {"storage_backend": "folder_store:FolderStore", "options": {"folder": str(scratch / "blocks")}}
    with system(controller=_dealing(), backend=own) as client:
        _begin(client)
        tq.save_checkpoint(files / "own store", metadata={"step": 3})
    journal = {"journal": {"folder": str(scratch / "journal")}}
    with system(controller=_dealing(**journal), backend=REPLICAS) as client:
        _begin(client)
        _continue(client)
    with system(controller=_dealing(**journal), backend=REPLICAS) as client:  # the values are lost
        client.put(numbers(2), partition_id="after the restart")
        client.put(rows(x=torch.tensor([7])), metadata=client.kv_retrieve_meta(["a"], "plain tensors"))
    shutil.copytree(scratch / "journal", files / "journal")


def _begin(client: Any) -> None:
    put_kinds(client)
    keys = [f"key {number}" for number in range(6)]
    tq.kv_batch_put(keys, "keyed", numbers(6), tags=[{"n": number} for number in range(6)])
    tq.kv_batch_put(["a", "b"], "plain tensors", rows(x=torch.arange(2)))
    client.create_partition("plain", group_size=2, producers=2)
    client.put(numbers(8), partition_id="plain", group_ids=[number // 2 for number in range(8)])
    for size in (1, 2):  # the sampler alternates between the first and the last rows
        client.get_meta(["x"], size, "plain", task_name="train")
    client.seal("plain")


def _continue(client: Any) -> None:
    tq.kv_clear(["key 1", "key 4"], "keyed")
    tq.kv_batch_put(["key 2", "key 7"], "keyed", rows(x=torch.tensor([20, 70])))
    client.get_meta(["x"], 2, "keyed", task_name="train", lease=1000.0)
    client.drop("plain", [3], reason="unfit")


# ------------------------------------------------------------ observations


def observe(files: Path, scratch: Path, records: Path) -> dict[str, Any]:
    """Observe a system that loads one checkpoint after the other, and a system that starts with the journal.

    scratch: an existing folder. records: the checkpoint of `golden_records`.
    """
    found: dict[str, Any] = {}
    with system(controller=_dealing()) as client:
        for name in CHECKPOINTS:
            tq.load_checkpoint(files / name)
            found[name] = {"now": described(client), "steps": list(_steps(client)), "then": described(client)}
        tq.save_checkpoint(scratch / "saved")
        before = described(client)
        tq.load_checkpoint(records)
        found["records"] = described(client)
        tq.load_checkpoint(scratch / "saved")
        assert samples(described(client)) == samples(before)
    shutil.copytree(files / "journal", scratch / "journal")
    journal = {"journal": {"folder": str(scratch / "journal")}}
    with system(controller=_dealing(**journal), backend=REPLICAS) as client:
        found["journal"] = {"now": described(client), "steps": list(_steps(client)), "then": described(client)}
    return found


def _steps(client: Any) -> Iterator[list[Any]]:
    """Use the partitions: what each step does, and its result."""

    def claim(partition: str, size: int, **more: Any) -> Any:
        return client.await_batch(["x"], size, partition, "train", timeout=0, **more)

    yield ["more rows", client.put(numbers(3, 50), partition_id="keyed").global_indexes]
    yield ["values again", tq.kv_batch_put(["key 0", "key 9"], "keyed", numbers(2, 90)).keys]
    for partition in ("keyed", "plain", "plain"):
        yield [f"two of {partition}", outcome(lambda partition=partition: batch(claim(partition, 2)))]  # type: ignore[misc]
    leased, _ = claim("keyed", 1, lease=1000.0)
    yield ["under a lease", leased.global_indexes, client.ack(leased)]
    client.clear_samples(leased)
    tq.kv_clear("key 3", "keyed")
    yield ["sealed once", outcome(lambda: client.put(numbers(1), partition_id="plain").global_indexes)]
    client.seal("plain")
    yield ["sealed", outcome(lambda: client.put(numbers(1), partition_id="plain").global_indexes)]
    client.clear_partition("many fields")
