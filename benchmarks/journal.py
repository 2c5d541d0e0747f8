"""Small puts with each durability of the journal, side by side in one run.

    python benchmarks/journal.py

Three systems run at once and are asked in turn, so that what else the machine does meets all alike. Prints, for one
and for eight clients (processes), puts a second and the share of `none` that is lost, medians of the rounds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from typing import Any

import torch
from common import own_runtime_dir

DURABILITIES = ("none", "async", "sync")
ROUNDS = 9
SECONDS = 0.4  # of each round
CLIENTS = 4


def putter(durability: str, pipe: Any) -> None:
    """Puts for so long as it is told to, and says how often it could."""
    import transfer_queue as tq

    torch.set_num_threads(1)
    os.environ["TQ_SYSTEM"] = durability
    client = tq.init({"system": {"name": durability}}) and tq.get_client()
    values = {"x": torch.arange(4.0)}
    mine = f"client-{os.getpid()}"
    while True:
        until = pipe.recv()
        if until is None:
            break
        count = 0
        while time.monotonic() < until:
            tq.kv_put(str(count), mine, values, tag={"n": count})
            count += 1
        client.clear_partition(mine)
        pipe.send(count)
    tq.close()


def rate(pipes: list[Any]) -> float:
    """Puts a second of these clients together."""
    until = time.monotonic() + SECONDS
    for pipe in pipes:
        pipe.send(until)
    return sum(pipe.recv() for pipe in pipes) / SECONDS


def main() -> None:
    """All rounds."""
    from transfer_queue.config import Settings
    from transfer_queue.node import launcher

    systems, pipes, processes = [], {}, []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tqb-") as folder:
        own_runtime_dir(folder)
        try:
            for durability in DURABILITIES:
                settings = Settings.from_config({"controller": {"journal": {"durability": durability}}})
                config = {"settings": settings.to_json(), "conf": {}}
                systems.append(launcher.start_local(durability, config, detached=True))
                pipes[durability] = []
                for _ in range(CLIENTS):
                    ours, theirs = context.Pipe()
                    process = context.Process(target=putter, args=(durability, theirs), daemon=True)
                    process.start()
                    processes.append(process)
                    pipes[durability].append(ours)
            found = []
            for clients in (1, CLIENTS):
                rates: dict[str, list[float]] = {durability: [] for durability in DURABILITIES}
                for round_ in range(ROUNDS + 1):
                    for durability in DURABILITIES:
                        each = rate(pipes[durability][:clients])
                        if round_:
                            rates[durability].append(each)
                shares = {d: [a / b for a, b in zip(rates[d], rates["none"])] for d in DURABILITIES}
                for durability in DURABILITIES:
                    each = statistics.median(rates[durability])
                    lost = 1 - statistics.median(shares[durability])
                    found.append(
                        {"clients": clients, "durability": durability, "puts_a_second": round(each), "lost": lost}
                    )
                    print(f"{clients} clients, {durability:5}: {each:8.0f} puts/s, {lost:6.1%} less than none")
            print(json.dumps(found))
        finally:
            for all_pipes in pipes.values():
                for pipe in all_pipes:
                    pipe.send(None)
            for process in processes:
                process.join(20)
            for system in systems:
                system.stop()


if __name__ == "__main__":
    main()
