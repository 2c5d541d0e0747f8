"""Cluster: controller, storage units and clients in one process, over a virtual network and clock.

The code that runs is that of production: the core, the unit, the client's operations with its session, allocator and
codec, real frames, and real arena files in a folder of the caller. Only sockets, the clock and the locks of the kernel
are simulated.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from transfer_queue.config.settings import Settings
from transfer_queue.core.appliers import apply_record
from transfer_queue.core.claims.plan import Plans
from transfer_queue.core.controller import Controller
from transfer_queue.core.events import effects as core_effects
from transfer_queue.core.events.records import AnyRecord, StateLoaded
from transfer_queue.core.state.state import State
from transfer_queue.core.units.mirror_writer import MirrorWriter
from transfer_queue.journal import state_file
from transfer_queue.journal.state_file import LoadedStates
from transfer_queue.messages.descriptors import DISK, MEMORY, MIRROR
from transfer_queue.messages.envelopes import AnyReply, AnyRequest, ReplyEnvelope, RequestEnvelope
from transfer_queue.messages.reports import unit_reports
from transfer_queue.net.calls import CONTROLLER
from transfer_queue.net.framing import FrameReader, pack_frame
from transfer_queue.net.session import Target
from transfer_queue.node.controller.controller_service import core_config
from transfer_queue.node.controller.state_files import StateFiles
from transfer_queue.node.unit.unit_service import handle_order
from transfer_queue.sampler import BaseSampler, SequentialSampler
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.stores.base import StoreAddress, connect
from transfer_queue.storage.unit import unit_effects as unit_effects
from transfer_queue.storage.unit.extent_pool import ArenaPool, DiskPool, MirrorPool
from transfer_queue.storage.unit.object_pool import UNLIMITED, ObjectNames, ObjectPool
from transfer_queue.storage.unit.storage_unit import StorageUnit
from transfer_queue.storage.unit.unit_effects import Begin
from transfer_queue.testing.network import Network, VirtualClock
from transfer_queue.testing.simulated_client import Client
from transfer_queue.testing.simulated_locks import HeldSlots, HoldsHere, SimulatedSlots
from transfer_queue.testing.state_recount import check_invariants

UNIT_PEER = 0  # the controller's connections to the units are 0, -1, -2, ...; they do not use the simulated network
DISK_BYTES = 256 << 20  # of each unit on disk, if the conf does not set it
MAX_WORK_SECONDS = 0.1  # of virtual time that work beside the core's loop takes
PART = 2  # effects of an event after which others may interrupt it
MAX_DELIVERIES = 1_000_000
MAX_STEPS = 100_000  # moments of virtual time that one call may wait through

_encode = msgspec.msgpack.Encoder().encode
_envelope = msgspec.msgpack.Decoder(RequestEnvelope)


def arena_of(unit: StorageUnit) -> Arena:
    """Return the arena of a simulated unit."""
    assert isinstance(unit.pool, ArenaPool)
    return unit.pool.arena


@cache
def _defaults() -> Settings:
    return Settings.from_config(None)


def registration(address: str, name: str, arena: Arena, leased: bytes) -> unit_reports.RegisterUnit:
    """Return the request with which a unit with this arena registers."""
    newer = arena.extents.next_extent
    about = arena.boot_id, name, "", leased, newer
    return unit_reports.RegisterUnit(address, str(arena.folder), *about, tier=arena.tier, capacity=arena.capacity)


def registration_of_store(
    where: str, name: str, unit: StorageUnit, address: StoreAddress, leased: bytes
) -> unit_reports.RegisterUnit:
    """Return the request with which the unit of an external store registers."""
    pool, store = unit.pool, msgspec.json.encode(address).decode()
    about = pool.boot_id, name, "", leased, pool.next_extent
    return unit_reports.RegisterUnit(where, str(pool.folder), *about, capacity=address.capacity, store=store)


def pool_of(arena: Arena, begin: Begin) -> ArenaPool:
    """Return the pool over an arena in memory, on disk or of a mirror. `begin` waits for the disk of a mirror."""
    assert arena.holds is not None
    arena.holds.close()
    arena.holds = HoldsHere(arena)
    if arena.tier == MIRROR:
        return MirrorPool(arena, begin)
    return DiskPool(arena) if arena.tier == DISK else ArenaPool(arena)


class Cluster:
    """A simulated system of one controller and one or more storage units.

    Args:
        folder: An empty folder for the arenas.
        seed: Determines the order in which messages arrive. Default: 0.
        sampler: The sampler of the system. Default: a SequentialSampler.
        conf: The configuration; its `num_data_storage_units`, `replicas`, `offload` and `durability` have an
            effect. Default: the
            defaults.
        arena_bytes: The size of the arena of each unit in memory. Default: 64 MiB.
        stores: Backend -> the address of its running store, for the external stores that `conf` names. Default: stores
            of your own are connected with `backend.options`.

    Example:
        >>> from pathlib import Path
        >>> from transfer_queue.testing import Cluster
        >>> with Cluster(Path.cwd(), seed=1) as cluster:
        ...     simulated = cluster.client("trainer")
        ...     meta = simulated.kv_put("a", "train_0", {"reward": torch.tensor(1.0)})
        ...     simulated.kv_list("train_0")
        ...     cluster.check()
        {'train_0': {'a': {}}}
    """

    def __init__(
        self,
        folder: Path,
        seed: int = 0,
        sampler: BaseSampler | None = None,
        conf: dict[str, Any] | Settings | None = None,
        arena_bytes: int = 64 * 1024 * 1024,
        stores: Mapping[str, StoreAddress] | None = None,
    ) -> None:
        self.clock = VirtualClock()
        """The virtual clock."""
        self.network = Network(seed)
        """The simulated network."""
        self.held = HeldSlots()
        """The simulated locks of writer slots."""
        if isinstance(conf, Settings):
            settings = conf
        else:
            settings = _defaults() if conf is None else Settings.from_config(conf)
        config = msgspec.json.encode({"settings": settings.to_json(), "conf": {}}).decode()
        core = core_config(settings, sampler or SequentialSampler(), config, part=PART, lease_key=b"")
        self.controller = Controller(core)
        """The controller."""
        tiers = [(MEMORY, arena_bytes)] * (settings.num_data_storage_units or 1) if settings.has_arenas else []
        if settings.offload_path is not None:
            tiers += [(DISK, settings.offload_bytes or DISK_BYTES)] * settings.replicas
        if settings.max_lag is not None:
            tiers.append((MIRROR, DISK_BYTES))
        arenas = [Arena.create(folder / f"unit-{n}", size, tier) for n, (tier, size) in enumerate(tiers)]
        self.units = [
            StorageUnit(n, pool_of(arena, partial(self._begin_beside, arena)), SimulatedSlots(n, self.held))
            for n, arena in enumerate(arenas)
        ]
        """The storage units, by their numbers. Those of external stores are the last ones."""
        self._addresses: dict[int, StoreAddress] = {}
        for backend in settings.stores:
            address = (stores or {}).get(backend) or StoreAddress(backend, settings.store_options[backend])
            self._add_store(folder, address)
        self.loaded = LoadedStates(folder / "loaded", sync=False)
        """The journal's copies of loaded states."""
        self.states = StateFiles(folder / "states", self.loaded)
        """The state files of checkpoints."""
        for each in (self.states.folder, self.loaded.folder):
            each.mkdir(parents=True)
        self.records: list[AnyRecord] = []
        """All records so far."""
        self._clients: list[Client] = []
        self._readers: dict[int, FrameReader] = {}
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._agenda_size = 0
        self._unit_sequences = [0] * len(self.units)
        for unit in self.units:
            self.controller.on_connect(f"unit-{unit.number}", UNIT_PEER - unit.number)
            self._register(unit)

    @property
    def unit(self) -> StorageUnit:
        """The first storage unit."""
        return self.units[0]

    def _add_store(self, folder: Path, address: StoreAddress) -> None:
        """Add the unit of an external store."""
        number = len(self.units)
        names = ObjectNames.create(folder / f"unit-{number}")
        self._addresses[number] = address
        self.units.append(self._store_unit(number, names, SimulatedSlots(number, self.held)))

    def _store_unit(self, number: int, names: ObjectNames, slots: SimulatedSlots) -> StorageUnit:
        """Return a unit of an external store, with the extents of these names."""
        address = self._addresses[number]
        store = connect(address)

        def begin(work: Callable[[], Any], then: Callable[[Any], list[unit_effects.Effect]]) -> None:
            """Call the store after some virtual time, unless the unit was killed meanwhile."""

            def done() -> None:
                if unit not in self.units:
                    return
                if not self._runs(unit):
                    self.later(MAX_WORK_SECONDS, done)
                    return
                try:
                    outcome = work()
                except Exception as error:
                    outcome = error
                self._run_unit_effects(unit, then(outcome))

            self.later(self.network.random.uniform(0, MAX_WORK_SECONDS), done)

        capacity = address.capacity or store.capacity or UNLIMITED
        pool = ObjectPool(names, store, begin, capacity, store.life, lambda: self.clock.now)
        unit = StorageUnit(number, pool, slots)  # `begin` refers to it
        return unit

    def _register(self, unit: StorageUnit) -> None:
        name, leased, address = f"unit-{unit.number}", unit.register(), self._addresses.get(unit.number)
        if address is None:
            self._deliver_from_unit(unit, registration("unit", name, arena_of(unit), leased))
        else:
            self._deliver_from_unit(unit, registration_of_store("unit", name, unit, address, leased))

    def _begin_beside(self, arena: Arena, run: Callable[[], Any], then: Callable[[Any], Any]) -> None:
        """Let the unit with this arena wait for the simulated disk, which takes some virtual time and never fails."""

        def end() -> None:
            unit = next((unit for unit in self.units if arena_of(unit) is arena), None)
            if unit is not None and self._runs(unit):
                self._run_unit_effects(unit, then(None))
            elif unit is not None:
                self.later(MAX_WORK_SECONDS, end)

        self.later(self.network.random.uniform(0, MAX_WORK_SECONDS), end)

    def _runs(self, unit: StorageUnit) -> bool:
        """Whether a unit does anything at present."""
        return unit in self._servers()

    def client(self, name: str) -> Client:
        """Return a new client.

        Args:
            name: Its id.

        Returns:
            The client.

        Example:
            >>> from pathlib import Path
            >>> from transfer_queue.testing import Cluster
            >>> with Cluster(Path.cwd()) as cluster:
            ...     cluster.client("trainer").get_partition_list()
            []
        """
        client = Client(self, name)
        self._clients.append(client)
        return client

    def close(self) -> None:
        """Close the files of the arenas, which stay in their folder.

        Example:
            >>> from pathlib import Path
            >>> from transfer_queue.testing import Cluster
            >>> Cluster(Path.cwd()).close()
        """
        for client in self._clients:
            client.forget_joins()
            client.state.devices.close()
            client.state.units.close()
        for unit in self.units:
            unit.pool.close() if isinstance(unit.pool, ObjectPool) else arena_of(unit).close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ time

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Deliver messages until a condition is met, or until no message is on its way.

        Args:
            until: The condition. Default: none.

        Example:
            >>> from pathlib import Path
            >>> from transfer_queue.testing import Cluster
            >>> with Cluster(Path.cwd()) as cluster:
            ...     cluster.run()
        """
        for _ in range(MAX_DELIVERIES):
            if (until is not None and until()) or not self.network.deliver():
                return
        raise AssertionError(f"still busy after {MAX_DELIVERIES} deliveries")

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Call a function after some virtual time. It may use clients.

        Args:
            seconds: The time.
            action: The function.

        Example:
            >>> from pathlib import Path
            >>> from transfer_queue.testing import Cluster
            >>> with Cluster(Path.cwd()) as cluster:
            ...     cluster.later(2.0, lambda: print("two seconds later"))
            ...     cluster.advance(3.0)
            two seconds later
        """
        heapq.heappush(self._agenda, (self.clock.now + seconds, self._agenda_size, action))
        self._agenda_size += 1

    def advance(self, seconds: float) -> None:
        """Let virtual time pass, deadline by deadline. Messages are delivered before, between and after.

        Args:
            seconds: The time.

        Example:
            >>> from pathlib import Path
            >>> from transfer_queue.testing import Cluster
            >>> with Cluster(Path.cwd()) as cluster:
            ...     cluster.advance(60.0)
            ...     cluster.clock.now
            60.0
        """
        end = self.clock.now + seconds
        self.run()
        due = self._next_deadline()
        while due is not None and due <= end:
            self._step(due)
            due = self._next_deadline()
        self.clock.move_to(end)

    def wait(self, until: Callable[[], bool]) -> None:
        """Deliver messages and let virtual time pass until a condition is met.

        Args:
            until: The condition.

        Raises:
            AssertionError: The condition can never be met, because no message and no deadline is left.

        Example:
            >>> from pathlib import Path
            >>> from transfer_queue.testing import Cluster
            >>> with Cluster(Path.cwd()) as cluster:
            ...     cluster.later(2.0, lambda: None)
            ...     cluster.wait(lambda: cluster.clock.now >= 2.0)
        """
        self.run(until)
        for _ in range(MAX_STEPS):
            if until():
                return
            due = self._next_deadline()
            if due is None:
                raise AssertionError("a call waits for an event that cannot happen: no message and no deadline is left")
            self._step(due, until)
        raise AssertionError(f"a call still waits after {MAX_STEPS} deadlines")

    def _next_deadline(self) -> float | None:
        """Return the time of the next deadline, not before now; None if there is none."""
        deadlines = [self._deadline_of(server) for server in self._servers()]
        deadlines += [client.next_deadline() for client in self._clients]
        times = [when for when in deadlines if when is not None]
        times += [when for when, _, _ in self._agenda[:1]]
        return max(self.clock.now, min(times)) if times else None

    def _servers(self) -> list[Controller | StorageUnit]:
        """Return the servers that are running."""
        return [self.controller, *self.units]

    def _deadline_of(self, server: Controller | StorageUnit) -> float | None:
        """Return the virtual time of a server's next deadline."""
        return server.next_deadline()

    def _tick(self, server: Controller | StorageUnit) -> None:
        """Let a server do what is due."""
        if isinstance(server, Controller):
            self._run_core_effects(server.tick(self._controller_now))
        else:
            self._run_unit_effects(server, server.tick(self.clock.now))

    @property
    def _controller_now(self) -> float:
        """The time on the clock of the controller's machine."""
        return self.clock.now

    def _step(self, due: float, until: Callable[[], bool] | None = None) -> None:
        self.clock.move_to(due)
        while self._agenda and self._agenda[0][0] <= due:
            heapq.heappop(self._agenda)[2]()
        # an action may have let time pass by itself
        for server in self._servers():
            self._tick(server)
        for client in self._clients:
            client.tick()
        self.run(until)

    # ------------------------------------------------------------ what must hold

    def check(self) -> None:
        """Verify the invariants of the controller and the units, and that their states agree.

        Raises:
            AssertionError: An invariant is violated, or replaying the records gives another state.

        Example:
            >>> from pathlib import Path
            >>> from transfer_queue.testing import Cluster
            >>> with Cluster(Path.cwd()) as cluster:
            ...     cluster.check()
        """
        check_invariants(self.controller.state)
        self.controller.context.services[Plans].check(self.controller.state.partitions)
        mirror = self.controller.context.services.get(MirrorWriter)
        if mirror is not None:
            mirror.check()
        for each in self.units:
            each.check()
        for unit, extent in self.controller.state.blocks.extents:
            if self._find_unit(unit).table.get(extent) is None:
                raise AssertionError(f"extent {extent} of unit {unit} contains needed blocks, but is not leased")
        self.records += self.controller.take_records()
        replayed = State(self.controller.state.capacity)
        for record in self.records:
            if isinstance(record, StateLoaded):
                self.loaded.prepare(replayed, record)
            apply_record(replayed, record)
        if replayed.snapshot() != self.controller.state.snapshot():
            raise AssertionError("replaying the records gives another state than the live one")

    # ------------------------------------------------------------ connections

    def _find_unit(self, number: int) -> StorageUnit:
        """Return the unit with this number."""
        return self.units[number]

    def _server(self, client: Client, target: Target) -> Target:
        """Return the address of a server for a client."""
        return target

    def _connect(self, client: Client, target: Target) -> int:
        connection = 0
        server = self._server(client, target)

        def up(frame: bytes) -> None:
            for body, _ in self._readers[connection].feed(frame):
                self._receive(client.name, server, connection, body)

        def down(frame: bytes) -> None:
            client._on_frame(connection, frame)

        connection = self.network.connect(
            up,
            down,
            lambda: self._on_disconnect(client.name, server, connection),
            lambda: client._on_connection_lost(target, connection),
        )
        self._readers[connection] = FrameReader()
        self._on_connect(client.name, server, connection)
        return connection

    def _on_connect(self, name: str, target: Target, connection: int) -> None:
        """Notify a server of a new connection."""
        if target == CONTROLLER:
            self.controller.on_connect(name, connection)

    def _cut(self, name: str, target: Target, connection: int) -> None:
        self.network.cut(connection)
        self._on_disconnect(name, target, connection)

    def _on_disconnect(self, name: str, target: Target, connection: int) -> None:
        """Notify a server that a connection has ended."""
        self._readers.pop(connection, None)
        if target == CONTROLLER:
            self._run_core_effects(self.controller.on_disconnect(name, connection, self._controller_now))
        else:
            unit = self.units[target[1]]
            self._run_unit_effects(unit, unit.on_disconnect(connection, self.clock.now))

    def _receive(self, name: str, target: Target, connection: int, body: bytes) -> None:
        envelope = _envelope.decode(body)
        if target == CONTROLLER:
            self._deliver_to_controller(name, connection, envelope)
        else:
            unit, now, acknowledged = self.units[target[1]], self.clock.now, envelope.acknowledged
            effects = unit.handle(name, connection, envelope.sequence, envelope.body, now, None, acknowledged)
            self._run_unit_effects(unit, effects)

    def _deliver_to_controller(self, name: str, connection: int, envelope: RequestEnvelope) -> None:
        self._run_core_effects(self.controller.handle(name, connection, envelope, self._controller_now))

    # ------------------------------------------------------------ effects

    def _run_core_effects(self, effects: list[core_effects.Effect]) -> None:
        self.records += self.controller.take_records()
        self._carry_out(effects)

    def _carry_out(self, effects: list[core_effects.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, core_effects.Send):
                self._answer(effect.peer, effect.sequence, effect.reply)
            elif isinstance(effect, core_effects.ComputeDeal):
                self._start_work(effect)
            elif isinstance(effect, core_effects.WriteState):
                self._write_state(effect)
            elif isinstance(effect, core_effects.ReadState):
                self._read_state(effect)
            elif isinstance(effect, core_effects.RemoveState):
                self.states.remove(effect.name)
            elif isinstance(effect, core_effects.ForgetState):
                self.states.forget(effect.file)
            elif isinstance(effect, core_effects.SendToUnit):
                self._deliver_to_unit(effect.unit, effect.request)

    def _deliver_to_unit(self, number: int, request: AnyRequest) -> None:
        """Deliver a request of the controller to a unit."""
        self._tell(self._find_unit(number), request)

    def _tell(self, unit: StorageUnit, request: AnyRequest) -> None:
        self._run_unit_effects(unit, handle_order(unit, request))

    def _start_work(self, work: core_effects.ComputeDeal) -> None:
        def done() -> None:
            try:
                outcome = work.run()
            except Exception as error:
                outcome = error
            self._run_core_effects(self.controller.on_outcome(work.number, outcome, self._controller_now))

        self._run_later(done)

    def _write_state(self, write: core_effects.WriteState) -> None:
        """Write the present state into a file, which exists after a delay."""
        trouble = None
        try:
            state_file.write(self.states.path(write.name), write.tree(), sync=False)
        except Exception as error:  # as in `node.controller.state_files`
            trouble = f"{type(error).__name__}: {error}"
        self._run_later(
            lambda: self._run_core_effects(self.controller.on_outcome(write.number, trouble, self._controller_now))
        )

    def _read_state(self, read: core_effects.ReadState) -> None:
        """Copy a state into the journal after a delay, and give its content to the controller after another delay."""

        def done() -> None:
            saved = self.states.read(read.name, read.watched)
            self._run_later(
                lambda: self._run_core_effects(self.controller.on_outcome(read.number, saved, self._controller_now))
            )

        self._run_later(done)

    def _run_later(self, action: Callable[[], object]) -> None:
        """Do something after a delay that the seed determines."""
        began = self.controller
        self.later(self.network.random.uniform(0, MAX_WORK_SECONDS), lambda: self._return_result(began, action))

    def _return_result(self, began: Controller, action: Callable[[], object]) -> None:
        """Call `action` with a result for a controller, unless that controller was killed meanwhile."""
        if self.controller is began:
            action()

    def _run_unit_effects(self, unit: StorageUnit, effects: list[unit_effects.Effect]) -> None:
        for effect in [*effects, *unit.take_reports(), *unit.take_shortage_report()]:
            if isinstance(effect, unit_effects.SendReply):
                self._answer(effect.peer, effect.sequence, effect.reply)
            elif isinstance(effect, unit_effects.Report):
                self._deliver_from_unit(unit, effect.body)
            else:
                raise AssertionError("all units of a simulation are on one node")

    def _deliver_from_unit(self, unit: StorageUnit, body: AnyRequest) -> None:
        """Deliver a request of a unit to the controller."""
        self._unit_sequences[unit.number] += 1
        sequence = self._unit_sequences[unit.number]
        self._deliver_to_controller(f"unit-{unit.number}", UNIT_PEER - unit.number, RequestEnvelope(sequence, 0, body))

    def _answer(self, peer: int, sequence: int, reply: AnyReply) -> None:
        if peer > UNIT_PEER:
            self.network.send(peer, "down", pack_frame(_encode(ReplyEnvelope(sequence, reply))))
