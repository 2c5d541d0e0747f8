"""Where a client writes: extents leased from storage units, and the blocks placed in them.

Small blocks are packed into open extents by a bump pointer, so that most puts lease nothing; a block of 1 MiB
or more gets an extent of its own. Units on disk take a block only where that is asked for (`reserve_anywhere`).
This is thread-safe and does no input or output of its own but lock its slot files (`storage.arena.writer_locks`). No
lock is held across a yield. It knows nothing of what a block contains.

The life of an extent here:

    open      takes blocks while they fit
    retired   takes no more; waits for the reservations still in flight to end
    over      nothing in flight: queued to be closed at the controller if a block in it may have been
              published, else to be returned to its unit

While nothing is in flight in an open extent it is *offered* (`storage.arena.writer_locks`): its unit may recall what
is not used of it, where space is short. The next reservation sees that, and the extent is over. It is not offered once
nobody can tell whether a Publish of a block in it was carried out.

A put goes: reserve, write, then Publish with `closes(reserved)`. If it succeeded, or nobody can tell
whether it did: `published(reserved)`. If it certainly failed: `keep` what `closes` gave, then
`abandon(reserved)`, and run `give_back`.

A lease whose reply nobody will look at, because its put was interrupted, is cancelled with the next request to a
unit. Extents of a unit that was lost are forgotten: nothing can be written, closed or returned there.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from transfer_queue.errors import CapacityError, ConnectionLostError, InvalidArgumentError, ProtocolError, UnitLostError
from transfer_queue.messages.claims import Cancel
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.storage import ExtentLeaseReply, LeaseExtent, OpenSlot, ReturnExtent, SlotReply
from transfer_queue.net.calls import Call
from transfer_queue.net.session import NOT_MADE
from transfer_queue.storage.arena.writer_locks import PLACES, hold_slot
from transfer_queue.storage.protocols import Allocator, Reserved

ALIGNMENT = 64
SMALLEST_EXTENT = 64 * 1024
LARGEST_EXTENT = 4 * 1024 * 1024
DEDICATED = 1024 * 1024
"""Blocks of this many bytes or more get an extent of their own."""
OPEN_EXTENTS = 4
"""Most extents open at once: what threads that ran out of space together may bring home."""

_SLOT_ATTEMPTS = 3


class SlotLockProtocol(Protocol):
    """A lock on a slot file, as `ownership.SlotLock`."""

    def release(self) -> None:
        """Gives it up."""

    def begin(self, place: int) -> bool:
        """Takes a place at which nothing is offered."""

    def take(self, place: int) -> bool:
        """Begins a put in the extent offered there; False where it was recalled."""

    def leave(self, place: int, extent: int = 0, used: int = 0) -> None:
        """No put is under way there: the extent is offered, or (0) the place is free."""


class _NoLock:
    """What stands for the lock of a slot on another node, where nothing is offered."""

    def release(self) -> None:
        pass

    def begin(self, place: int) -> bool:
        return False

    def take(self, place: int) -> bool:
        return True

    def leave(self, place: int, extent: int = 0, used: int = 0) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _WriterSlot:
    """session: of one on another node; "" elsewhere."""

    number: int
    lock: SlotLockProtocol
    session: str = ""


@dataclass(slots=True, eq=False)
class _OpenExtent:
    unit: int
    number: int
    offset: int
    length: int
    generation: int
    used: int = 0
    """The bump pointer: bytes from the extent's offset, a multiple of ALIGNMENT."""
    open: bool = True
    published: bool = False
    """Whether a block in it may be known to the controller."""
    lost: bool = False
    """Its unit will not come back."""
    certain: bool = True
    """Whether it is known of every Publish of a block in it that it will not be carried out later."""
    place: int = -1
    """Where it is offered; -1 where it never is."""
    offered: bool = False
    closing: bool = False
    """Taken by `closes` together with the reservation that is its last."""
    flights: set[int] = field(default_factory=set)
    """Offsets of all and only the reservations that have not ended."""

    @property
    def name(self) -> tuple[int, int]:
        return self.unit, self.number


