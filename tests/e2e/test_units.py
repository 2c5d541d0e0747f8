"""Storage units whose arenas are lost: what two units keep outlives the loss of either."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

import transfer_queue as tq
from server_processes import restart, started, unit_status, until
from transfer_queue.interface import CURRENT


def test_two_copies_outlive_the_loss_of_either_unit() -> None:
    with started("copies", backend={"SimpleStorage": {"num_data_storage_units": 2, "replicas": 2}}):
        keys = [f"k{i}" for i in range(4)]
        rows = torch.arange(4 << 18, dtype=torch.int32).reshape(4, -1)
        tq.kv_batch_put(keys, "p", {"x": rows})
        arenas = Path(os.readlink(Path(CURRENT.system.folder) / "arena"))
        for place, made_up in ((0, 2), (1, 3)):
            shutil.rmtree(arenas / f"unit-{place}")
            restart(f"unit-{place}")
            assert torch.equal(torch.stack(tq.kv_batch_get(keys, "p")["x"].unbind()), rows)
            until(lambda new=made_up: unit_leases(new) >= rows.nbytes)  # where a copy is made up for
        assert torch.equal(torch.stack(tq.kv_batch_get(keys, "p")["x"].unbind()), rows)


def unit_leases(number: int) -> int:
    """Bytes leased from a unit; 0 while its number is not known to this client."""
    client = tq.TransferQueueClient(CURRENT.system)
    try:
        client.get_partition_list()
        return unit_status(number, client).leased if number in client.storage_manager.units.known else 0
    finally:
        client.close()
