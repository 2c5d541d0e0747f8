"""Real processes that are killed and stopped: `make chaos` does it for minutes, here it is short."""

from __future__ import annotations

import chaos
import pytest

import warm


@pytest.mark.slow
def test_nothing_is_lost() -> None:
    done = warm.run_program(chaos.main, "--seconds", "2", "--faults", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the ledger holds" in done.stdout
    assert "nothing was left behind" in done.stdout
