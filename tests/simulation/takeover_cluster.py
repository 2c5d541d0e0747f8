"""A simulated cluster in which other nodes take the controller over.

The controller keeps its journal in a term of a shared folder (`transfer_queue.journal.terms`), and checks the term with
the production's `ControllerService.commit`. A node that takes over claims the next term with the production's steps,
between which everything else goes on. The controller of the earlier term may be dead, may run on, or may be frozen at
any point of a turn and wake up later. Clients and storage units learn where the next one is one by one, as from the
folder of the system on their nodes: until then they use the earlier one.

One controller runs at a time: `running` exchanges the attributes of the cluster that belong to it. Each host has a
clock and a folder for state files of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.simulation.controller_host import ControllerHost, Frozen, Turn, WatchedJournal, WatchedTerm, is_of
from tests.simulation.faulty_cluster import STOPPED_SECONDS, FaultyCluster
from tests.simulation.retrying_client import RetryingClient
from tests.simulation.snapshot_writer import RememberedStates
from tests.simulation.unit_place import Place
from transfer_queue.core.controller import Controller
from transfer_queue.core.events import effects as core_effects
from transfer_queue.core.events.records import AnyRecord, RequestParked, Unparked
from transfer_queue.errors import StartError
from transfer_queue.journal.journal import Journal, Recovered, shift_time
from transfer_queue.journal.segment import ClockIdentity
from transfer_queue.journal.terms import Term, Terms
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.net.calls import CONTROLLER
from transfer_queue.net.server.server_loop import COMMIT_PAUSE
from transfer_queue.net.session import Target
from transfer_queue.node.controller.controller_service import CHECK_SECONDS, ControllerService
from transfer_queue.node.controller.state_files import StateFiles
from transfer_queue.node.system import controller_moves
from transfer_queue.storage.unit.storage_unit import StorageUnit
from transfer_queue.testing.simulated_client import Client

OF_CONTROLLER = (
    "controller", "records", "states", "fuse", "_journal", "_journaling", "_writer", "_unsaved", "_journal_folder",
)  # fmt: skip
"""The attributes of the cluster that belong to the controller that runs."""
MIN_SKEW = 1 << 20  # seconds; with whole seconds from here on, a conversion to another node's clock rounds nothing
MAX_SKEW = 1000  # seconds between the clocks of two nodes
STEP_SECONDS = 0.2  # at most, between two steps of a claim
FOLLOW_SECONDS = 1.5  # at most, until a client or a unit knows the next controller
FROZEN_SECONDS = 3.0  # at most, for which a controller is frozen
STEPS_IN_A_TURN = 3  # of a claim, at a point of a controller's turn
STEPS_CHANCES = (0.0, 0.03, 0.1, 0.3)  # of such steps at a point: one of these for each claim
MAX_WAITS = 100  # for the units, at the end
MAX_STEPS = 14  # of a claim, until the node that makes it dies


@dataclass(eq=False)
class Claim:
    """A claim of a term that is under way.

    left: The number of steps after which its node dies; None: it does not. chance: The chance of steps at each point of
    a controller's turn.
    """

    steps: Generator[None, None, Term]
    left: int | None
    chance: float


class TakeoverCluster(FaultyCluster):
    """See the module.

    host: The host of the controller that runs. Outside of events of controllers it is `current`.
    current: The host of the newest term that has a controller.
    hosts: All hosts so far.
    late: The number of controllers that found that their term had ended.
    froze: How often a controller was frozen at each point.
    """

    host: ControllerHost
    gathers_puts = False
    """A turn is one event, at whose points a host may be frozen."""

    def __init__(self, folder: Path, seed: int = 0, *others: Any, **more: Any) -> None:
        self._host_of: dict[int, ControllerHost] = {}  # connection to a controller -> its host
        self.known: dict[str, ControllerHost] = {}  # client or unit -> the host to which it connects
        self.claims: list[Claim] = []
        self._starting = 0  # terms that are claimed and have no controller yet
        self._atomic = False  # nothing may happen within a turn
        self._taken_over_at = -math.inf
        self.late = 0
        self.froze: dict[str, int] = {}
        super().__init__(folder, seed, *others, **more)

    def _open_journal(self) -> Path:
        folder = super()._open_journal()
        self._terms = Terms(folder)
        self.host = self.current = ControllerHost(0, self._terms.claim("simulated"), MIN_SKEW)
        self.hosts = [self.host]
        return self.host.term.folder

    def client(self, name: str) -> RetryingClient:
        """See `FaultyCluster.client`."""
        client = super().client(name)
        recent = self.hosts[-2:] if self.clock.now < self._taken_over_at + FOLLOW_SECONDS else self.hosts[-1:]
        self.known[name] = host = self.network.random.choice(recent)  # its node may not know the next one yet
        if host is not self.current:
            self._use_states(client, host)
            self._let_follow(name)
        return client

    def close(self) -> None:
        """See `FaultyCluster.close`."""
        for host in self.hosts:
            with self.running(host):
                if self._journal is not None:
                    self._journal.close()
        super().close()

    def check(self) -> None:
        """See `Cluster.check`. Controllers of earlier terms must have ended."""
        left = [host.number for host in self.hosts if host is not self.current and not host.ended]
        assert not left, f"the controllers of hosts {left} still run, and that of {self.current.number} took over"
        super().check()

    # ------------------------------------------------------------ the controller that runs

    @contextmanager
    def running(self, host: ControllerHost) -> Iterator[None]:
        """Let the controller of this host run meanwhile."""
        before = self.host
        self._switch(host)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, host: ControllerHost) -> None:
        if host is self.host:
            return
        self.host.saved = {name: getattr(self, name) for name in OF_CONTROLLER}
        self.host.reasons = self.stopped.pop(CONTROLLER, set())
        for name, value in host.saved.items():
            setattr(self, name, value)
        if host.reasons:
            self.stopped[CONTROLLER] = host.reasons
        self.host = host

    def _reasons(self, host: ControllerHost) -> set[str]:
        """Return why the controller of a host does nothing."""
        return self.stopped.get(CONTROLLER, set()) if host is self.host else host.reasons

    def _with(self, controller: Controller) -> ControllerHost | None:
        """Return the host of a controller; None if the controller was killed."""
        if controller is self.controller:
            return self.host
        return next((host for host in self.hosts if host is not self.host and is_of(host, controller)), None)

    def _servers(self) -> list[Controller | StorageUnit]:
        others = [host for host in self.hosts if host is not self.host and not self._reasons(host)]
        return [*super()._servers(), *(host.saved["controller"] for host in others)]

    def _tick(self, server: Controller | StorageUnit) -> None:
        if not isinstance(server, Controller):
            super()._tick(server)
            return
        host, deadline = self._with(server), self._deadline_of(server)
        # not at other times: each turn checks the term
        if host is not None and not self._reasons(host) and deadline is not None and deadline <= self.clock.now:
            with self.running(host):
                super()._tick(server)

    def _deadline_of(self, server: Controller | StorageUnit) -> float | None:
        deadline = super()._deadline_of(server)
        host = self._with(server) if isinstance(server, Controller) else None
        return deadline if deadline is None or host is None else deadline - host.skew

    @property
    def _controller_now(self) -> float:
        return self.clock.now + self.host.skew

    @property
    def _clock(self) -> ClockIdentity:
        return self.host.clock

    def _return_result(self, began: Controller, action: Callable[[], object]) -> None:
        host = self._with(began)
        if host is not None:
            with self.running(host):
                super()._return_result(began, action)

    def _later_in_process(self, seconds: float, action: Callable[[], object]) -> None:
        host = self.host

        def act() -> None:
            if self._reasons(host) and not host.ended:
                self.later(STOPPED_SECONDS, act)
                return
            with self.running(host):
                action()

        self.later(seconds, act)

    # ------------------------------------------------------------ connections

    def _waits(self, connection: int, target: Target) -> bool:
        if target != CONTROLLER:
            return super()._waits(connection, target)
        return bool(self._reasons(self._host_of.get(connection, self.host)))

    def _is_own(self, connection: int | None) -> bool:
        return connection is not None and self._host_of.get(connection) is self.host

    def _connect(self, client: Client, target: Target) -> int:
        if target == CONTROLLER and self.known[client.name].ended:
            raise ConnectionRefusedError(f"no controller runs where {client.name} looks for it")
        return super()._connect(client, target)

    def _on_connect(self, name: str, target: Target, connection: int) -> None:
        if target != CONTROLLER:
            super()._on_connect(name, target, connection)
            return
        with self.running(self._host_of.setdefault(connection, self.known[name])):
            super()._on_connect(name, target, connection)

    def _on_disconnect(self, name: str, target: Target, connection: int) -> None:
        with self.running(self._host_of.get(connection, self.host)):
            super()._on_disconnect(name, target, connection)

    def _left(self, name: str, link: int) -> None:
        with self.running(self._host_of[link]):
            super()._left(name, link)

    def _deliver_to_controller(self, name: str, connection: int, envelope: RequestEnvelope) -> None:
        with self.running(self._host_of.get(connection, self.host)):
            if not self.host.ended:
                super()._deliver_to_controller(name, connection, envelope)

    def _join(self, place: Place) -> None:
        host = self.known.setdefault(place.name, self.current)
        if host.ended or place.link is not None:
            return
        with self.running(host):
            super()._join(place)
            if place.link is not None:
                self._host_of[place.link] = host

    # ------------------------------------------------------------ turns

    def _new_journal(self, recovered: Recovered) -> Journal:
        return WatchedJournal(self.host, recovered, self._bytes_at_half, partial(self._point, "half"))

    def _keep_journal(self, recovered: Recovered) -> None:
        super()._keep_journal(recovered)
        host, term = self.host, self.host.term
        watched = WatchedTerm(term.number, term.folder, term.mark, self._before_check)
        host.service = ControllerService(self.controller, self.states, self._journaling, term=watched)
        host.service.end = self._on_late

    def _run_core_effects(self, effects: list[core_effects.Effect]) -> None:
        """Carry out a turn of the controller's loop, which may be frozen at each of its `POINTS`."""
        host = self.host
        if self._journal is None:  # while the cluster is made
            super()._run_core_effects(effects)
            return
        if host.ended or self.crashed(CONTROLLER):
            return
        if host.turn is not None:  # a connection ended while the controller is frozen
            host.turn.effects += effects
            return
        records = list(self.controller.context.log.records)
        if self._has_burnt(records, effects):
            return
        host.turn = Turn(effects, len(records))
        self._continue_turn(host.turn)

    def _continue_turn(self, turn: Turn) -> None:
        host = self.host
        try:
            if not turn.committed:
                self._point("begun")
                if not self._commit():
                    return
                turn.committed = True
                records = host.take_unsettled()
                if host is self.current:
                    self._happened(records)
                self._point("checked")
            while turn.effects:
                self._carry_out([turn.effects.pop(0)])
                if turn.effects:
                    self._point("sending")
        except Frozen:
            return
        host.turn = None

    def _commit(self) -> bool:
        """Commit a turn. If that fails, the controller does nothing else until it succeeds, as `ServerLoop`."""
        host = self.host
        try:
            if host.service.commit():
                return True
            assert host.ended or host.cut_off, "a commit failed, although the term goes on"
        except OSError:
            assert host.cut_off
        if not host.ended:
            self.stop(CONTROLLER, "held")
            self.later(COMMIT_PAUSE, lambda: self._go_on_with(host, {"held"}))
        return False

    def _before_check(self) -> None:
        """Take a snapshot as `Journaling.commit` does, and perhaps stop before the check of the term."""
        turn = self.host.turn
        assert self._journal is not None
        if turn is not None and self._journal.committed:
            self._snapshot_if_due(turn.records)
            turn.records = 0
            self._point("written")
        self.host.reach_storage()

    def _bytes_at_half(self, size: int) -> int:
        """Return how many of the bytes of a frame are written before something else happens."""
        if self._atomic or not (self.host.freeze_at == "half" or self.claims):
            return 0
        return self.network.random.randint(1, size - 1)

    def _point(self, point: str) -> None:
        """Let other nodes take steps of their claims here, or freeze the controller. Raises Frozen."""
        if self._atomic:
            return
        host, draw = self.host, self.network.random
        if host.freeze_at == point:
            host.freeze_at = ""
            self.froze[point] = self.froze.get(point, 0) + 1
            self.freeze()
            raise Frozen
        claim = draw.choice(self.claims) if self.claims else None
        if claim is not None and draw.random() < claim.chance:
            for _ in range(draw.randint(1, STEPS_IN_A_TURN)):
                self.step_claim(claim)

    def _burn(self, records: list[AnyRecord], effects: list[core_effects.Effect]) -> None:
        self._atomic = True
        try:
            super()._burn(records, effects)
        finally:
            self._atomic = False

    def _may_answer(self) -> bool:
        if not self.host.term.is_current():
            return False
        self.host.unsettled.clear()
        return True

    def _settle(self, folder: Path) -> None:
        """Decide whether the records of the last turn happened, by the journal with which a controller continues."""
        if records := self.host.take_unsettled(folder):
            self._happened(records)

    # ------------------------------------------------------------ freezing and killing

    def freeze(self) -> None:
        """Freeze the controller for a while, now or in a turn."""
        host = self.host
        self.stop(CONTROLLER, "frozen")
        self.later(self.network.random.uniform(0, FROZEN_SECONDS), lambda: self._wake(host))

    def cut_off(self) -> None:
        """Separate the controller's node from the storage of the journal for a while."""
        host = self.host
        host.cut_off = True
        self.later(self.network.random.uniform(0, FROZEN_SECONDS), lambda: setattr(host, "cut_off", False))

    def _wake(self, host: ControllerHost) -> None:
        host.cut_off = False
        self._go_on_with(host, {"frozen", "stopped", "held"})

    def _go_on_with(self, host: ControllerHost, reasons: set[str]) -> None:
        with self.running(host):
            for reason in sorted(self._reasons(host) & reasons):
                self.go_on(CONTROLLER, reason)

    def go_on(self, target: Target, why: str = "stopped") -> None:
        """See `FaultyCluster.go_on`. A frozen controller continues its turn."""
        super().go_on(target, why)
        turn = self.host.turn
        if target == CONTROLLER and turn is not None and CONTROLLER not in self.stopped:
            self._continue_turn(turn)

    def crash(self, target: Target, seconds: float) -> None:
        """See `FaultyCluster.crash`. A controller of an earlier term would be started again in vain."""
        if target == CONTROLLER and self.host is not self.current:
            self.end_host()
        else:
            super().crash(target, seconds)

    def end_host(self) -> None:
        """Kill the controller; it is not started again on this node."""
        self.host.ended = True
        if not self.crashed(CONTROLLER):
            self._kill(CONTROLLER)
        own = [each for each in self._unopened if self._is_own(each[2])]
        self._unopened = [each for each in self._unopened if each not in own]
        for _, _, connection in own:
            self.network.sever(connection, 0)

    def _on_late(self) -> None:
        """End a controller that has found that its term has ended."""
        self.late += 1
        self.end_host()

    def _kill(self, target: Target) -> None:
        if target == CONTROLLER:
            host = self.host
            host.turn, host.freeze_at = None, ""
            assert isinstance(self._journal, WatchedJournal)
            self._journal.abandon()
            host.cut_off = False
            self.stopped.get(CONTROLLER, set()).difference_update({"frozen", "held"})
        super()._kill(target)

    def restart(self, target: Target) -> None:
        """See `FaultyCluster.restart`. A controller whose term has ended is not started, as in `build_controller`."""
        if target == CONTROLLER and (self.host.ended or not self.host.term.is_current()):
            return
        super().restart(target)

    def _restart_controller(self) -> None:
        self._settle(self._journal_folder)
        super()._restart_controller()

    # ------------------------------------------------------------ taking over

    def begin_claim(self, dies: bool = False) -> None:
        """Let another node take the controller over. dies: That node dies at a step, and another one does so later."""
        draw = self.network.random
        left = draw.randint(0, MAX_STEPS) if dies else None
        claim = Claim(self._terms.claim_in_steps("simulated"), left, draw.choice(STEPS_CHANCES))
        self.claims.append(claim)
        self._go_on_claiming(claim)
        self.later(draw.uniform(0, CHECK_SECONDS), partial(self._check_idle, self.current))

    def _go_on_claiming(self, claim: Claim) -> None:
        """Take the next steps of a claim at random times."""

        def step() -> None:
            if claim in self.claims:
                self.step_claim(claim)
                self._go_on_claiming(claim)

        self.later(self.network.random.choice([0.0, self.network.random.uniform(0, STEP_SECONDS)]), step)

    def step_claim(self, claim: Claim) -> None:
        if claim not in self.claims:
            return
        draw = self.network.random
        if claim.left is not None:
            claim.left -= 1
        try:
            if claim.left is not None and claim.left < 0:
                claim.steps.close()
                raise StartError("the node that was taking over has died")
            next(claim.steps)
        except StopIteration as end:
            self.claims.remove(claim)
            self._starting += 1
            self.later(draw.uniform(0, STEP_SECONDS), partial(self._take_over, end.value))
        except StartError:
            self.claims.remove(claim)
            self.later(draw.uniform(0, STEP_SECONDS), self._claim_if_needed)

    def _claim_if_needed(self) -> None:
        """Let another node take over if the term of the controller has ended, and no node does so."""
        needed = self.current.ended or not self.current.term.is_current()
        if needed and not self.claims and not self._starting:
            self.begin_claim()

    def _take_over(self, term: Term) -> None:
        """Start a controller in a term that was claimed."""
        self._starting -= 1
        if not term.is_current():  # see `build_controller`
            self._claim_if_needed()
            return
        former, before = self.current, self.controller
        self._settle(term.folder)
        skew = MIN_SKEW + self.network.random.randrange(MAX_SKEW)
        records: list[AnyRecord] = [
            shift_time(record, skew - former.skew)
            for record in self.records
            if not isinstance(record, (RequestParked, Unparked))
        ]
        self.current = ControllerHost(len(self.hosts), term, skew)
        self.hosts.append(self.current)
        self._switch(self.current)
        self.records, self.fuse, self._journal_folder = records, None, term.folder
        folder = self.folder / f"states-{self.current.number}"
        folder.mkdir()
        self.states = StateFiles(folder, RememberedStates(term.folder, self.loaded))
        self._start_controller(before, f"term {term.number}")
        self._end_former(former)
        self._taken_over_at = self.clock.now
        for name in self.known:
            self._let_follow(name)

    def _end_former(self, former: ControllerHost) -> None:
        """Let a controller whose term has ended find this out at some time, if it still exists."""
        if "crashed" in former.reasons:
            with self.running(former):
                self.end_host()
        elif former.reasons:
            self.later(self.network.random.uniform(0, FROZEN_SECONDS), partial(self._wake, former))
        self.later(self.network.random.uniform(0, CHECK_SECONDS), partial(self._check_idle, former))

    def _check_idle(self, host: ControllerHost) -> None:
        """Let a controller check its term although nothing happens, as `ControllerService.on_deadline` does."""
        if host.ended or (host is self.current and not self.claims and host.term.is_current()):
            return
        if not self._reasons(host):
            with self.running(host):
                self._run_core_effects([])
        self.later(CHECK_SECONDS, partial(self._check_idle, host))

    # ------------------------------------------------------------ following

    def _let_follow(self, name: str) -> None:
        self.later(self.network.random.uniform(0, FOLLOW_SECONDS), partial(self._follow, name, self.current))

    def _follow(self, name: str, host: ControllerHost) -> None:
        """Let a client or a unit learn where the controller is."""
        if self.known[name].number >= host.number:
            return
        place = next((place for place in self.places if place.name == name), None)
        if place is not None:
            done = self._follow_with_unit(place, host)
        else:
            done = self._follow_with_client(next(each for each in self.clients if each.name == name), host)
        if not done:
            self.later(STOPPED_SECONDS, partial(self._follow, name, host))

    def _follow_with_unit(self, place: Place, host: ControllerHost) -> bool:
        if place.target in self.stopped and not self.crashed(place.target):
            return False
        self.known[place.name] = host
        if place.link is not None:
            self._unlink(place, "down")
            if place.number is not None:
                self.units[place.index].forget_move()
        self._join(place)
        return True

    def _follow_with_client(self, client: RetryingClient, host: ControllerHost) -> bool:
        """End the connection to the earlier controller, and show the next one that the client is there."""
        if client.frozen:
            return False
        self.known[client.name] = host
        if client.dead or client.state.session.closed:
            return True
        self._use_states(client, host)
        connection = client.connection_to(CONTROLLER)
        if connection is not None:
            self.network.deafen(connection, "down")
            self.network.sever(connection, up=self.network.random.choice([0, 1, None]))
            client.note_severed(CONTROLLER, connection)
        client.start(controller_moves._ask_for_units())
        return True

    def _use_states(self, client: RetryingClient, host: ControllerHost) -> None:
        """Let a client use the folder for state files on the controller's node."""
        states: StateFiles = self.states if host is self.host else host.saved["states"]
        system: Any = client.state.system
        system.states = states.folder

    # ------------------------------------------------------------ the end of the faults

    def finish_takeovers(self) -> None:
        """Let all nodes that take over do so, and all frozen controllers wake up. All units then follow."""
        for host in self.hosts:
            host.freeze_at = ""
            self._wake(host)
        for claim in list(self.claims):
            claim.left = None
            while claim in self.claims:
                self.step_claim(claim)
        self._claim_if_needed()
        for _ in range(MAX_WAITS):
            if all(self._has_followed(place) for place in self.places):
                return
            self.advance(FOLLOW_SECONDS)
        raise AssertionError("a storage unit does not follow the controller")

    def _has_followed(self, place: Place) -> bool:
        """Return whether a unit is registered with the newest controller."""
        controller = self.controller if self.host is self.current else self.current.saved["controller"]
        return place.number is not None and place.link == controller.context.connections.units.get(place.number)
