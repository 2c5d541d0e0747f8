"""What does the journal cost small puts?

Systems of each durability run at the same time and are measured in turn, so that other load of the machine affects all
of them equally.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

from benchmarks.harness.report import Row, Scale, compared
from benchmarks.harness.systems import Worker, own_folder
from transfer_queue import interface as tq
from transfer_queue.config.settings import Settings
from transfer_queue.node.system import launcher

QUESTION = "What does the journal cost small puts?"
DURABILITIES = ("none", "async", "sync")


def puts(until: float) -> int:
    """Put until a point in time; return the number of puts. The last values are compared."""
    torch.set_num_threads(1)
    client = tq.get_client()
    mine = client.client_id
    count = 0
    while time.monotonic() < until:
        tq.kv_put(str(count), mine, {"x": torch.arange(4.0) + count}, tag={"n": count})
        count += 1
    if count and not torch.equal(tq.kv_batch_get(str(count - 1), mine)["x"].values(), torch.arange(4.0) + count - 1):
        raise AssertionError("the values of the get differ from those of the put")
    client.clear_partition(mine)
    return count


def run(scale: Scale) -> list[Row]:
    """Measure one client and several."""
    seconds, rounds, most = scale.pick((0.4, 9, 4), (0.1, 1, 1))
    rates: dict[tuple[int, str], list[float]] = {}
    with own_folder(), contextlib.ExitStack() as stack:
        clients: dict[str, list[Any]] = {}
        for durability in DURABILITIES:
            settings = Settings.from_config({"controller": {"journal": {"durability": durability}}})
            config = {"settings": settings.to_json(), "conf": {}}
            running = launcher.start_local(durability, config)
            stack.callback(running.stop)
            made = [stack.enter_context(Worker(str(running.folder))) for _ in range(most)]
            clients[durability] = made
        for count in sorted({1, most}):
            for round_ in range(rounds + 1):
                for durability in DURABILITIES:
                    rate = _rate(clients[durability][:count], seconds)
                    if round_:
                        rates.setdefault((count, durability), []).append(rate)
    rows = []
    for (count, durability), found in rates.items():
        what = f"single-row puts, {count} client{'s' if count > 1 else ''}, journal {durability}"
        rows.append(compared(what, "a second", found, rates[count, "none"], "journal none"))
    return rows


def _rate(workers: list[Worker], seconds: float) -> float:
    """Return the puts per second of these clients together."""
    until = time.monotonic() + seconds
    for worker in workers:
        worker.begin(puts, until)
    done: int = sum(worker.result() for worker in workers)
    return done / seconds
