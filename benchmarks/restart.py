"""How long clients wait where the controller of a large system is killed: from the kill to the first answer.

    python benchmarks/restart.py [--rows 1000000] [--fields 20] [--block 1000] [--puts 16000] [--rounds 3]

Every row has a key and three tags. The journal is a snapshot and, after it, as many records as small puts make (three
each). Prints a line for each round, and how long the process stood still to fork for a snapshot of this state.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path

from common import own_runtime_dir
from saved_state import filled

from transfer_queue.config import Settings
from transfer_queue.journal import state_file
from transfer_queue.journal.journal import Journal, recover, segment_path, snapshot_of, snapshot_path
from transfer_queue.journal.segment import Clock
from transfer_queue.messages import Envelope, Publish
from transfer_queue.node import launcher


def write(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Makes the journal; says what it is."""
    clock = Clock.now()
    controller = filled(options.rows, options.fields, options.block)
    journal = Journal(folder, recover(folder, clock), clock, durable=False)
    state_file.write(snapshot_path(folder, 1), snapshot_of(controller.state, clock))
    start = time.perf_counter()
    child = os.fork()
    if not child:
        os._exit(0)
    fork = time.perf_counter() - start
    os.waitpid(child, 0)
    for number in range(options.puts):
        put = Publish("p", 1, keys=[f"small-{number}"], tags=[{"n": number, "s": "fresh", "p": 0.5}], pre_allocate=0)
        controller.handle("client", 1, Envelope(10**7 + number, 10**7 + number - 1, put), 0.0)
        journal.append(controller.take_records())
        journal.commit()
    journal.close()
    return {
        "fork_ms": fork * 1e3,
        "snapshot_mib": snapshot_path(folder, 1).stat().st_size / 2**20,
        "records": journal.records,
        "segment_mib": segment_path(folder, 1).stat().st_size / 2**20,
    }


def main() -> None:
    """All rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rows", 1_000_000), ("fields", 20), ("block", 1000), ("puts", 16_000), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tqb-") as base:
        own_runtime_dir(base)
        folder = Path(base) / "kept"
        folder.mkdir()
        found = write(folder, options)
        print({name: round(value, 1) for name, value in found.items()})
        settings = Settings.from_config({"controller": {"journal": {"folder": str(folder)}}})
        system = launcher.start_local("restart", {"settings": settings.to_json(), "conf": {}}, detached=True)
        try:
            print(json.dumps({**found, "seconds": [one(system) for _ in range(options.rounds)]}))
        finally:
            system.stop()


def one(system: launcher.RunningSystem) -> float:
    """Kills the controller; seconds until a client that was there has its first answer."""
    import transfer_queue as tq

    with tq.TransferQueueClient(system) as client:
        assert "p" in client.get_partition_list()
        log = (system.logs / "controller.log").read_text()
        os.kill(int(re.findall(r"up, process (\d+)", log)[-1]), 9)
        start = time.perf_counter()
        assert client.kv_retrieve_meta(["sample-00000007"], "p").global_indexes == [7]
        seconds = time.perf_counter() - start
    print(f"first answer after {seconds:.2f} s")
    return seconds


if __name__ == "__main__":
    main()
