"""`tq demo --runtime ray`: the roles of examples/grpo as Ray actors, the same code as in processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil


def test_the_demo_runs_on_ray_though_a_worker_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "report"
    process = subprocess.Popen(
        [sys.executable, "-m", "transfer_queue.cli", "demo", "--smoke", "--runtime", "ray", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "RAY_raylet_start_wait_time_s": "120"},  # busy cores
    )
    printed = ""
    killed = None
    try:
        for line in process.stdout:
            printed += line
            found = re.search(r"processes: .*rollout 1 \((\d+)\)", line)
            if found is not None:
                killed = psutil.Process(int(found[1]))
                assert "ray::" in " ".join(killed.cmdline()), "it is an actor's process"
                killed.kill()
        assert process.wait(300) == 0, printed
    finally:
        process.kill()
        process.communicate()
    assert killed is not None, printed
    assert "rollout 1 was killed" in printed
    figures = json.loads((out / "report.json").read_text())
    assert "driver" not in figures, "on Ray only the streamed training runs"
    streamed = figures["queue"]
    assert streamed["killed_workers"] == ["rollout 1"]
    assert streamed["steps"] >= 1
    assert streamed["samples_trained_on"] == streamed["steps"] * figures["settings"]["prompts"] * 8
    assert figures["settings"]["runtime"] == "ray"
