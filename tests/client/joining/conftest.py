"""The simulated system."""

from simulated import a, b, cluster, start  # noqa: F401
