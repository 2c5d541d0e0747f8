"""Run all benchmarks on a machine with many cores and without a network, in less than eight minutes.

    tools/make_wheels WHEELS                                on a machine with a network; copy the folder
    python3 benchmarks/large_machine.py WHEELS RESULTS      on the large one, which has torch and numpy

The wheels are installed into RESULTS/site, beside the packages of the machine. RESULTS/measured then has the folder of
this machine for `benchmarks/measured`. The benchmarks that need the bandwidth of the memory or many cores run first,
one after the other; then the others run, LANES at a time. What has not ended in time is killed with all that it has
started, and named at the end with what failed. This script needs only Python's standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LANES = 4
SECONDS = 460.0
"""The time for everything, so that what runs can be ended in less than eight minutes."""
ALONE = ("kv", "gpu", "trainings")
OTHERS = (
    "rare_events", "small_operations", "pipeline", "balance", "wakeup", "queues", "claims", "memory", "durability",
    "timeline", "controller_limits", "loader", "restart", "live_page", "tags", "equal_values",
)  # fmt: skip
"""The other benchmarks, the longest first."""


def main() -> int:
    """Install the wheels, run the benchmarks, and return the exit code: 1 if a benchmark failed or did not run."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path, help="the folder that tools/make_wheels has filled")
    parser.add_argument("results", type=Path, help="the folder for the results")
    parser.add_argument("--quick", action="store_true", help="smoke test; its results are not meaningful")
    options = parser.parse_args()
    began = time.monotonic()
    site = options.results.resolve() / "site"
    install(sorted(options.wheels.glob("*.whl")), site)
    paths = [str(site), str(ROOT / "src"), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.performance"]
    command += ["--into", str(options.results.resolve() / "measured"), *(["--quick"] if options.quick else [])]
    failed: list[str] = []

    def measure(name: str) -> None:
        output, code = run([*command, name], environment, began + SECONDS - time.monotonic())
        print(output, flush=True)
        if code is None:
            failed.append(f"{name} (no time left)")
        elif code or f"{name}: skipped" in output:
            failed.append(f"{name} (see above)")

    for name in ALONE:
        measure(name)
    with ThreadPoolExecutor(LANES) as lanes:
        list(lanes.map(measure, OTHERS))
    words = f"not measured: {', '.join(failed)}" if failed else "all were measured"
    print(f"{time.monotonic() - began:.0f} s; {words}")
    return bool(failed)


def run(command: list[str], environment: dict[str, str], seconds: float) -> tuple[str, int | None]:
    """Return the output and the exit code of a command, or None if it has not ended in time and was killed.

    A system has a session of its own, and ends when the process that has started it is killed. The command's other
    processes are killed with it, because they are in its process group.
    """
    if seconds <= 0:
        return "", None
    process = subprocess.Popen(
        command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        return process.communicate(timeout=seconds)[0], process.returncode
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0], None


def install(wheels: list[Path], site: Path) -> None:
    """Install these wheels, and nothing else, into a folder."""
    if not wheels:
        sys.exit("the folder has no wheels; fill it with tools/make_wheels on a machine with a network")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-cache-dir", "--upgrade"]
    subprocess.run([*pip, "--target", str(site), *map(str, wheels)], check=True)


if __name__ == "__main__":
    sys.exit(main())