class ExtentAllocator(Allocator[Call]):
    """The space of one client, `writer` by name, in these storage units; the first is preferred.

    hold: locks a slot file for the life of the client. replicas: units that each block is to lie in. disks: units on
    disk, which are not among `units`. nodes: on which each unit is; node: the client's own. Its own units come first,
    and copies go to other nodes than the first, where there are any. alone: each block
    gets an extent of its own, however small.
    """

    def __init__(
        self,
        writer: str,
        units: Sequence[int],
        hold: Callable[[Path], SlotLockProtocol] = hold_slot,
        replicas: int = 1,
        disks: Sequence[int] = (),
        nodes: Mapping[int, str] | None = None,
        node: str = "",
        alone: bool = False,
    ) -> None:
        if len(units) < replicas:
            raise InvalidArgumentError(f"a client needs {replicas} storage units or more to write to; start some")
        self.replicas = replicas
        self._alone = alone
        self.writer = writer
        self.node = node
        self._nodes = dict(nodes or {})
        self.units = self._nearest(units)
        self.disks = self._nearest(disks)
        self._hold = hold
        self._mutex = threading.Lock()
        self._sessions: dict[int, str] = {}
        """Unit on another node -> under which name the slot there was asked for, until it is over."""
        self._session_numbers = itertools.count(1)
        self._slots: dict[int, _WriterSlot] = {}
        """Unit -> this writer's slot there and the lock on it, of all and only the units it has leased from."""
        self._extents: dict[tuple[int, int], _OpenExtent] = {}
        """(unit, extent) -> all and only the extents that are open or have reservations in flight."""
        self._open: list[_OpenExtent] = []
        """The open ones, oldest first; at most OPEN_EXTENTS for each replica."""
        self._places: set[tuple[int, int]] = set()
        """(unit, place) of the extents that have one."""
        self._closes: dict[tuple[int, int], None] = {}
        """Extents that are over, to be closed at the controller; disjoint from the next."""
        self._returns: dict[tuple[int, int], None] = {}
        """Extents that are over and in which nothing was published."""
        self._orphans: list[tuple[int, int]] = []
        """(unit, sequence) of leases that may have been granted, and whose replies nobody will look at."""
        self._next_length = SMALLEST_EXTENT

    # ------------------------------------------------------------ one block

    def reserve(self, nbytes: int, wait: float | None = None) -> Generator[Call, AnyReply, Reserved]:
        """See `Allocator.reserve`. With replicas there is space in as many units, or in none."""
        return (yield from self._reserve((self.units,), nbytes, wait))

    def reserve_anywhere(self, nbytes: int) -> Generator[Call, AnyReply, Reserved]:
        """The same, on disk where memory has no room, without a wait."""
        return (yield from self._reserve((self.units, self.disks), nbytes, None))

    def _reserve(
        self, tiers: Sequence[Sequence[int]], nbytes: int, wait: float | None
    ) -> Generator[Call, AnyReply, Reserved]:
        if nbytes < 0:
            raise InvalidArgumentError(f"a block of {nbytes} bytes: it must be none or more")
        first = yield from self._reserve_first(tiers, nbytes, wait)
        if self.replicas == 1:
            return first
        try:
            others = [self._apart_from(first.unit, units) for units in tiers]
            second = yield from self._reserve_first(others, nbytes, wait)
        except BaseException:
            self.abandon(first)
            raise
        return replace(first, copies=(second,))

    def _reserve_first(
        self, tiers: Sequence[Sequence[int]], nbytes: int, wait: float | None
    ) -> Generator[Call, AnyReply, Reserved]:
        """Space in a unit of the first tier that has some. CapacityError says what each of them has said."""
        told: list[str] = []
        for units in tiers:
            try:
                if units:
                    return (yield from self._reserve_in(units, nbytes, wait))
            except CapacityError as error:
                if len(tiers) == 1:
                    raise
                told.append(str(error))
        raise CapacityError("; ".join(told) or "there is no storage unit to write to")

    def _reserve_in(self, units: Sequence[int], nbytes: int, wait: float | None) -> Generator[Call, AnyReply, Reserved]:
        """Space in one of these units."""
        size = _aligned(nbytes)
        dedicated = self._alone or size >= DEDICATED
        extent = None
        while extent is None:
            if not dedicated:
                with self._mutex:
                    reserved = self._pack(units, nbytes, size)
                if reserved is not None:
                    return reserved
            want = size if dedicated else max(size, self._next_length)
            # many tasks that find the open extents full at once need one new extent, not one each
            extent = yield from self._lease(units, size, want, wait, shared=not dedicated and wait is None)
        with self._mutex:
            self._extents[extent.name] = extent
            if dedicated:
                extent.open = False
                return self._place(extent, nbytes, size)
            self._next_length = min(LARGEST_EXTENT, max(SMALLEST_EXTENT, 2 * extent.length))
            self._allot(extent)
            # its own block first, so that the lease is worth its round trip whatever other threads found
            reserved = self._place(extent, nbytes, size)
            for full in [
                old for old in self._open if old.unit == extent.unit and old.length - old.used < old.length // 4
            ]:
                self._retire(full)  # only a closed extent can be emptied and freed
            if extent.open:
                self._open.append(extent)
                if len(self._open) > OPEN_EXTENTS * self.replicas:
                    self._retire(min(self._open, key=lambda open_: open_.length - open_.used))
            return reserved

    def published(self, reserved: Reserved, certain: bool = True) -> None:
        """See `Allocator.published`."""
        with self._mutex:
            for place in reserved.places:
                extent = self._end(place)
                extent.published = True
                extent.certain &= certain
                self._settle(extent)

    def abandon(self, reserved: Reserved) -> None:
        """See `Allocator.abandon`. The bytes are used again where nothing was placed after them."""
        size = _aligned(reserved.nbytes)
        with self._mutex:
            for place in reserved.places:
                extent = self._end(place)
                extent.closing = False
                if not extent.flights and not extent.published:
                    extent.used = 0
                elif place.offset + size == extent.offset + extent.used:
                    extent.used -= size
                self._settle(extent)

    # ------------------------------------------------------------ extents that are over

    def closes(self, current: Reserved | None = None) -> list[tuple[int, int]]:
        """See `Allocator.closes`: put them into the next Publish.

        current: the reservation that this Publish is about; its extent is among the answer if nothing
        else will come in it, so that a writer that falls silent afterwards holds up no space.
        """
        with self._mutex:
            taken = list(self._closes)
            self._closes.clear()
            for place in () if current is None else current.places:
                extent = self._find(place)
                if not extent.open and len(extent.flights) == 1:
                    extent.closing = True
                    taken.append(extent.name)
            return taken

    def keep(self, closes: Iterable[tuple[int, int]]) -> None:
        """Takes back what `closes` gave, because the Publish failed."""
        with self._mutex:
            for name in closes:
                extent = self._extents.get(name)
                if extent is not None:
                    extent.closing = False
                elif name not in self._returns and name[0] in self._slots:
                    self._closes[name] = None

    def returns(self) -> list[tuple[int, int]]:
        """Takes the (unit, extent) in which nothing was published, to be returned to their units."""
        with self._mutex:
            taken = list(self._returns)
            self._returns.clear()
            return taken

    def give_back(self) -> Generator[Call, AnyReply, int]:
        """Returns what `returns` names to the units; how many extents. What could not be returned stays queued."""
        yield from self._cancel_orphans()
        pending = self.returns()
        returned = len(pending)
        try:
            for unit in dict.fromkeys(unit for unit, _ in pending):
                numbers = [number for of, number in pending if of == unit]
                with self._mutex:
                    slot = self._slots.get(unit)
                if slot is not None:  # else it was lost meanwhile
                    yield Call(("unit", unit), ReturnExtent(slot.number, numbers, unit))
                pending = [name for name in pending if name[0] != unit]
        finally:
            with self._mutex:
                self._returns.update(dict.fromkeys(name for name in pending if name[0] in self._slots))
        return returned

    def drain(self) -> None:
        """Retires every open extent, so that `closes` and `returns` come to name all that is leased.

        Those with reservations in flight follow when these end.
        """
        with self._mutex:
            for extent in list(self._open):
                self._retire(extent)

    def release(self) -> None:
        """Gives up the slots, for good: the units then take this writer for dead. The last thing a client does."""
        with self._mutex:
            for slot in self._slots.values():
                slot.lock.release()
            self._slots.clear()

    def use(self, units: Sequence[int], disks: Sequence[int] = (), nodes: Mapping[int, str] | None = None) -> None:
        """These are the units now, on these nodes; those that are not among them are lost."""
        with self._mutex:
            self._nodes = dict(nodes or {})
            gone = {*self.units, *self.disks} - {*units, *disks}
            there = [unit for unit in self.units if unit not in gone]
            self.units = self._nearest([*there, *(unit for unit in units if unit not in there)])
            self.disks = self._nearest(disks)
            self._forget(gone)

    def renounce(self, reserved: Reserved) -> None:
        """What was leased in units on other nodes, where this lies, may have been taken back: it is not used again."""
        with self._mutex:
            self._forget({place.unit for place in reserved.places if place.session})

    def is_elsewhere(self, unit: int) -> bool:
        """Whether a unit is on another node, so that it is asked to write."""
        return self._nodes.get(unit, self.node) != self.node

    def _nearest(self, units: Sequence[int]) -> tuple[int, ...]:
        """Those of this node first."""
        return tuple(sorted(units, key=self.is_elsewhere))

    def _apart_from(self, first: int, units: Sequence[int]) -> list[int]:
        """Where a copy may go, those on other nodes first."""
        there = self._nodes.get(first, "")
        others = [unit for unit in units if unit != first]
        return sorted(others, key=lambda unit: self._nodes.get(unit, "") == there)

    def _forget(self, gone: Collection[int]) -> None:
        """Nothing in these units is this client's any more."""
        for unit in gone:
            self._sessions.pop(unit, None)
            if unit in self._slots:
                self._slots.pop(unit).lock.release()
        for extent in list(self._extents.values()):
            if extent.unit in gone:
                extent.lost = True
                self._retire(extent)
        self._closes = {name: None for name in self._closes if name[0] not in gone}
        self._returns = {name: None for name in self._returns if name[0] not in gone}
        self._orphans = [orphan for orphan in self._orphans if orphan[0] not in gone]

    # ------------------------------------------------------------ slots and leases

    def _claim_slot(self, unit: int) -> Generator[Call, AnyReply, int]:
        with self._mutex:
            known = self._slots.get(unit)
            session = ""
            if known is None and self.is_elsewhere(unit):
                session = self._sessions.setdefault(unit, f"{self.writer}/{next(self._session_numbers)}")
        if known is not None:
            return known.number
        for attempt in range(_SLOT_ATTEMPTS):
            reply = yield Call(("unit", unit), OpenSlot(session or self.writer, unit, bool(session)))
            if not isinstance(reply, SlotReply):
                raise ProtocolError(f"storage unit {unit} answered OpenSlot with {type(reply).__name__}")
            with self._mutex:
                # Another thread may have got here first. Opening the file twice would lose the lock.
                if unit not in self._slots:
                    try:
                        lock = _NoLock() if session else self._hold(Path(reply.lock_path))
                        self._slots[unit] = _WriterSlot(reply.slot, lock, session)
                    except ProtocolError:  # withdrawn, because a connection ended in between
                        if attempt == _SLOT_ATTEMPTS - 1:
                            raise
                        continue
                return self._slots[unit].number
        raise AssertionError("unreachable")

    def _lease(
        self, units: Sequence[int], nbytes: int, want: int, wait: float | None, shared: bool
    ) -> Generator[Call, AnyReply, _OpenExtent | None]:
        """Lease an extent from the first of these units that has room; if none has, wait for the first unit.

        shared: all tasks of an event loop that need an extent now share one. None if another task has leased it.
        """
        if len(units) > 1:
            for unit in units:
                try:
                    return (yield from self._lease_of(unit, nbytes, want, None, shared))
                except CapacityError:
                    if unit == units[-1] and not wait:
                        raise
                except ConnectionLostError:
                    if unit == units[-1] or not self.is_elsewhere(unit):
                        raise
        return (yield from self._lease_of(units[0], nbytes, want, wait, shared))

    def _lease_of(
        self, unit: int, nbytes: int, want: int, wait: float | None, shared: bool
    ) -> Generator[Call, AnyReply, _OpenExtent | None]:
        try:
            return (yield from self._lease_once(unit, nbytes, want, wait, shared))
        except ProtocolError:
            if not self.is_elsewhere(unit):
                raise
        with self._mutex:
            self._forget({unit})  # its slot is over, as all connections to the unit had ended
        return (yield from self._lease_once(unit, nbytes, want, wait, shared))

    def _lease_once(
        self, unit: int, nbytes: int, want: int, wait: float | None, shared: bool
    ) -> Generator[Call, AnyReply, _OpenExtent | None]:
        yield from self._cancel_orphans()
        slot = yield from self._claim_slot(unit)
        call = Call(
            ("unit", unit), LeaseExtent(slot, nbytes, want, wait, unit), wait, turn=("lease", unit) if shared else None
        )
        try:
            reply = yield call
        except BaseException as error:
            if call.sequence and not isinstance(error, (CapacityError, UnitLostError)):
                with self._mutex:
                    self._orphans.append((unit, call.sequence))
            raise
        if reply is NOT_MADE:
            return None
        if not isinstance(reply, ExtentLeaseReply) or reply.length < nbytes or reply.offset % ALIGNMENT:
            raise ProtocolError(f"storage unit {unit} answered a lease of {nbytes} bytes with {reply}")
        return _OpenExtent(unit, reply.extent, reply.offset, reply.length, reply.generation)

    def _cancel_orphans(self) -> Generator[Call, AnyReply, None]:
        while self._orphans:
            with self._mutex:
                if not self._orphans:
                    return
                orphan = self._orphans.pop()
            try:
                yield Call(("unit", orphan[0]), Cancel(orphan[1]))
            except UnitLostError:
                continue
            except BaseException:
                with self._mutex:
                    self._orphans.append(orphan)
                raise

    # ------------------------------------------------------------ with the mutex held

    def _pack(self, units: Sequence[int], nbytes: int, size: int) -> Reserved | None:
        """Places a block into the first open extent in these units that has room for it."""
        for extent in list(self._open):
            if extent.length - extent.used >= size and extent.unit in units:
                if self._take(extent):
                    return self._place(extent, nbytes, size)
                self._retire(extent)
        return None

    def _allot(self, extent: _OpenExtent) -> None:
        """Finds a place at which the extent can be offered."""
        slot = self._slots.get(extent.unit)
        place = next((p for p in range(PLACES) if (extent.unit, p) not in self._places), None)
        if slot is not None and place is not None and slot.lock.begin(place):
            extent.place = place
            self._places.add((extent.unit, place))

    def _take(self, extent: _OpenExtent) -> bool:
        """Whether a block may be written there; where it was offered and recalled it may not."""
        if not extent.offered:
            return True
        slot = self._slots.get(extent.unit)
        extent.offered = False
        return slot is not None and slot.lock.take(extent.place)

    def _leave(self, extent: _OpenExtent, offer: bool) -> None:
        """Nothing is in flight there: the extent is offered, or its place is free."""
        if extent.place < 0 or (offer and not extent.certain):
            return
        slot = self._slots.get(extent.unit)
        if offer:
            extent.offered = True
        else:
            self._places.discard((extent.unit, extent.place))
        if slot is not None:
            slot.lock.leave(extent.place, *((extent.number, extent.used) if offer else ()))

    def _place(self, extent: _OpenExtent, nbytes: int, size: int) -> Reserved:
        slot = self._slots.get(extent.unit)
        session = ("", 0) if slot is None or not slot.session else (slot.session, slot.number)
        reserved = Reserved(
            extent.unit,
            extent.number,
            extent.offset + extent.used,
            extent.generation,
            nbytes,
            extent.length,
            (),
            *session,
        )
        extent.flights.add(reserved.offset)
        extent.used += size
        if extent.open and extent.used == extent.length:
            self._retire(extent)
        return reserved

    def _find(self, reserved: Reserved) -> _OpenExtent:
        extent = self._extents.get((reserved.unit, reserved.extent))
        if extent is None or reserved.offset not in extent.flights:
            raise InvalidArgumentError(f"{reserved} is not in flight: it was published or abandoned before, "
                                       f"or another client reserved it")  # fmt: skip
        return extent

    def _end(self, reserved: Reserved) -> _OpenExtent:
        extent = self._find(reserved)
        extent.flights.remove(reserved.offset)
        return extent

    def _retire(self, extent: _OpenExtent) -> None:
        extent.open = False
        if extent in self._open:
            self._open.remove(extent)
        self._settle(extent)

    def _settle(self, extent: _OpenExtent) -> None:
        """Queues an extent that is over where it belongs."""
        if extent.open or extent.flights:
            if not extent.flights:
                self._leave(extent, offer=True)
            return
        self._leave(extent, offer=False)
        del self._extents[extent.name]
        if extent.lost:
            return
        if not extent.published:
            self._returns[extent.name] = None
        elif not extent.closing:
            self._closes[extent.name] = None


def _aligned(nbytes: int) -> int:
    """What a block takes of an extent; at least one cell, so that no two blocks start at one place."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
