"""Injects faults into a simulated cluster, at times and of kinds that a seed determines.

break      a connection ends; what is on its way arrives in part, late, or not at all, each direction by itself
slow       a direction of a connection waits for a while
part       some clients reach no server for a while; their connections break, or wait
freeze     a client does nothing for a while, like a process that is stopped by a signal
tear       a client stops in the middle of its next write, for a while
late       a client stops between its next lookup and the copy, for a while
kill       a client ends like a killed process; another client takes its place
stop       a server does nothing for a while
unlink     a unit and the controller lose their connection
controller the controller is killed at one of its next records, before it is written down, or before or while what it
           led to leaves; and recovered
unit       a unit is killed and started again
both       the controller and a unit are killed
system     all servers are killed, at once or when the controller dies at one of its next records, and most clients; the
           servers start again together, with the journal and the arenas of before (`durability.values: processes`)
lose       a unit is killed, and its arena is deleted
reboot     all servers are killed and the arenas in memory are deleted, if there is a mirror
rank       a rank ends permanently, and is declared gone
server     a server of the external store dies with its blocks, and a new one takes its place
put        the same in the middle of the next put
get        the same in the middle of the next get
outage     all servers of the external store die
evict      the external store loses some blocks
pause      the controller is frozen for a while, at once or at a point of one of its next turns
cut        the controller does not reach the storage of its journal for a while
claim      another node takes the controller over, sometimes after one that died while it did so; the first node runs on
takeover   the same, and the first controller is frozen, cut off from the storage, killed, or killed at one of its next
           records, or its node dies with a unit and some clients
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.simulation.controller_host import POINTS
from tests.simulation.faulty_cluster import FaultyCluster
from tests.simulation.ledger import LedgerError
from tests.simulation.retrying_client import RetryingClient
from tests.simulation.run_features import RANKS
from tests.simulation.simulated_store import SERVERS
from tests.simulation.takeover_cluster import TakeoverCluster
from transfer_queue.net.calls import CONTROLLER
from transfer_queue.net.session import Target

MAX_FAULTS = 24  # of a run
CLAIM_DIES = 0.2  # of the nodes that take over
MAX_RECORDS = 12  # until the controller is killed
KILLED_WITH_SYSTEM = 0.7  # of the clients
KILLED_WITH_NODE = 0.2
SHORT, LONG = 2.0, 45.0  # seconds that a fault lasts: most of them, and some


class Faults:
    """The faults of one run.

    kinds: The relative frequency of each kind. kill: Ends a client. end_rank: Ends a rank. most_losses: The maximum
    number of arenas that are lost.
    """

    def __init__(
        self,
        cluster: FaultyCluster,
        draw: random.Random,
        kinds: dict[str, int],
        kill: Callable[[RetryingClient], None],
        end_rank: Callable[[int], None] = lambda rank: None,
        most_losses: int = 0,
    ) -> None:
        self.cluster = cluster
        self.draw = draw
        self.kinds = kinds
        self.happened: dict[str, int] = {}
        self.over = False
        self._kill = kill
        self._end_rank = end_rank
        self._most_losses = most_losses

    def carry_out(self, seconds: float, patience: float, close: Callable[[], None], done: Callable[[], bool]) -> None:
        """Let the clients run with faults, then without faults until all of them have finished.

        Args:
            seconds: The virtual time in which faults happen.
            patience: The seconds of virtual time in which the clients must finish afterwards.
            close: Asks the clients to finish.
            done: Returns whether all clients have finished.

        Raises:
            LedgerError: A client did not finish in time.
        """
        cluster = self.cluster
        self.plan(self.draw.randint(0, MAX_FAULTS), seconds)
        cluster.advance(seconds)
        self.end()
        close()
        limit = cluster.clock.now + patience
        while not done():
            cluster.advance(1.0)
            if cluster.clock.now > limit:
                raise LedgerError("a client waits forever")

    def plan(self, count: int, seconds: float) -> None:
        """Schedule `count` faults at random times within the next `seconds`."""
        for _ in range(count):
            kind = self.draw.choices(list(self.kinds), list(self.kinds.values()))[0]
            self.cluster.later(self.draw.uniform(0, seconds), lambda kind=kind: self.happen(kind))  # type: ignore[misc]

    def happen(self, kind: str) -> None:
        """Inject a fault of this kind now."""
        if self.over:
            return
        self.happened[kind] = self.happened.get(kind, 0) + 1
        getattr(self, f"_{kind}")()

    def end(self) -> None:
        """Stop injecting faults; frozen, stopped and separated clients and servers continue."""
        self.over = True
        cluster = self.cluster
        cluster.fuse = None
        for target in sorted(cluster.stopped):
            cluster.go_on(target)
            cluster.restart(target)  # a unit without its arena runs when it has a number
        if cluster.world is not None:
            cluster.world.fails_at = None
            for server in range(SERVERS):
                cluster.restart_server(server)
        cluster.heal(set(cluster.apart))
        for client in cluster.clients:
            client.torn = client.late = None
            if client.frozen:
                client.thaw()
        for connection, direction in list(cluster.network.held):
            cluster.network.release(connection, direction, "slow")
        cluster.finish_takeovers()

    # ------------------------------------------------------------ kinds

    def _while(self) -> float:
        return self.draw.choice([self.draw.uniform(0, SHORT)] * 4 + [self.draw.uniform(0, LONG)])

    def _some_client(self) -> RetryingClient | None:
        living = [client for client in self.cluster.clients if not client.dead and not client.frozen]
        return self.draw.choice(living) if living else None

    def _break(self) -> None:
        connections = self.cluster.connections()
        if connections:
            connection = self.draw.choice(connections)
            up, down = (self.draw.choice([0, 0, 1, None]) for _ in range(2))
            self.cluster.network.sever(connection, up, down)
            if up != 0:
                self._slow_down(connection, "up")

    def _slow(self) -> None:
        connections = self.cluster.connections()
        if connections:
            self._slow_down(self.draw.choice(connections), self.draw.choice(["up", "down"]))

    def _slow_down(self, connection: int, direction: str) -> None:
        network = self.cluster.network
        network.hold(connection, direction, "slow")
        self.cluster.later(self._while(), lambda: network.release(connection, direction, "slow"))

    def _part(self) -> None:
        names = [client.name for client in self.cluster.clients if not client.dead]
        some = set(self.draw.sample(names, self.draw.randint(1, max(1, len(names) // 2))))
        self.cluster.part(some)
        breaks = self.draw.random() < 0.5

        def heal() -> None:
            self.cluster.heal(some)
            for connection in [c for name in sorted(some) for c in self.cluster.connections(name)]:
                if breaks:
                    self.cluster.network.sever(connection, 0, 0)

        self.cluster.later(self._while(), heal)

    def _freeze(self) -> None:
        client = self._some_client()
        if client is not None:
            client.freeze()
            self.cluster.later(self._while(), lambda: client.thaw() if client.frozen else None)

    def _tear(self) -> None:
        client = self._some_client()
        if client is not None:
            client.torn = self._while()

    def _late(self) -> None:
        client = self._some_client()
        if client is not None:
            client.late = self._while()

    def _kill_one(self) -> None:
        client = self._some_client()
        if client is not None:
            self._kill(client)

    def _stop(self) -> None:
        target = self.draw.choice([CONTROLLER, self._some_unit()])
        if target not in self.cluster.stopped:
            self.cluster.stop(target)
            self.cluster.later(self._while(), lambda: self.cluster.go_on(target))

    def _some_unit(self) -> Target:
        return self.draw.choice(self.cluster.places).target

    def _unlink(self) -> None:
        links = [place.link for place in self.cluster.places if place.link is not None]
        if links:
            self.cluster.network.sever(self.draw.choice(links), *(self.draw.choice([0, 1, None]) for _ in range(2)))

    def _controller(self) -> None:
        if CONTROLLER not in self.cluster.stopped:
            self.cluster.fuse = self.draw.randint(1, MAX_RECORDS)

    def _unit(self) -> None:
        self.cluster.crash(self._some_unit(), self.draw.uniform(0, SHORT))

    def _both(self) -> None:
        self._unit()
        self.cluster.crash(CONTROLLER, self.draw.uniform(0, SHORT))

    def _system(self) -> None:
        if CONTROLLER in self.cluster.stopped:
            return
        if self.draw.random() < 0.5:
            self._kill_system()
        else:
            self.cluster.fuse = self.draw.randint(1, MAX_RECORDS)
            self.cluster.on_burnt = self._kill_system

    def _kill_system(self) -> None:
        seconds = self.draw.uniform(0, SHORT)
        servers = [CONTROLLER, *(place.target for place in self.cluster.places)]
        for target in self.draw.sample(servers, len(servers)):
            self.cluster.crash(target, seconds)
        for client in [client for client in self.cluster.clients if not client.dead]:
            if self.draw.random() < KILLED_WITH_SYSTEM:
                self._kill(client)

    def _lose(self) -> None:
        targets = [place.target for place in self.cluster.places if place.arena is not None]
        if targets and len(self.cluster.lost) < self._most_losses:
            self.cluster.lose(self.draw.choice(targets), self.draw.uniform(0, SHORT))

    def _server(self) -> None:
        if self.cluster.world is not None:
            self.cluster.world.kill(self.draw.randrange(SERVERS))

    def _put(self) -> None:
        if self.cluster.world is not None:
            self.cluster.world.fails_at = "write"

    def _get(self) -> None:
        if self.cluster.world is not None:
            self.cluster.world.fails_at = "read"

    def _outage(self) -> None:
        if self.cluster.world is not None:
            for server in range(SERVERS):
                self.cluster.world.kill(server)

    def _evict(self) -> None:
        if self.cluster.world is not None:
            self.cluster.world.lose_some()

    def _reboot(self) -> None:
        """Kill everything, and lose the arenas in memory if arenas may be lost."""
        if len(self.cluster.lost) < self._most_losses and self.cluster.controller.state.mirrors:
            self.cluster.reboot(self.draw.uniform(0, SHORT))

    def _pause(self) -> None:
        cluster = self.cluster
        assert isinstance(cluster, TakeoverCluster)
        if CONTROLLER in cluster.stopped:
            return
        point = self.draw.choice(["", *POINTS])
        cluster.host.freeze_at = point
        if not point:
            cluster.freeze()

    def _cut(self) -> None:
        cluster = self.cluster
        assert isinstance(cluster, TakeoverCluster)
        if CONTROLLER not in cluster.stopped:
            cluster.cut_off()

    def _takeover(self) -> None:
        fails = [self._pause, self._pause, self._cut, self._controller, self._end_controller, self._end_node]
        self.draw.choice(fails)()
        self._claim()

    def _claim(self) -> None:
        cluster = self.cluster
        assert isinstance(cluster, TakeoverCluster)
        cluster.later(
            self.draw.choice([0.0, self.draw.uniform(0, 1.0)]),
            lambda: cluster.begin_claim(dies=self.draw.random() < CLAIM_DIES),
        )

    def _end_controller(self) -> None:
        """Kill the controller; only another node starts one again."""
        assert isinstance(self.cluster, TakeoverCluster)
        self.cluster.end_host()

    def _end_node(self) -> None:
        """Kill the controller, a unit with its arena, and some clients."""
        self._end_controller()
        self._lose()
        for client in [client for client in self.cluster.clients if not client.dead]:
            if self.draw.random() < KILLED_WITH_NODE:
                self._kill(client)

    def _rank(self) -> None:
        self._end_rank(self.draw.randrange(RANKS))
