"""A whole system in one process, deterministic by its seed, for tests of this package and of its users.

`Cluster` runs the production controller, storage units and client operations over a virtual network and a virtual
clock: nothing sleeps, no socket is opened, and a seed repeats a run exactly.
"""

from transfer_queue.testing.cluster import Cluster
from transfer_queue.testing.network import Network, VirtualClock
from transfer_queue.testing.simulated_client import Client, Task

__all__ = ["Client", "Cluster", "Network", "Task", "VirtualClock"]
