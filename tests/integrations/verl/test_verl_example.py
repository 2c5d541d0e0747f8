"""The example runs: ten steps of verl's synchronous trainer on the CPU, with its own processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "verl_cpu" / "run.py"


def test_ten_steps_raise_the_reward() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=500, env=os.environ)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = re.findall(r"^step +(\d+): reward ([\d.]+)", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(1, 11))
    assert float(found[-1][1]) > 2 * float(found[0][1]), "the reward did not rise"
