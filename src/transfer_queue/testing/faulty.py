"""A simulated cluster that can fail: its clients retry, its units reach the controller over the network, too, and its
servers can be stopped, cut off, and killed.

The controller keeps a journal, the production's, in the cluster's folder: what a turn recorded is written before
anything of it leaves. Killed, it is recovered from there; a unit is from the folder of its arena.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from transfer_queue.client.calls import CONTROLLER
from transfer_queue.core import effects as core_effects
from transfer_queue.core.controller import Controller
from transfer_queue.core.records import Parked, Unparked
from transfer_queue.journal.journal import Journal, recover, segment_path
from transfer_queue.journal.segment import Clock
from transfer_queue.messages import Answer, AnyRequest, Done, Drained, Envelope, Failure, Free, Move, Refuse
from transfer_queue.net.session import Target
from transfer_queue.sampler import BaseSampler, SequentialSampler
from transfer_queue.sampler.wrapper import ranked_tags
from transfer_queue.storage.arena import Arena
from transfer_queue.storage.simple import StorageUnit
from transfer_queue.testing.cluster import UNIT_PEER, Client, Cluster
from transfer_queue.testing.retrying import RetryingClient
from transfer_queue.wire.framing import FrameReader, pack_frame

CLOCK = Clock(b"simulated system", 0.0)

_encode = msgspec.msgpack.Encoder().encode
_envelope = msgspec.msgpack.Decoder(Envelope)
_answer = msgspec.msgpack.Decoder(Answer)
_ANSWER = b"\x92"  # the first byte of an Answer; an Envelope is a longer array


class FaultyCluster(Cluster):
    """See the module. stopped: the servers that do nothing, and why. apart: the clients that reach no server.

    fuse: the controller is killed when it has made so many records more; None: it is not. crashes: how often it was.
    """

    def __init__(
        self,
        folder: Path,
        seed: int = 0,
        sampler: BaseSampler | None = None,
        conf: dict[str, Any] | None = None,
        arena_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        self.stopped: dict[Target, set[str]] = {}
        self.apart: set[str] = set()
        self.clients: list[RetryingClient] = []
        self.fuse: int | None = None
        self.crashes = 0
        self._sampler = sampler or SequentialSampler()
        self._of: dict[int, tuple[str, Target]] = {}  # connection -> who has made it, and to whom
        self._unopened: list[tuple[str, Target, int]] = []
        self._links: dict[int, int] = {}  # unit -> its connection to the controller
        self._lives: dict[int, int] = {}  # unit -> how often it was started
        self._journal: Journal | None = None
        self._journal_folder = folder / "journal"
        self._journal_folder.mkdir(parents=True)
        super().__init__(folder, seed, self._sampler, conf, arena_bytes)
        self._open_journal()
        self._journal.append(self.records)  # type: ignore[attr-defined]
        for unit in self.units:
            self._core(self.controller.closed(f"unit-{unit.number}", UNIT_PEER - unit.number, 0.0))
            self._join(unit.number)
        self.run()

    def client(self, name: str) -> RetryingClient:
        """A new client."""
        client = RetryingClient(self, name)
        self._clients.append(client)
        self.clients.append(client)
        return client

    def close(self) -> None:
        """See `Cluster.close`."""
        super().close()
        if self._journal is not None:
            self._journal.close()

    # ------------------------------------------------------------ stopping and parting

    def connections(self, name: str | None = None) -> list[int]:
        """The open connections, of one client or of all."""
        return sorted(c for c, (of, _) in self._of.items() if self.network.is_open(c) and name in (None, of))

    def stop(self, target: Target, why: str = "stopped") -> None:
        """A server does nothing until `go_on` for the same reason; connections wait in its backlog."""
        self.stopped.setdefault(target, set()).add(why)
        self._hold()

    def go_on(self, target: Target, why: str = "stopped") -> None:
        """It works again, unless it does not for another reason."""
        reasons = self.stopped.get(target, set())
        reasons.discard(why)
        if reasons or target not in self.stopped:
            return
        del self.stopped[target]
        waiting, self._unopened = self._unopened, []
        for each in waiting:
            self._opened(*each)
        self._hold()

    def part(self, names: set[str]) -> None:
        """These clients reach nobody until `heal`."""
        self.apart |= names
        self._hold()

    def heal(self, names: set[str]) -> None:
        """They do again."""
        self.apart -= names
        self._hold()

    def _hold(self) -> None:
        """Holds what cannot pass now, and lets go of what can."""
        self._of = {c: of for c, of in self._of.items() if self.network.is_open(c)}
        for connection, (name, target) in self._of.items():
            self._held(connection, "up", "stopped", target in self.stopped)
            for direction in ("up", "down"):
                self._held(connection, direction, "apart", name in self.apart)
        for number, link in self._links.items():
            self._held(link, "up", "stopped", CONTROLLER in self.stopped)
            self._held(link, "down", "stopped", ("unit", number) in self.stopped)

    def _held(self, connection: int, direction: str, why: str, held: bool) -> None:
        (self.network.hold if held else self.network.release)(connection, direction, why)

    def _servers(self) -> list[Controller | StorageUnit]:
        servers: list[Controller | StorageUnit] = [] if CONTROLLER in self.stopped else [self.controller]
        return servers + [unit for unit in self.units if ("unit", unit.number) not in self.stopped]

    # ------------------------------------------------------------ killing and starting anew

    def crash(self, target: Target, seconds: float) -> None:
        """A server ends as if killed, and is started anew after these seconds."""
        if "crashed" in self.stopped.get(target, ()):
            return
        self.crashes += 1
        for connection, (_, of) in list(self._of.items()):
            if of == target and all(connection != waiting for _, _, waiting in self._unopened):
                self._break_off(connection, "up")
        if target == CONTROLLER:
            self.fuse = None
            for link in self._links.values():
                self._break_off(link, "up")
            self._links.clear()
        else:
            if target[1] in self._links:
                self._break_off(self._links.pop(target[1]), "down")
            self.units[target[1]].arena.close()
        self.stop(target, "crashed")
        self.later(seconds, lambda: self.restart(target))

    def restart(self, target: Target) -> None:
        """A server that was killed is there again."""
        if "crashed" not in self.stopped.get(target, ()):
            return
        if target == CONTROLLER:
            self._restart_controller()
        else:
            old = self.units[target[1]]
            self.units[target[1]] = StorageUnit(old.number, Arena.reopen(old.arena.folder), old._files)
            self._lives[old.number] = self._lives.get(old.number, 0) + 1
        self.go_on(target, "crashed")
        for unit in self.units:
            if unit.number not in self._links:
                self._join(unit.number)

    def _restart_controller(self) -> None:
        assert self._journal is not None
        self._journal.close()
        self.records = [record for record in self.records if not isinstance(record, (Parked, Unparked))]
        state = self._open_journal().state
        before = self.controller
        self.controller = Controller(
            self._sampler,
            before.config,
            before.state.capacity,
            restored=state,
            now=self.clock.now,
            replicas=before.moves.replicas,
        )

    def _open_journal(self) -> Any:
        capacity, watched = self.controller.state.capacity, ranked_tags(self._sampler)
        recovered = recover(self._journal_folder, CLOCK, capacity, watched)
        self._journal = Journal(self._journal_folder, recovered, CLOCK, durable=False)
        return recovered

    def _break_off(self, connection: int, direction: str) -> None:
        """The end at which `direction` arrives has died; the other learns of it behind what still comes."""
        self.network.deafen(connection, direction)
        arriving = self.network.random.choice([0, 1, None])
        self.network.sever(connection, up=arriving, down=arriving)

    def _core(self, effects: list[core_effects.Effect]) -> None:
        """What a turn recorded is in the journal before anything of it leaves; a fuse may burn down between."""
        records = self.controller.take_records()
        if self._journal is None:  # while the cluster is made
            self.records += records
            super()._core(effects)
            return
        size = self._journal._segment.size
        self._journal.append(records)
        self._journal.commit()
        if self.fuse is None or not records or self.fuse > len(records):
            self.fuse = None if self.fuse is None else self.fuse - len(records)
            self.records += records
            super()._core(effects)
            return
        draw = self.network.random
        if self.fuse == len(records):
            self.records += records
            super()._core(effects[: draw.randint(0, len(effects))])
        elif self._journal._segment.size > size:  # killed while it wrote this turn: its frame is torn
            path = segment_path(self._journal_folder, self._journal.number)
            os.truncate(path, draw.randint(size, self._journal._segment.size - 1))
        self.crash(CONTROLLER, draw.uniform(0, 2.0))

    # ------------------------------------------------------------ connections

    def _connect(self, client: Client, target: Target) -> int:
        if client.name in self.apart:
            raise TimeoutError(f"{client.name} reaches nobody")
        return super()._connect(client, target)

    def _opened(self, name: str, target: Target, connection: int) -> None:
        self._of[connection] = name, target
        if target in self.stopped:
            self._held(connection, "up", "stopped", True)
            self._unopened.append((name, target, connection))
        else:
            super()._opened(name, target, connection)

    def _join(self, number: int) -> None:
        """A unit connects to the controller and registers, if both are there."""
        if any("crashed" in self.stopped.get(target, ()) for target in (CONTROLLER, ("unit", number))):
            return
        name, ups, downs = f"unit-{number}.{self._lives.get(number, 0)}", FrameReader(), FrameReader()
        registering = self._unit_sequences[number] + 1

        def up(frame: bytes) -> None:
            for body, _ in ups.feed(frame):
                self._to_controller(name, link, _envelope.decode(body))

        def down(frame: bytes) -> None:
            for body, _ in downs.feed(frame):
                if body[:1] != _ANSWER:
                    self._told(number, _envelope.decode(body).body)
                    continue
                answer = _answer.decode(body)
                if isinstance(answer.body, Failure):
                    raise AssertionError(f"the controller refused a report of a unit: {answer.body.message}")
                if answer.sequence == registering:
                    assert answer.body == Done(number), "a unit that came back got another number"
                    for report in self.units[number].unsettled():
                        self._from_unit(self.units[number], report.body)

        def parted() -> None:
            """The controller is gone: the unit seeks it."""
            if self._links.get(number) == link:
                del self._links[number]
                self.units[number].forget_move()
                self.later(0.1, lambda: None if number in self._links else self._join(number))

        link = self.network.connect(up, down, lambda: self._left(name, link), parted)
        self._links[number] = link
        self.controller.opened(name, link)
        self._hold()
        self._register(self.units[number])

    def _left(self, name: str, link: int) -> None:
        self._core(self.controller.closed(name, link, self.clock.now))

    def _to_unit(self, number: int, request: Free | Refuse | Move | Drained) -> None:
        link = self._links.get(number)
        if link is not None:
            self.network.send(link, "down", pack_frame(_encode(Envelope(0, 0, request))))

    def _told(self, number: int, request: Any) -> None:
        super()._to_unit(number, request)

    def _from_unit(self, unit: StorageUnit, body: AnyRequest) -> None:
        if self._journal is None:  # while the cluster is made
            super()._from_unit(unit, body)
            return
        self._unit_sequences[unit.number] += 1
        link = self._links.get(unit.number)
        if link is not None:
            frame = pack_frame(_encode(Envelope(self._unit_sequences[unit.number], 0, body)))
            self.network.send(link, "up", frame)
