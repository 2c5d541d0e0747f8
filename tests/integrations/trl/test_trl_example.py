"""The example: it learns, in time, and a killed generator loses no sample."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import toy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@pytest.mark.parametrize("trainer", ["async", "grpo"])
def test_the_example_learns_while_a_generator_is_killed(tmp_path: Path, trainer: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("TQ_ADDRESS", "TQ_SYSTEM")}
    done = subprocess.run(
        [sys.executable, str(toy.EXAMPLE / "run.py"), "--trainer", trainer, "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=400, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"killed the generator with process id \d+\n(step .*\n)+reward ", done.stdout)
    first, last, seconds = re.search(r"reward ([\d.]+) -> ([\d.]+) in \d+ steps and (\d+) s", done.stdout).groups()  # type: ignore[union-attr]
    assert float(first) < 0.2
    assert float(last) > 0.75
    assert "samples lost: 0" in done.stdout
    print(f"{trainer}: {seconds} s")
    events = EventAccumulator(str(tmp_path / "runs" / "transfer_queue")).Reload()
    assert "tq/generate/wait_share" in events.Tags()["scalars"]
