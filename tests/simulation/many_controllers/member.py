"""Member: one controller of several, with its own journal and storage units, behind a gate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tests.simulation.faulty_cluster import STOPPED_SECONDS, FaultyCluster
from tests.simulation.many_controllers.gate import MOVES, Gate
from tests.simulation.many_controllers.member_client import ORDER, MemberClient
from transfer_queue.core.controller import Controller
from transfer_queue.core.events import effects as core_effects
from transfer_queue.messages.envelopes import NOTICE, RequestEnvelope
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.net.calls import CONTROLLER
from transfer_queue.net.framing import pack_frame
from transfer_queue.net.session import Target
from transfer_queue.storage.unit.storage_unit import StorageUnit
from transfer_queue.testing.network import Network, VirtualClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.many_controllers.many_cluster import ManyCluster

OWN = "gate"  # the client id under which the gate drops partitions
OWN_PEER = -1_000  # its connection, on which no reply is sent

_encode = msgspec.msgpack.Encoder().encode
_order = msgspec.msgpack.Decoder(tuple[int, list[Any]]).decode


class Member(FaultyCluster):
    """See the module. many: All controllers. number: That of this one. gate: Decides before the core."""

    def __init__(self, many: ManyCluster, number: int, folder: Path, seed: int, **others: Any) -> None:
        self.many = many
        self.number = number
        self._dropped = 0
        super().__init__(folder, seed, **others)
        self.gate = Gate(self)

    def _make_clock(self) -> VirtualClock:
        return self.many.clock

    def _make_network(self, seed: int) -> Network:
        return self.many.network

    def member_client(self, name: str) -> MemberClient:
        """Return the part of a client that talks to this controller."""
        client = MemberClient(self, name)
        self._clients.append(client)
        self.clients.append(client)
        return client

    def is_running(self) -> bool:
        """Return whether the controller runs."""
        return CONTROLLER not in self.stopped

    # ------------------------------------------------------------ time

    def advance(self, seconds: float) -> None:
        """See `Cluster.advance`. Time passes for all controllers."""
        self.many.advance(seconds)

    def wait(self, until: Callable[[], bool]) -> None:
        """See `Cluster.wait`."""
        self.many.wait(until)

    def _servers(self) -> list[Controller | StorageUnit]:
        return [each for each in super()._servers() if each is not self.controller or not self.many.is_held(self)]

    # ------------------------------------------------------------ what reaches the core

    def _receive(self, name: str, target: Target, connection: int, body: bytes) -> None:
        if body[:1] != ORDER:
            super()._receive(name, target, connection, body)
            return
        number, order = _order(body[1:])
        if order[0] in MOVES and self.gate.must_wait(name):
            self._put_back(lambda: self._receive(name, target, connection, body))
            return
        reply = self.gate.carry_out(name, order)
        self.network.send(connection, "down", pack_frame(ORDER + _encode((number, reply))))

    def _deliver_to_controller(self, name: str, connection: int, envelope: RequestEnvelope) -> None:
        if not hasattr(self, "gate"):  # while the cluster is made
            super()._deliver_to_controller(name, connection, envelope)
        elif self.gate.must_wait(name):
            self._put_back(lambda: self._deliver_to_controller(name, connection, envelope))
        else:
            refusal = self.gate.refusal(name, envelope)
            if refusal is None:
                super()._deliver_to_controller(name, connection, envelope)
            else:
                if envelope.report is not None:  # the client takes any reply as the receipt of its notices
                    super()._deliver_to_controller(name, connection, RequestEnvelope(NOTICE, 0, envelope.report))
                self._answer(connection, envelope.sequence, refusal)

    def _on_disconnect(self, name: str, target: Target, connection: int) -> None:
        if target == CONTROLLER and self.gate.must_wait(name):
            self._put_back(lambda: self._on_disconnect(name, target, connection))
        else:
            super()._on_disconnect(name, target, connection)

    def _start_work(self, work: core_effects.ComputeDeal) -> None:
        began = self.controller

        def done() -> None:
            try:
                outcome = work.run()
            except Exception as error:
                outcome = error
            end(outcome)

        def end(outcome: Any) -> None:
            if self.gate.must_wait(""):
                self._put_back(lambda: end(outcome))
            else:
                self._run_core_effects(began.on_outcome(work.number, outcome, self.clock.now))

        self._run_later(done)

    def _put_back(self, action: Callable[[], None]) -> None:
        """Do something when the hold has ended, unless the controller is killed before."""
        began, hold = self.controller, self.gate.hold
        assert hold is not None
        hold.back.append(lambda: action() if self.controller is began and not self.crashed(CONTROLLER) else None)

    # ------------------------------------------------------------ partitions

    def drop(self, name: str) -> None:
        """Drop a partition without a client; a killed controller does it after its restart."""
        if self.crashed(CONTROLLER) or name not in self.controller.state.partitions:
            return
        self._dropped += 1
        envelope = RequestEnvelope(self._dropped, self._dropped - 1, ClearPartition(name))
        self.controller.on_connect(OWN, OWN_PEER)
        self._run_core_effects(self.controller.handle(OWN, OWN_PEER, envelope, self.clock.now))

    def drop_foreign(self) -> None:
        """Drop the copies of partitions that this controller does not own, and that no move will need."""
        for name in list(self.controller.state.partitions):
            if not self.gate.owns(name):
                self.drop(name)

    def crash(self, target: Target, seconds: float) -> None:
        """See `FaultyCluster.crash`."""
        if target == CONTROLLER and not self.crashed(target):
            self.gate.forget_volatile()
        super().crash(target, seconds)

    def _restart_controller(self) -> None:
        super()._restart_controller()
        for name in self.gate.ownership.given:
            self.later(0.0, lambda name=name: self._drop_late(name))  # type: ignore[misc]

    def _drop_late(self, name: str) -> None:
        if not self.is_running() or self.gate.is_held():
            self.later(STOPPED_SECONDS, lambda: self._drop_late(name))
        elif not self.gate.owns(name) and name not in self.gate.ownership.incoming:
            self.drop(name)
