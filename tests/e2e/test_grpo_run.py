"""The whole of examples/grpo, short: what it leaves, a worker that is killed, Ctrl-C."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

RUN = Path(__file__).resolve().parents[2] / "examples" / "grpo" / "run.py"
SECONDS = 600  # after which a run is killed, so that a test that waits for a line fails
pytestmark = pytest.mark.slow


class Run:
    """A run in a session of its own, read line by line."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "TQ_RUNTIME_DIR": str(folder / "systems"), "PYTHONUNBUFFERED": "1"}
        self.environment = environment
        self.out = folder / "report"
        self.process = subprocess.Popen(
            [sys.executable, str(RUN), "--smoke", "--keep", "--out", str(self.out)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        self.printed = ""
        self.limit = threading.Timer(SECONDS, os.killpg, (self.process.pid, signal.SIGKILL))
        self.limit.start()

    def until(self, pattern: str) -> re.Match[str]:
        for line in self.process.stdout:
            self.printed += line
            if found := re.search(pattern, line):
                return found
        pytest.fail(f"the run ended without {pattern!r}:\n{self.printed}")

    def workers(self, part: str = "2. GRPO") -> dict[str, psutil.Process]:
        """The processes by name of the run through the driver ("1. ") or through the queue ("2. ")."""
        self.until(part)
        words = self.until(r"processes: (.*)").group(1)
        return {name: psutil.Process(int(pid)) for name, pid in re.findall(r"([a-z]+(?: \d)?) \((\d+)\)", words)}

    def end(self) -> int:
        self.printed += self.process.communicate()[0]
        self.limit.cancel()
        return self.process.returncode


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    yield made
    made.limit.cancel()
    if made.process.poll() is None:
        os.killpg(made.process.pid, signal.SIGKILL)
        made.end()


def test_both_runs_are_compared_even_if_a_rollout_worker_is_killed(run):
    workers = run.workers()
    assert sorted(workers) == ["reference", "reward", "rollout 0", "rollout 1", "trainer 0", "trainer 1"]
    workers["rollout 1"].kill()
    run.until("the system is up until Ctrl-C")
    assert run.until(r"http://127.0.0.1:\d+/\?token=\S+$")
    name = run.until(r"tq top --name (\S+)").group(1)
    assert run.printed.count(f"tq top --name {name}") == 2
    assert "rollout 1 was killed" in run.printed
    assert f"report: {run.out}" in run.printed
    figures = json.loads((run.out / "report.json").read_text())
    in_driver, in_queue = figures["driver"], figures["queue"]
    assert 1 <= in_queue["steps"] <= in_driver["steps"]
    for one in (in_driver, in_queue):
        assert one["samples_trained_on"] == one["steps"] * figures["settings"]["prompts"] * 8
        assert sum(one["staleness_histogram"].values()) == one["samples_trained_on"]
        assert one["tokens_generated"] >= one["samples_trained_on"]
        assert one["busy_over_wall"] > 0
        measured = one["held_out_accuracy"]
        assert [each["step"] for each in (measured[0], measured[-1])] == [0, one["steps"]]
        assert 0 == measured[0]["seconds"] < measured[-1]["seconds"] <= one["seconds"]
    assert set(in_driver["staleness_histogram"]) == {"0"}
    assert max(map(int, in_queue["staleness_histogram"])) <= figures["settings"]["staleness"]
    assert in_queue["killed_workers"] == ["rollout 1"]
    speed = (in_driver["seconds"] / in_driver["steps"]) / (in_queue["seconds"] / in_queue["steps"])
    assert figures["times_faster"] == pytest.approx(speed)
    assert all(0 < share < 1 for share in figures["idle_share"].values())
    assert set(figures["idle_share"]) == {"driver", "queue"}
    idle = figures["idle_share"]
    assert re.search(rf"\d times (faster|slower), idle {idle['driver']:.0%} -> {idle['queue']:.0%}", run.printed)
    assert "held-out accuracy after" in run.printed
    assert 0 <= figures["token_imbalance"]["balanced"] < figures["token_imbalance"]["in_order"]
    assert set(figures["held_out_accuracy"]) == {"before", "driver", "queue"}
    assert (run.out / "report.png").stat().st_size > 10_000
    if importlib.util.find_spec("tensorboard") is not None:
        assert list((run.out / "tensorboard").iterdir())
    assert list_partitions(run, name) >= {"prompts", "weights", f"train_{in_queue['steps'] - 1}"}
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end() == 0, run.printed
    assert not (run.out / "rendezvous").exists()
    assert not psutil.wait_procs(workers.values(), timeout=120)[1]


def list_partitions(run: Run, system: str) -> set[str]:
    """Return the names of the partitions that `tq status` shows."""
    command = [sys.executable, "-m", "transfer_queue.cli", "status", "--name", system]
    printed = subprocess.run(command, env=run.environment, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^(\w+): ", printed, re.MULTILINE))


def test_ctrl_c_ends_everything(run):
    workers = run.workers()
    everything = [*workers.values(), *psutil.Process(run.process.pid).children(recursive=True)]
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end() == 130, run.printed
    assert "Traceback" not in run.printed
    assert not psutil.wait_procs(everything, timeout=120)[1]


@pytest.mark.parametrize("part", ["1. GRPO", "2. GRPO"], ids=["driver", "queue"])
def test_a_worker_that_fails_ends_the_run_with_its_error(run, part):
    workers = run.workers(part)
    workers["trainer 0"].kill()
    assert run.end() == 1
    assert re.search(r"trainer \d failed:", run.printed)
    assert not psutil.wait_procs(workers.values(), timeout=120)[1]
