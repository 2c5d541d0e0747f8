"""ManyCluster: several simulated controllers with their units, one virtual clock and one network."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.simulation.many_controllers.gate import home_of
from tests.simulation.many_controllers.member import Member
from tests.simulation.many_controllers.routing_client import RoutingClient
from transfer_queue.client.checkpoint.checkpoint_folder import STATE
from transfer_queue.core.checkpoints import FORMAT
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.serialization import save_state
from transfer_queue.core.state.state import State
from transfer_queue.journal import state_file
from transfer_queue.testing.cluster import MAX_DELIVERIES, MAX_STEPS
from transfer_queue.testing.network import Network, VirtualClock
from transfer_queue.testing.simulated_locks import HeldSlots

INDEX_BITS = 40  # of a global index; the bits above are the number of the controller that issued it


class ManyCluster:
    """See the module.

    members: The controllers with their units.
    clients: All clients that were made.
    on_move: Called when a partition is given away.
    """

    def __init__(self, folder: Path, seed: int, controllers: int, others: Callable[[], dict[str, Any]]) -> None:
        self.clock = VirtualClock()
        self.network = Network(seed)
        self.held = HeldSlots()
        self.folder = folder
        self.clients: list[RoutingClient] = []
        self.on_move: Callable[[], object] = lambda: None
        self._salt = seed
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._planned = 0
        self.members: list[Member] = []
        for number in range(controllers):
            self.members.append(Member(self, number, folder / f"controller-{number}", seed, **others()))
        self.states = self.members[0].states
        for member in self.members:
            self._begin(member)

    def _begin(self, member: Member) -> None:
        """Let a new controller load an empty state, so that it issues global indexes of its own."""
        state = State(member.controller.state.capacity)
        state.next_index = member.number << INDEX_BITS
        path = member.folder / STATE
        tree = {"format": FORMAT, "time": 0.0, "sampler": None, "origin": "", "state": save_state(state)}
        state_file.write(path, tree, sync=False)
        client = self.client(f"starter-{member.number}")
        part = client.parts[member.number]
        client._run(client.through(part, part.operations.load_controller_checkpoint(path)))
        client.close()
        if member.controller.state.next_index != member.number << INDEX_BITS:
            raise AssertionError("a controller does not begin with its own global indexes")

    def client(self, name: str) -> RoutingClient:
        """Return a new client of all controllers."""
        client = RoutingClient(self, name)
        self.clients.append(client)
        return client

    def close(self) -> None:
        """Close all files."""
        for member in self.members:
            member.close()

    # ------------------------------------------------------------ partitions

    def home_of(self, name: str) -> int:
        """Return the number of the controller of a partition that was never moved."""
        return home_of(name, len(self.members), self._salt)

    def partitions(self) -> dict[str, Partition]:
        """Return the partitions, each of its owner."""
        return {
            name: partition
            for member in self.members
            for name, partition in member.controller.state.partitions.items()
            if member.gate.owns(name)
        }

    def is_held(self, member: Member) -> bool:
        """Return whether a controller is held for a checkpoint."""
        return member in self.members and member.gate.is_held()

    def finish_moves(self) -> None:
        """Let the next owners adopt what was given to them, and remove all other copies."""
        for member in self.members:
            for name, ticket in member.gate.ownership.given.items():
                self.members[ticket.owner].gate.carry_out("", ["adopt", name, ticket.move])
        for member in self.members:
            member.drop_foreign()

    # ------------------------------------------------------------ time

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """See `Cluster.run`."""
        for _ in range(MAX_DELIVERIES):
            if (until is not None and until()) or not self.network.deliver():
                return
        raise AssertionError(f"still busy after {MAX_DELIVERIES} deliveries")

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """See `Cluster.later`."""
        heapq.heappush(self._agenda, (self.clock.now + seconds, self._planned, action))
        self._planned += 1

    def advance(self, seconds: float) -> None:
        """See `Cluster.advance`."""
        end = self.clock.now + seconds
        self.run()
        due = self._next_deadline()
        while due is not None and due <= end:
            self._step(due)
            due = self._next_deadline()
        self.clock.move_to(max(end, self.clock.now))

    def wait(self, until: Callable[[], bool]) -> None:
        """See `Cluster.wait`."""
        self.run(until)
        for _ in range(MAX_STEPS):
            if until():
                return
            due = self._next_deadline()
            if due is None:
                raise AssertionError("a call waits for an event that cannot happen")
            self._step(due, until)
        raise AssertionError(f"a call still waits after {MAX_STEPS} deadlines")

    def _next_deadline(self) -> float | None:
        deadlines = [each._next_deadline() for each in self.members] + [each.next_deadline() for each in self.clients]
        times = [when for when in deadlines if when is not None] + [when for when, _, _ in self._agenda[:1]]
        return max(self.clock.now, min(times)) if times else None

    def _step(self, due: float, until: Callable[[], bool] | None = None) -> None:
        self.clock.move_to(max(due, self.clock.now))
        while self._agenda and self._agenda[0][0] <= due:
            heapq.heappop(self._agenda)[2]()
        for member in self.members:
            member._step(max(due, self.clock.now))
        for client in self.clients:
            client.tick()
        self.run(until)

    # ------------------------------------------------------------ what must hold

    def check(self) -> None:
        """Verify every controller with its units, and that each partition is in one controller only.

        Raises:
            AssertionError: See `Cluster.check`.
        """
        for member in self.members:
            member.check()
        owners = Counter(name for member in self.members for name in member.controller.state.partitions)
        twice = sorted(name for name, count in owners.items() if count > 1)
        if twice:
            raise AssertionError(f"{twice} are in several controllers")
