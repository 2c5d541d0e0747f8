"""Real processes that are killed and stopped: `make chaos` does it for minutes, here it is short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[1] / "long" / "chaos.py"


@pytest.mark.slow
def test_nothing_is_lost() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", CHAOS, "--seconds", "5", "--faults", "15"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the ledger holds" in done.stdout
    assert "nothing was left behind" in done.stdout
