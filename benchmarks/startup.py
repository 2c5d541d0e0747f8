"""How long a system takes to come up and to go, as a starter sees it, beside the bare imports of its servers.

python benchmarks/startup.py [rounds]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

from transfer_queue.config import Settings
from transfer_queue.node.launcher import start_local


def imports() -> float:
    """Seconds that a Python process takes to import what the servers import."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import transfer_queue.node.supervisor"], check=True)
    return time.perf_counter() - start


def life(config: dict[str, object]) -> tuple[float, float]:
    """Seconds from the call to a system that serves, and from `stop` to nothing left."""
    start = time.perf_counter()
    system = start_local("benchmark", config)
    up = time.perf_counter()
    system.stop()
    return up - start, time.perf_counter() - up


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TQ_RUNTIME_DIR"] = folder
        config: dict[str, object] = {"settings": Settings.from_config(None).to_json()}
        figures = [(imports(), *life(config)) for _ in range(rounds)]
    for label, column in zip(("imports alone", "start", "stop"), zip(*figures, strict=True), strict=True):
        print(f"{label:14} median {statistics.median(column) * 1000:6.0f} ms   slowest {max(column) * 1000:6.0f} ms")


if __name__ == "__main__":
    main()
