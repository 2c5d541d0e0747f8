"""The soak itself is `make soak`; here it runs short, to be known to measure."""

from __future__ import annotations

import pytest
import soak

import warm


@pytest.mark.slow
def test_measures_every_process() -> None:
    """With a bound that all exceed."""
    done = warm.run_program(soak.main, "--batches", "100", "--bound", "-1000")
    assert done.returncode == 1, done.stderr
    _, *lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:10]] == [str(1 + 10 * tenth) for tenth in range(10)]
    names = ("arena", "controller", "unit-0", "supervisor", "producer", "consumer", "consumer's worker 0")
    for name in names:
        assert f"  {name} " in lines[0]
        assert any(line.startswith(f"{name}: ") for line in lines)
    more = [f"{name}'s {what}" for name in names if name != "arena" for what in ("descriptors", "threads")]
    every = sorted([*names, *more, "system", "system's files"])
    assert lines[-1] == f"grew by more than -1000: {', '.join(every)}"
