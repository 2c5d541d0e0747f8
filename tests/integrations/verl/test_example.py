"""The example: ten steps of verl's trainer on the CPU, in each of the modes that it has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "verl_cpu" / "run.py"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_ten_steps_run(mode: str) -> None:
    command = [sys.executable, str(EXAMPLE), "--mode", mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    steps = [(int(step), float(reward)) for step, reward in re.findall(r"^step +(\d+): reward ([\d.]+)", done.stdout, re.M)]
    assert [step for step, _ in steps] == list(range(1, 11))
    assert steps[-1][1] > steps[0][1], "the reward did not rise"
