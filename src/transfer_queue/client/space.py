"""The space into which a client writes: one allocator for each backend, and the rules of a put that finds none.

In an arena the blocks of a put lie one after the other in one reservation. In an external store each block is an object
of its own, so each is a group with a reservation of its own.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from transfer_queue.client.data.extent_allocator import ExtentAllocator, aligned
from transfer_queue.client.units import Units
from transfer_queue.config.settings import Settings
from transfer_queue.config.store_options import SIMPLE
from transfer_queue.errors import CapacityError, DeadlockError, TransferQueueError
from transfer_queue.messages.descriptors import DISK, MEMORY, parents
from transfer_queue.net.calls import Operation
from transfer_queue.net.session import Session
from transfer_queue.storage.arena.writer_locks import HeldSlot
from transfer_queue.storage.protocols import Reserved
from transfer_queue.wire.blocks.encode import EncodedBlock

FREEING_SECONDS = 0.25
"""Seconds until a unit knows that an extent is free, after the controller does."""
OFFLOAD_SECONDS = 2.0
"""Seconds that a put waits at most until blocks are moved to disk, before it is written to disk itself."""
MAX_KNOWN = 100_000
"""The number of fields whose backend is remembered."""


class BlockGroup(msgspec.Struct):
    """Blocks of one backend that get one reservation."""

    backend: str
    blocks: list[EncodedBlock]


class BackendRoutes:
    """The backend of each field of a system.

    Args:
        default: The backend of fields that no pattern fits.
        patterns: Pattern of field names -> backend. The first one that fits decides.
    """

    def __init__(self, default: str, patterns: Mapping[str, str]) -> None:
        self._default = default
        self._patterns = patterns
        self._known: dict[str, str] = {}

    def backend_of(self, name: str) -> str:
        """Return the backend of a field. For a field in a nested TensorDict, a pattern may also fit the latter."""
        chosen = self._known.get(name)
        if chosen is None:
            names = [name, *parents(name)]
            fits = (backend for pattern, backend in self._patterns.items() if _fits_any(pattern, names))
            chosen = next(fits, self._default)
            if len(self._known) < MAX_KNOWN:
                self._known[name] = chosen
        return chosen

    def group(self, encoded: EncodedBlock) -> list[BlockGroup]:
        """Return the blocks as which a put is written, the one with most fields first."""
        groups: list[BlockGroup] = []
        for backend, block in (self._divide(encoded) if self._patterns else {self._default: encoded}).items():
            blocks = block.split()
            if backend == SIMPLE:
                groups.append(BlockGroup(backend, blocks))
            else:  # each block is an object, so that each is reserved by itself
                groups += [BlockGroup(backend, [each]) for each in blocks]
        return groups if len(groups) == 1 else sorted(groups, key=lambda group: -len(group.blocks[0].schema))

    def _divide(self, encoded: EncodedBlock) -> dict[str, EncodedBlock]:
        """Return the columns of each backend."""
        places: dict[str, list[int]] = {}
        for at, spec in enumerate(encoded.schema):
            places.setdefault(self.backend_of(spec.name), []).append(at)
        if len(places) == 1:
            return {next(iter(places)): encoded}
        made = {backend: encoded.with_columns(columns) for backend, columns in places.items()}
        bare = [backend for backend, block in made.items() if backend != SIMPLE and not block.nbytes]
        if bare:  # a store has no object without bytes, which would count as lost: such columns join another block
            into = next((backend for backend in made if backend not in bare), bare[0])
            joined = sorted(at for backend in {*bare, into} for at in places[backend])
            made = {backend: block for backend, block in made.items() if backend not in bare}
            made[into] = encoded.with_columns(joined)
        return made


def _fits_any(pattern: str, names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def group_bytes(group: Sequence[EncodedBlock]) -> int:
    """Return the bytes of the reservation of a group."""
    *others, last = group
    return sum(aligned(block.nbytes) for block in others) + last.nbytes


class WriteSpace:
    """The space of one client, empty before `begin`.

    Args:
        units: The units.
        session: The session of the client.
        node: The node of the client.
        hold: Locks a slot file.
    """

    def __init__(self, units: Units, session: Session, node: str, hold: Callable[[Path], HeldSlot]) -> None:
        self._units = units
        self._session = session
        self._node = node
        self._hold = hold
        self._allocators: dict[str, ExtentAllocator] = {}
        self._only: ExtentAllocator | None = None
        """The allocator of the backend if there is only one."""
        self.routes = BackendRoutes(SIMPLE, {})
        """The backend of each field."""
        units.on_change = self._follow_units

    def begin(self, settings: Settings) -> None:
        """Make the allocators of the system's backends."""
        self.routes = BackendRoutes(settings.storage_backend, settings.field_backends)
        allocators = {backend: self._make(backend, settings.replicas) for backend in settings.backends}
        self._only = next(iter(allocators.values())) if len(allocators) == 1 else None
        self._allocators = allocators

    def _make(self, backend: str, replicas: int) -> ExtentAllocator:
        numbers = self._units.of_tier(backend, MEMORY)
        client_id = self._session.client_id
        first = zlib.crc32(client_id.encode()) % max(1, len(numbers))  # clients spread over the units
        external = backend != SIMPLE
        return ExtentAllocator(
            client_id, numbers[first:] + numbers[:first], self._hold, 1 if external else replicas,
            self._units.of_tier(backend, DISK), self._units.nodes, self._node, external, self._units.unreachable,
        )  # fmt: skip

    def _follow_units(self) -> None:
        for backend, allocator in self._allocators.items():
            memory, disk = (self._units.of_tier(backend, tier) for tier in (MEMORY, DISK))
            allocator.set_units(memory, disk, self._units.nodes)

    @property
    def allocators(self) -> Collection[ExtentAllocator]:
        """One allocator for each backend."""
        return self._allocators.values()

    def of(self, reserved: Reserved) -> ExtentAllocator:
        """Return the allocator that has made a reservation."""
        return self._only or self._allocators[self._units.backend_of(reserved.unit)]

    # ------------------------------------------------------------ reservations

    def reserve_all(self, groups: Sequence[BlockGroup], wait: float | None) -> Operation[list[Reserved]]:
        """Reserve space for each group, or for none.

        While a put waits for space beyond FREEING_SECONDS, it has none of its other reservations, so that no two puts
        wait for each other.
        """
        clock = self._session.clock
        end = None if wait is None else clock() + wait
        order = list(range(len(groups)))
        while True:
            made: dict[int, Reserved] = {}
            try:
                for at in order:
                    patience = None if made or end is None else max(0.0, end - clock())
                    made[at] = yield from self.reserve(groups[at].backend, group_bytes(groups[at].blocks), patience)
                return [made[at] for at in range(len(groups))]
            except BaseException as error:
                yield from self.abandon(list(made.values()), interrupted=not isinstance(error, Exception))
                full = isinstance(error, CapacityError) and not isinstance(error, DeadlockError)
                if not full or not made or end is None or clock() >= end:
                    raise
            full_at = order[len(made)]
            order.sort(key=lambda at: at != full_at)  # the next attempt begins with what is full

    def reserve(
        self, backend: str, nbytes: int, wait: float | None, patience: float = OFFLOAD_SECONDS
    ) -> Operation[Reserved]:
        """Reserve space in a backend. If there is none, this client first returns its leased and unfilled extents.

        It then waits at least FREEING_SECONDS, because space that was cleared just before becomes free within this
        time. If there are units on disk, blocks are moved there meanwhile. If this frees no space within `patience`,
        this block is written to disk.
        """
        allocator, watch_lost = self._allocators[backend], self._units.watch_lost
        packed = allocator.pack(nbytes)
        if packed is not None:
            return packed
        try:
            return (yield from watch_lost(allocator.reserve(nbytes)))
        except CapacityError:
            yield from self.return_extents()
        try:
            if allocator.disks:
                return (yield from watch_lost(_reserve_beside_disk(allocator, nbytes, wait, patience)))
            return (yield from watch_lost(allocator.reserve(nbytes, max(wait or 0.0, FREEING_SECONDS))))
        except CapacityError:
            with contextlib.suppress(TransferQueueError):  # return an extent that was leased for one of two replicas
                yield from allocator.return_extents()
            raise

    def restore_closes(self, spaces: Sequence[Reserved], closes: list[tuple[int, int]], certain: bool = True) -> None:
        """Keep these extents for the next put. See `ExtentAllocator.restore_closes`."""
        for allocator in {id(each): each for each in map(self.of, spaces)}.values():
            allocator.restore_closes(closes, certain)

    def mark_published(self, spaces: Sequence[Reserved], certain: bool = True) -> None:
        """End reservations whose blocks were published, or may have been."""
        for reserved in spaces:
            self.of(reserved).mark_published(reserved, certain)

    def abandon(
        self, spaces: Sequence[Reserved], *, lost: bool = False, interrupted: bool = False, sent: bool = False
    ) -> Operation[None]:
        """End reservations whose blocks were certainly not published, and return extents that are then empty.

        Args:
            spaces: The reservations.
            lost: Whether units on other nodes may have taken the space back.
            interrupted: Whether the operation must make no further calls.
            sent: Whether units on other nodes may still write the bytes that were sent, so that this space is only
                closed.
        """
        for reserved in spaces:
            allocator = self.of(reserved)
            if sent and any(place.session for place in reserved.places):
                allocator.mark_published(reserved, certain=False)
                continue
            if lost:
                allocator.forget_remote_units(reserved)
            allocator.abandon(reserved)
        for reserved in () if interrupted else spaces:
            with contextlib.suppress(TransferQueueError):  # it stays queued; the error of the put is more important
                yield from self.of(reserved).return_extents()

    def return_extents(self) -> Operation[None]:
        """Return every extent into which no block is being written."""
        for allocator in self.allocators:
            allocator.drain()
            yield from allocator.return_extents()
            yield from allocator.close_extents()

    def release(self) -> None:
        """Release the locks of slots."""
        for allocator in self.allocators:
            allocator.release()


def _reserve_beside_disk(
    allocator: ExtentAllocator, nbytes: int, wait: float | None, patience: float
) -> Operation[Reserved]:
    """Reserve space in memory when blocks were moved out of it, else on disk, else in memory within the wait."""
    first = patience if wait is None else min(max(wait, FREEING_SECONDS), patience)
    with contextlib.suppress(CapacityError):
        return (yield from allocator.reserve(nbytes, first))
    try:
        return (yield from allocator.reserve_anywhere(nbytes))
    except CapacityError as error:
        if wait is None or wait <= first:
            raise
        full = error
    try:
        return (yield from allocator.reserve(nbytes, wait - first))
    except DeadlockError:
        raise
    except CapacityError:
        raise full from None
