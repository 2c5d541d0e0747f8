"""Every row that is read is the row that was put: a random run over all layouts, containers, dtypes and tiers.

`make torn` does the same with many processes, for longer, and with every backend that is installed.
"""

from __future__ import annotations

from typing import Any

import pytest

from checked_rows import Reader, Writer
from simulated import Start
from transfer_queue.core.units import migration_planner

MIB = 1 << 20
STEPS = 25
SYSTEMS: dict[str, dict[str, Any]] = {
    "one unit": {"num_data_storage_units": 1},
    "two units": {"num_data_storage_units": 2},
    "two copies": {"num_data_storage_units": 3, "replicas": 2},
    "a disk tier": {"offload": {"enabled": True, "path": "/disk", "high_watermark": 0.2, "low_watermark": 0.05}},
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_row_is_what_was_put(start: Start, system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration_planner, "SPARE", 0)  # so that little is enough to be moved
    conf = SYSTEMS[system]
    cluster = start(seed=5, conf={"backend": {"SimpleStorage": conf}}, arena_bytes=6 * MIB)
    writers = [Writer(cluster.client(f"writer {n}"), "p", seed=n, place=n, most=60) for n in range(2)]
    reader = Reader(cluster.client("reader"), "p", seed=9)
    for step in range(STEPS):
        for writer in writers:
            writer.step()
        live = [number for writer in writers for number in writer.live]
        if live:
            reader.read(reader.selection(live), whole=True)
        if step % 5 == 4:
            cluster.advance(2)  # blocks are made smaller, and moved
        if step % 10 == 9 and conf.get("num_data_storage_units", 1) > 1:
            reader.client.drain_unit(step // 10 % 2, timeout=60)
            reader.client.drain_unit(step // 10 % 2, undo=True)
    assert sum(each.rows for each in [*writers, reader]) > 150
