"""A simulated cluster with faults: servers can be stopped, disconnected and killed, units also with their arenas.

Clients retry, and units reach the controller over the simulated network, too. The controller keeps a journal in the
cluster's folder with the production code: the records of a turn are written before any of its effects leaves, and
snapshots are taken meanwhile. A killed controller is recovered from the journal. A killed unit is recovered from the
folder of its arena; if the arena is lost, the unit starts with an empty one under a new number.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.simulation import expected_losses
from tests.simulation.retrying_client import RetryingClient
from tests.simulation.simulated_store import KIND, StoreWorld
from tests.simulation.snapshot_writer import RememberedStates, SnapshotWriter
from tests.simulation.unit_place import Place
from transfer_queue.core.controller import Controller
from transfer_queue.core.events import effects as core_effects
from transfer_queue.core.events.records import AnyRecord, RequestParked, StateLoaded, UnitLost, Unparked
from transfer_queue.journal import state_file
from transfer_queue.journal.journal import Journal, Recovered, recover, segment_path
from transfer_queue.journal.segment import ClockIdentity
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.descriptors import MEMORY
from transfer_queue.messages.envelopes import AnyRequest, ReplyEnvelope, RequestEnvelope
from transfer_queue.messages.puts import Publish
from transfer_queue.messages.reports.store_reports import ReportStoreServer
from transfer_queue.messages.reports.unit_reports import (  # fmt: skip
    ExtentsGone,
    RegisterUnit,
)
from transfer_queue.net.calls import CONTROLLER
from transfer_queue.net.framing import FrameReader, pack_frame
from transfer_queue.net.session import Target
from transfer_queue.node.controller.journal_service import Journaling
from transfer_queue.node.controller.state_files import StateFiles
from transfer_queue.sampler import BaseSampler, SequentialSampler
from transfer_queue.sampler.sampler_wrapper import ranked_tags
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.unit.extent_pool import ArenaPool
from transfer_queue.storage.unit.object_pool import ObjectNames, ObjectPool, key_of
from transfer_queue.storage.unit.storage_unit import StorageUnit
from transfer_queue.testing.cluster import (
    UNIT_PEER,
    Cluster,
    arena_of,
    pool_of,
    registration,
    registration_of_store,
)
from transfer_queue.testing.simulated_client import Client
from transfer_queue.testing.simulated_locks import SimulatedSlots

CLOCK = ClockIdentity(b"simulated system", 0.0)
RECONNECT_SECONDS = 0.1  # between two attempts of a unit to connect to the controller
TURN_SECONDS = 0.005  # in which the puts of several clients arrive in one turn of the controller
STOPPED_SECONDS = 0.1  # between two checks whether the controller runs

_encode = msgspec.msgpack.Encoder().encode
_envelope = msgspec.msgpack.Decoder(RequestEnvelope)
_answer = msgspec.msgpack.Decoder(ReplyEnvelope)
_ANSWER = b"\x92"  # the first byte of an Answer; an Envelope is a longer array


class FaultyCluster(Cluster):
    """See the module.

    stopped: The servers that do nothing, with the reasons.
    apart: The clients that reach no server.
    fuse: The number of further records after which the controller is killed; None: it is not killed.
    on_burnt: Called once when the fuse has killed the controller.
    crashes: How often the controller was killed.
    snapshot_every: The number of records after which a snapshot of the journal is taken.
    snapshots: The number of snapshots that were started.
    lost: The units whose arenas are lost.
    lost_values: The number of values that were lost with them.
    on_cut, on_loaded: Called with the time of a checkpoint when its state is taken, and when it is loaded.
    """

    gathers_puts = True
    """Whether puts that arrive within TURN_SECONDS are handed to the controller together."""

    def __init__(
        self,
        folder: Path,
        seed: int = 0,
        sampler: BaseSampler | None = None,
        *,
        snapshot_every: int = 1000,
        world: StoreWorld | None = None,
        **others: Any,
    ) -> None:
        self.stopped: dict[Target, set[str]] = {}
        self.apart: set[str] = set()
        self.clients: list[RetryingClient] = []
        self.fuse: int | None = None
        self.on_burnt: Callable[[], object] = lambda: None
        self.crashes = 0
        self.snapshot_every = snapshot_every
        self.snapshots = 0
        self.lost: set[int] = set()
        self.lost_values = 0
        self.on_cut: Callable[[float], object] = lambda time: None
        self.on_loaded: Callable[[float], object] = lambda time: None
        self._cuts: set[float] = set()  # the times of the states that were written
        self.places: list[Place] = []
        self.world = world
        self._server_links: dict[int, int] = {}
        self.folder = folder
        self._sampler = sampler or SequentialSampler()
        self._of: dict[int, tuple[str, Target]] = {}  # connection -> its client and its server
        self._unopened: list[tuple[str, Target, int]] = []
        self._gathered: list[tuple[str, int, RequestEnvelope]] = []  # puts that have arrived in this turn
        self._by_number: dict[int, Place] = {}
        self._journal: Journal | None = None
        self._unsaved = 0  # records since the start of the last snapshot
        self._journal_folder = self._open_journal()
        stores = {} if world is None else {KIND: world.address}
        super().__init__(folder, seed, self._sampler, stores=stores, **others)
        self.states = StateFiles(self.states.folder, RememberedStates(self._journal_folder, self.loaded))
        self._keep_journal(self._recover(self.controller))
        self.controller.context.log.records = self.records  # the records before the journal existed are its beginning
        self.records = []
        for unit in self.units:
            external = isinstance(unit.pool, ObjectPool)
            place = Place(unit.number, None if external else arena_of(unit), unit.number)
            self.places.append(place)
            self._by_number[unit.number] = place
            self._run_core_effects(self.controller.on_disconnect(f"unit-{unit.number}", UNIT_PEER - unit.number, 0.0))
            self._join(place)
        if world is not None:
            world.on_killed = self._on_server_killed
            self._link_servers()
        self.run()

    def _open_journal(self) -> Path:
        """Create the folder of the journal, and return it."""
        folder = self.folder / "journal"
        folder.mkdir(parents=True)
        return folder

    def client(self, name: str) -> RetryingClient:
        """A new client."""
        client = RetryingClient(self, name)
        self._clients.append(client)
        self.clients.append(client)
        return client

    def close(self) -> None:
        """See `Cluster.close`."""
        super().close()
        for place in self.places:
            if place.arena is not None:
                place.arena.close()
        if self._journal is not None:
            self._journal.close()

    # ------------------------------------------------------------ stopping and parting

    def connections(self, name: str | None = None) -> list[int]:
        """Return the open connections of one client or of all."""
        return sorted(c for c, (of, _) in self._of.items() if self.network.is_open(c) and name in (None, of))

    def stop(self, target: Target, why: str = "stopped") -> None:
        """Let a server do nothing until `go_on` with the same reason. Connections wait in its backlog."""
        self.stopped.setdefault(target, set()).add(why)
        self._hold()

    def go_on(self, target: Target, why: str = "stopped") -> None:
        """Let a server continue, unless it is stopped for another reason, too."""
        reasons = self.stopped.get(target, set())
        reasons.discard(why)
        if reasons or target not in self.stopped:
            return
        del self.stopped[target]
        waiting, self._unopened = self._unopened, []
        for each in waiting:
            self._on_connect(*each)
        self._hold()

    def part(self, names: set[str]) -> None:
        """Separate these clients from all servers until `heal`."""
        self.apart |= names
        self._hold()

    def heal(self, names: set[str]) -> None:
        """Let these clients reach servers again."""
        self.apart -= names
        self._hold()

    def _hold(self) -> None:
        """Hold the connections that cannot pass messages now, and release the others."""
        self._of = {c: of for c, of in self._of.items() if self.network.is_open(c)}
        for connection, (name, target) in self._of.items():
            self._held(connection, "up", "stopped", self._waits(connection, target))
            for direction in ("up", "down"):
                self._held(connection, direction, "apart", name in self.apart)
        for place in self.places:
            if place.link is not None:
                self._held(place.link, "up", "stopped", self._waits(place.link, CONTROLLER))
                self._held(place.link, "down", "stopped", place.number is not None and place.target in self.stopped)
        for link in self._server_links.values():
            self._held(link, "up", "stopped", self._waits(link, CONTROLLER))

    def _waits(self, connection: int, target: Target) -> bool:
        """Return whether the server of a connection receives nothing from it at present."""
        return target in self.stopped

    def _is_own(self, connection: int | None) -> bool:
        """Return whether a connection to a controller is one to the controller that runs."""
        return True

    def _held(self, connection: int, direction: str, why: str, held: bool) -> None:
        (self.network.hold if held else self.network.release)(connection, direction, why)

    def _servers(self) -> list[Controller | StorageUnit]:
        servers: list[Controller | StorageUnit] = [] if CONTROLLER in self.stopped else [self.controller]
        return servers + [self.units[place.index] for place in self.places if place.target not in self.stopped]

    # ------------------------------------------------------------ killing and restarting

    def crashed(self, target: Target) -> bool:
        """Return whether a server was killed and was not restarted yet."""
        return "crashed" in self.stopped.get(target, ())

    def crash(self, target: Target, seconds: float) -> None:
        """Kill a server, and start it again after `seconds`."""
        if self.crashed(target):
            return
        self._kill(target)
        self.later(seconds, lambda: self.restart(target))

    def _kill(self, target: Target) -> None:
        """Kill a server."""
        self.crashes += 1
        if target == CONTROLLER:
            self._gathered.clear()
        for connection, (_, of) in list(self._of.items()):
            own = of == target and (target != CONTROLLER or self._is_own(connection))
            if own and all(connection != waiting for _, _, waiting in self._unopened):
                self._break_off(connection, "up")
        if target == CONTROLLER:
            self.fuse = None
            self._writer.kill()
            for place in self.places:
                if self._is_own(place.link):
                    self._unlink(place, "up")
            for link in self._server_links.values():
                self._break_off(link, "up")
            self._server_links.clear()
        else:
            self._unlink(self.places[target[1]], "down")
            pool = self.units[target[1]].pool
            pool.close() if isinstance(pool, ObjectPool) else arena_of(self.units[target[1]]).close()
        self.stop(target, "crashed")

    def lose(self, target: Target, seconds: float) -> None:
        """Kill a unit and delete its arena; start it again after `seconds`."""
        if self.crashed(target):
            return
        place = self.places[target[1]]
        assert place.number is not None
        assert place.arena is not None
        self.crash(target, seconds)
        shutil.rmtree(place.arena.folder)
        self.lost.add(place.number)
        place.number = None

    def reboot(self, seconds: float) -> None:
        """Kill all servers and delete the arenas in memory; start everything again after `seconds`."""
        self.crash(CONTROLLER, seconds)
        for place in self.places:
            in_memory = place.arena is not None and place.arena.tier == MEMORY
            (self.lose if in_memory and place.number is not None else self.crash)(place.target, seconds)

    def restart(self, target: Target) -> None:
        """Start a killed server again. A unit without its arena runs as soon as it has a number."""
        if not self.crashed(target):
            return
        if target == CONTROLLER:
            self._restart_controller()
            self.go_on(target, "crashed")
        else:
            self._restart_unit(self.places[target[1]])
        for place in self.places:
            self._join(place)
        self._link_servers()

    def _restart_unit(self, place: Place) -> None:
        old = self.units[place.index]
        if place.number is None:
            if place.arena is arena_of(old):  # otherwise it has started already, and waits for its number
                place.lives += 1
                place.arenas += 1
                folder, old_arena = self.folder / f"{place.name}.{place.arenas}", arena_of(old)
                place.arena = Arena.create(folder, old_arena.capacity, old_arena.tier)
            return
        place.lives += 1
        if place.arena is None:
            files = old._files
            assert isinstance(files, SimulatedSlots)
            self.units[place.index] = self._store_unit(place.index, ObjectNames.reopen(old.pool.folder), files)
            self.go_on(place.target, "crashed")
            return
        place.arena = Arena.reopen(arena_of(old).folder, arena_of(old).tier)
        self.units[place.index] = StorageUnit(place.number, self._pool_of(place.arena), old._files)
        self.go_on(place.target, "crashed")

    def _begin_unit(self, place: Place, number: int) -> None:
        """Start a unit with a new arena, which has received its number."""
        assert place.arena is not None
        place.number = number
        self._by_number[number] = place
        self.units[place.index] = StorageUnit(number, self._pool_of(place.arena), SimulatedSlots(number, self.held))
        self.go_on(place.target, "crashed")

    def _pool_of(self, arena: Arena) -> ArenaPool:
        return pool_of(arena, partial(self._begin_beside, arena))

    def _restart_controller(self) -> None:
        """Start the controller with what the journal has."""
        assert self._journal is not None
        self._journal.close()
        self.records = [record for record in self.records if not isinstance(record, (RequestParked, Unparked))]
        self._start_controller(self.controller, f"after crash {self.crashes}")

    def _start_controller(self, before: Controller, boot: str) -> None:
        """Start a controller with the journal and the settings of one before it."""
        recovered = self._recover(before)
        core = dataclasses.replace(before.context.config, sampler=self._sampler, boot=boot, lease_key=None)
        self.controller = Controller(core, recovered.state, self._controller_now)
        self._keep_journal(recovered)

    def _recover(self, before: Controller) -> Recovered:
        return recover(self._journal_folder, self._clock, before.state.capacity, ranked_tags(self._sampler))

    def _keep_journal(self, recovered: Recovered) -> None:
        self._journal = self._new_journal(recovered)
        self._journaling = Journaling(self.controller, self._journal, self._clock, sync=False)
        self._writer = SnapshotWriter(self.network.random, self._later_in_process)
        self._journaling.attach(self._writer)
        self._unsaved = 0

    def _new_journal(self, recovered: Recovered) -> Journal:
        return Journal(self._journal_folder, recovered, self._clock, durable=False)

    @property
    def _clock(self) -> ClockIdentity:
        """The clock of the controller's machine."""
        return CLOCK

    def _later_in_process(self, seconds: float, action: Callable[[], object]) -> None:
        """Call a function of the controller's process after some virtual time."""
        self.later(seconds, action)

    def finish_takeovers(self) -> None:
        """Let takeovers that are under way end; see `TakeoverCluster`."""

    def _unlink(self, place: Place, direction: str) -> None:
        """Handle the death of the process at the end at which `direction` arrives."""
        if place.link is not None:
            self._break_off(place.link, direction)
            place.link = None

    def _break_off(self, connection: int, direction: str) -> None:
        """Handle the death of the end at which `direction` arrives; the other end is notified after all frames."""
        self.network.deafen(connection, direction)
        arriving = self.network.random.choice([0, 1, None])
        self.network.sever(connection, up=arriving, down=arriving)

    # ------------------------------------------------------------ records

    def _run_core_effects(self, effects: list[core_effects.Effect]) -> None:
        """Write the records of a turn to the journal before its effects leave; the controller may be killed between."""
        if self._journal is None:  # while the cluster is made
            super()._run_core_effects(effects)
            return
        records = list(self.controller.context.log.records)
        if self._has_burnt(records, effects):
            return
        self._journaling.commit()
        self._snapshot_if_due(len(records))
        self._happened(records)
        self._carry_out(effects)

    def _has_burnt(self, records: list[AnyRecord], effects: list[core_effects.Effect]) -> bool:
        """Count the records of a turn for the fuse. Returns whether it has killed the controller at one of them."""
        if records and self.fuse is not None and self.fuse <= len(records):
            self._burn(records, effects)
            return True
        if self.fuse is not None:
            self.fuse -= len(records)
        return False

    def _snapshot_if_due(self, written: int) -> None:
        """Take a snapshot if there are enough records. written: The number of records of this turn."""
        self._unsaved += written
        if self._unsaved >= self.snapshot_every and not self._journaling.snapshotting:
            self._unsaved = 0
            self.snapshots += 1
            self._journaling._snapshot()

    def _burn(self, records: list[AnyRecord], effects: list[core_effects.Effect]) -> None:
        """Kill the controller while it writes the records of this turn, or before all of its effects have left."""
        assert self._journal is not None
        assert self.fuse is not None
        draw, size = self.network.random, self._segment_bytes()
        if not self._journaling.commit():
            pass  # it does not reach the storage, so nothing was written and nothing is answered
        elif self.fuse == len(records):
            if self._may_answer():
                self._happened(records)
                self._carry_out(effects[: draw.randint(0, len(effects))])
        elif (whole := self._segment_bytes()) > size:  # it was killed while it wrote this turn, so the frame is torn
            self._journal.close()  # otherwise it would repair the file when it ends
            os.truncate(segment_path(self._journal_folder, self._journal.number), draw.randint(size, whole - 1))
        self.crash(CONTROLLER, draw.uniform(0, 2.0))
        # not within this turn, in which a client or a unit may be at work
        then, self.on_burnt = self.on_burnt, lambda: None
        self.later(0.0, then)

    def _segment_bytes(self) -> int:
        """Return the size of the segment; 0 if it does not exist, or if a controller of a later term has removed it."""
        assert self._journal is not None
        path = segment_path(self._journal_folder, self._journal.number)
        return path.stat().st_size if path.exists() else 0

    def _may_answer(self) -> bool:
        """Return whether a controller that has written its records may send what follows from them."""
        return True

    def _happened(self, records: list[AnyRecord]) -> None:
        """Handle records that were written."""
        self.records += records
        for record in records:
            if type(record) is StateLoaded:
                self.on_loaded(state_file.read(self.loaded.path(record.file))["time"])

    def _write_state(self, write: core_effects.WriteState) -> None:
        time = self._controller_now  # it identifies the state
        while time in self._cuts:
            time = math.nextafter(time, math.inf)
        self._cuts.add(time)
        super()._write_state(msgspec.structs.replace(write, tree=lambda: {**write.tree(), "time": time}))
        self.on_cut(time)

    def _return_result(self, began: Controller, action: Callable[[], object]) -> None:
        if self.crashed(CONTROLLER):
            return
        if CONTROLLER in self.stopped:
            self.later(STOPPED_SECONDS, lambda: self._return_result(began, action))
        else:
            super()._return_result(began, action)

    def _deliver_to_controller(self, name: str, connection: int, envelope: RequestEnvelope) -> None:
        if type(envelope.body) is Publish and self.gathers_puts:
            if any(name == other for other, _, _ in self._gathered) and not self._serve_puts():
                return
            if not self._gathered:
                self.later(TURN_SECONDS, partial(self._end_turn, self.controller))
            self._gathered.append((name, connection, envelope))
            return
        if self._serve_puts():
            self._serve(name, connection, envelope)

    def _end_turn(self, began: Controller) -> None:
        """Serve the puts that have arrived in a turn, unless the controller was killed meanwhile."""
        if self.controller is began and CONTROLLER in self.stopped:
            self.later(STOPPED_SECONDS, partial(self._end_turn, began))
        elif self.controller is began:
            self._serve_puts()

    def _serve_puts(self) -> bool:
        """Serve the puts that have arrived in this turn, as `ControllerService.serve_puts` does.

        Returns whether the controller lives, which may be killed at one of its records.
        """
        puts, self._gathered = self._gathered, []
        if len(puts) > 1:
            self._run_core_effects(self.controller.handle_puts(puts, self._controller_now))
        else:
            for put in puts:
                self._serve(*put)
        return not self.crashed(CONTROLLER)

    def _serve(self, name: str, connection: int, envelope: RequestEnvelope) -> None:
        if isinstance(envelope.body, ExtentsGone):
            self._check_gone(envelope.body)
        if not isinstance(envelope.body, RegisterUnit):
            lost = sum(expected_losses.lost(self.controller.state).values())
            super()._deliver_to_controller(name, connection, envelope)
            if isinstance(envelope.body, ExtentsGone):
                self.lost_values += sum(expected_losses.lost(self.controller.state).values()) - lost
            return
        state = self.controller.state
        before, told = expected_losses.values(state), expected_losses.lost(state)
        effects = self.controller.handle(name, connection, envelope, self._controller_now)
        gone = {record.unit for record in self.controller.context.log.records if isinstance(record, UnitLost)}
        assert gone <= self.lost, f"units {sorted(gone - self.lost)} are recorded as lost, but have their arenas"
        if gone:
            self.lost_values += expected_losses.check(before, told, state, gone)
        self._run_core_effects(effects)

    # ------------------------------------------------------------ the servers of an external store

    def store_units(self) -> set[int]:
        """Return the units of the external store."""
        return {unit.number for unit in self.units if isinstance(unit.pool, ObjectPool)}

    def missing_blocks(self) -> list[str]:
        """Return the names of blocks that are needed and that the store does not have."""
        if self.world is None:
            return []
        names = [
            key_of(self.units[unit].pool.boot_id, extent * GRANULE)
            for unit, extent in self.controller.state.blocks.extents
            if unit in self.store_units()
        ]
        return [name for name in names if name not in self.world.blocks]

    def _check_gone(self, report: ExtentsGone) -> None:
        """Check that the store does not have what a unit reports as lost."""
        assert self.world is not None
        boot_id = self._find_unit(report.unit).pool.boot_id
        names = [key_of(boot_id, int(extent) * GRANULE) for extent in np.frombuffer(report.extents, "<i8")]
        there = [name for name in names if name in self.world.blocks]
        assert not there, f"{there} are reported as lost, but are in the store"

    def restart_server(self, server: int) -> None:
        """Start a server of the store again."""
        assert self.world is not None
        self.world.restart(server)
        self._link_servers()

    def _on_server_killed(self, server: int) -> None:
        link = self._server_links.pop(server, None)
        if link is not None:
            self._break_off(link, "down")
        self.later(self.network.random.uniform(0, 2.0), lambda: self.restart_server(server))

    def _link_servers(self) -> None:
        """Let the servers of the store that have no connection to the controller report themselves."""
        for server, up in enumerate(self.world.up if self.world is not None else []):
            if up and server not in self._server_links and not self.crashed(CONTROLLER):
                self._link_server(server)

    def _link_server(self, server: int) -> None:
        assert self.world is not None
        life = f"{server}.{self.world.lives[server]}"
        name, ups = f"store-{life}", FrameReader()

        def up(frame: bytes) -> None:
            for body, _ in ups.feed(frame):
                self._deliver_to_controller(name, link, _envelope.decode(body))

        def parted() -> None:
            if self._server_links.get(server) == link:
                del self._server_links[server]
                self.later(RECONNECT_SECONDS, self._link_servers)

        link = self.network.connect(up, lambda frame: None, lambda: self._left(name, link), parted)
        self._server_links[server] = link
        self.controller.on_connect(name, link)
        self._hold()
        report = ReportStoreServer(KIND, f"node-{server}", "", life, server)
        self.network.send(link, "up", pack_frame(_encode(RequestEnvelope(1, 0, report))))

    # ------------------------------------------------------------ connections

    def _server(self, client: Client, target: Target) -> Target:
        if target == CONTROLLER:
            return target
        address = client.state._resolve(target)
        return next(place.target for place in self.places if place.name == address)

    def _find_unit(self, number: int) -> StorageUnit:
        return self.units[self._by_number[number].index]

    def _connect(self, client: Client, target: Target) -> int:
        if client.name in self.apart:
            raise TimeoutError(f"{client.name} reaches no server")
        return super()._connect(client, target)

    def _on_connect(self, name: str, target: Target, connection: int) -> None:
        self._of[connection] = name, target
        if target in self.stopped:
            self._held(connection, "up", "stopped", True)
            self._unopened.append((name, target, connection))
        else:
            super()._on_connect(name, target, connection)

    def _join(self, place: Place) -> None:
        """Connect a unit to the controller and register it, if both run and it is not connected."""
        kept = place.arena is None or place.arena is arena_of(self.units[place.index])
        killed = self.crashed(place.target) and kept
        if place.link is not None or killed or self.crashed(CONTROLLER):
            return
        name, ups, downs = f"{place.name}.{place.lives}", FrameReader(), FrameReader()
        registering = place.sequence + 1

        def up(frame: bytes) -> None:
            for body, _ in ups.feed(frame):
                self._deliver_to_controller(name, link, _envelope.decode(body))

        def down(frame: bytes) -> None:
            for body, _ in downs.feed(frame):
                if body[:1] != _ANSWER:
                    order: Any = _envelope.decode(body).body
                    self._tell(self.units[place.index], order)
                    continue
                answer = _answer.decode(body)
                if isinstance(answer.body, Failure):
                    raise AssertionError(f"the controller refused a report of a unit: {answer.body.message}")
                if answer.sequence == registering:
                    self._registered(place, answer.body)

        def parted() -> None:
            """Handle the loss of the controller: the unit connects again."""
            if place.link == link:
                place.link = None
                if place.number is not None:
                    self.units[place.index].forget_move()
                self.later(RECONNECT_SECONDS, lambda: self._join(place))

        link = self.network.connect(up, down, lambda: self._left(name, link), parted)
        place.link = link
        self.controller.on_connect(name, link)
        self._hold()
        unit, leased = self.units[place.index], b""
        if place.number is not None:
            leased = unit.register()
        if place.arena is None:
            address = self._addresses[place.index]
            self._say(place, registration_of_store(place.name, place.name, unit, address, leased))
        else:
            self._say(place, registration(place.name, place.name, place.arena, leased))

    def _registered(self, place: Place, body: object) -> None:
        assert isinstance(body, Done), f"a unit that registered was answered {body}"
        if place.number is None:
            self._begin_unit(place, int(body.value))
        assert body.value == place.number, "a unit that registered again got another number"
        for report in self.units[place.index].repeat_reports():
            self._say(place, report.body)

    def _on_disconnect(self, name: str, target: Target, connection: int) -> None:
        if target != CONTROLLER or self._serve_puts():
            super()._on_disconnect(name, target, connection)

    def _left(self, name: str, link: int) -> None:
        if self._serve_puts():
            self._run_core_effects(self.controller.on_disconnect(name, link, self._controller_now))

    def _deliver_to_unit(self, number: int, request: AnyRequest) -> None:
        link = self.controller.context.connections.units.get(number)
        if link is not None:
            self.network.send(link, "down", pack_frame(_encode(RequestEnvelope(0, 0, request))))

    def _deliver_from_unit(self, unit: StorageUnit, body: AnyRequest) -> None:
        if not self.places:  # while the cluster is made
            super()._deliver_from_unit(unit, body)
        else:
            self._say(self._by_number[unit.number], body)

    def _say(self, place: Place, body: AnyRequest) -> None:
        """Send a message of a unit to the controller."""
        place.sequence += 1
        if place.link is not None:
            self.network.send(place.link, "up", pack_frame(_encode(RequestEnvelope(place.sequence, 0, body))))
