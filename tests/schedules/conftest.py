"""Tests that choose schedules and faults by a seed, in a simulated system."""

from simulated import a, b, cluster, start  # noqa: F401
